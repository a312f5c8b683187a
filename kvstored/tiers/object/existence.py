"""What the bucket has, asked by HEADs: few of them, each name once at a time, under a deadline.

The pool's `ExistencePart` (parts.py). A call runs on the bucket's loop, one hop for a whole prefix.
What the bucket said, that an object is there or is not, is remembered for `remember_s`, at most
MOST_KNOWN names; what nobody answered in time is absent in that answer and not remembered.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvstored.tiers.object.api import ObjectName, Outcome
from kvstored.tiers.object.backend import Bucket
from kvstored.tiers.object.format import object_bytes
from kvstored.tiers.object.galloping import Gallop
from kvstored.tiers.object.naming import path_of

MOST_KNOWN: Final = 65_536
MOST_ASKING: Final = 1024
"""Questions under way or waiting; beyond that nothing more is asked, and what is not known is
absent."""

_ABSENT: Final = -1

Names = Sequence[Sequence[ObjectName]]


class Existence:
    """See the module. `parallel`: HEADs under way at once; `head_timeout_s`: for each of them."""

    def __init__(
        self,
        bucket: Bucket,
        parallel: int,
        head_timeout_s: float,
        remember_s: float,
        most_known: int = MOST_KNOWN,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = bucket
        self._parallel = parallel
        self._head_timeout_s = head_timeout_s
        self._remember_s = remember_s
        self._most_known = most_known
        self._now = now
        self._slots = asyncio.Semaphore(parallel)  # used on the bucket's loop alone
        self._lock = threading.Lock()  # held for a look into what is below, never over a wait
        self._known: OrderedDict[ObjectName, tuple[int, float]] = OrderedDict()
        self._asking: dict[ObjectName, asyncio.Task[int | None]] = {}

    # ---- what is asked of it ------------------------------------------------------------------

    async def leading(self, names: Names, deadline: float) -> list[Sequence[int]]:
        """As `Pool.leading`. Lengths are 0 where the search did not have to ask."""
        found: list[Sequence[int]] = []

        async def work() -> None:
            found.extend(await self._leading(names, deadline))

        if names:
            await self._bucket.run(work)
        return found

    async def each(self, names: Names, deadline: float) -> list[Sequence[int] | None]:
        """As `Pool.each`."""
        found: list[Sequence[int] | None] = []

        async def work() -> None:
            found.extend(await self._ask(names, deadline))

        if names:
            await self._bucket.run(work)
        return found

    def learn(self, name: ObjectName, length_bytes: int) -> None:
        """An object of that length is there: it was just brought up, or read."""
        with self._lock:
            self._asking.pop(name, None)
            self._remember(name, length_bytes)

    def forget(self, names: Iterable[ObjectName]) -> None:
        """What was known of names is not true any more, nor what is being asked."""
        with self._lock:
            for name in names:
                self._asking.pop(name, None)
                self._known.pop(name, None)

    def clear(self) -> None:
        """Nothing of what was known may be true any more."""
        with self._lock:
            self._asking.clear()
            self._known.clear()

    def absent(self, names: Iterable[ObjectName]) -> None:
        """The bucket has just said that these are not there."""
        with self._lock:
            for name in names:
                self._remember(name, _ABSENT)

    # ---- on the bucket's loop -----------------------------------------------------------------

    async def _leading(self, names: Names, deadline: float) -> list[Sequence[int]]:
        lengths: dict[int, Sequence[int]] = {}
        search = Gallop(len(names), self._parallel // max(1, len(names[0])))
        while not search.done:
            questions = search.questions()
            answers = await self._ask([names[at] for at in questions], deadline)
            search.answers(questions, [answer is not None for answer in answers])
            lengths |= {a: b for a, b in zip(questions, answers, strict=True) if b is not None}
        return [lengths.get(at, (0,) * len(names[at])) for at in range(search.leading)]

    async def _ask(self, names: Names, deadline: float) -> list[Sequence[int] | None]:
        """For each chunk the lengths of all its objects, or None where one is not there."""
        wanted = {name for chunk in names for name in chunk}
        known = {name: length for name in wanted if (length := self._lookup(name)) is not None}
        tasks = {
            name: task for name in wanted - known.keys() if (task := self._flight(name)) is not None
        }
        if tasks:
            await asyncio.wait(tasks.values(), timeout=max(0.0, deadline - time.monotonic()))
        for name, task in tasks.items():
            if task.done() and not task.cancelled() and (length := task.result()) is not None:
                known[name] = length
        found: list[Sequence[int] | None] = []
        for chunk in names:
            lengths = [known.get(name, _ABSENT) for name in chunk]
            found.append(None if _ABSENT in lengths else lengths)
        return found

    def _flight(self, name: ObjectName) -> asyncio.Task[int | None] | None:
        """The question about a name that is under way, or a new one; None if there are too many."""
        with self._lock:
            task = self._asking.get(name)
            if task is None and len(self._asking) < MOST_ASKING:
                task = asyncio.create_task(self._head(name), name="object-head")
                self._asking[name] = task
                task.add_done_callback(lambda task: self._answered(name, task))
        return task

    async def _head(self, name: ObjectName) -> int | None:
        """The length of an object, _ABSENT, or None if that is not known."""
        async with self._slots:
            head = await self._bucket.head(path_of(name), time.monotonic() + self._head_timeout_s)
        if head.outcome is Outcome.ABSENT:
            return _ABSENT
        if head.outcome is not Outcome.OK:
            return None
        length = object_bytes(head.length_bytes)
        return length if length > 0 else _ABSENT  # not one of ours: nothing to be read

    def _answered(self, name: ObjectName, task: asyncio.Task[int | None]) -> None:
        with self._lock:
            if self._asking.get(name) is not task:
                return  # something has happened to the object since it was asked
            del self._asking[name]
            if not task.cancelled() and task.exception() is None:
                length = task.result()
                if length is not None:
                    self._remember(name, length)

    # ---- memory, under the lock ---------------------------------------------------------------

    def _lookup(self, name: ObjectName) -> int | None:
        with self._lock:
            known = self._known.get(name)
            if known is None:
                return None
            length, until = known
            if self._now() >= until:
                del self._known[name]
                return None
            return length

    def _remember(self, name: ObjectName, length: int) -> None:
        self._known[name] = (length, self._now() + self._remember_s)
        self._known.move_to_end(name)
        while len(self._known) > self._most_known:
            self._known.popitem(last=False)
