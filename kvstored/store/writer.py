"""Writes published objects behind to the persistent tier: batched, bounded, in order of arrival.

An object is *dirty* from its publication until its write has come back, whatever the outcome. While
it is dirty its RAM copy stays (see `busy`). A failed write leaves it in RAM only and is counted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from kvstored.store.api import let_go
from kvstored.store.namespace import Namespace
from kvstored.store.residency import Residency
from kvstored.store.room import Room
from kvstored.store.trash import Trash
from kvstored.tiers.base import (
    NoRoom,
    ObjectMeta,
    ObjectWrite,
    Tier,
    WriteOutcome,
    padded_bytes,
)
from kvstored.tiers.ram.tier import RamTier

BATCH_BYTES = 64 << 20
BATCH_OBJECTS = 1024


@dataclass(slots=True, eq=False)
class Dirty:
    """One object on its way. `durable` tells waiters whether it got there."""

    ns: Namespace
    row: int
    generation: int
    meta: ObjectMeta
    ram_place: int
    durable: asyncio.Future[bool] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes it counts against the bound on dirty bytes."""
        return padded_bytes(self.meta.length_bytes)

    @property
    def alive(self) -> bool:
        """Whether it is still in the index as it was."""
        return self.ns.index.alive(self.row, self.generation)


class Writer:
    """The write-behind queue between the RAM tier and one persistent tier."""

    def __init__(
        self, ram: RamTier, tier: Tier, residency: Residency, room: Room, trash: Trash
    ) -> None:
        self._ram = ram
        self._tier = tier
        self._residency = residency
        self._room = room
        self._trash = trash
        self._queue: deque[Dirty] = deque()
        self._dirty: dict[tuple[int, int], Dirty] = {}  # (namespace number, object row)
        self._writing: list[Dirty] = []  # the batch under way
        self._work = asyncio.Event()
        self.dirty_bytes = 0
        self.not_written: dict[str, int] = {}  # reason -> objects that stayed in RAM only

    def submit(
        self, ns: Namespace, row: int, meta: ObjectMeta, ram_place: int
    ) -> asyncio.Future[bool]:
        """Queue a published object. The future tells, in the end, whether it is durable."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        dirty = Dirty(ns, row, ns.index.generation[row], meta, ram_place, future)
        self._ram.lease(ram_place)  # the write reads from it; ends in `_finish`
        self._dirty[ns.number, row] = dirty
        self._queue.append(dirty)
        self.dirty_bytes += dirty.nbytes
        self._work.set()
        return future

    def pending(self, ns: Namespace, row: int) -> asyncio.Future[bool] | None:
        """The future of an object that is dirty now, or None."""
        dirty = self._dirty.get((ns.number, row))
        return dirty.durable if dirty is not None and dirty.alive else None

    def busy(self, ns: Namespace, chunk: int) -> bool:
        """Whether some object of the chunk is dirty."""
        return any((ns.number, row) in self._dirty for row in ns.index.object_rows(chunk))

    def in_flight(self) -> list[asyncio.Future[bool]]:
        """Futures of everything queued or being written, for whoever must see the end of it."""
        return [dirty.durable for dirty in (*self._queue, *self._writing)]

    def dying(self, ns: Namespace) -> list[asyncio.Future[bool]]:
        """Futures of the writes under way whose objects have left the index, whoever dropped them.

        A delete holds only when these have ended and their places are flushed from the trash. What
        is merely queued will not be written once its object is gone.
        """
        return [d.durable for d in self._writing if d.ns is ns and not d.alive]

    async def run(self) -> None:
        """Write what comes, for ever; a supervised task."""
        while True:
            while self._queue:
                await self._write(self._next_batch())
            self._work.clear()
            await self._work.wait()

    def _next_batch(self) -> list[Dirty]:
        batch: list[Dirty] = []
        nbytes = 0
        while self._queue and len(batch) < BATCH_OBJECTS and nbytes < BATCH_BYTES:
            if batch and self._queue[0].ns is not batch[0].ns:
                break
            dirty = self._queue.popleft()
            if not dirty.alive:
                self._finish(dirty, False)
                continue
            batch.append(dirty)
            nbytes += dirty.nbytes
        return batch

    async def _write(self, batch: list[Dirty]) -> None:
        if not batch:
            return
        self._writing = batch
        items: list[tuple[Dirty, ObjectWrite]] = []
        try:
            lengths = [dirty.meta.length_bytes for dirty in batch]
            places = await self._room.reserve(self._tier.kind, batch[0].ns, lengths)
            items = [
                (
                    dirty,
                    ObjectWrite(place, dirty.meta, self._ram.view(dirty.ram_place, padded=True)),
                )
                for dirty, place in zip(batch, places, strict=True)
                if not isinstance(place, NoRoom)
            ]
            for place in places:
                if isinstance(place, NoRoom):
                    self._count("no_room")
            outcomes = await self._tier.write([item for _, item in items]) if items else []
            for (dirty, item), outcome in zip(items, outcomes, strict=True):
                self._settle(dirty, item.place, outcome)
        finally:  # also when this task dies: nobody may wait for ever
            self._writing = []
            for _, item in items:
                let_go(item.payload)
            for dirty in batch:
                self._finish(dirty, False)

    def _settle(self, dirty: Dirty, place: int, outcome: WriteOutcome) -> None:
        if outcome is not WriteOutcome.OK:
            self._count(outcome.value)
            return
        if not dirty.alive:  # deleted meanwhile: the delete waits for us, then flushes the trash
            self._trash.discard(self._tier.kind, [place])
            return
        self._residency.place_object(dirty.ns, dirty.row, self._tier.kind, place)
        self._finish(dirty, True)

    def _count(self, reason: str) -> None:
        self.not_written[reason] = self.not_written.get(reason, 0) + 1

    def _finish(self, dirty: Dirty, durable: bool) -> None:
        if dirty.durable.done():
            return
        dirty.durable.set_result(durable)
        key = (dirty.ns.number, dirty.row)
        if self._dirty.get(key) is dirty:
            del self._dirty[key]
        self.dirty_bytes -= dirty.nbytes
        self._ram.release(dirty.ram_place)
        self._trash.freed.notify()  # its RAM copy may be evicted now

    def fail_all(self) -> tuple[int, int]:
        """End every waiting write as not durable. Gives the objects and bytes given up."""
        left = [*self._queue, *self._writing]
        lost = [dirty for dirty in left if dirty.alive and not dirty.durable.done()]
        self._queue.clear()
        for dirty in left:
            self._finish(dirty, False)
        return len(lost), sum(dirty.meta.length_bytes for dirty in lost)
