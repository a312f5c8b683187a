"""Bringing whole prefixes: many objects by many reads at once, the first objects first.

A `FetchJob` runs on the bucket's loop. Each object goes through: its first read, which brings the
header; memory, asked for on the caller's loop; further reads. A read that fails is repeated from
its beginning, after a pause with jitter; one that gives wrong bytes is repeated once.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvstored.tiers.base import ObjectMeta
from kvstored.tiers.object.api import Fetch, Fetched, Outcome
from kvstored.tiers.object.backend import Bucket
from kvstored.tiers.object.landing import Landing
from kvstored.tiers.object.naming import path_of
from kvstored.tiers.object.ranges import Span, first_span, further_spans, pause_s

logger = logging.getLogger(__name__)

ATTEMPTS = 4
CORRUPT_ATTEMPTS = 2
_REPEATED = frozenset(
    {
        Outcome.SHORT,
        Outcome.LONG,
        Outcome.THROTTLED,
        Outcome.SERVER,
        Outcome.NETWORK,
        Outcome.NAME,
        Outcome.DEADLINE,
        Outcome.CORRUPT,
    }
)

Arrived = Callable[[int, Fetched], None]


class Fetcher:
    """What all fetches of one bucket share: how many reads may be under way, and how long each."""

    def __init__(
        self, bucket: Bucket, parallel: int, range_bytes: int, range_timeout_s: float
    ) -> None:
        self.bucket = bucket
        self.parallel = parallel
        self.range_bytes = range_bytes
        self.range_timeout_s = range_timeout_s
        self.slots = asyncio.Semaphore(parallel)  # used on the bucket's loop alone
        self.random = random.Random()  # noqa: S311 (jitter)

    async def fetch(self, items: Sequence[Fetch], deadline: float, arrived: Arrived) -> None:
        """As `Pool.fetch`; on any loop."""
        job = _FetchJob(self, items, deadline, arrived)
        try:
            await self.bucket.run(job.run)
        finally:
            job.settle_rest()


class _FetchJob:
    """One call of `fetch`."""

    def __init__(
        self, fetcher: Fetcher, items: Sequence[Fetch], deadline: float, arrived: Arrived
    ) -> None:
        self._fetcher = fetcher
        self._deadline = deadline
        self._arrived = arrived
        self._caller = asyncio.get_running_loop()
        self._landings = [
            Landing(item, partial(self._ask, index, item)) for index, item in enumerate(items)
        ]
        self._settled = [False] * len(items)
        self._waiting: list[tuple[int, int, Span]] = [
            (index, 0, first_span(item.length_bytes, fetcher.range_bytes))
            for index, item in enumerate(items)
        ]
        heapq.heapify(self._waiting)
        self._running = 0
        self._change = asyncio.Condition()

    async def run(self) -> None:
        """Everything, on the bucket's loop."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._fetcher.parallel):
                group.create_task(self._work())

    def settle_rest(self) -> None:
        """On the caller's loop, when nothing runs any more: what did not arrive was cancelled."""
        for index, settled in enumerate(self._settled):
            if not settled:
                self._settled[index] = True
                self._arrived(index, Fetched(Outcome.CANCELLED, None))

    async def _work(self) -> None:
        """Read spans, the first objects' first, until there are none and none can come."""
        while (found := await self._next()) is not None:
            index, span = found
            landing = self._landings[index]
            try:
                if landing.failure is None:
                    async with self._fetcher.slots:
                        outcome = await self._read(landing, span)
                    self._after(index, landing, span, outcome)
            finally:
                landing.in_flight -= 1
                self._running -= 1
                async with self._change:
                    self._change.notify_all()
            self._settle_if_over(index, landing)

    async def _next(self) -> tuple[int, Span] | None:
        async with self._change:
            while not self._waiting:
                if not self._running:
                    return None
                await self._change.wait()
            index, _, span = heapq.heappop(self._waiting)
            self._running += 1
            self._landings[index].in_flight += 1
            return index, span

    def _after(self, index: int, landing: Landing, span: Span, outcome: Outcome) -> None:
        """A read is over, for good or not."""
        if outcome is not Outcome.OK:
            landing.failure = landing.failure or outcome
            return
        landing.done(span)
        if span.first and landing.meta is not None:
            length_bytes = landing.meta.length_bytes
            for further in further_spans(length_bytes, span, self._fetcher.range_bytes):
                heapq.heappush(self._waiting, (index, further.start_bytes, further))

    def _settle_if_over(self, index: int, landing: Landing) -> None:
        """Tell of an object that is complete, or failed and not written to any more."""
        over = landing.complete or (landing.failure is not None and not landing.in_flight)
        if self._settled[index] or not over:
            return
        self._settled[index] = True
        fetched = Fetched(landing.failure or Outcome.OK, landing.meta)
        self._caller.call_soon_threadsafe(self._arrived, index, fetched)

    async def _read(self, landing: Landing, span: Span) -> Outcome:
        """Read a span, again where that may help, until the deadline."""
        attempt = corrupt = 0
        while True:
            now = time.monotonic()
            if now >= self._deadline:
                return Outcome.DEADLINE
            outcome = await self._once(landing, span, now + self._fetcher.range_timeout_s)
            attempt += 1
            corrupt += outcome is Outcome.CORRUPT
            given_up = attempt >= ATTEMPTS or corrupt >= CORRUPT_ATTEMPTS
            if outcome not in _REPEATED or given_up or landing.failure is not None:
                return outcome
            draw = self._fetcher.random.random()
            pause = pause_s(attempt, outcome is Outcome.THROTTLED, draw)
            if time.monotonic() + pause >= self._deadline:
                return outcome
            await asyncio.sleep(pause)

    async def _once(self, landing: Landing, span: Span, limit: float) -> Outcome:
        reading = landing.reading(span)
        got = await self._fetcher.bucket.get(
            path_of(landing.item.name),
            span.stored_start_bytes,
            span.stored_length_bytes,
            reading.sink,
            min(limit, self._deadline),
        )
        if reading.verdict is not Outcome.OK:
            return reading.verdict
        if got.outcome is Outcome.OK and not (reading.complete and landing.fits(got.total_bytes)):
            return Outcome.CORRUPT  # the stored object is not as long as its header says
        return got.outcome

    async def _ask(self, index: int, item: Fetch, meta: ObjectMeta) -> memoryview | None:
        """Ask for memory, on the caller's loop; but not once the object has arrived, in vain."""
        here = asyncio.get_running_loop()
        answer: asyncio.Future[memoryview | None] = here.create_future()

        def tell(memory: memoryview | None) -> None:
            if not answer.done():
                answer.set_result(memory)

        def ask() -> None:
            memory = None
            try:
                if not self._settled[index]:
                    memory = item.into(meta)
            except Exception:
                logger.exception("no memory for an object from the bucket")
            here.call_soon_threadsafe(tell, memory)

        self._caller.call_soon_threadsafe(ask)
        return await answer
