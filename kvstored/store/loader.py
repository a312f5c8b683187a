"""Brings objects from the persistent tier into RAM, each at most once however many ask for it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import xxhash

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

BATCH_BYTES = 16 << 20


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
    waiters: list[asyncio.Future[Loaded]] = field(default_factory=list)

    def end(self, ram: RamTier, place: int, state: int) -> None:
        """Answer every waiter that is still there, each with a lease of its own."""
        for waiter in self.waiters:
            if not waiter.done():
                if place != NONE:
                    ram.lease(place)
                waiter.set_result(Loaded(place, state))
        self.waiters.clear()


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
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="ram-hash")

    def busy(self, ns: Namespace, chunk: int) -> bool:
        """Whether some object of the chunk is being loaded."""
        if not self._loads:
            return False
        return any((ns.number, row) in self._loads for row in ns.index.object_rows(chunk))

    def want(self, ns: Namespace, rows: list[int]) -> list[asyncio.Future[Loaded]]:
        """Load objects that are on the persistent tier and not in RAM.

        A future may be cancelled; the load goes on and lands in RAM all the same. A future whose
        result has a place carries a lease on it that the caller must release.
        """
        futures: list[asyncio.Future[Loaded]] = []
        batch: list[_Load] = []
        nbytes = 0
        loop = asyncio.get_running_loop()
        for row in rows:
            load = self._loads.get((ns.number, row))
            if load is None:
                load = _Load(ns, row, ns.index.generation[row])
                self._loads[ns.number, row] = load
                batch.append(load)
                nbytes += ns.index.object_length[row]
                if nbytes >= BATCH_BYTES:
                    self._start(batch)
                    batch, nbytes = [], 0
            future: asyncio.Future[Loaded] = loop.create_future()
            load.waiters.append(future)
            futures.append(future)
        if batch:
            self._start(batch)
        return futures

    def _start(self, batch: list[_Load]) -> None:
        task = asyncio.ensure_future(self._run(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: list[_Load]) -> None:
        try:
            await self._load(batch)
        finally:
            for load in batch:
                self._loads.pop((load.ns.number, load.row), None)
                load.end(self._ram, NONE, pb.MISS_TIER_DOWN)

    async def _load(self, batch: list[_Load]) -> None:
        ns = batch[0].ns
        index = ns.index
        places = await self._room.reserve(
            TierKind.RAM, ns, [index.object_length[load.row] for load in batch]
        )
        reads: list[tuple[_Load, int, ObjectRead]] = []
        for load, place in zip(batch, places, strict=True):
            if isinstance(place, NoRoom):
                load.end(self._ram, NONE, pb.MISS_DECLINED)
            elif not index.alive(load.row, load.generation):
                self._ram.cancel([place])
                load.end(self._ram, NONE, pb.MISS_EVICTED)
            else:
                reads.append((load, place, self._read_of(ns, load.row, place)))
        if not reads:
            return
        # Called at once, without a task: no other code may free a place before the tier knows of
        # the read, and it waits for its readers before it reuses a slot.
        outcomes = await self._tier.read([read for _, _, read in reads])
        for (load, place, read), outcome in zip(reads, outcomes, strict=True):
            await self._settle(load, place, read, outcome)

    def _read_of(self, ns: Namespace, row: int, place: int) -> ObjectRead:
        index = ns.index
        chunk = index.object_chunk[row]
        family = ns.families.by_number[index.family[chunk]]
        return ObjectRead(
            index.place[self._tier.kind][row],
            index.keys[chunk],
            family.parts[index.object_part[row]].name,
            index.object_length[row],
            index.checksum(row),
            self._ram.view(place, padded=True),
        )

    async def _settle(
        self, load: _Load, place: int, read: ObjectRead, outcome: ReadOutcome
    ) -> None:
        ns, index = load.ns, load.ns.index
        if outcome is ReadOutcome.OK:
            view = self._ram.view(place)
            loop = asyncio.get_running_loop()
            pieces = await loop.run_in_executor(self._pool, piece_checksums, view)
            if index.alive(load.row, load.generation) and (
                index.place[TierKind.RAM][load.row] == NONE
            ):
                self._ram.publish(place, self._meta(ns, load.row, read, pieces))
                self._residency.place_object(ns, load.row, TierKind.RAM, place)
                load.end(self._ram, place, 0)
                return
            self._ram.cancel([place])
            load.end(self._ram, NONE, pb.MISS_EVICTED)
            return
        self._ram.cancel([place])
        if outcome is ReadOutcome.CORRUPT:
            self._residency.accounts.checksum_failures["nvme"] += 1
            if index.alive(load.row, load.generation):
                self._residency.drop_object(ns, load.row, pb.MISS_CORRUPT, "corrupt")
            load.end(self._ram, NONE, pb.MISS_CORRUPT)
        else:
            load.end(self._ram, NONE, pb.MISS_TIER_DOWN)

    def _meta(self, ns: Namespace, row: int, read: ObjectRead, pieces: bytes) -> ObjectMeta:
        index = ns.index
        chunk = index.object_chunk[row]
        return ObjectMeta(
            namespace=ns.name,
            family=ns.families.by_number[index.family[chunk]].fingerprint,
            key=read.key,
            part=read.part,
            tenant=ns.tenants[index.tenant[chunk]],
            parent=index.parent_keys[chunk],
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
        self._pool.shutdown(wait=False)
