"""Group commit: changes that wait for the index are taken together, batch after batch.

One for each LMDB environment. While a batch is being synced the next one gathers, so the number of
syncs follows the device and not the number of objects.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvstored.tiers.nvme.index import Entry

_log = logging.getLogger(__name__)

PATIENCE_S = 0.05
"""How long publications wait for others to share their sync, at most."""


class Kind(enum.Enum):
    """What a change does to the index."""

    PUBLISH = "publish"
    REMOVE = "remove"
    OPEN = "open"  # let the slots, and some behind them, be written


@dataclass(slots=True, eq=False)
class Change:
    """One change to some places, and the future that says whether it holds."""

    kind: Kind
    places: Sequence[int]
    weight_bytes: int
    done: asyncio.Future[bool]
    entries: Sequence[Entry] = ()
    voided: bool = False  # REMOVE: the slots' headers were overwritten, though not yet synced


class Committer:
    """Owner of the queue of changes of one environment. Used on the verbs' loop.

    The queue is bounded by the tier's places: each change holds some.
    """

    def __init__(
        self,
        apply: Callable[[list[Change]], Awaitable[None]],
        max_places: int,
        max_bytes: int,
        name: str,
        more_to_come: Callable[[], bool] = lambda: False,
    ) -> None:
        """`apply` gets a batch and resolves the future of each of its changes. No change may by
        itself have more than `max_places`. `more_to_come()`: whether publications are on their way
        that could share a sync with those that wait; whenever that ends, `look` must be called.
        """
        self._apply = apply
        self._max_places = max_places
        self._max_bytes = max_bytes
        self._more_to_come = more_to_come
        self._queue: deque[Change] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name=name)

    def submit(
        self,
        kind: Kind,
        places: Sequence[int],
        entries: Sequence[Entry] = (),
        *,
        weight_bytes: int = 0,
        voided: bool = False,
    ) -> asyncio.Future[bool]:
        """Queue a change; the future never raises."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append(Change(kind, places, weight_bytes, done, entries, voided))
        self._wake.set()
        return done

    def look(self) -> None:
        """Something that `more_to_come` tells of has come, or will not."""
        self._wake.set()

    async def close(self) -> None:
        """Apply what is queued, then end."""
        self._closing = True
        self._wake.set()
        await self._task

    async def _run(self) -> None:
        while True:
            if not self._queue:
                if self._closing:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._gather()
            await self._commit(self._next_batch())

    async def _gather(self) -> None:
        """Let publications that are on their way join those that wait: a sync stops the device for
        as long as some MiB take. What others wait for in order to write or delete goes at once.
        """
        try:
            async with asyncio.timeout(PATIENCE_S):
                while self._more_to_come() and not self._closing:
                    if any(change.kind is not Kind.PUBLISH for change in self._queue):
                        return
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            pass

    async def _commit(self, batch: list[Change]) -> None:
        """Apply one batch. A function of its own, so that an idle committer keeps no payload."""
        try:
            await self._apply(batch)
        except Exception:
            # A bug must not end the task that every write and delete waits for.
            _log.exception("committing %d changes", len(batch))
        for change in batch:
            if not change.done.done():
                change.done.set_result(False)

    def _next_batch(self) -> list[Change]:
        batch = [self._queue.popleft()]
        weight = batch[0].weight_bytes
        places = set(batch[0].places)
        while self._queue:
            following = self._queue[0]
            weight += following.weight_bytes
            count = len(places) + len(following.places)
            if count > self._max_places or weight > self._max_bytes:
                break
            if not places.isdisjoint(following.places):
                break  # within a batch the order of changes to one place would be lost
            places.update(following.places)
            batch.append(self._queue.popleft())
        return batch
