"""What the sizes of `bench disk`, `bench striping` and `bench object` have in common."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvstored.bench.processes import BenchError

RAM_BYTES = 1 << 30
"""The RAM tier's default cap, which the daemon gets where the sizes allow."""

_LEAST_IN_RAM = 2.5  # prefixes


@dataclass(frozen=True, slots=True)
class Prefixed:
    """One object size, and how many chunks make a prefix."""

    object_bytes: int
    chunks: int

    most_in_ram: ClassVar[float]
    """Most prefixes that the RAM tier holds."""

    @property
    def prefix_bytes(self) -> int:
        """Of one prefix."""
        return self.object_bytes * self.chunks

    @property
    def ram_cap_bytes(self) -> int:
        """The default, but at least two and a half prefixes, and at most `most_in_ram`."""
        least, most = _LEAST_IN_RAM * self.prefix_bytes, self.most_in_ram * self.prefix_bytes
        return max(int(least), min(RAM_BYTES, int(most)))

    @property
    def warming(self) -> int:
        """Puts until the RAM tier has taken all the memory it will have."""
        return -(-self.ram_cap_bytes // self.prefix_bytes)


def half_of_what_is_free(place: Path, most_bytes: int) -> int:
    """What a benchmark may use of a path's file system. Raises BenchError."""
    try:
        found = os.statvfs(place)
    except OSError as error:
        raise BenchError(f"{place}: {error.strerror}") from error
    return min(most_bytes, found.f_bavail * found.f_frsize // 2)


def too_little(disk_bytes: int, object_bytes: int) -> BenchError:
    """That not even one chunk of such objects fits."""
    return BenchError(
        f"{disk_bytes >> 20} MiB of disk are too little for objects of {object_bytes >> 20} MiB; "
        "name a larger disk by --directory, or smaller objects by --object-mib"
    )
