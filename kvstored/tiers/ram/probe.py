"""What this kernel can do, found out on a small segment when the tier is opened."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from kvstored.tiers.ram import pages
from kvstored.tiers.ram.segment import SEALS, Segment

_SMAPS = Path("/proc/self/smaps")
_PROBE_BYTES = 2 * pages.HUGE_PAGE_BYTES


def probe(hugepages: bool) -> bool:
    """Make, fill, seal and check one segment; True when huge pages were wanted and came.

    Raises OSError when the kernel cannot seal memory, or seals that do not hold.
    """
    segment = Segment(_PROBE_BYTES, hugepages)
    try:
        segment.populate(0, _PROBE_BYTES)
        segment.finish()
        if fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise OSError(errno.ENOTSUP, "seals were taken but are not there")
        try:
            os.pwrite(segment.fd, b"x", 0)
        except PermissionError:
            return hugepages and _is_huge(segment.address)
        raise OSError(errno.ENOTSUP, "sealed memory could be written")
    finally:
        segment.close()


def _is_huge(address: int) -> bool:
    """True when the mapping at this address has huge pages, by the kernel's own account."""
    begins = f"{address:x}-"
    inside = False
    for line in _SMAPS.read_text().splitlines():
        if line.startswith(begins):
            inside = True
        elif inside and line.startswith("ShmemPmdMapped:"):
            return line.split()[1] != "0"
    return False
