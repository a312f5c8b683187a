"""What becomes of the index when a volume of the persistent tier goes away, or comes back.

What a lost volume held are misses, and nothing else is: chunks below them stay, as chunks whose
parent is not held, and are of use again once it is put again, or its volume is back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping

from kvstored.store import recovery
from kvstored.store.index import NONE, TIERS
from kvstored.store.namespace import Namespace
from kvstored.store.residency import Residency
from kvstored.store.trash import Trash
from kvstored.tiers.base import VOLUME_SHIFT, Recovered, TierKind
from kvstored_client.proto import kvstore_pb2 as pb

SLICE_ROWS = 512
"""Objects that are taken in before others have their turn."""


class Volumes:
    """Volumes of the NVMe tier, as far as the index is concerned."""

    def __init__(
        self, namespaces: Mapping[str, Namespace], residency: Residency, trash: Trash
    ) -> None:
        self._namespaces = namespaces
        self._residency = residency
        self._trash = trash
        self._losses: Counter[int] = Counter()  # times that each volume went away
        self._adopting = 0
        self._adopted = asyncio.Event()
        self._deleted: set[tuple[str, bytes]] = set()  # while volumes are being adopted

    def lost(self, number: int) -> None:
        """Drop the objects whose place is on that volume; where RAM has them, from there alone."""
        self._losses[number] += 1
        for ns in self._namespaces.values():
            first, stop = number << VOLUME_SHIFT, number + 1 << VOLUME_SHIFT
            for row in ns.index.placed_within(TierKind.NVME, first, stop).tolist():
                self._lose(ns, row)

    def _lose(self, ns: Namespace, row: int) -> None:
        index = ns.index
        chunk = index.object_chunk[row]
        self._residency.unplace_object(ns, row, TierKind.NVME, "volume_lost")
        if any(index.place[tier][row] != NONE for tier in TIERS):
            return
        index.remove_object(row)
        if index.first_object[chunk] == NONE:
            ns.ghosts.remember(index.key(chunk), pb.MISS_TIER_DOWN)
            ns.pins.pop(chunk, None)
            index.remove_chunk(chunk)

    async def found(self, found: Recovered) -> None:
        """Take in the objects of a volume that is back, a slice at a time."""
        number = int(found.place[0]) >> VOLUME_SHIFT if len(found.place) else 0
        losses = self._losses[number]
        self._adopting += 1
        try:
            for part in recovery.slices(found, SLICE_ROWS):
                if self._losses[number] != losses:
                    return
                self._adopt(part)
                await asyncio.sleep(0)  # others have their turn
        finally:
            self._adopting -= 1
            if not self._adopting:
                self._deleted.clear()
                self._adopted.set()
                self._adopted.clear()

    def _adopt(self, part: Recovered) -> None:
        kind = TierKind.NVME
        if self._deleted:
            part, places = recovery.without(part, self._deleted)
            self._trash.discard(kind, places)
        unwanted = recovery.load(part, kind, self._namespaces.get, self._residency)
        self._trash.discard(kind, unwanted)

    async def settled(self, ns: Namespace, keys: Collection[bytes]) -> None:
        """Have these chunks, which were just deleted, gone from what is being taken in as well."""
        if self._adopting:
            self._deleted.update((ns.name, key) for key in keys)
            await self._adopted.wait()
