"""One segment's memory: a sealed memfd, mapped by the daemon.

Everything here blocks and runs in the pool, except the properties and slices of `memory`.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from kvstored.tiers.ram import pages

# linux/fcntl.h; Python 3.11 does not name it.
F_SEAL_FUTURE_WRITE = 0x0010

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
"""Without FUTURE_WRITE anyone who holds the descriptor could reopen it for writing."""


class Segment:
    """Shared memory of a fixed size that only this process can write.

    Life: construct, `populate` (ranges, in parallel), `finish`, use, `close` until it is True.
    `memory` is a writable view of all of it. Raises OSError when the kernel refuses.
    """

    def __init__(self, size_bytes: int, hugepages: bool) -> None:
        self.size_bytes = size_bytes
        self.huge_bytes = 0  # for the maker to note what `populate` said
        self._hugepages = hugepages and size_bytes >= pages.HUGE_PAGE_BYTES
        self._fd = pages.sealable("kvstored-ram", size_bytes)
        try:
            self._map()
        except OSError:
            os.close(self._fd)
            raise

    @property
    def fd(self) -> int:
        """The descriptor; it stays the segment's."""
        return self._fd

    def populate(self, start: int, stop: int) -> int:
        """Make the pages of a byte range present (`start` at a huge page's border); how many
        bytes of it lie in huge pages.
        """
        huge_bytes = self._populate_huge(start, min(stop, self._inside_bytes))
        pages.populate(self.address + start + huge_bytes, stop - start - huge_bytes)
        return huge_bytes

    def finish(self) -> None:
        """Seal the memory, all of whose pages are present."""
        os.posix_fallocate(self._fd, 0, self.size_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)

    def copy_from(self, offset: int, source: Segment, source_offset: int, size_bytes: int) -> None:
        """Copy a range of another segment here."""
        ctypes.memmove(self.address + offset, source.address + source_offset, size_bytes)

    def close(self) -> bool:
        """Give the memory back; False (try again later) while anyone holds a view of it."""
        self.memory.release()
        # Drops the page table with the GIL released, so that unmapping has little left to do;
        # harmless to a view that is still held, as the pages stay in the memfd.
        pages.advise(self.address, self.size_bytes, pages.MADV_DONTNEED)
        try:
            self._owner.close()
        except BufferError:
            return False
        os.close(self._fd)
        return True

    def _populate_huge(self, start: int, stop: int) -> int:
        """Make a range of whole huge pages; 0 when the kernel does not give all of them."""
        if stop <= start:
            return 0
        # A small page of each, grown to a huge one, is cleared in one go, several times faster
        # than touching every small page. One call for all, as each waits for all processors once.
        for offset in range(start, stop, pages.HUGE_PAGE_BYTES):
            pages.populate(self.address + offset, pages.PAGE_BYTES)
        size_bytes = stop - start
        collapsed = pages.advise(self.address + start, size_bytes, pages.MADV_COLLAPSE)
        return size_bytes if collapsed else 0

    def _map(self) -> None:
        # Python's own mmap of a descriptor keeps a second one, and knows no alignment. So an
        # anonymous mapping owns the addresses (and knows of every view) and the memfd lies over it.
        slack = pages.HUGE_PAGE_BYTES if self._hugepages else 0
        self._owner = mmap.mmap(
            -1,
            self.size_bytes + slack,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | pages.MAP_NORESERVE,
        )
        base = pages.address_of(self._owner)
        offset = -base % pages.HUGE_PAGE_BYTES if self._hugepages else 0
        self.address = base + offset
        pages.map_over(self.address, self.size_bytes, self._fd)
        pages.advise(self.address, self.size_bytes, pages.MADV_DONTDUMP)
        # A huge page behind the last aligned one would reach beyond the end, and past the cap.
        inside = self.size_bytes & -pages.HUGE_PAGE_BYTES if self._hugepages else 0
        self._inside_bytes = inside
        pages.advise(self.address, inside, pages.MADV_HUGEPAGE)
        pages.advise(self.address + inside, self.size_bytes - inside, pages.MADV_NOHUGEPAGE)
        with memoryview(self._owner) as whole:
            self.memory = whole[offset : offset + self.size_bytes]
