"""What the requests of one session that move bytes share: their watch, their mover, their end.

Belongs to the verbs' loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from kvstored.errors import KvstoredError
from kvstored.server.dispatcher import Dispatcher
from kvstored.server.local.mover import Mover, Movers
from kvstored.server.local.works import Ending, Work
from kvstored.server.watch import Watchdog, Watched
from kvstored.store.api import Received

_Close = Callable[[BaseException | None], Awaitable[None]]


class Carrier:
    """Runs a session's requests that copy bytes; `close` ends them and waits for them."""

    def __init__(self, dispatcher: Dispatcher, movers: Movers) -> None:
        self._movers = movers
        self._mover: Mover | None = None
        self._watchdog = Watchdog(dispatcher.limits.stall_timeout_s, lambda: dispatcher.draining)
        self._watching = False
        self._running: dict[asyncio.Future[None], Watched | None] = {}
        self._closed: KvstoredError | None = None

    @property
    def mover(self) -> Mover:
        """The session's own, one of all."""
        if self._mover is None:
            self._mover = self._movers.take()
        return self._mover

    @contextlib.asynccontextmanager
    async def running(self, close: _Close) -> AsyncIterator[Watched]:
        """Watch the running task to the end of the block, and call `close` then whatever happened.

        Raises what the watch ends it with. `Carrier.close` waits for `close`.
        """
        if self._closed is not None:
            raise self._closed
        if not self._watching:
            self._watching = True
            self._watchdog.look()
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            with self._watchdog.watch() as watched:
                self._running[over] = watched
                try:
                    yield watched
                finally:
                    self._running[over] = None  # what follows is not to be cut short
        except BaseException as error:
            await close(error)
            raise
        else:
            await close(None)
        finally:
            self._running.pop(over, None)
            over.set_result(None)

    async def carry(
        self, work: Work, begun: Callable[[], None] = lambda: None
    ) -> tuple[Ending, list[Received]]:
        """Have the mover do a work; `begun` is called once it knows of it. Whether this returns or
        is cancelled, the mover is done then with staging and extents.
        """
        self.mover.begin(work)
        try:
            begun()
            await asyncio.shield(work.ended)
        finally:
            if not work.ended.done():
                self.mover.end(work, KvstoredError("the request has ended"))
                await settled(work.ended)
        return work.ended.result(), work.filling.received

    async def close(self, cause: KvstoredError) -> None:
        """End every request with the cause, wait until each is over, take no more."""
        self._closed = cause
        self._watchdog.stop()
        for watched in list(self._running.values()):
            if watched is not None:
                watched.end(cause)
        if self._running:
            await asyncio.wait(list(self._running))

    def forget_mover(self) -> None:
        """The session needs no mover any more."""
        mover, self._mover = self._mover, None
        if mover is not None:
            self._movers.give_back(mover)


async def settled(future: asyncio.Future[Ending]) -> None:
    """Wait for a future that comes soon, whoever cancels meanwhile; then give way to them."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


def loop_time(monotonic: float) -> float:
    """A time.monotonic() as the running loop's clock has it."""
    return asyncio.get_running_loop().time() + (monotonic - time.monotonic())
