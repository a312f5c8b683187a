"""Memory like the RAM tier's: what `bench local` is compared with.

Usage: python -m kvstored.bench.memory BYTES SEED

Holds one segment, filled with `random_bytes(BYTES, SEED)`; prints "ready DESCRIPTOR" and waits
until its standard input is closed. `Reading` maps it in another process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import numpy as np

from kvstored.bench.payloads import Bytes, random_bytes
from kvstored.tiers.ram import pages
from kvstored.tiers.ram.segment import Segment

_MADV_POPULATE_READ = 22  # asm-generic/mman-common.h
_MAP_FIXED = 0x10
_POPULATE_BYTES = 32 << 20  # as the tier does it: what huge pages are had or not had for

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)


class Written:
    """A segment of this process's, made as the RAM tier makes its own. Raises OSError.

    `array` is all of it, writable, and must be gone before `close`.
    """

    def __init__(self, size_bytes: int) -> None:
        self._segment = Segment(size_bytes, hugepages=True)
        for start in range(0, size_bytes, _POPULATE_BYTES):
            self._segment.populate(start, min(start + _POPULATE_BYTES, size_bytes))
        self._segment.finish()
        self.fd = self._segment.fd
        self.address = self._segment.address

    def array(self) -> Bytes:
        """All of it, writable; to be dropped before `close`."""
        return np.frombuffer(self._segment.memory, np.uint8)

    def close(self) -> None:
        """Give the memory back."""
        self._segment.close()


class Reading:
    """Another process's segment, mapped read-only at a huge page's border, every page present."""

    def __init__(self, pid: int, descriptor: int, size_bytes: int) -> None:
        self._owner = mmap.mmap(
            -1,
            size_bytes + pages.HUGE_PAGE_BYTES,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | pages.MAP_NORESERVE,
        )
        base = pages.address_of(self._owner)
        self.address = base + -base % pages.HUGE_PAGE_BYTES
        mine = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            flags = mmap.MAP_SHARED | _MAP_FIXED
            if _mmap(self.address, size_bytes, mmap.PROT_READ, flags, mine, 0) != self.address:
                code = ctypes.get_errno()
                raise OSError(code, f"mmap: {os.strerror(code)}")
        finally:
            os.close(mine)
        pages.advise(self.address, size_bytes, pages.MADV_HUGEPAGE)
        # Before Linux 5.14 the first round, which does not count, brings the pages.
        pages.advise(self.address, size_bytes, _MADV_POPULATE_READ)

    def close(self) -> None:
        """Unmap."""
        self._owner.close()


def main() -> None:
    """See the module."""
    size_bytes, seed = int(sys.argv[1]), int(sys.argv[2])
    written = Written(size_bytes)
    array = written.array()
    array[:] = random_bytes(size_bytes, seed)
    sys.stdout.write(f"ready {written.fd}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
