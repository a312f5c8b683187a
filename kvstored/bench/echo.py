"""A bare uvloop server on a Unix socket: what small calls are compared with.

Usage: python -m kvstored.bench.echo PATH KEYS SEED

A request is a head (length of its body, length of its answer) and a body. It is answered by zeros,
or, where the answer's length is `LOOKUP`, by one byte per 32-byte key of the body: whether it is in
a dict of KEYS random keys. An answer of no bytes is no answer. Prints "ready BYTES", what the dict
took per key, and serves until its standard input is closed.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from typing import cast

import uvloop

from kvstored.bench.payloads import random_bytes
from kvstored.bench.processes import BenchError, connect, private_bytes

HEAD = struct.Struct("<II")
LOOKUP = 0xFFFF_FFFF
KEY_BYTES = 32


class _Server(asyncio.Protocol):
    """One connection."""

    def __init__(self, table: dict[bytes, int]) -> None:
        self._found = table.__contains__
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = cast("asyncio.WriteTransport", transport).write

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at = 0
        while len(data) - at >= HEAD.size:
            length, answer = HEAD.unpack_from(data, at)
            body = at + HEAD.size
            if len(data) < body + length:
                break
            at = body + length
            if answer == LOOKUP:
                keys = struct.unpack_from("32s" * (length // KEY_BYTES), data, body)
                self._write(bytes(map(self._found, keys)))
            elif answer:
                self._write(bytes(answer))
        self._rest = data[at:]


class Echo:
    """The blocking client of it. Raises OSError."""

    def __init__(self, path: str) -> None:
        self._socket = connect(path)

    def call(self, body: bytes, answer_bytes: int) -> bytearray:
        """Send a request whose answer has that length; the answer."""
        self._socket.sendall(HEAD.pack(len(body), answer_bytes) + body)
        return self._receive(answer_bytes)

    def look_up(self, keys: bytes) -> bytearray:
        """One byte per key: 1 where it is in the dict."""
        self._socket.sendall(HEAD.pack(len(keys), LOOKUP) + keys)
        return self._receive(len(keys) // KEY_BYTES)

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()

    def _receive(self, nbytes: int) -> bytearray:
        answer = bytearray(nbytes)
        view = memoryview(answer)
        while view:
            got = self._socket.recv_into(view)
            if not got:
                raise BenchError("the bare server went away")
            view = view[got:]
        return answer


async def _serve(path: str, keys: int, seed: int) -> None:
    before = private_bytes(os.getpid())
    table: dict[bytes, int] = {}
    step = 1 << 16
    packed = random_bytes(keys * KEY_BYTES, seed).data
    held = private_bytes(os.getpid()) - before
    for first in range(0, keys, step):
        part = bytes(packed[first * KEY_BYTES : (first + step) * KEY_BYTES])
        table.update((part[at : at + KEY_BYTES], 1) for at in range(0, len(part), KEY_BYTES))
    taken = private_bytes(os.getpid()) - before - held
    del packed
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: _Server(table), path)
    sys.stdout.write(f"ready {taken / max(keys, 1):.1f}\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.buffer.read)
    server.close()


def main() -> None:
    """See the module."""
    uvloop.run(_serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))


if __name__ == "__main__":
    main()
