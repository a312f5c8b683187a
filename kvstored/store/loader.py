"""Brings objects from the persistent tier into RAM, each at most once however many ask for it.

A reader that wants no copy kept in RAM gets one in memory apart (bypass.py), unless a load of the
same object is under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field

import xxhash

from kvstored.store.api import let_go
from kvstored.store.bypass import Bypass, Copied, Copy
from kvstored.store.index import NONE
from kvstored.store.namespace import Namespace
from kvstored.store.residency import Residency
from kvstored.store.room import Room
from kvstored.tiers.base import (
    PIECE_BYTES,
    NoRoom,
    ObjectMeta,
    ObjectRead,
    ReadOutcome,
    Tier,
    TierKind,
)
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.proto import kvstore_pb2 as pb

log = logging.getLogger("kvstored.store")

FIRST_BATCH_BYTES = 8 << 20
"""Read first, so that the device has something to do while room is made for more."""

BATCH_BYTES = 32 << 20
"""Read in one go from then on: enough to keep a device busy with large transfers."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The end of a load: a leased RAM place (the waiter releases it), or why there is none."""

    place: int
    state: int  # 0, or the ChunkState of a miss


@dataclass(slots=True, eq=False)
class _Load:
    ns: Namespace
    row: int
    generation: int
    place: int = NONE  # that is being read
    waiters: list[asyncio.Future[Loaded]] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether it still is the object that was asked for."""
        return self.ns.index.alive(self.row, self.generation)


def piece_checksums(view: memoryview) -> bytes:
    """XXH3-64 of each piece of an object, little-endian 8 bytes each."""
    return b"".join(
        xxhash.xxh3_64_intdigest(view[at : at + PIECE_BYTES]).to_bytes(8, "little")
        for at in range(0, len(view), PIECE_BYTES)
    )


class Loader:
    """Loads under way, by object."""

    def __init__(self, ram: RamTier, tier: Tier, residency: Residency, room: Room) -> None:
        self._ram = ram
        self._tier = tier
        self._residency = residency
        self._room = room
        self._loads: dict[tuple[int, int], _Load] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._bypass = Bypass(tier, self._read_of, self._refuse)

    def busy(self, ns: Namespace, chunk: int) -> bool:
        """Whether some object of the chunk is being loaded, or read past RAM."""
        return any(
            (ns.number, row) in self._loads or self._bypass.reading(ns, row)
            for row in ns.index.object_rows(chunk)
        )

    def want(self, ns: Namespace, rows: list[int], until: float) -> list[asyncio.Future[Loaded]]:
        """Load objects that are on the persistent tier and not in RAM; in order, as there is room.

        `until` (time.monotonic()): how long to wait for room. A future may be cancelled; the load
        goes on and lands in RAM all the same. A future whose result has a place carries a lease on
        it that the caller must release.
        """
        futures: list[asyncio.Future[Loaded]] = []
        fresh: list[_Load] = []
        loop = asyncio.get_running_loop()
        for row in rows:
            load = self._loads.get((ns.number, row))
            if load is None or not load.alive:  # the row may be another object's by now
                load = _Load(ns, row, ns.index.generation[row])
                self._loads[ns.number, row] = load
                fresh.append(load)
            future: asyncio.Future[Loaded] = loop.create_future()
            load.waiters.append(future)
            futures.append(future)
        if fresh:
            self._start(self._load_all(fresh, until))
        return futures

    def want_copies(self, ns: Namespace, rows: list[int]) -> list[asyncio.Future[Copied] | None]:
        """Copies of objects of the persistent tier in memory apart; see Bypass.

        None where there is no room for one, or where a load is under way: `want` that one.
        """
        loading = [
            (load := self._loads.get((ns.number, row))) is not None and load.alive for row in rows
        ]
        alone = [row for row, busy in zip(rows, loading, strict=True) if not busy]
        futures = iter(self._bypass.want(ns, alone))
        return [None if busy else next(futures, None) for busy in loading]

    def lost(self, first: int, stop: int) -> None:
        """The device of these places is given up: nobody waits for what is read there, nor joins
        them. The memory that it may still write to is in use until the read returns.
        """
        for load in [load for load in self._loads.values() if first <= load.place < stop]:
            self._end(load, NONE, pb.MISS_TIER_DOWN)
        self._bypass.lost(first, stop)

    def give_back(self, copy: Copy) -> None:
        """End the use of a copy."""
        self._bypass.give_back(copy)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a load failed", exc_info=error)

    async def _load_all(self, loads: list[_Load], until: float) -> None:
        """Reserve batch after batch, so that the first objects never wait for room that the later
        ones hold, and read each batch while room is made for the next.
        """
        reads: list[asyncio.Task[None]] = []
        try:
            while loads:
                batch = self._next_batch(loads, BATCH_BYTES if reads else FIRST_BATCH_BYTES)
                placed = await self._reserve(batch, until)
                if not placed:
                    break
                reads.append(self._start(self._read(placed)))
                loads = loads[len(placed) :]
        finally:
            for load in loads:  # no room within the time
                self._end(load, NONE, pb.MISS_DECLINED)
        if reads:
            await asyncio.wait(reads)  # each has answered its waiters and told of its own failure

    def _next_batch(self, loads: list[_Load], most_bytes: int) -> list[_Load]:
        batch: list[_Load] = []
        nbytes = 0
        for load in loads:
            if batch and nbytes >= most_bytes:
                break
            batch.append(load)
            nbytes += load.ns.index.object_length[load.row] if load.alive else 0
        return batch

    async def _reserve(self, batch: list[_Load], until: float) -> list[tuple[_Load, int]]:
        """Places for the leading loads; waits only where there is no room for even one.

        A load whose object was dropped meanwhile gets NONE.
        """
        ns = batch[0].ns
        lengths = [ns.index.object_length[load.row] if load.alive else 0 for load in batch]
        wanted = [length for length in lengths if length]
        places = await self._room.reserve(TierKind.RAM, ns, wanted) if wanted else []
        if wanted and isinstance(places[0], NoRoom):
            first = wanted[:1]
            places = await self._room.reserve(TierKind.RAM, ns, first, until, ns.load_queue)
        got = iter(place for place in places if not isinstance(place, NoRoom))
        placed: list[tuple[_Load, int]] = []
        for load, length in zip(batch, lengths, strict=True):
            place = next(got, None) if length else NONE
            if place is None:
                break
            placed.append((load, place))
        return placed

    async def _read(self, placed: list[tuple[_Load, int]]) -> None:
        """Read a batch into its places; each object is published and handed on as it arrives."""
        unsettled = {place for _, place in placed if place != NONE}
        reads: list[tuple[_Load, ObjectRead]] = []
        into: list[int] = []

        def arrived(i: int, outcome: ReadOutcome, pieces: bytes) -> None:
            load, read = reads[i]
            let_go(read.into)
            if not self._settle(load, into[i], read, outcome, pieces):
                self._ram.cancel([into[i]])  # nothing more is written to it
            unsettled.discard(into[i])

        try:
            for load, place in placed:
                if place != NONE and load.alive and self._is_below(load):
                    reads.append((load, self._read_into(load, place)))
                    load.place = reads[-1][1].place
                    into.append(place)
                else:
                    self._end(load, NONE, pb.MISS_EVICTED)
            if reads:
                # Called at once, without a task: no other code may free a place before the tier
                # knows of the read, and it waits for its readers before it reuses a slot.
                await self._tier.read([read for _, read in reads], arrived)
        finally:
            self._ram.cancel(list(unsettled))
            for load, _ in placed:
                self._end(load, NONE, pb.MISS_TIER_DOWN)

    def _end(self, load: _Load, place: int, state: int) -> None:
        """Answer every waiter that is still there, each with a lease of its own. Idempotent."""
        if self._loads.get((load.ns.number, load.row)) is load:
            del self._loads[load.ns.number, load.row]
        for waiter in load.waiters:
            if not waiter.done():
                if place != NONE:
                    self._ram.lease(place)
                waiter.set_result(Loaded(place, state))
        load.waiters.clear()

    def _is_below(self, load: _Load) -> bool:
        """Whether the persistent tier still has it."""
        return load.ns.index.place[self._tier.kind][load.row] != NONE

    def _read_into(self, load: _Load, place: int) -> ObjectRead:
        return self._read_of(load.ns, load.row, self._ram.view(place, padded=True))

    def _read_of(self, ns: Namespace, row: int, into: memoryview) -> ObjectRead:
        index = ns.index
        chunk = index.object_chunk[row]
        family = ns.families.by_number[index.family[chunk]]
        return ObjectRead(
            index.place[self._tier.kind][row],
            index.key(chunk),
            family.parts[index.object_part[row]].name,
            index.object_length[row],
            index.checksum(row),
            into,
        )

    def _settle(
        self, load: _Load, place: int, read: ObjectRead, outcome: ReadOutcome, pieces: bytes
    ) -> bool:
        """Publish what was read and answer its waiters. False: the place is not used."""
        ns, index = load.ns, load.ns.index
        if outcome is not ReadOutcome.OK:
            self._end(load, NONE, self._refuse(ns, load.row, load.generation, outcome))
            return False
        if not load.alive or index.place[TierKind.RAM][load.row] != NONE:
            self._end(load, NONE, pb.MISS_EVICTED)
            return False
        self._ram.publish(place, self._meta(ns, load.row, read, pieces))
        self._residency.place_object(ns, load.row, TierKind.RAM, place)
        self._end(load, place, 0)
        return True

    def _refuse(self, ns: Namespace, row: int, generation: int, outcome: ReadOutcome) -> int:
        """The ChunkState of an object that could not be read; a rotten one is dropped, and one
        whose delete or eviction, before the start, had come as far as the device.
        """
        if outcome is ReadOutcome.GONE:
            if ns.index.alive(row, generation):
                self._residency.drop_object(ns, row, pb.MISS_EVICTED, "deleted")
            return pb.MISS_EVICTED
        if outcome is not ReadOutcome.CORRUPT:
            return pb.MISS_TIER_DOWN
        self._residency.accounts.checksum_failures["nvme"] += 1
        if ns.index.alive(row, generation):
            self._residency.drop_object(ns, row, pb.MISS_CORRUPT, "corrupt")
        return pb.MISS_CORRUPT

    def _meta(self, ns: Namespace, row: int, read: ObjectRead, pieces: bytes) -> ObjectMeta:
        index = ns.index
        chunk = index.object_chunk[row]
        return ObjectMeta(
            namespace=ns.name,
            family=ns.families.by_number[index.family[chunk]].fingerprint,
            key=read.key,
            part=read.part,
            tenant=ns.tenants[index.tenant[chunk]],
            parent=index.parent_key(chunk),
            depth=index.depth[chunk],
            end_token=index.end_token[chunk],
            expires_ms=index.expires_ms[chunk],
            length_bytes=read.length_bytes,
            checksum=read.checksum,
            piece_checksums=pieces,
        )

    async def close(self) -> None:
        """Wait for the loads under way."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._bypass.close()
