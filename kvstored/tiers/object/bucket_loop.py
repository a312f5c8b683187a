"""A loop on a thread of its own, so that what the bucket does costs the verbs' loop nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import uvloop

T = TypeVar("T")


class BucketLoop:
    """One thread that runs one event loop, and a way to await there what was called here."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvstored-object", daemon=True)
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        """Begin."""
        self._loop = uvloop.new_event_loop()  # half of asyncio's cost per request
        self._thread.start()

    async def stop(self) -> None:
        """Cancel what still runs there, and end the thread. Once only, and not from the thread."""
        if not self._thread.is_alive():
            return
        await self.run(self._cancel_all)
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    @property
    def here(self) -> bool:
        """Whether the caller runs on this loop."""
        return threading.current_thread() is self._thread

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await `work()` on this loop; directly, if the caller is on it.

        Cancelling the caller cancels the work; either way this ends only when the work has ended:
        whatever memory it was using is the caller's again.
        """
        if self.here:
            return await work()
        caller = asyncio.get_running_loop()
        done: asyncio.Future[T] = caller.create_future()
        started: list[asyncio.Task[T]] = []

        def finish(task: asyncio.Task[T]) -> None:
            caller.call_soon_threadsafe(_settle, done, task)

        def begin() -> None:
            task = self._loop.create_task(_awaited(work))
            started.append(task)
            task.add_done_callback(finish)

        self._loop.call_soon_threadsafe(begin)
        cancelled = False
        while not done.done():
            try:
                await asyncio.wait((done,))
            except asyncio.CancelledError:
                cancelled = True
                self._loop.call_soon_threadsafe(lambda: started[0].cancel())
        if cancelled:
            if not done.cancelled():
                done.exception()  # seen; the cancellation is what counts
            raise asyncio.CancelledError
        return done.result()


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


def _settle(done: asyncio.Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        done.cancel()
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())
