"""Gives freed places back to their tiers, in batches.

A delete on a persistent tier costs a synced commit; what is discarded while one runs goes with the
next. Whoever needs the room, or must know that a delete holds, awaits `flush`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from kvstored.errors import KvstoredError
from kvstored.store.changes import Changes
from kvstored.tiers.base import Tier, TierKind

log = logging.getLogger("kvstored.store")


class Trash:
    """Places on their way back to free, per tier. Bounded by what the tiers hold."""

    def __init__(self, tiers: Mapping[TierKind, Tier]) -> None:
        self._tiers = tiers
        self._waiting: dict[TierKind, list[int]] = {tier: [] for tier in tiers}
        self._locks = {tier: asyncio.Lock() for tier in tiers}
        self._work = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.freed = Changes()
        """Notified whenever places became free or may be evicted; who needs room waits on it."""

    def discard(self, tier: TierKind, places: list[int]) -> None:
        """Take places that no index entry names any more; they are freed soon."""
        if places:
            self._waiting[tier].extend(places)
            self._work.set()

    def purge(self, tier: TierKind, first: int, stop: int) -> None:
        """Forget places from `first` up to before `stop`: their device is gone, and if it is back
        they may be of objects that are held.
        """
        self._waiting[tier] = [p for p in self._waiting[tier] if not first <= p < stop]

    async def flush(self, tier: TierKind) -> None:
        """Free everything discarded so far; durably, where the tier persists.

        Cancelling the caller does not cut it short. Raises KvstoredError where the device could
        not be told: the places stay charged, and the tier tries again by itself.
        """
        if not self._waiting[tier] and not self._locks[tier].locked():
            return
        task = asyncio.ensure_future(self._flush(tier))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def _flush(self, tier: TierKind) -> None:
        async with self._locks[tier]:
            batch, self._waiting[tier] = self._waiting[tier], []
            if batch:
                await self._tiers[tier].delete(batch)
                self.freed.notify()

    async def run(self) -> None:
        """Free what comes, for ever; a supervised task."""
        while True:
            await self._work.wait()
            self._work.clear()
            for tier in self._tiers:
                try:
                    await self.flush(tier)
                except KvstoredError as error:  # whoever needs to know awaits a flush of their own
                    fields = {"tier": tier.name, "error": str(error)}
                    log.warning("deletes are not durable yet", extra={"fields": fields})
