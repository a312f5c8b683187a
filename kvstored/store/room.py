"""Makes room: reserves places in a tier, evicting the least recently used leaves of it.

Nothing is held while waiting: a reservation that cannot be had in full is given back first, so that
two callers can never wait for each other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvstored.errors import KvstoredError
from kvstored.store.index import NONE, TIER_BIT
from kvstored.store.namespace import Namespace
from kvstored.store.residency import Residency
from kvstored.store.trash import Trash
from kvstored.tiers.base import NoRoom, Tier, TierKind

MAX_INNER_CHUNKS = 4096
"""Chunks that are no leaves and are looked at in one search for room, at most."""


class Room:
    """Reservations in the tiers of one store."""

    def __init__(
        self,
        tiers: Mapping[TierKind, Tier],
        namespaces: Mapping[str, Namespace],
        residency: Residency,
        trash: Trash,
        busy: Callable[[Namespace, int, TierKind], bool],
        wanted: Callable[[Namespace, int], bool],
    ) -> None:
        """`busy(ns, chunk, tier)`: something is under way that needs the chunk to stay there.
        `wanted(ns, chunk)`: it may not be lost; unlike a lease, which only needs the bytes.
        """
        self._tiers = tiers
        self._namespaces = namespaces
        self._residency = residency
        self._trash = trash
        self._busy = busy
        self._wanted = wanted

    async def reserve(
        self,
        tier: TierKind,
        ns: Namespace,
        lengths: Sequence[int],
        until: float | None = None,
        queue: asyncio.Lock | None = None,
    ) -> list[int | NoRoom]:
        """Places for the lengths, in order; from the first without room on, why not.

        Evicts what it may. With `until` (time.monotonic()) it waits for room that others hold, in
        `queue` (by default the namespace's for puts), and then gives either every place or none.
        """
        if until is None:
            return await self._reserve_now(tier, ns, lengths)
        # One waiter of a namespace tries at a time, in order of arrival; a crowd that tries anew
        # at every freed place would evict for nobody's good.
        try:
            async with asyncio.timeout(until - time.monotonic()), queue or ns.put_queue:
                return await self._reserve_waiting(tier, ns, lengths)
        except TimeoutError:
            return [NoRoom.TIER] * len(lengths)

    async def _reserve_waiting(
        self, tier: TierKind, ns: Namespace, lengths: Sequence[int]
    ) -> list[int | NoRoom]:
        while True:
            seen = self._trash.freed.count
            places = await self._reserve_now(tier, ns, lengths)
            refusal = next((p for p in places if isinstance(p, NoRoom)), None)
            if refusal is None:
                return places
            self._tiers[tier].cancel([p for p in places if isinstance(p, int)])
            if refusal in (NoRoom.NEVER, NoRoom.DOWN):
                return [refusal] * len(lengths)
            await self._trash.freed.after(seen)

    async def _reserve_now(
        self, tier: TierKind, ns: Namespace, lengths: Sequence[int]
    ) -> list[int | NoRoom]:
        places: list[int | NoRoom] = []
        try:
            while True:
                got = await self._tiers[tier].reserve(ns.name, lengths[len(places) :])
                refusal = next((p for p in got if isinstance(p, NoRoom)), None)
                places.extend(p for p in got if isinstance(p, int))
                if refusal is None:
                    return places
                missing = lengths[len(places) :]
                scope = ns if refusal is NoRoom.NAMESPACE else None
                hopeless = refusal in (NoRoom.NEVER, NoRoom.DOWN, NoRoom.PENDING)
                emptied = refusal is NoRoom.TIER and self._empty(tier, missing[0])
                if hopeless or not (emptied or self._evict(tier, scope, missing)):
                    return [*places, *([refusal] * len(missing))]
                try:
                    await self._trash.flush(tier)
                except KvstoredError:  # the device takes no deletes: no room will come of them
                    return [*places, *([NoRoom.DOWN] * len(missing))]
        except asyncio.CancelledError:
            self._tiers[tier].cancel([p for p in places if isinstance(p, int)])
            raise

    def _empty(self, tier: TierKind, length: int) -> bool:
        """Where the tier says so, evict all that lies in one range of places, whatever its age.
        False: nothing was.

        Else, when the sizes of objects change, leaf after leaf would go without any room to come of
        it: places of the old size all over the tier.
        """
        for places in self._tiers[tier].crowded(length):
            found = [
                (ns, chunk)
                for ns in self._namespaces.values()
                for chunk in self._chunks_at(ns, tier, places)
            ]
            if found and all(self._may_leave(ns, tier, chunk) for ns, chunk in found):
                for ns, chunk in found:
                    if ns.index.tiers[chunk] & TIER_BIT[tier]:  # else gone with one above it
                        self._residency.evict_chunk(ns, chunk, tier)
                return True
        return False

    @staticmethod
    def _chunks_at(ns: Namespace, tier: TierKind, places: range) -> list[int]:
        """Chunks with an object at one of the places, the deepest first."""
        index = ns.index
        rows = index.placed_within(tier, places.start, places.stop).tolist()
        return sorted({index.object_chunk[row] for row in rows}, key=lambda c: -index.depth[c])

    def _evict(self, tier: TierKind, scope: Namespace | None, lengths: Sequence[int]) -> bool:
        """Evict leaves until the lengths' worth of bytes is freed. False: nothing could be."""
        wanted = sum(self._tiers[tier].charge_bytes(length) for length in lengths)
        among = list(self._namespaces.values()) if scope is None else [scope]
        freed = 0
        try:
            while freed < wanted:
                ns, chunk = self._victim(tier, among)
                if ns is None:
                    break
                freed += self._residency.evict_chunk(ns, chunk, tier)
        finally:
            for ns in among:
                ns.lru[tier].put_back()
        if freed < wanted:
            freed += self._evict_inner(tier, among, wanted - freed)
        return freed > 0

    def _evict_inner(self, tier: TierKind, among: Sequence[Namespace], wanted: int) -> int:
        """No leaf may go: evict chunks above those that somebody keeps. Gives the bytes freed.

        Without it the lease of one leaf would keep its whole prefix in place, which nobody is
        charged for. With a chunk that is nowhere else goes what RAM alone has below it; what is
        leased of that stays where its reader looks.
        """
        oldest = sorted(
            (tick, ns.number, ns, row)
            for ns in among
            for tick, row in ns.lru[tier].inner(MAX_INNER_CHUNKS)
        )
        freed = 0
        for _, _, ns, row in oldest[:MAX_INNER_CHUNKS]:
            if freed >= wanted:
                break
            if ns.index.tiers[row] & TIER_BIT[tier] and self._may_leave(ns, tier, row):
                freed += self._residency.evict_chunk(ns, row, tier)
        return freed

    def _may_leave(self, ns: Namespace, tier: TierKind, chunk: int) -> bool:
        """Whether a chunk that is no leaf may go from the tier, with what would be lost by it."""
        if self._kept(ns, tier, chunk):
            return False
        if ns.index.tiers[chunk] & ~TIER_BIT[tier]:
            return True
        return not any(self._wanted(ns, row) for row in ns.index.subtree(chunk))

    def _victim(self, tier: TierKind, among: Sequence[Namespace]) -> tuple[Namespace | None, int]:
        best: Namespace | None = None
        best_chunk = NONE
        for ns in among:
            chunk = ns.lru[tier].victim(partial(self._kept, ns, tier))
            if chunk == NONE:
                continue
            if best is None or ns.index.tick[chunk] < best.index.tick[best_chunk]:
                best, best_chunk = ns, chunk
        return best, best_chunk

    def _kept(self, ns: Namespace, tier: TierKind, chunk: int) -> bool:
        return ns.pinned(chunk) or self._busy(ns, chunk, tier)
