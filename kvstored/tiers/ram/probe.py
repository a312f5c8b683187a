"""What this kernel can do, found out on a small segment when the tier is opened."""

from __future__ import annotations

import errno
import fcntl
import os

from kvstored.tiers.ram import pages
from kvstored.tiers.ram.segment import SEALS, Segment

_PROBE_BYTES = 2 * pages.HUGE_PAGE_BYTES


def probe(hugepages: bool) -> bool:
    """Make, fill, seal and check one segment; True when huge pages were wanted and came.

    Raises OSError when the kernel cannot seal memory, or seals that do not hold.
    """
    segment = Segment(_PROBE_BYTES, hugepages)
    try:
        huge_bytes = segment.populate(0, _PROBE_BYTES)
        segment.finish()
        if fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise OSError(errno.ENOTSUP, "seals were taken but are not there")
        try:
            os.pwrite(segment.fd, b"x", 0)
        except PermissionError:
            return huge_bytes > 0
        raise OSError(errno.ENOTSUP, "sealed memory could be written")
    finally:
        segment.close()
