"""Bringing up what others may want: a bounded queue of objects, each created once in the bucket.

A bucket's object is never replaced: whoever came first stands (`Outcome.EXISTED`, CONFLICT or
LENGTH, told by its header), unless what stands there is rotten. An upload that fails is repeated
after a pause with jitter; as long as the bucket is not trusted nothing is begun. What was taken is
owed, and remembered by `Owed`, until it is up or cannot be had any more.

The pool's `WriteBackPart` (parts.py). All of it belongs to one loop, the caller's; requests
themselves run on the bucket's. Each object's end is counted under the verb "upload".
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, cast

from kvstored.supervise import Supervisor
from kvstored.tiers.object.api import ObjectName, Offer, Outcome
from kvstored.tiers.object.creating import OF_THE_BUCKET, TRANSIENT, Creator
from kvstored.tiers.object.format import stored_bytes
from kvstored.tiers.object.guarded import GuardedBucket
from kvstored.tiers.object.journal import Owed
from kvstored.tiers.object.naming import path_of
from kvstored.tiers.object.parts import Backlog
from kvstored.tiers.object.ranges import pause_s

_log = logging.getLogger(__name__)

LONGEST_PAUSE_S: Final = 5.0
MOST_DOUBLINGS: Final = 7
"""Of pauses; an outage may have thousands of repetitions."""


@dataclass(frozen=True, slots=True)
class WriteBackLimits:
    """`in_hand_bytes`: most bytes whose memory is kept in place for uploads under way; one object
    may exceed it alone. `attempts` count only while the bucket is trusted.
    """

    max_backlog_bytes: int = 4 << 30
    max_backlog_objects: int = 65_536
    parallel: int = 8
    in_hand_bytes: int = 272 << 20  # sixteen of 16 MiB
    attempts: int = 6


@dataclass(slots=True, eq=False)
class _Item:
    offer: Offer
    name: ObjectName
    path: str
    nbytes: int
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class WriteBack:
    """See the module. `supervisor` keeps it going; `learned` is told the name and length of each
    object that is now known to be there.
    """

    def __init__(
        self,
        bucket: GuardedBucket,
        creator: Creator,
        owed: Owed,
        supervisor: Supervisor,
        limits: WriteBackLimits,
        learned: Callable[[ObjectName, int], None] = lambda name, length_bytes: None,
    ) -> None:
        self._bucket = bucket
        self._creator = creator
        self._owed = owed
        self._supervisor = supervisor
        self._limits = limits
        self._learned = learned
        self._queue: OrderedDict[_Item, None] = OrderedDict()
        self._by_path: dict[str, list[_Item]] = {}  # all that have not ended
        self._aside: dict[str, deque[_Item]] = {}  # their path is busy
        self._under_way: dict[_Item, asyncio.Task[None]] = {}
        self._busy: set[str] = set()  # paths of what is under way
        self._held: dict[str, int] = {}  # paths that are being deleted, by how many
        self._in_hand_bytes = 0
        self._change = asyncio.Event()
        self._closing = False  # nothing is taken any more
        self._stopped = False  # nothing is begun any more
        self._random = random.Random()  # noqa: S311 (jitter)
        self._objects = 0
        self._bytes = 0
        self._up_bytes = 0
        self._left: Sequence[ObjectName] = ()
        self.refused = 0
        """Offers not taken, because the queue was full."""

    @property
    def backlog(self) -> Backlog:
        """As in WriteBackPart."""
        under_way, forgetful = len(self._under_way), self._owed.problem
        return Backlog(self._objects, self._bytes, under_way, self._up_bytes, forgetful)

    @property
    def left(self) -> Sequence[ObjectName]:
        """As in WriteBackPart."""
        return self._left

    # ---- what is asked of it ------------------------------------------------------------------

    async def open(self) -> None:
        """As in WriteBackPart."""
        self._left = await self._owed.open()
        self._supervisor.start("object_write_back", self.run)

    def offer(self, offers: Sequence[Offer]) -> int:
        """As `Pool.offer`."""
        taken = 0
        for offer in offers:
            nbytes = stored_bytes(offer.meta.length_bytes)
            if self._closing or not self._has_room(nbytes):
                break
            self._take(offer, nbytes)
            taken += 1
        self.refused += len(offers) - taken
        return taken

    def _has_room(self, nbytes: int) -> bool:
        limits = self._limits
        return self._objects < limits.max_backlog_objects and (
            self._bytes + nbytes <= limits.max_backlog_bytes
        )

    def _take(self, offer: Offer, nbytes: int) -> None:
        meta = offer.meta
        name = ObjectName(meta.namespace, meta.family, meta.key, meta.part)
        item = _Item(offer, name, path_of(name), nbytes)
        self._queue[item] = None
        self._by_path.setdefault(item.path, []).append(item)
        self._objects += 1
        self._bytes += nbytes
        self._owed.add(name)
        self._change.set()

    def disown(self, names: Sequence[ObjectName]) -> None:
        """As `Pool.disown`. What is in the queue stays there, and is owed."""
        for name in names:
            if path_of(name) not in self._by_path:
                self._owed.drop(name)

    async def delete(self, names: Sequence[ObjectName], deadline: float) -> bool:
        """As `Pool.delete`. What was offered before is cancelled, or waited for where it is under
        way; what is offered meanwhile goes up afterwards. False: some may still be there.
        """
        paths = list(dict.fromkeys(map(path_of, names)))
        for path in paths:
            self._held[path] = self._held.get(path, 0) + 1
        try:
            items = [item for path in paths for item in self._by_path.get(path, ())]
            if not await self._cancel(items, deadline):
                return False
            self.disown(names)
            return await self._delete(paths, deadline)
        finally:
            for path in paths:
                self._held[path] -= 1
                if not self._held[path]:
                    del self._held[path]
                self._free(path)

    async def cancel(self, namespace: str, tenant: str, deadline: float) -> bool:
        """End all uploads of a namespace (of one of its tenants, unless ""), as before a sweep.
        False: not in time.
        """
        items = [
            item
            for items in self._by_path.values()
            for item in items
            if item.name.namespace == namespace and tenant in ("", item.offer.meta.tenant)
        ]
        return await self._cancel(items, deadline)

    async def close(self, timeout_s: float) -> int:
        """Take nothing more, bring up what can be in time, stop the rest. How many objects are
        owed: they are remembered.
        """
        self._closing = True
        deadline = time.monotonic() + timeout_s
        running = asyncio.create_task(self.run(), name="object-write-back-last")
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._objects and self._bucket.closed:
                    self._change.clear()
                    await self._change.wait()
        self._stopped = True
        running.cancel()  # the supervisor's may have ended long ago, or go on to find nothing
        tasks = [running, *self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=max(0.1, deadline - time.monotonic()))
        for item in [item for items in self._by_path.values() for item in items]:
            if item not in self._under_way:
                self._end(item, Outcome.CANCELLED, remember=True)
        await self._owed.close()
        return self._owed.count

    # ---- uploads ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Bring up what comes, for ever; a supervised task. What is under way when it ends comes
        to its end by itself.
        """
        while True:
            await self._bucket.until_closed()
            item = self._next()
            if item is None:
                self._change.clear()
                await self._change.wait()
                continue
            self._in_hand_bytes += item.nbytes
            self._busy.add(item.path)
            work: Coroutine[object, object, None] = self._bring_up(item)
            task = asyncio.create_task(work, name="object-upload")
            self._under_way[item] = task
            task.add_done_callback(lambda task, item=item: self._ended(item, task))  # type: ignore[misc]

    def _next(self) -> _Item | None:
        """The first of the queue that may begin now."""
        if self._stopped or len(self._under_way) >= self._limits.parallel:
            return None
        while self._queue:
            item = next(iter(self._queue))
            if self._in_hand_bytes and (
                self._in_hand_bytes + item.nbytes > self._limits.in_hand_bytes
            ):
                return None
            del self._queue[item]
            if item.path not in self._busy and item.path not in self._held:
                return item
            self._aside.setdefault(item.path, deque()).append(item)
        return None

    async def _bring_up(self, item: _Item) -> None:
        """One upload, to its end."""
        read = cast("Callable[[], Coroutine[object, object, memoryview | None]]", item.offer.read)
        padded = await read()
        if padded is None:
            self._end(item, Outcome.CANCELLED)
            return
        payload = padded[: item.offer.meta.length_bytes]
        try:
            outcome = await self._create(item, payload)
        finally:
            payload.release()
        if outcome is Outcome.OK:
            self._up_bytes += item.offer.meta.length_bytes
        if outcome in (Outcome.OK, Outcome.EXISTED, Outcome.CONFLICT):
            self._learned(item.name, item.offer.meta.length_bytes)
        self._end(item, outcome)

    async def _create(self, item: _Item, payload: memoryview) -> Outcome:
        """Try until it is settled, or is not worth more."""
        failures = repetition = 0
        while True:
            outcome = await self._creator.create(item.path, item.offer.meta, payload, repetition)
            if outcome not in TRANSIENT:
                return outcome
            self._change.set()  # the bucket may not be trusted any more
            repetition = min(repetition + 1, MOST_DOUBLINGS)
            failures += self._bucket.closed and outcome not in OF_THE_BUCKET
            if failures >= self._limits.attempts:
                return outcome
            throttled = outcome is Outcome.THROTTLED
            pause = min(pause_s(repetition, throttled, self._random.random()), LONGEST_PAUSE_S)
            if await _within(item.stop.wait(), pause):
                return Outcome.CANCELLED
            if not self._bucket.closed and await _first(
                item.stop.wait(), self._bucket.until_closed()
            ):
                return Outcome.CANCELLED

    def _ended(self, item: _Item, task: asyncio.Task[None]) -> None:
        del self._under_way[item]
        self._busy.discard(item.path)
        self._in_hand_bytes -= item.nbytes
        if task.cancelled():
            self._end(item, Outcome.CANCELLED, remember=self._closing)
        elif (error := task.exception()) is not None:
            _log.error("an upload failed in a way that it must not", exc_info=error)
            self._end(item, Outcome.SERVER)
        self._free(item.path)

    def _end(self, item: _Item, outcome: Outcome, *, remember: bool = False) -> None:
        """An item has come to its end, whatever that is; once."""
        if item.ended.is_set():
            return
        item.ended.set()
        same = self._by_path[item.path]
        same.remove(item)
        if not same:
            del self._by_path[item.path]
            if not remember:
                self._owed.drop(item.name)
        self._queue.pop(item, None)
        if item in self._aside.get(item.path, ()):
            self._aside[item.path].remove(item)
        self._objects -= 1
        self._bytes -= item.nbytes
        self._change.set()
        self._bucket.count("upload", outcome)
        try:
            item.offer.done(outcome)
        except Exception as error:  # the store's callback must not stop the others
            _log.error("told of the end of an upload", exc_info=error)

    def _free(self, path: str) -> None:
        """A path is not busy any more: what waits for it goes to the front of the queue."""
        for item in reversed(self._aside.pop(path, ())):
            self._queue[item] = None
            self._queue.move_to_end(item, last=False)
        self._change.set()

    # ---- deletes ------------------------------------------------------------------------------

    async def _cancel(self, items: Iterable[_Item], deadline: float) -> bool:
        """End uploads: those that wait at once; those under way are waited for, since a request
        that was given up might still arrive after a delete.
        """
        for item in list(items):
            item.stop.set()
            if item not in self._under_way:
                self._end(item, Outcome.CANCELLED)
        for item in items:
            if not await _within(item.ended.wait(), deadline - time.monotonic()):
                return False
        return True

    async def _delete(self, paths: Sequence[str], deadline: float) -> bool:
        repetition = 0
        while self._bucket.closed:
            outcome = await self._bucket.delete(paths, deadline)
            if outcome is Outcome.OK:
                return True
            repetition = min(repetition + 1, MOST_DOUBLINGS)
            pause = pause_s(repetition, outcome is Outcome.THROTTLED, self._random.random())
            if outcome not in TRANSIENT or time.monotonic() + pause >= deadline:
                return False
            await asyncio.sleep(pause)
        return False


async def _within(wait: Coroutine[object, object, object], timeout_s: float) -> bool:
    """Whether something came in time."""
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            await wait
    except TimeoutError:
        return False
    return True


async def _first(
    one: Coroutine[object, object, object], other: Coroutine[object, object, object]
) -> bool:
    """Wait for either of two; whether the first has come."""
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
