"""Keeping a bucket that many nodes share within its cap and age, by whichever node gets to it.

Every node has a janitor; one at a time holds the lease, lists the bucket, and drops what is too old
or too much (eviction.py says in which order). It stops as soon as it cannot be sure of the lease.
The pool's `JanitorPart` (parts.py): `run` is a task of the supervisor, and the work happens on the
bucket's loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from typing import Final

from kvstored.supervise import Supervisor
from kvstored.tiers.object.api import Outcome, Swept
from kvstored.tiers.object.eviction import Survey, victims, window
from kvstored.tiers.object.guarded import GuardedBucket
from kvstored.tiers.object.lease import Lease
from kvstored.tiers.object.leftovers import Leftovers
from kvstored.tiers.object.naming import listing_prefix
from kvstored.tiers.object.parts import Inventory
from kvstored.tiers.object.sweep import BATCH, Sweeper, Unreadable

_log = logging.getLogger(__name__)

LIST_TIMEOUT_S: Final = 3600.0
HEADERS_AT_ONCE: Final = 500
"""Between these the lease is renewed."""

SPARE: Final = 16
"""Where there is too much, a 16th of the cap is made free: listing costs more than dropping."""


@dataclass(frozen=True, slots=True)
class JanitorLimits:
    """`cap_bytes` and `ttl_s`: 0 is no limit. `interval_s`: between runs, whichever node does them;
    `expires_s`: after so long without a sign of life another node takes over.
    """

    cap_bytes: int = 0
    ttl_s: float = 0.0
    interval_s: float = 300.0
    expires_s: float = 60.0


class LeaseLost(Exception):
    """Another node may be at it."""


class Janitor:
    """See the module. With `enabled` false it only sweeps when asked to."""

    def __init__(
        self,
        bucket: GuardedBucket,
        lease: Lease,
        sweeper: Sweeper,
        supervisor: Supervisor,
        limits: JanitorLimits,
        *,
        leftovers: Leftovers | None = None,
        enabled: bool = True,
    ) -> None:
        self._bucket = bucket
        self._lease = lease
        self._sweeper = sweeper
        self._supervisor = supervisor
        self._limits = limits
        self._leftovers = leftovers
        self._enabled = enabled
        self._words = "waiting" if enabled else "off"
        self._totals = (0, 0)
        self._random = random.Random()  # noqa: S311 (jitter)
        self.dropped_objects = 0
        self.dropped_bytes = 0

    # ---- what the pool asks -------------------------------------------------------------------

    async def open(self) -> None:
        """As in JanitorPart."""
        if self._enabled:
            self._supervisor.start("object_janitor", self.run)

    async def close(self) -> None:
        """As in JanitorPart. The lease is left to its time."""
        self._lease.leave()

    async def delete_all(self, namespace: str, tenant: str, deadline: float) -> Swept:
        """As in Pool."""
        swept = Swept(0, Outcome.CANCELLED)

        async def work() -> None:
            nonlocal swept
            swept = await self._sweeper.sweep(namespace, tenant, deadline)

        await self._bucket.run(work)
        return swept

    @property
    def inventory(self) -> Inventory:
        """As in JanitorPart."""
        objects, nbytes = self._totals
        return Inventory(nbytes, objects, self._words)

    # ---- runs ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look after the bucket, for ever; a supervised task."""
        while True:
            pause_s = await self.turn()
            await asyncio.sleep(pause_s * (0.8 + 0.4 * self._random.random()))

    async def turn(self) -> float:
        """One look: clean up if it is this node's turn. How long to wait for the next, seconds."""
        await self._bucket.until_closed()
        pause_s = self._limits.interval_s

        async def work() -> None:
            nonlocal pause_s
            pause_s = await self._turn()

        await self._bucket.run(work)
        return pause_s

    async def _turn(self) -> float:
        """`turn`, on the bucket's loop."""
        if not await self._lease.take(self._news()):
            self._hear()
            return self._limits.interval_s if self._lease.changed else self._lease.expires_s
        try:
            more = await self._clean()
            self._words = f"ran; {self.dropped_objects} objects dropped so far"
            await self._lease.keep(self._news(), always=True)
            return 0.0 if more else self._limits.interval_s
        except LeaseLost:
            self._words = "another node took over"
        except Unreadable as error:
            self._words = f"stopped: {error.outcome.value}"
        finally:
            self._lease.leave()
        return self._limits.expires_s

    def _news(self) -> dict[str, object]:
        """What others may know from the lease."""
        objects, nbytes = self._totals
        return {"objects": objects, "bytes": nbytes}

    def _hear(self) -> None:
        """Take over what the holder says."""
        words = self._lease.words
        objects, nbytes = words.get("objects"), words.get("bytes")
        if isinstance(objects, int) and isinstance(nbytes, int):
            self._totals = (objects, nbytes)
        self._words = f"another node's turn ({words.get('owner', 'unknown')!s:.64})"

    async def _clean(self) -> bool:
        """List, and drop what must go. Whether there is more to drop than one run does."""
        if self._leftovers is not None:
            await asyncio.to_thread(self._leftovers.drop)
        self._words = "listing"
        survey = await self._survey()
        self._totals = (survey.objects, survey.bytes)
        oldest = survey.oldest()
        now_ms = self._lease.bucket_now_ms()
        ttl_ms = int(1000 * self._limits.ttl_s)
        too_old = [e for e in oldest if ttl_ms and e.modified_ms + ttl_ms <= now_ms]
        await self._drop({e.path: e.length_bytes for e in too_old})
        more = len(too_old) == len(oldest) < survey.objects
        cap = self._limits.cap_bytes
        if cap and self._totals[1] > cap:
            need = self._totals[1] - cap + cap // SPARE
            looked_at = window(oldest[len(too_old) :], need)
            self._words = "reading headers"
            candidates = []
            for at in range(0, len(looked_at), HEADERS_AT_ONCE):
                await self._sure()
                part = looked_at[at : at + HEADERS_AT_ONCE]
                candidates += await self._sweeper.headers(part, _soon())
            chosen = victims(candidates, need, int(time.time() * 1000))
            await self._drop({e.path: e.length_bytes for e in chosen})
            more = more or (self._totals[1] > cap and bool(chosen))
        return more

    async def _survey(self) -> Survey:
        survey = Survey()
        async for page in self._bucket.list_pages(listing_prefix(), _soon()):
            if page.outcome is not Outcome.OK:
                raise Unreadable(page.outcome)
            survey.add(page.entries)
            await self._sure()
        return survey

    async def _drop(self, victims: dict[str, int]) -> None:
        """Drop objects, by path and length."""
        self._words = f"dropping {len(victims)} objects"
        paths = list(victims)
        for at in range(0, len(paths), BATCH):
            await self._sure()
            batch = paths[at : at + BATCH]
            outcome = await self._sweeper.drop(batch, time.monotonic() + self._limits.expires_s / 4)
            if outcome is not Outcome.OK:
                raise Unreadable(outcome)
            nbytes = sum(victims[path] for path in batch)
            self.dropped_objects += len(batch)
            self.dropped_bytes += nbytes
            self._totals = (self._totals[0] - len(batch), self._totals[1] - nbytes)

    async def _sure(self) -> None:
        """Raises LeaseLost unless the lease is ours for a while yet."""
        if not await self._lease.keep(self._news()):
            raise LeaseLost


def _soon() -> float:
    return time.monotonic() + LIST_TIMEOUT_S
