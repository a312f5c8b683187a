"""Files whose reads of chosen ranges stop, or fail, until the test says otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Iterator, Sequence

from kvstored.io.base import Buffer, RealFiles


class Gate(threading.Event):
    """An event that says when somebody began to wait for it. Made on the loop."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self.reached = asyncio.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self._loop.call_soon_threadsafe(self.reached.set)
        return super().wait(timeout)


class RangeFiles(RealFiles):
    """Reads that touch a byte of `gates` wait there first; those that touch one of `bad` fail."""

    def __init__(self) -> None:
        self.gates: dict[int, Gate] = {}
        self.bad: set[int] = set()
        self.reads: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def all_opened(self) -> Iterator[None]:
        """Opens every gate at the end, so that a test that fails ends too."""
        try:
            yield
        finally:
            for gate in self.gates.values():
                gate.set()

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        end = offset_bytes + sum(map(len, buffers))
        self.reads.append((offset_bytes, end))
        for at, gate in list(self.gates.items()):
            if offset_bytes <= at < end:
                gate.wait()
        if any(offset_bytes <= at < end for at in self.bad):
            raise OSError(errno.EIO, "a bad block")
        return super().preadv(fd, buffers, offset_bytes)
