"""Segments on their way back to the machine.

The daemon's own mapping and descriptor go at once. The memory is the machine's when the last client
has unmapped it too; until then it is counted. Everything here runs on the verbs' loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from kvstored.tiers.ram.segment import Segment
from kvstored.tiers.ram.slabs import Slabs, SlabSegment

_log = logging.getLogger(__name__)

CLIENTS_S = 0.25
"""How long a growth waits for the clients of one segment."""
EXPECTED_S = 2.0
"""How long after that the memory is thought to be on its way, so that none is emptied instead."""

AskClients = Callable[[int], "asyncio.Future[None] | None"]
StuckSegments = Callable[[], frozenset[int]]


@dataclass(slots=True, eq=False)
class _Leaving:
    """One segment that somebody still maps: this process, while `segment` is there, or clients."""

    record: SlabSegment
    segment: Segment | None
    clients: asyncio.Future[None] | None
    overdue: asyncio.TimerHandle | None = None

    @property
    def gone(self) -> bool:
        """Nobody maps it any more."""
        return self.segment is None and (self.clients is None or self.clients.done())


class Retirement:
    """Gives segments back and keeps those that linger.

    `ask(segment_id)`: have the clients unmap a segment; None when none maps it, else a future that
    is done when none does. `freed()` is called when the memory of one that lingered is the
    machine's, and when it is no longer expected soon: who waits for room looks again.
    """

    def __init__(
        self,
        slabs: Slabs,
        pool: Executor,
        ask: AskClients,
        freed: Callable[[], None],
        stuck: StuckSegments = frozenset,
    ) -> None:
        """`stuck()`: ids of the segments in use whose memory would not come back now."""
        self.stuck = stuck
        self._slabs = slabs
        self._pool = pool
        self._ask = ask
        self._freed = freed
        self._leaving: list[_Leaving] = []

    async def give_back(self, record: SlabSegment, segment: Segment) -> None:
        """Unmap a retired segment, and wait a moment for its clients. Its memory may linger."""
        leaving = _Leaving(record, segment, self._ask(record.segment_id))
        await self._unmap(leaving)
        if leaving.clients is not None and not leaving.clients.done():
            await asyncio.wait([leaving.clients], timeout=CLIENTS_S)
        if leaving.gone:
            self._slabs.retired(record)
        else:
            self._linger(leaving)

    async def look_again(self) -> None:
        """Unmap what this process had views of, where they are gone."""
        for leaving in list(self._leaving):
            await self._unmap(leaving)
            self._settle(leaving)

    async def close(self, rest: list[tuple[SlabSegment, Segment]]) -> None:
        """Unmap these too, and forget about clients: they unmap when their session ends."""
        leaving = [*self._leaving, *(_Leaving(record, segment, None) for record, segment in rest)]
        self._leaving.clear()
        viewed_bytes = 0
        for each in leaving:
            await self._unmap(each)
            _stop_timer(each)
            if each.segment is None:
                self._slabs.retired(each.record)
            else:
                viewed_bytes += each.record.size_bytes
        if viewed_bytes:
            _log.error("%d bytes of RAM are still viewed at close", viewed_bytes)

    async def _unmap(self, leaving: _Leaving) -> None:
        if leaving.segment is not None:
            loop = asyncio.get_running_loop()
            if await loop.run_in_executor(self._pool, leaving.segment.close):
                leaving.segment = None

    def _linger(self, leaving: _Leaving) -> None:
        self._leaving.append(leaving)
        if leaving.clients is None:
            return
        if leaving.segment is None:
            self._slabs.expect(leaving.record)
            loop = asyncio.get_running_loop()
            leaving.overdue = loop.call_later(EXPECTED_S, self._give_up, leaving)
        leaving.clients.add_done_callback(lambda _: self._settle(leaving))

    def _give_up(self, leaving: _Leaving) -> None:
        """The clients are late beyond reason; their session's end will bring the memory back."""
        self._slabs.overdue(leaving.record)
        self._freed()

    def _settle(self, leaving: _Leaving) -> None:
        if leaving.gone and leaving in self._leaving:
            self._leaving.remove(leaving)
            _stop_timer(leaving)
            self._slabs.retired(leaving.record)
            self._freed()


def _stop_timer(leaving: _Leaving) -> None:
    if leaving.overdue is not None:
        leaving.overdue.cancel()
