"""A peer below gRPC: it speaks just enough HTTP/2 (RFC 9113, RFC 7541) to grant no window.

What a server sends it, but for headers, stays in the server until `thaw`.
"""

from __future__ import annotations

import socket
import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4


class FrozenPeer:
    """One call on a connection of its own."""

    def __init__(self, path: str, method_path: str, message: bytes, *, close: bool) -> None:
        """Send the call's first message; `close`: and no more."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(20)
        self._socket.connect(path)
        self._socket.sendall(_PREFACE)
        self._send(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0))
        fields = {
            b":method": b"POST",
            b":scheme": b"http",
            b":path": method_path.encode(),
            b":authority": b"localhost",
            b"te": b"trailers",
            b"content-type": b"application/grpc",
        }
        # Literals without indexing and without Huffman code; all are shorter than 127 bytes.
        block = b"".join(
            b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
            for name, value in fields.items()
        )
        self._send(_HEADERS, _END_HEADERS, 1, block)
        framed = b"\0" + struct.pack(">I", len(message)) + message
        self._send(_DATA, _END_STREAM if close else 0, 1, framed)

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags])
        self._socket.sendall(head + struct.pack(">I", stream) + payload)

    def thaw(self) -> None:
        """Grant all the window there is."""
        grant = struct.pack(">I", 1 << 30)
        self._send(_WINDOW_UPDATE, 0, 0, grant)
        self._send(_WINDOW_UPDATE, 0, 1, grant)

    def headers(self) -> bytes:
        """The next block of headers, as it is on the wire; payload before it is dropped."""
        while True:
            length, kind, flags, _ = struct.unpack(">IBBI", b"\0" + self._read(9))
            payload = self._read(length)
            if kind in (_SETTINGS, _PING) and not flags & _ACK:
                self._send(kind, _ACK, 0, payload if kind == _PING else b"")
            if kind == _HEADERS:
                return payload

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            if not more:
                raise ConnectionError("the server closed the connection")
            data += more
        return data

    def close(self) -> None:
        """End the connection without a word."""
        self._socket.close()
