"""What a volume's index says it holds, a few records at a time, while the volume is in use."""

from __future__ import annotations

from dataclasses import dataclass

from kvstored.tiers.nvme import record
from kvstored.tiers.nvme.format import SMALL_BIT
from kvstored.tiers.nvme.index import Environment


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as its record has it. `sequence` is that of no other object."""

    place: int
    sequence: int
    key: bytes
    part: str
    length_bytes: int
    checksum: bytes


def list_after(index: Environment, small: Environment, place: int, most: int) -> list[Listed]:
    """The next objects behind a place (-1: the first), slots before small ones, at most so many.

    Blocks. Raises lmdb.Error or OSError.
    """
    found = _listed(index, place, most) if place + 1 < SMALL_BIT else []
    if len(found) < most:
        found += _listed(small, max(place, SMALL_BIT - 1), most - len(found))
    return found


def _listed(env: Environment, place: int, most: int) -> list[Listed]:
    rows = record.from_bytes(env.records_after(place, most))
    parts = env.part_names() if len(rows) else {}
    return [
        Listed(
            place=int(row["place"]),
            sequence=int(row["sequence"]),
            key=row["key"].tobytes(),
            part=parts.get(int(row["part"]), ""),
            length_bytes=int(row["length_bytes"]),
            checksum=row["checksum"].tobytes(),
        )
        for row in rows
    ]
