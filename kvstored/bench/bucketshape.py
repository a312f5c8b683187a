"""How large `bench object` is: what fits into the memory and onto the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstored.bench import payloads
from kvstored.bench.report import MIN_ROUNDS
from kvstored.bench.shapes import Prefixed, half_of_what_is_free, too_little

MOST_DISK_BYTES = 16 << 30
_MEMORY_COPIES = 7  # RAM tier 2.5, source, staging, bare bodies, the server's, something over


@dataclass(frozen=True, slots=True)
class Shape(Prefixed):
    """One object size: how many chunks make a prefix, and how many rounds there are."""

    rounds: int

    most_in_ram = 4.0

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
    disk_bytes = half_of_what_is_free(place, MOST_DISK_BYTES)
    chunks = payloads.chunks_that_fit(wanted_chunks, _MEMORY_COPIES * object_bytes)
    for fewer in range(chunks, 0, -1):
        for times in range(wanted_rounds, MIN_ROUNDS - 1, -1):
            shape = Shape(object_bytes, fewer, times)
            if shape.disk_bytes <= disk_bytes:
                return shape
    raise too_little(disk_bytes, object_bytes)
