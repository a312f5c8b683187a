"""A line to a server that is as far away as is said: what is sent there arrives so much later.

Usage: python -m kvstored.bench.delay PORT MS

Passes TCP connections on to 127.0.0.1:PORT. Every byte on its way there takes MS milliseconds, so
every request does; answers come at once. Bytes are only delayed, whatever their rate; answers are
spliced, and so cost little more than without. Prints "ready PORT" and serves until its standard
input is closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import socket
import sys
import threading
import time

_STEP = 1 << 18
_PIPE_BYTES = 1 << 20
_MOST_PARTS = 1024  # under way on one connection: 256 MiB, more than any object's


def main() -> None:
    """See the module."""
    port, delay_s = int(sys.argv[1]), float(sys.argv[2]) / 1000
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    threading.Thread(target=_accept, args=(listener, port, delay_s), daemon=True).start()
    sys.stdout.write(f"ready {listener.getsockname()[1]}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()


def _accept(listener: socket.socket, port: int, delay_s: float) -> None:
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        for it in (near, far):
            it.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        parts: queue.Queue[tuple[float, bytes]] = queue.Queue(_MOST_PARTS)
        for work in (
            lambda near=near, parts=parts: _take(near, parts, delay_s),
            lambda far=far, parts=parts: _send(far, parts),
            lambda near=near, far=far: _answer(far, near),
        ):
            threading.Thread(target=work, daemon=True).start()


def _take(near: socket.socket, parts: queue.Queue[tuple[float, bytes]], delay_s: float) -> None:
    part = b"begin"
    while part:
        try:
            part = near.recv(_STEP)
        except OSError:
            part = b""
        parts.put((time.monotonic() + delay_s, part))


def _send(far: socket.socket, parts: queue.Queue[tuple[float, bytes]]) -> None:
    while True:
        due, part = parts.get()
        wait_s = due - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        try:
            if not part:
                far.shutdown(socket.SHUT_WR)
                return
            far.sendall(part)
        except OSError:
            return


def _answer(far: socket.socket, near: socket.socket) -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        while count := os.splice(far.fileno(), writing, _PIPE_BYTES):
            while count:
                count -= os.splice(reading, near.fileno(), count)
    except OSError:
        pass
    finally:
        os.close(reading)
        os.close(writing)
        for it in (near, far):
            with contextlib.suppress(OSError):
                it.shutdown(socket.SHUT_RDWR)
            # not closed: the other threads may still be about to use its number


if __name__ == "__main__":
    main()
