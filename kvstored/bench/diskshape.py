"""How large `bench disk` and `bench striping` are: what fits into the memory and onto the disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvstored.bench import payloads
from kvstored.bench.payloads import MIB
from kvstored.bench.processes import BenchError
from kvstored.bench.report import MIN_ROUNDS
from kvstored.bench.shapes import Prefixed, half_of_what_is_free, too_little
from kvstored.tiers.nvme import layout

MOST_DISK_BYTES = 12 << 30
_MEMORY_COPIES = 6  # RAM tier 2.5, source, destination, the ceiling's segment, and something over
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Shape(Prefixed):
    """One object size: how many chunks make a prefix, how many prefixes the volumes hold, and the
    cap of each volume.
    """

    prefixes: int
    volume_cap_bytes: int

    most_in_ram = 8.0

    @property
    def least_prefixes(self) -> int:
        """More than the RAM tier holds; and a put of each makes the rounds that must be."""
        return self.warming + MIN_ROUNDS


def shape_of(object_bytes: int, wanted_chunks: int, wanted_rounds: int, disk_bytes: int) -> Shape:
    """As asked for, or as fits: at first fewer prefixes, and so fewer rounds of filling, then fewer
    chunks.

    `disk_bytes`: what there is for a volume that could hold everything and the ceiling's files.
    Raises BenchError where not even one chunk fits.
    """
    chunks = payloads.chunks_that_fit(wanted_chunks, _MEMORY_COPIES * object_bytes)
    while chunks:
        probe = Shape(object_bytes, chunks, 0, 0)
        most = max(probe.least_prefixes, probe.warming + wanted_rounds)
        for prefixes in range(most, probe.least_prefixes - 1, -1):
            cap_bytes = cap_for(object_bytes, chunks * prefixes)
            # Beside the volume: the file that is read and overwritten, and one that is new.
            if cap_bytes + 2 * chunks * object_bytes <= disk_bytes:
                return Shape(object_bytes, chunks, prefixes, cap_bytes)
        chunks -= 1
    raise too_little(disk_bytes, object_bytes)


def cap_for(object_bytes: int, objects: int) -> int:
    """The least cap, near enough, of a volume with slots for so many objects of one size."""
    cap_bytes = objects * object_bytes + 16 * MIB
    while _slots(cap_bytes, object_bytes) < objects:
        cap_bytes += max(MIB, cap_bytes // 256)
    return cap_bytes


def _slots(cap_bytes: int, object_bytes: int) -> int:
    region_bytes = layout.default_region_bytes(cap_bytes)
    plan = layout.make_plan(cap_bytes, region_bytes, layout.default_small_bytes(cap_bytes))
    return plan.regions * (region_bytes // layout.slot_bytes(object_bytes))


def disk_there_is(directory: Path) -> int:
    """What a benchmark may use of a directory's file system. Raises BenchError."""
    disk_bytes = half_of_what_is_free(directory, MOST_DISK_BYTES)
    if file_system(directory) in _IN_MEMORY:
        raise BenchError(f"{directory} is in memory; name one on a device by --directory")
    return disk_bytes


def default_directory(temporary: Path) -> Path:
    """The temporary directory, or /var/tmp where that is in memory."""
    return Path("/var/tmp") if file_system(temporary) in _IN_MEMORY else temporary  # noqa: S108


def file_system(path: Path) -> str:
    """Type of the file system that a path is on, like "ext4"; "" if it cannot be told."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == number:
            return rest.split()[0]
    return ""
