"""Does what `slabs.plan` names: makes segments, empties them, gives them back.

Bookkeeping changes on the verbs' loop; memory is touched in the pool.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from kvstored.tiers.base import NoRoom
from kvstored.tiers.ram.places import Move, Places
from kvstored.tiers.ram.retirement import Retirement
from kvstored.tiers.ram.segment import Segment
from kvstored.tiers.ram.slabs import Create, Slabs, SlabSegment

_log = logging.getLogger(__name__)

_POPULATE_BYTES = 32 << 20  # one pool job
_MOVES = 256  # of one batch: bounds the time on the loop
_MOVE_BYTES = 64 << 20
_RETRY_S = 1.0

_T = TypeVar("_T")


class Growth:
    """Finds slots where there are none. One growth at a time; taking slots needs no growth.

    `memory` has the segments in use by id. `down` says why the kernel refused memory, for a
    second; then it is None and the next growth tries again.
    """

    def __init__(
        self,
        slabs: Slabs,
        places: Places,
        pool: Executor,
        retirement: Retirement,
        hugepages: bool,
    ) -> None:
        self.memory: dict[int, Segment] = {}
        self._slabs = slabs
        self._places = places
        self._pool = pool
        self._retirement = retirement
        self._hugepages = hugepages
        self._lock = asyncio.Lock()
        self._refusal = ""
        self._retry_at = 0.0

    @property
    def down(self) -> str | None:
        """Why no segment can be made at present."""
        return self._refusal if time.monotonic() < self._retry_at else None

    @property
    def huge_bytes(self) -> int:
        """Memory known to lie in huge pages."""
        return sum(segment.huge_bytes for segment in self.memory.values())

    async def grow(
        self,
        namespace: str,
        slot_bytes: int,
        demand_bytes: int,
        take: Callable[[], int | None],
    ) -> int | NoRoom:
        """Bring about a free slot of that class and `take` a place in it.

        It is taken before the next growth may begin: an empty segment is what that one would
        reclaim first, and two callers would undo each other's work for ever.
        """
        async with self._lock:
            await self._retirement.look_again()
            stuck = self._retirement.stuck()
            spared = set(stuck)
            while (place := take()) is None:
                step = self._slabs.plan(namespace, slot_bytes, demand_bytes, spared, stuck)
                if isinstance(step, NoRoom):
                    return step
                if isinstance(step, Create):
                    if not await self._create(namespace, slot_bytes, step.slots):
                        return NoRoom.DOWN
                elif not await self._reclaim(step.segment):
                    spared.add(step.segment.segment_id)
            return place

    async def close(self) -> None:
        """Give back every segment, whatever lies in it and whoever maps it."""
        async with self._lock:
            segments = self._slabs.segments
            rest = [(segments[segment_id], segment) for segment_id, segment in self.memory.items()]
            self.memory.clear()
            await self._retirement.close(rest)

    async def _create(self, namespace: str, slot_bytes: int, slots: int) -> bool:
        if self.down is not None:
            return False
        record = self._slabs.begin_segment(namespace, slot_bytes, slots)
        try:
            segment = await self._make(record.size_bytes)
        except Exception as error:
            self._slabs.retire(record)
            self._slabs.retired(record)
            if not isinstance(error, OSError):
                raise
            self._refusal = f"no segment of {record.size_bytes} bytes: {error}"
            self._retry_at = time.monotonic() + _RETRY_S
            _log.warning("RAM tier: %s", self._refusal)
            return False
        self.memory[record.segment_id] = segment
        self._slabs.activate(record)
        return True

    async def _make(self, size_bytes: int) -> Segment:
        segment = await self._run(Segment, size_bytes, self._hugepages)
        starts = range(0, size_bytes, _POPULATE_BYTES)
        jobs = [
            self._run(segment.populate, start, min(start + _POPULATE_BYTES, size_bytes))
            for start in starts
        ]
        # Every job ends before the memory may go, also when one of them fails.
        results = await asyncio.gather(*jobs, return_exceptions=True)
        try:
            for result in results:
                if isinstance(result, BaseException):
                    raise result
                segment.huge_bytes += result
            await self._run(segment.finish)
        except BaseException:
            await self._run(segment.close)
            raise
        return segment

    async def _reclaim(self, record: SlabSegment) -> bool:
        """True when the segment was emptied and given back; else it is in use as before."""
        self._slabs.drain(record)
        try:
            while record.used and (moves := self._places.begin_moves(record, _MOVES, _MOVE_BYTES)):
                await self._move(moves)
        finally:
            if record.used:
                self._slabs.activate(record)
        if record.used:
            return False
        self._slabs.retire(record)
        await self._retirement.give_back(record, self.memory.pop(record.segment_id))
        return True

    async def _move(self, moves: Sequence[Move]) -> None:
        copied = False
        try:
            await self._run(self._copy, moves)
            copied = True
        finally:
            for move in moves:
                self._places.end_move(move, copied)

    def _copy(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self.memory[move.target.segment_id].copy_from(
                move.target_slot * move.target.slot_bytes,
                self.memory[move.source.segment_id],
                move.source_slot * move.source.slot_bytes,
                move.length_bytes,
            )

    def _run(self, job: Callable[..., _T], *args: object) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, job, *args)
