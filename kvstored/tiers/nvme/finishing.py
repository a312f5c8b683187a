"""Work that goes on to its end whatever becomes of who asked for it. Used on the verbs' loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

R = TypeVar("R")


class Finishing:
    """What of one volume is under way, and is waited for before the volume is closed."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self, work: Coroutine[object, object, R]) -> asyncio.Task[R]:
        """Run something that nobody waits for."""
        task: asyncio.Task[R] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, work: Coroutine[object, object, R]) -> R:
        """Run to the end even if the caller is cancelled, and only then say so to it: the buffers
        are still in use.
        """
        task = self.start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                try:
                    await asyncio.wait({task})
                except asyncio.CancelledError:
                    continue  # however often we are asked
            raise

    async def ended(self) -> None:
        """Wait until nothing is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)
