"""What a daemon and its index child say to each other, and the names in LMDB that both know.

A message is a list of byte strings, on a stream socket: the length of the rest (u64), their number
(u32), their lengths (u32 each), their bytes; all little-endian. Imports next to nothing: the child
has to start quickly.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

RECORDS = b"records"
NAMES = b"names"
FAMILIES = b"families"
META = b"meta"
PAYLOAD = b"payload"
DATABASES = (RECORDS, NAMES, FAMILIES, META, PAYLOAD)
OPENED = b"opened/"
VOLUME = b"volume"
CHUNK_BYTES = 4080
"""Bytes of a small object that lie under one key: one LMDB page each."""

OPEN, CLOSE, COMMIT, DISCARD, RECORDS_AFTER, BODY = (b"o", b"c", b"w", b"d", b"r", b"b")
"""Requests: what is asked, the environment's path, and what belongs to it."""
DONE, LMDB_ERROR, OS_ERROR = b"", b"l", b"e"
"""Answers: how it went; then what was asked for, or what the error was."""

WRITERS = ("index", "small")
READERS = 8
CHANNELS = len(WRITERS) + READERS
"""Sockets between the two; on each, one request at a time."""
MAX_BYTES = 1 << 30
_LENGTH = struct.Struct("<Q")
_SHELF_BITS = 10


class EndedError(Exception):
    """The other side is gone, or says what it cannot say."""


def shelf_key(place: int) -> bytes:
    """Key under which a place's record lies: its region, or a thousand small objects."""
    if place >> 32 & 1 << 23:  # the small bit, seen from the region's position
        return ((place & 0xFFFFFFFF) >> _SHELF_BITS).to_bytes(4, "big")
    return (place >> 32).to_bytes(4, "big")


def chunk_key(place: int, chunk: int) -> bytes:
    """Key of a piece of a small object."""
    return (place & 0xFFFFFFFF).to_bytes(4, "big") + chunk.to_bytes(2, "big")


def pack(parts: Sequence[bytes | memoryview]) -> bytes:
    """Byte strings as one."""
    return b"".join([struct.pack(f"<{len(parts) + 1}I", len(parts), *map(len, parts)), *parts])


def unpack(packed: bytes) -> list[bytes]:
    """The reverse of `pack`. Raises EndedError for what it cannot have made."""
    try:
        (count,) = struct.unpack_from("<I", packed)
        lengths = struct.unpack_from(f"<{count}I", packed, 4)
    except struct.error as error:
        raise EndedError("a message that is none") from error
    parts = []
    at = 4 + 4 * count
    for length in lengths:
        parts.append(packed[at : at + length])
        at += length
    if at != len(packed):
        raise EndedError("a message of another length than it says")
    return parts


def send(sock: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    """Send a message. Raises OSError."""
    packed = pack(parts)
    sock.sendall(_LENGTH.pack(len(packed)) + packed)


def receive(sock: socket.socket) -> list[bytes]:
    """Wait for a message. Raises EndedError or OSError."""
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    if length > MAX_BYTES:
        raise EndedError(f"a message of {length} B")
    return unpack(bytes(_exactly(sock, length)))


def _exactly(sock: socket.socket, count: int) -> bytearray:
    block = bytearray(count)
    left = memoryview(block)
    while left:
        done = sock.recv_into(left)
        if not done:
            raise EndedError("the other side closed the connection")
        left = left[done:]
    return block
