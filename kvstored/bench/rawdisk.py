"""Bare transfers between memory and files: what `bench disk` and `bench striping` compare with."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstored.bench.payloads import Bytes
from kvstored.bench.processes import BenchError
from kvstored.tiers.ram import pages

IN_FLIGHT = 8
MOST_REQUEST_BYTES = 4 << 20


class Aligned:
    """Private memory of this process that O_DIRECT takes, in huge pages if they are to be had.

    `array` is all of it, writable.
    """

    def __init__(self, size_bytes: int) -> None:
        self._map = mmap.mmap(
            -1, size_bytes + pages.HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        whole = np.frombuffer(self._map, np.uint8)
        start = -whole.ctypes.data % pages.HUGE_PAGE_BYTES
        self.array: Bytes = whole[start : start + size_bytes]
        pages.advise(self.array.ctypes.data, size_bytes, pages.MADV_HUGEPAGE)
        self.array.fill(1)


@dataclass(frozen=True, slots=True)
class _Share:
    """A device's part of a payload: bytes [start, stop), in a file of its own."""

    start: int
    stop: int
    fd: int


def split(nbytes: int, weights: Sequence[float], unit_bytes: int) -> list[int]:
    """Sizes of consecutive parts in proportion to `weights`, each a multiple of `unit_bytes` (which
    divides `nbytes`).
    """
    total = sum(weights)
    bounds = [0]
    upto = 0.0
    for weight in weights:
        upto += weight
        bounds.append(round(nbytes * upto / total / unit_bytes) * unit_bytes)
    return [stop - start for start, stop in itertools.pairwise(bounds)]


class RawFiles:
    """One payload in nameless files, a part of it in each of some directories.

    `weights`: how much of the payload each directory has. Every part is transferred by `IN_FLIGHT`
    threads of its own, in requests of `request_bytes`. The files are fallocated: unwritten extents
    until `write`. Raises BenchError where a file system does not take O_DIRECT, OSError.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        weights: Sequence[float],
        nbytes: int,
        request_bytes: int,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._request_bytes = request_bytes
        self._pool = pool
        self._shares: list[_Share] = []
        start = 0
        try:
            for directory, size in zip(
                directories, split(nbytes, weights, mmap.PAGESIZE), strict=True
            ):
                fd = _nameless(directory)
                self._shares.append(_Share(start, start + size, fd))
                if size:
                    os.posix_fallocate(fd, 0, size)
                start += size
        except BaseException:
            self.close()
            raise

    def read(self, into: Bytes) -> None:
        """Fill `into`, aligned and of the payload's size."""
        self._transfer(os.preadv, into)

    def write(self, source: Bytes) -> None:
        """Write `source`, aligned and of the payload's size, and sync every file."""
        self._transfer(os.pwritev, source)
        for _ in self._pool.map(os.fdatasync, [share.fd for share in self._shares]):
            pass

    def _transfer(
        self, call: Callable[[int, Sequence[memoryview], int], int], memory: Bytes
    ) -> None:
        view = memory.data
        works = [(share, self._requests(share)) for share in self._shares]

        def work(share: _Share, requests: Iterator[tuple[int, int]]) -> None:
            for start, stop in requests:  # one iterator for all threads of a share
                done = call(share.fd, [view[start:stop]], start - share.start)
                if done != stop - start:
                    raise BenchError(f"a transfer of {stop - start} bytes ended after {done}")

        running = [self._pool.submit(work, *item) for item in works for _ in range(IN_FLIGHT)]
        for each in running:
            each.result()

    def _requests(self, share: _Share) -> Iterator[tuple[int, int]]:
        starts = range(share.start, share.stop, self._request_bytes)
        stops = [min(start + self._request_bytes, share.stop) for start in starts]
        return iter(list(zip(starts, stops, strict=True)))

    def close(self) -> None:
        """Give the room back."""
        for share in self._shares:
            os.close(share.fd)
        self._shares.clear()


@contextlib.contextmanager
def threads(devices: int) -> Iterator[ThreadPoolExecutor]:
    """As many threads as there are requests in flight; all are there at once."""
    with ThreadPoolExecutor(devices * IN_FLIGHT) as pool:
        yield pool


def _nameless(directory: Path) -> int:
    flags = os.O_RDWR | os.O_TMPFILE | os.O_DIRECT | os.O_CLOEXEC
    try:
        return os.open(directory, flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        raise BenchError(
            f"{directory}: its file system does not take O_DIRECT; name another by --directory"
        ) from error
