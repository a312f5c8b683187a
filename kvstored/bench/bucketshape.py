"""How large `bench object` is: what fits into the memory and onto the disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvstored.bench import payloads
from kvstored.bench.processes import BenchError
from kvstored.bench.report import MIN_ROUNDS

RAM_BYTES = 1 << 30
MOST_DISK_BYTES = 16 << 30
_LEAST_IN_RAM, _MOST_IN_RAM = 2.5, 4.0  # prefixes
_MEMORY_COPIES = 7  # RAM tier 2.5, source, staging, bare bodies, the server's, something over


@dataclass(frozen=True, slots=True)
class Shape:
    """One object size: how many chunks make a prefix, and how many rounds there are."""

    object_bytes: int
    chunks: int
    rounds: int

    @property
    def prefix_bytes(self) -> int:
        """Of one prefix."""
        return self.object_bytes * self.chunks

    @property
    def ram_cap_bytes(self) -> int:
        """The default, but at least two and a half prefixes, and at most four."""
        least, most = (int(times * self.prefix_bytes) for times in (_LEAST_IN_RAM, _MOST_IN_RAM))
        return max(least, min(RAM_BYTES, most))

    @property
    def warming(self) -> int:
        """Puts until the RAM tier has taken all the memory it will have."""
        return -(-self.ram_cap_bytes // self.prefix_bytes)

    @property
    def prefixes(self) -> int:
        """That are put; more than the RAM tier holds."""
        return self.warming + self.rounds

    @property
    def disk_bytes(self) -> int:
        """What the server stores: the daemon's prefixes, and the bare ones."""
        return (self.prefixes + self.rounds + 1) * self.prefix_bytes


def shape_of(object_bytes: int, wanted_chunks: int, wanted_rounds: int, place: Path) -> Shape:
    """As asked for, or as fits: at first fewer rounds, then fewer chunks. Raises BenchError where
    not even one chunk does.
    """
    try:
        found = os.statvfs(place)
    except OSError as error:
        raise BenchError(f"{place}: {error.strerror}") from error
    disk_bytes = min(MOST_DISK_BYTES, found.f_bavail * found.f_frsize // 2)
    chunks = payloads.chunks_that_fit(wanted_chunks, _MEMORY_COPIES * object_bytes)
    for fewer in range(chunks, 0, -1):
        for times in range(wanted_rounds, MIN_ROUNDS - 1, -1):
            shape = Shape(object_bytes, fewer, times)
            if shape.disk_bytes <= disk_bytes:
                return shape
    raise BenchError(
        f"{disk_bytes >> 20} MiB of disk are too little for objects of {object_bytes >> 20} MiB; "
        "name a larger disk by --directory, or smaller objects by --object-mib"
    )
