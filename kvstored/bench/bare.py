"""A bare gRPC server of raw frames: what `bench remote` is compared with.

Usage: python -m kvstored.bench.bare ADDRESS PAYLOAD_BYTES

Both methods copy between frames and one mapped memfd, as the daemon does between frames and its RAM
tier; nothing else is done. Prints "ready PORT" and serves until its standard input is closed.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import sys

import grpc
import grpc.aio
import numpy as np

from kvstored.server.allocator import keep_freed_frames

GET = "/kvstored.bench.Bare/Get"
PUT = "/kvstored.bench.Bare/Put"
FRAME_BYTES = 1 << 20
_OPTIONS = [("grpc.max_receive_message_length", 16 << 20), ("grpc.so_reuseport", 0)]
_Context = grpc.aio.ServicerContext[bytes, bytes]


class Bare:
    """One payload in mapped memory."""

    def __init__(self, payload_bytes: int) -> None:
        descriptor = os.memfd_create("kvstored-bench")
        os.ftruncate(descriptor, payload_bytes)
        self._map = mmap.mmap(descriptor, payload_bytes)
        os.close(descriptor)
        self._view = memoryview(self._map)
        self._array = np.frombuffer(self._map, np.uint8)
        self._array[:] = np.random.default_rng(1).integers(0, 256, payload_bytes, np.uint8)

    async def get(self, _request: bytes, context: _Context) -> None:
        """The whole payload in frames."""
        for at in range(0, len(self._view), FRAME_BYTES):
            await context.write(bytes(self._view[at : at + FRAME_BYTES]))

    async def put(self, _requests: object, context: _Context) -> None:
        """Take frames until the client closes its side; answer with their number."""
        at = count = 0
        while frame := await _read(context):
            np.copyto(self._array[at : at + len(frame)], np.frombuffer(frame, np.uint8))
            at += len(frame)
            count += 1
        await context.write(str(count).encode())


async def _read(context: _Context) -> bytes:
    frame: object = await context.read()
    return frame if isinstance(frame, bytes) else b""


async def serve(address: str, payload_bytes: int) -> None:
    """Serve until standard input is closed."""
    bare = Bare(payload_bytes)
    server = grpc.aio.server(options=_OPTIONS)
    handlers = {
        "Get": grpc.unary_stream_rpc_method_handler(bare.get),
        "Put": grpc.stream_stream_rpc_method_handler(bare.put),
    }
    service = GET.split("/")[1]
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    port = server.add_insecure_port(address)
    await server.start()
    sys.stdout.write(f"ready {port}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    await server.stop(None)


def main() -> None:
    """See the module."""
    keep_freed_frames()
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))


if __name__ == "__main__":
    main()
