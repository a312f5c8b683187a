"""Moves what a volume holds to the others, some at a time. Used on the verbs' loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvstored.tiers.base import (
    VOLUME_SHIFT,
    ObjectMeta,
    ObjectRead,
    ObjectWrite,
    ReadOutcome,
    Recovered,
    Tier,
    WriteOutcome,
    padded_bytes,
)
from kvstored.tiers.nvme import merging
from kvstored.tiers.nvme.device import aligned_block
from kvstored.tiers.nvme.volume_tier import VolumeTier

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SLICE_BYTES = 16 << 20
_SLICE_OBJECTS = 256
_PLACE_MASK = (1 << VOLUME_SHIFT) - 1


@dataclass(frozen=True, slots=True)
class Moved:
    """Objects that are on other volumes now; `found` has them at their new places, and nobody
    knows of them yet.
    """

    found: Recovered
    lives: list[int]  # of the volumes, when they were written


class Move:
    """The move of everything on one volume."""

    def __init__(
        self, owner: Tier, tier: VolumeTier, found: Recovered, lives: Callable[[], list[int]]
    ) -> None:
        """`tier` is read; `owner` takes what is read, and does not place anything on `tier`.
        `lives()` says which life each volume is in: what was moved to another one is lost again.
        """
        self._lives = lives
        self._owner = owner
        self._tier = tier
        self._found = found
        self.seen = 0
        self.moved = 0

    async def slices(self) -> AsyncGenerator[Moved, None]:
        """Move slice after slice. Each must be handed over before the next is asked for."""
        lengths = self._found.length_bytes.astype(np.int64)
        at, count = 0, len(lengths)
        while at < count:
            stop = at + 1
            total = int(lengths[at])
            while stop < min(count, at + _SLICE_OBJECTS) and total < _SLICE_BYTES:
                total += int(lengths[stop])
                stop += 1
            yield await self._move(list(range(at, stop)))
            at = self.seen = stop

    async def hand_over(self, moved: Moved, keep: NDArray[np.bool_]) -> None:
        """Have the store know of moved objects, but for those that were deleted meanwhile."""
        numbers = (moved.found.place >> np.uint64(VOLUME_SHIFT)).astype(np.int64)
        same = np.array(self._lives(), np.int64) == np.array(moved.lives, np.int64)
        keep = keep & same[numbers]
        unwanted = moved.found.place[~keep].tolist()
        kept = merging.rows(moved.found, keep)
        self.moved += len(kept.place)
        if len(kept.place) and self._owner.on_found is not None:
            await self._owner.on_found(kept)
        if unwanted:
            await self._owner.delete(unwanted)

    async def _move(self, rows: list[int]) -> Moved:
        lives = self._lives()
        reads = [self._read(row) for row in rows]
        pieces: dict[int, bytes] = {}

        def arrived(index: int, outcome: ReadOutcome, checksums: bytes) -> None:
            if outcome is ReadOutcome.OK:
                pieces[index] = checksums

        await self._tier.read(reads, arrived)
        by_namespace: dict[str, list[int]] = defaultdict(list)
        for i in sorted(pieces):
            namespace = self._found.namespaces[self._found.namespace_id[rows[i]]]
            by_namespace[namespace].append(i)
        done: list[tuple[int, int]] = []
        for namespace, some in by_namespace.items():
            items = await self._place(namespace, [(rows[i], reads[i], pieces[i]) for i in some])
            outcomes = await self._owner.write([item for _, item in items]) if items else []
            for (row, item), outcome in zip(items, outcomes, strict=True):
                if outcome is WriteOutcome.OK:
                    done.append((row, item.place))
        found = merging.rows(self._found, np.array([row for row, _ in done], np.int64))
        return Moved(replace(found, place=np.array([place for _, place in done], np.uint64)), lives)

    async def _place(
        self, namespace: str, objects: list[tuple[int, ObjectRead, bytes]]
    ) -> list[tuple[int, ObjectWrite]]:
        """Writes of the objects for which there is room."""
        places = await self._owner.reserve(namespace, [read.length_bytes for _, read, _ in objects])
        return [
            (row, ObjectWrite(place, self._meta(row, checksums), read.into))
            for (row, read, checksums), place in zip(objects, places, strict=True)
            if isinstance(place, int)
        ]

    def _read(self, row: int) -> ObjectRead:
        found = self._found
        length = int(found.length_bytes[row])
        return ObjectRead(
            int(found.place[row]) & _PLACE_MASK,
            found.keys[row].tobytes(),
            found.parts[found.part_id[row]],
            length,
            found.checksums[row].tobytes(),
            aligned_block(padded_bytes(length)),
        )

    def _meta(self, row: int, checksums: bytes) -> ObjectMeta:
        found = self._found
        parent = found.parents[row].tobytes()
        return ObjectMeta(
            namespace=found.namespaces[found.namespace_id[row]],
            family=found.families[found.family_id[row]],
            key=found.keys[row].tobytes(),
            part=found.parts[found.part_id[row]],
            tenant=found.tenants[found.tenant_id[row]],
            parent=parent if any(parent) else b"",
            depth=int(found.depth[row]),
            end_token=int(found.end_token[row]),
            expires_ms=int(found.expires_ms[row]),
            length_bytes=int(found.length_bytes[row]),
            checksum=found.checksums[row].tobytes(),
            piece_checksums=checksums,
        )
