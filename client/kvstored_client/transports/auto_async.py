"""Which way AsyncKVClient's steps go: the local session on worker threads, grpc.aio otherwise.

A local step waits for little but memory, and copies at its speed: on threads, so that the event
loop goes on meanwhile. grpc is imported with the first step that needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

from kvstored_client.failures import CLIENT_CLOSED, DEADLINE_PASSED
from kvstored_client.local.transport import serves
from kvstored_client.steps import Acquire, Answer, Commit, Hold, Reserve, Step
from kvstored_client.stopping import StopFlag
from kvstored_client.transports.auto import BY_WIRE, AutoTransport

if TYPE_CHECKING:
    from kvstored_client.transports.blocking import BlockingTransport
    from kvstored_client.transports.nonblocking import AsyncTransport

THREADS = 8
"""Local steps that run at a time; further ones wait, until their deadlines."""


class AsyncAutoTransport:
    """Runs steps of any number of tasks of one event loop."""

    def __init__(self, target: str, namespace: str, token: str | None) -> None:
        self._target = target
        self._token = token
        self._closed = False
        self._local = _LocalPart(target, namespace, token)
        self._threads: ThreadPoolExecutor | None = None
        self._wire: AsyncTransport | None = None

    async def run(self, step: Step) -> Answer:
        """Run one step to its end; at the latest at its deadline. Never raises for the peer.

        When it is cancelled, it has stopped touching the caller's memory before CancelledError
        leaves it.
        """
        if self._closed:
            return CLIENT_CLOSED
        if self._local.takes(step):
            answer = await self._in_thread(step)
            if answer is not BY_WIRE:
                return answer
        if self._is_closed():
            return CLIENT_CLOSED
        if self._wire is None:
            from kvstored_client.transports.nonblocking import AsyncTransport

            self._wire = AsyncTransport(self._target, self._token)
        return await self._wire.run(step)

    async def close(self) -> None:
        """End running steps (they fail as CLOSED) and the connections."""
        self._closed = True
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)
        await asyncio.to_thread(self._local.close)
        if self._wire is not None:
            await self._wire.close()

    def _is_closed(self) -> bool:
        return self._closed

    async def _in_thread(self, step: Step) -> Answer:
        stop = StopFlag()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "kvstored-step")
        work = self._threads.submit(self._local.run, step, stop)
        done = asyncio.wrap_future(work)
        try:
            await asyncio.wait({done}, timeout=max(0.0, step.deadline - time.monotonic()))
            if not done.done() and work.cancel():
                return DEADLINE_PASSED  # no thread had come to it
            await asyncio.wait({done})
        except asyncio.CancelledError:
            stop.set()
            if not work.cancel():
                while not done.done():
                    # Who cancels twice wants it no more than once.
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait({done})
            raise
        return done.result()


class _LocalPart(AutoTransport):
    """The local session, and when to try it; what goes by gRPC is handed back."""

    def takes(self, step: Step) -> bool:
        """Whether the step is to be tried here."""
        if isinstance(step, Acquire | Commit | Hold | Reserve):
            return True
        return self._local is not None and serves(step) and self._worth_a_try()

    def _connected(self) -> BlockingTransport:
        return cast("BlockingTransport", _HandBack())


class _HandBack:
    """Stands where the blocking client has its gRPC transport."""

    def run(self, step: Step, stop: StopFlag | None = None) -> Answer:
        """Nothing is run."""
        del step, stop
        return BY_WIRE
