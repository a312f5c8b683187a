"""Copies of objects for readers that want none kept in RAM: read past the RAM tier.

The memory is one arena of SCRATCH_BYTES, made when it is first needed. It is no tier: nothing is
found in it, and a copy goes when its last reader gives it back. Readers of one object that is there
or on its way share it. Memory serves again only after the tier has let go of it.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstored.store.api import let_go
from kvstored.store.index import NONE
from kvstored.store.namespace import Namespace
from kvstored.tiers.base import ObjectRead, ReadOutcome, Tier, padded_bytes
from kvstored_client.proto import kvstore_pb2 as pb

log = logging.getLogger("kvstored.store")

SCRATCH_BYTES = 64 << 20
"""Of all readers together. What has no room in it is read through RAM."""


class Arena:
    """Ranges of one piece of memory; first fit, neighbours joined. Pure."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free: list[tuple[int, int]] = [(0, size_bytes)]  # offset, size; by offset

    @property
    def free_bytes(self) -> int:
        """Sum of what is free."""
        return sum(size for _, size in self._free)

    def take(self, size_bytes: int) -> int | None:
        """Offset of a range that is the caller's from now on; None: there is none."""
        for i, (offset, size) in enumerate(self._free):
            if size >= size_bytes:
                rest = (offset + size_bytes, size - size_bytes)
                self._free[i : i + 1] = [rest] if rest[1] else []
                return offset
        return None

    def give(self, offset: int, size_bytes: int) -> None:
        """Take a range back."""
        insort(self._free, (offset, size_bytes))
        joined: list[tuple[int, int]] = []
        for at, size in self._free:
            if joined and sum(joined[-1]) == at:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((at, size))
        self._free = joined


@dataclass(slots=True, eq=False)
class Copy:
    """An object's bytes in the arena, on their way or there."""

    ns: Namespace
    row: int
    generation: int
    length_bytes: int
    checksum: bytes
    offset: int  # in the arena
    into: memoryview  # there, padded
    place: int = NONE  # that is being read
    pieces: bytes = b""  # once it has arrived: XXH3-64 of each piece
    waiters: list[asyncio.Future[Copied]] = field(default_factory=list)
    readers: int = 0  # who have it and did not give it back

    @property
    def alive(self) -> bool:
        """Whether it still is the object that was asked for."""
        return self.ns.index.alive(self.row, self.generation)

    def view(self) -> memoryview:
        """The object's bytes, read-only, until it is given back."""
        return self.into[: self.length_bytes].toreadonly()


@dataclass(frozen=True, slots=True)
class Copied:
    """The end of a read: a copy (the waiter gives it back), or why there is none."""

    copy: Copy | None
    state: int  # 0, or the ChunkState of a miss


class Bypass:
    """Reads into the arena. Belongs to the loop."""

    def __init__(
        self,
        tier: Tier,
        read_of: Callable[[Namespace, int, memoryview], ObjectRead],
        refuse: Callable[[Namespace, int, int, ReadOutcome], int],
    ) -> None:
        """`read_of(ns, row, into)`: what to ask of the tier. `refuse(ns, row, generation,
        outcome)`: the ChunkState of what could not be read.
        """
        self._tier = tier
        self._read_of = read_of
        self._refuse = refuse
        self.arena = Arena(SCRATCH_BYTES)
        self._memory: memoryview | None = None
        self._copies: dict[tuple[int, int], Copy] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def reading(self, ns: Namespace, row: int) -> bool:
        """Whether the object is on its way."""
        copy = self._copies.get((ns.number, row))
        return copy is not None and not copy.pieces

    def want(self, ns: Namespace, rows: list[int]) -> list[asyncio.Future[Copied]]:
        """Copies of the leading objects, as far as there is room for them. All of them are on the
        tier. A future may be cancelled; whoever gets a copy gives it back.
        """
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Copied]] = []
        fresh: list[Copy] = []
        for row in rows:
            copy = self._copies.get((ns.number, row))
            if copy is None or not copy.alive:
                copy = self._new(ns, row)
                if copy is None:
                    break
                fresh.append(copy)
            future: asyncio.Future[Copied] = loop.create_future()
            futures.append(future)
            if copy.pieces:
                self._hand(copy, future)
            else:
                copy.waiters.append(future)
        if fresh:
            task = loop.create_task(self._read(fresh))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        return futures

    def lost(self, first: int, stop: int) -> None:
        """The device of these places is given up: nobody waits for what is read there, nor joins
        them. Its memory is in use until the read returns.
        """
        for at, copy in list(self._copies.items()):
            if not copy.pieces and first <= copy.place < stop:
                del self._copies[at]
                self._answer(copy, pb.MISS_TIER_DOWN)

    def give_back(self, copy: Copy) -> None:
        """One reader less."""
        copy.readers -= 1
        if not copy.readers:
            self._free(copy)

    def _new(self, ns: Namespace, row: int) -> Copy | None:
        index = ns.index
        length = index.object_length[row]
        offset = self.arena.take(padded_bytes(length))
        if offset is None:
            return None
        if self._memory is None:
            self._memory = memoryview(mmap.mmap(-1, self.arena.size_bytes))
        into = self._memory[offset : offset + padded_bytes(length)]
        copy = Copy(ns, row, index.generation[row], length, index.checksum(row), offset, into)
        self._copies[ns.number, row] = copy
        return copy

    def _free(self, copy: Copy) -> None:
        let_go(copy.into)
        self.arena.give(copy.offset, padded_bytes(copy.length_bytes))
        if self._copies.get((copy.ns.number, copy.row)) is copy:
            del self._copies[copy.ns.number, copy.row]

    @staticmethod
    def _hand(copy: Copy, future: asyncio.Future[Copied]) -> None:
        copy.readers += 1
        future.set_result(Copied(copy, 0))

    async def _read(self, copies: list[Copy]) -> None:
        left = set(copies)
        reading: list[Copy] = []

        def arrived(i: int, outcome: ReadOutcome, pieces: bytes) -> None:
            copy = reading[i]
            left.discard(copy)
            if outcome is ReadOutcome.OK:
                copy.pieces = pieces
                for waiter in copy.waiters:
                    if not waiter.done():
                        self._hand(copy, waiter)
                copy.waiters.clear()
                if not copy.readers:
                    self._free(copy)
            else:
                self._fail(copy, self._refuse(copy.ns, copy.row, copy.generation, outcome))

        try:
            reads: list[ObjectRead] = []
            for copy in copies:
                # From here to the tier's read nothing waits: no other code may free a place before
                # the tier knows of the read.
                if copy.alive and copy.ns.index.place[self._tier.kind][copy.row] != NONE:
                    reading.append(copy)
                    reads.append(self._read_of(copy.ns, copy.row, copy.into))
                    copy.place = reads[-1].place
                else:
                    left.discard(copy)
                    self._fail(copy, pb.MISS_EVICTED)
            if reads:
                await self._tier.read(reads, arrived)
        finally:
            for copy in left:  # a bug in the tier
                self._fail(copy, pb.MISS_TIER_DOWN)

    def _fail(self, copy: Copy, state: int) -> None:
        self._answer(copy, state)
        self._free(copy)

    @staticmethod
    def _answer(copy: Copy, state: int) -> None:
        for waiter in copy.waiters:
            if not waiter.done():
                waiter.set_result(Copied(None, state))
        copy.waiters.clear()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a read past RAM failed", exc_info=error)

    async def close(self) -> None:
        """Wait for the reads under way."""
        if self._tasks:
            await asyncio.wait(self._tasks)
