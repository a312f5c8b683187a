"""From the stream loop to the verbs' loop, and bounds on what may cross."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Coroutine, Iterator
from typing import TypeVar

from kvstored.errors import Draining, ResourceExhausted

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class VerbsLoop:
    """Runs work on the verbs' loop for callers on another loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def run(self, work: Coroutine[object, object, _T]) -> _T:
        """Result of `work`. Cancelling the caller cancels the work.

        Raises Draining when the verbs' loop is gone.
        """
        return await self.start(work)

    def start(self, work: Coroutine[object, object, _T]) -> asyncio.Future[_T]:
        """The future result of `work`, which runs from now on. Cancelling it cancels the work.

        Raises Draining when the verbs' loop is gone.
        """
        future = asyncio.wrap_future(self._submit(work))
        # A caller that fails meanwhile never looks; the work's error was for it alone.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def spawn(self, work: Coroutine[object, object, object]) -> None:
        """Run `work` without waiting for it; what it raises is logged."""
        try:
            self._submit(work).add_done_callback(_log_failure)
        except Draining:
            _log.debug("the verbs' loop is gone; what was held is gone with it")

    def _submit(self, work: Coroutine[object, object, _T]) -> concurrent.futures.Future[_T]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise Draining("the daemon has stopped", "call another node") from error


def _log_failure(done: concurrent.futures.Future[object]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        _log.error("ending a call failed", exc_info=error)


class Admission:
    """A bound on how many of something run at once. Belongs to one loop."""

    def __init__(self, most: int, what: str, retry_after_ms: int) -> None:
        self._most = most
        self._what = what
        self._retry_after_ms = retry_after_ms
        self.running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def full(self) -> bool:
        """Whether `slot` would raise."""
        return self.running >= self._most

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one slot. Raises ResourceExhausted when all are taken."""
        if self.full:
            raise ResourceExhausted(
                f"{self.running} {self._what} are running, which is the daemon's limit",
                f"try again in {self._retry_after_ms} ms",
                retry_after_ms=self._retry_after_ms,
            )
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def idle(self) -> None:
        """Return when none is running."""
        await self._idle.wait()
