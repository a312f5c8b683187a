"""What becomes of the index when a volume of the persistent tier goes away, or comes back.

What a lost volume held are misses, and nothing else is: chunks below them stay, and so do these, as
chunks without an object, so that what is below is of use again once they are put again, or their
volume is back. Those with nothing below them are swept up in time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping

from kvstored.store import recovery
from kvstored.store.index import NONE
from kvstored.store.namespace import Namespace
from kvstored.store.residency import Residency
from kvstored.store.trash import Trash
from kvstored.tiers.base import VOLUME_SHIFT, Recovered, TierKind
from kvstored_client.proto import kvstore_pb2 as pb

SLICE_ROWS = 512
"""Objects that are taken in, or chunks swept up, before others have their turn."""

MOST_REASONS = 16_384
"""Chunks of a lost volume of which a miss says so; of the others it says less."""


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
        self.adopted = 0
        """Slices of objects that were taken in so far."""
        self._adopted = asyncio.Event()
        self._deleted: set[tuple[str, bytes]] = set()  # while volumes are being adopted

    def lost(self, number: int) -> None:
        """Drop the objects whose place is on that volume; where RAM has them, from there alone."""
        self._losses[number] += 1
        first, stop = number << VOLUME_SHIFT, number + 1 << VOLUME_SHIFT
        self._trash.purge(TierKind.NVME, first, stop)
        for ns in self._namespaces.values():
            rows = ns.index.placed_within(TierKind.NVME, first, stop)
            chunks = self._residency.lose_many(ns, rows, TierKind.NVME, "volume_lost")
            ns.ghosts.remember_many(ns.index.keys(chunks[-MOST_REASONS:]), pb.MISS_TIER_DOWN)

    async def sweep(self, ns: Namespace, first: int, stop: int) -> None:
        """Forget chunks among these rows that have no object and nothing below them, and what is
        above and kept by them alone.
        """
        index = ns.index
        husks = index.husks(first, stop)
        for at in range(0, len(husks), SLICE_ROWS):
            for husk in husks[at : at + SLICE_ROWS]:
                row = husk if index.held(husk) else NONE
                while row != NONE and index.first_object[row] == index.first_child[row] == NONE:
                    parent = index.parent[row]
                    ns.pins.pop(row, None)
                    index.remove_chunk(row)
                    row = parent
            await asyncio.sleep(0)  # others have their turn

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
        self.adopted += 1
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
