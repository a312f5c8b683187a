"""Writes published objects behind to the persistent tier: batched, bounded, in order of arrival.

An object is *dirty* from its publication until its write has come back, whatever the outcome. While
it is dirty its RAM copy stays (see `busy`). A failed write leaves it in RAM only and is counted;
a clean stop tries it once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstored.store.api import let_go
from kvstored.store.index import NONE
from kvstored.store.namespace import Namespace
from kvstored.store.residency import Residency
from kvstored.store.room import Room
from kvstored.store.trash import Trash
from kvstored.tiers.base import (
    NoRoom,
    ObjectMeta,
    ObjectWrite,
    Tier,
    TierKind,
    WriteOutcome,
    padded_bytes,
)
from kvstored.tiers.ram.tier import RamTier

_log = logging.getLogger("kvstored.store")

BATCH_BYTES = 64 << 20
BATCH_OBJECTS = 1024
_ROOM_MAY_COME = (NoRoom.TIER, NoRoom.NAMESPACE)
_MOST_TOLD = 1000
MOST_WRITING_BYTES = 256 << 20
"""Of batches under way: while some are being synced and committed together, others keep the device
busy. A batch more may be begun with less than that.
"""
MOST_WRITING_BATCHES = 16


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
        self._writing: dict[asyncio.Task[None], list[Dirty]] = {}  # the batches under way
        self._writing_bytes = 0
        self._placing: list[Dirty] = []  # the batch that is getting its places
        self._stuck: set[asyncio.Task[None]] = set()  # one for each payload a device may still read
        self._work = asyncio.Event()
        self._left: dict[tuple[int, int], Dirty] = {}  # failed; in RAM only, as far as known
        self._told: set[tuple[int, bytes]] = set()  # families of which too large objects were seen
        self.dirty_bytes = 0
        self.claimed_bytes = 0
        """Of puts that are under way; they become dirty when they are published."""
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

    def claim(self, nbytes: int) -> None:
        """Count bytes that a put will make dirty, or, negative, that it will not (any more)."""
        self.claimed_bytes += nbytes
        if nbytes < 0:
            self._trash.freed.notify()

    def pending(self, ns: Namespace, row: int) -> asyncio.Future[bool] | None:
        """The future of an object that is dirty now, or None."""
        dirty = self._dirty.get((ns.number, row))
        return dirty.durable if dirty is not None and dirty.alive else None

    def pending_of(self, ns: Namespace, rows: Mapping[int, int]) -> dict[int, asyncio.Future[bool]]:
        """`pending` of those of the rows that are dirty, by what they are filed under."""
        found = ((at, self.pending(ns, row)) for at, row in rows.items())
        return {at: future for at, future in found if future is not None}

    def busy(self, ns: Namespace, chunk: int) -> bool:
        """Whether some object of the chunk is dirty."""
        return any((ns.number, row) in self._dirty for row in ns.index.object_rows(chunk))

    def _under_way(self) -> list[Dirty]:
        return [*self._placing, *(d for batch in self._writing.values() for d in batch)]

    def in_flight(self) -> list[asyncio.Future[bool]]:
        """Futures of everything queued or being written, for whoever must see the end of it."""
        return [dirty.durable for dirty in (*self._queue, *self._under_way())]

    def dying(self, ns: Namespace) -> list[asyncio.Future[bool]]:
        """Futures of the writes under way whose objects have left the index, whoever dropped them.

        A delete holds only when these have ended and their places are flushed from the trash. What
        is merely queued will not be written once its object is gone.
        """
        return [d.durable for d in self._under_way() if d.ns is ns and not d.alive]

    async def run(self) -> None:
        """Write what comes, for ever; a supervised task.

        Batches that are under way when it ends come to their end by themselves.
        """
        while True:
            while self._queue:
                while not self._may_begin():
                    await asyncio.wait(self._writing, return_when=asyncio.FIRST_COMPLETED)
                await self._start(self._next_batch())
            self._work.clear()
            await self._work.wait()

    def _may_begin(self) -> bool:
        """Whether the device is to get another batch, too."""
        few = len(self._writing) < MOST_WRITING_BATCHES
        return few and self._writing_bytes < MOST_WRITING_BYTES

    async def _start(self, batch: list[Dirty]) -> None:
        """Find places for a batch, and have it written."""
        self._placing = batch
        try:
            waited = False
            while (refusal := await self._place()) is not None:
                if refusal is NoRoom.NEVER:
                    self._drop_too_large()
                elif refusal in _ROOM_MAY_COME and self._writing and not waited:
                    # What is being written cannot be evicted; some of it can once it is there.
                    await asyncio.wait(self._writing)
                    waited = True
                else:
                    break
            for dirty in self._placing:
                self._fail(dirty, "no_room")
        finally:  # also when this task dies: nobody may wait for ever
            for dirty in self._placing:
                self._finish(dirty, False)
            self._placing = []

    def _drop_too_large(self) -> None:
        """Give up the first of `_placing`, which is larger than the tier ever takes, and all
        that are as large; what comes behind them is not to suffer for that.
        """
        first = self._placing[0]
        least = first.meta.length_bytes
        family = (first.ns.number, first.meta.family)
        if family not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(family)
            _log.warning(
                "objects of %d B of family %s, namespace %s, can never be durable: no volume, or "
                "not the namespace's cap, takes objects of that size; docs/nvme-tier.md says which "
                "cap takes which",
                least,
                first.meta.family.hex(),
                first.ns.name,
            )
        too_large = [dirty for dirty in self._placing if dirty.meta.length_bytes >= least]
        self._placing = [dirty for dirty in self._placing if dirty.meta.length_bytes < least]
        for dirty in too_large:
            self._fail(dirty, "too_large")

    async def _place(self) -> NoRoom | None:
        """Have those written for which there is room; the others stay in `_placing`."""
        batch = self._placing
        if not batch:
            return None
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
        self._placing = batch[len(items) :]
        if items:
            task = asyncio.create_task(self._write(items), name="store-writer-batch")
            self._writing[task] = [dirty for dirty, _ in items]
            self._writing_bytes += sum(dirty.nbytes for dirty, _ in items)
            task.add_done_callback(self._ended)
        return next((p for p in places if isinstance(p, NoRoom)), None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        for dirty in self._writing.pop(task):
            self._writing_bytes -= dirty.nbytes
            self._finish(dirty, False)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._count("failed")
            _log.error("writing a batch behind", exc_info=error)

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

    async def _write(self, items: list[tuple[Dirty, ObjectWrite]]) -> None:
        stuck: set[int] = set()
        try:
            outcomes = await self._tier.write([item for _, item in items])
            for (dirty, item), outcome in zip(items, outcomes, strict=True):
                if outcome is WriteOutcome.STUCK:
                    stuck.add(item.place)
                    self._keep(dirty.ram_place, item)
                self._settle(dirty, item.place, outcome)
        finally:
            for _, item in items:
                if item.place not in stuck:
                    let_go(item.payload)

    def _keep(self, ram_place: int, item: ObjectWrite) -> None:
        """Keep the bytes of a write in place that a silent device may still read."""
        self._ram.lease(ram_place)

        async def wait() -> None:
            await self._tier.released(item.place)
            let_go(item.payload)
            self._ram.release(ram_place)
            self._trash.freed.notify()

        task = asyncio.create_task(wait(), name="store-writer-stuck")
        self._stuck.add(task)
        task.add_done_callback(self._stuck.discard)

    def _settle(self, dirty: Dirty, place: int, outcome: WriteOutcome) -> None:
        if outcome is not WriteOutcome.OK:
            self._fail(dirty, outcome.value)
        elif not dirty.alive:  # deleted meanwhile: the delete waits for us, then flushes the trash
            self._trash.discard(self._tier.kind, [place])
            self._finish(dirty, False)
        else:
            self._residency.place_object(dirty.ns, dirty.row, self._tier.kind, place)
            self._finish(dirty, True)

    def _fail(self, dirty: Dirty, reason: str) -> None:
        self._count(reason)
        if not dirty.durable.done() and dirty.alive:
            self._left[dirty.ns.number, dirty.row] = dirty
        self._finish(dirty, False)

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

    def try_again(self) -> None:
        """Queue once more what is in RAM only because its write failed. For a clean stop."""
        for dirty in self._still_left():
            place = dirty.ns.index.place[TierKind.RAM][dirty.row]
            if place != NONE:
                self.submit(dirty.ns, dirty.row, dirty.meta, place)
        self._left.clear()

    def _still_left(self) -> list[Dirty]:
        """What failed and is not durable for all that is known."""
        kind = self._tier.kind
        return [d for d in self._left.values() if d.alive and d.ns.index.place[kind][d.row] == NONE]

    def fail_all(self) -> tuple[int, int]:
        """End every waiting write as not durable. Gives the objects and bytes that are lost with
        RAM: these, and those whose writes have failed.
        """
        waiting = [*self._queue, *self._under_way()]
        lost = [dirty for dirty in waiting if dirty.alive and not dirty.durable.done()]
        lost += self._still_left()
        self._queue.clear()
        self._left.clear()
        for dirty in waiting:
            self._finish(dirty, False)
        return len(lost), sum(dirty.meta.length_bytes for dirty in lost)
