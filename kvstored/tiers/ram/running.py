"""Work that must come to its end whatever becomes of who asked for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import TypeVar

_T = TypeVar("_T")


class Running:
    """Tasks of one event loop that `settle` waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self, work: Coroutine[object, object, _T]) -> asyncio.Task[_T]:
        """Run `work` as a task."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(
        self, work: Coroutine[object, object, _T], stop: threading.Event | None = None
    ) -> _T:
        """Result of `work`, which runs to its end also when the caller is cancelled; the
        cancellation is raised after it has ended. `stop` tells it to be quick about it.
        """
        task = self.start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if stop is not None:
                stop.set()
            await _outlast(task)
            raise

    async def settle(self) -> None:
        """Wait until nothing runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)


async def _outlast(task: asyncio.Task[_T]) -> None:
    """Wait until the task has ended, however often the caller is cancelled meanwhile."""
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            continue
