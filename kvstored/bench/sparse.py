"""A daemon whose volume's data file is sparse, for benchmarks that need many objects and no bytes.

Usage: python -m kvstored.bench.sparse CONFIG

A million objects of the smallest size for slots need 74 GB of data file, which a restart never
reads. This is `kvstored serve` with one operation replaced: what is to be allocated for `data`, or
for `small/data.mdb`, is only made as long. Everything else, the index's file among it, is real.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from kvstored import config
from kvstored.config import host
from kvstored.io.base import RealFiles
from kvstored.stopping import block_signals

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SPARSE = ("/data", "/small/data.mdb")


class SparseFiles(RealFiles):
    """The kernel's files, but two of a volume's take no room before they are written."""

    def fallocate(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        """See Files."""
        if not os.readlink(f"/proc/self/fd/{fd}").endswith(_SPARSE):
            super().fallocate(fd, offset_bytes, length_bytes)
        elif os.fstat(fd).st_size < offset_bytes + length_bytes:
            os.ftruncate(fd, offset_bytes + length_bytes)


def main() -> None:
    """See the module."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # ends with the benchmark
    # As its disk takes sparse files of any size, the configuration need not look at it.
    host.disk_for = lambda path: 1 << 60
    loaded = config.load(Path(sys.argv[1]), os.environ)
    block_signals()  # before numpy starts threads; see kvstored.cli
    from kvstored.daemon import serve

    serve(loaded, SparseFiles())


if __name__ == "__main__":
    main()
