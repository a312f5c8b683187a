"""A bucket that is asked only as long as it can be trusted, and what came of everything asked.

All parts of the object tier share one of these. It counts each request under its outcome, and lets
a breaker (kvstored.tiers.nvme.breaker) decide from them: once it is open every request is OPEN at
once; `watch` probes the bucket in the background, and after a good probe requests are tried again.
Nothing here needs a restart to recover.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from kvstored.tiers.nvme.breaker import Breaker, BreakerState, Patience, Seen
from kvstored.tiers.object.api import Outcome
from kvstored.tiers.object.backend import Bucket, Got, Head, Page, Sink
from kvstored.tiers.object.naming import CONTROL

PATIENCE = Patience(failures=8, probe_first_s=0.5, probe_longest_s=4.0, look_every_s=0.1)
PROBE_TIMEOUT_S = 3.0
FAIR_CHANCE_S = 0.5
"""A request that was given less time than this and did not make it says nothing of the bucket."""

_FAILURES = frozenset(
    {
        Outcome.SHORT,
        Outcome.LONG,
        Outcome.DEADLINE,
        Outcome.THROTTLED,
        Outcome.SERVER,
        Outcome.NETWORK,
        Outcome.NAME,
        Outcome.DENIED,
        Outcome.NO_BUCKET,
    }
)
_SUCCESSES = frozenset({Outcome.OK, Outcome.ABSENT, Outcome.EXISTED})


class GuardedBucket(Bucket):
    """See the module. Requests may come from any loop."""

    def __init__(self, bucket: Bucket, patience: Patience = PATIENCE) -> None:
        self._bucket = bucket
        self._patience = patience
        self._breaker = Breaker(patience, "request")
        self._lock = threading.Lock()  # held for a few counters, never over a wait
        self._failures = 0
        self._successes = 0
        self._counts: Counter[tuple[str, str]] = Counter()
        self._trusted = asyncio.Event()  # set when a probe went well

    @property
    def url(self) -> str:
        """As in Bucket."""
        return self._bucket.url

    @property
    def detail(self) -> str:
        """As in Bucket."""
        return self._bucket.detail

    @property
    def closed(self) -> bool:
        """Whether requests are let through."""
        return self._breaker.closed

    @property
    def health(self) -> str:
        """What is wrong in words; "ok" if nothing is. Any thread."""
        if self._breaker.state is BreakerState.CLOSED:
            return "ok"
        return f"{self._breaker.state.value}: {self._breaker.detail}"

    def counts(self) -> dict[tuple[str, str], int]:
        """(verb, outcome) -> requests so far. Any thread. Reads are under "range"."""
        with self._lock:
            return dict(self._counts)

    def count(self, verb: str, outcome: Outcome) -> None:
        """Count something that is no request of its own, like a whole object."""
        with self._lock:
            self._counts[verb, outcome.value] += 1

    async def open(self) -> None:
        """As in Bucket."""
        await self._bucket.open()

    async def close(self) -> None:
        """As in Bucket."""
        await self._bucket.close()

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """As in Bucket."""
        await self._bucket.run(work)

    async def watch(self) -> None:
        """Probe the bucket when it is time to; a supervised task, for ever."""
        while True:
            await asyncio.sleep(self._patience.look_every_s)
            if self._breaker.probe_due(time.monotonic()):
                await self._probe()

    async def until_closed(self) -> None:
        """Wait until requests are let through. On the loop that `watch` runs on."""
        while not self.closed:
            self._trusted.clear()
            await self._trusted.wait()

    async def _probe(self) -> None:
        outcome = Outcome.OK
        async for page in self._bucket.list_pages(CONTROL, time.monotonic() + PROBE_TIMEOUT_S):
            outcome = page.outcome
            break
        with self._lock:
            self._counts["probe", outcome.value] += 1
            self._failures = 0
            error = "" if outcome is Outcome.OK else f"{outcome.value} ({self.detail})"
            self._breaker.probed(time.monotonic(), self._seen(outcome), error)
        if self.closed:
            self._trusted.set()

    def _seen(self, outcome: Outcome) -> Seen:
        error = f"{outcome.value} ({self.detail})"
        return Seen(failures=self._failures, successes=self._successes, error=error)

    def _note(self, verb: str, outcome: Outcome, given_s: float) -> None:
        fair = outcome is not Outcome.DEADLINE or given_s >= FAIR_CHANCE_S
        with self._lock:
            self._counts[verb, outcome.value] += 1
            if outcome in _SUCCESSES:
                self._failures = 0
                self._successes += 1
            elif outcome in _FAILURES and fair:
                self._failures += 1
            else:
                return
            self._breaker.look(time.monotonic(), self._seen(outcome))

    async def head(self, path: str, deadline: float) -> Head:
        """As in Bucket; OPEN while the breaker is."""
        if not self.closed:
            self.count("head", Outcome.OPEN)
            return Head(Outcome.OPEN)
        given_s = deadline - time.monotonic()
        head = await self._bucket.head(path, deadline)
        self._note("head", head.outcome, given_s)
        return head

    async def get(
        self, path: str, start_bytes: int, length_bytes: int, sink: Sink, deadline: float
    ) -> Got:
        """As in Bucket; OPEN while the breaker is."""
        if not self.closed:
            self.count("range", Outcome.OPEN)
            return Got(Outcome.OPEN)
        given_s = deadline - time.monotonic()
        got = await self._bucket.get(path, start_bytes, length_bytes, sink, deadline)
        self._note("range", got.outcome, given_s)
        return got

    async def put_if_absent(
        self, path: str, pieces: Sequence[bytes | memoryview], deadline: float
    ) -> Outcome:
        """As in Bucket; OPEN while the breaker is."""
        if not self.closed:
            self.count("put", Outcome.OPEN)
            return Outcome.OPEN
        given_s = deadline - time.monotonic()
        outcome = await self._bucket.put_if_absent(path, pieces, deadline)
        self._note("put", outcome, given_s)
        return outcome

    async def list_pages(self, prefix: str, deadline: float) -> AsyncIterator[Page]:
        """As in Bucket; OPEN while the breaker is."""
        if not self.closed:
            self.count("list", Outcome.OPEN)
            yield Page(Outcome.OPEN)
            return
        given_s = deadline - time.monotonic()
        async for page in self._bucket.list_pages(prefix, deadline):
            self._note("list", page.outcome, given_s)
            yield page

    async def delete(self, paths: Sequence[str], deadline: float) -> Outcome:
        """As in Bucket; OPEN while the breaker is."""
        if not self.closed:
            self.count("delete", Outcome.OPEN)
            return Outcome.OPEN
        given_s = deadline - time.monotonic()
        outcome = await self._bucket.delete(paths, deadline)
        self._note("delete", outcome, given_s)
        return outcome
