"""Get, Acquire and Put, apart from any transport.

Objects may be made on any thread; every method runs on the verbs' loop. A transport must schedule
`close` whatever happens: it ends leases and tickets, also those whose making was still under way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstored.server import validation as check
from kvstored.server.auth import Caller
from kvstored.server.dispatcher import Dispatcher, outcome_of
from kvstored.server.ports import AcquireStreamPort, GetStreamPort
from kvstored.store.api import Grant, Leased, PutTicket, Received
from kvstored_client.proto import kvstore_pb2 as pb

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a PutCall wants. `deadline`: time.monotonic() at which the transport gives up."""

    ticket: PutTicket
    deadline: float


class _PayloadCall:
    """What Get and Put share: one step at a time, and a close that comes after every step."""

    verb = ""

    def __init__(self, dispatcher: Dispatcher, caller: Caller) -> None:
        self.dispatcher = dispatcher
        self.caller = caller
        self.outcome = "CANCELLED"  # unless a step says otherwise
        self.tier = 0
        self._step: asyncio.Task[object] | None = None
        self._closed = False
        self._began = False
        self._namespace: str | None = None

    def admit(self, namespace: str) -> None:
        """Let the caller in, and hold one of the namespace's streams until `close`.

        Raises Draining, Unauthenticated or ResourceExhausted.
        """
        self.dispatcher.admit(self.caller, namespace)
        self.dispatcher.streams.take(namespace)
        self._namespace = namespace

    async def step(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Run one step; `close` waits for the end of one that was cancelled."""
        if self._closed:
            raise asyncio.CancelledError
        if not self._began:
            self._began = True
            self.dispatcher.payload_call_began()
        self._step = asyncio.current_task()
        try:
            return await work()
        except BaseException as error:
            self.outcome = outcome_of(error)
            raise

    async def close(self, error: BaseException | None = None) -> None:
        """End the call, however far it came; `error`: what the transport met. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if error is not None:
            self.outcome = outcome_of(error)
        step = self._step
        if step is not None and not step.done():
            step.cancel()
            await asyncio.wait([step])
        try:
            await self.release()
        finally:
            if self._namespace is not None:
                self.dispatcher.streams.give_back(self._namespace)
            if self._began:
                self.dispatcher.payload_call_ended()
            tier = pb.TierKind.Name(self.tier)[len("TIER_") :].lower() if self.tier else ""
            self.dispatcher.report(self.verb, self.outcome, self.caller, tier)

    async def release(self) -> None:
        """Give back what the call holds."""
        raise NotImplementedError


class GetCall(_PayloadCall):
    """One Get: `begin`, `next` until `final_states` is there, `close`; meanwhile `delivered`."""

    verb = "get"

    def __init__(self, dispatcher: Dispatcher, caller: Caller) -> None:
        super().__init__(dispatcher, caller)
        self._stream: GetStreamPort | None = None
        self._taken: deque[Sequence[Grant]] = deque()
        self.final_states: bytes | None = None
        """The ChunkStates, as soon as nothing comes after what `begin` or `next` gave last."""

    def delivered(self, grants: Sequence[Grant]) -> None:
        """The transport took these in full. May be called from any thread.

        The store hears of it with the next step, or at the end: a hop between loops of its own
        would cost as much as half a frame.
        """
        self._taken.append(grants)

    def _tell_delivered(self) -> None:
        while self._taken and self._stream is not None:
            self._stream.delivered(self._taken.popleft())

    async def begin(self, request: pb.GetRequest) -> tuple[float, list[Grant] | None]:
        """Validate and open; the transport's deadline, time.monotonic(), and the first `next`."""
        return await self.step(lambda: self._begin(request))

    async def _begin(self, request: pb.GetRequest) -> tuple[float, list[Grant] | None]:
        self.admit(request.run.namespace)
        run = self.dispatcher.run_of(request.run, request.ctx)
        end, deadline = self.dispatcher.deadlines(self.caller, request.ctx)
        self._stream = self.dispatcher.store.open_get(run, deadline, request.bypass_ram)
        return end, await self._next()

    async def next(self) -> list[Grant] | None:
        """Objects that are ready; None at the end. May run ahead of `delivered`."""
        return await self.step(self._next)

    async def _next(self) -> list[Grant] | None:
        assert self._stream is not None, "begin comes first"
        self._tell_delivered()
        grants = await self._stream.next()
        self.tier = max([self.tier, *(g.tier for g in grants or ())])
        if grants is None or self._stream.exhausted:
            self.final_states = self._stream.states
            self.outcome = "ok"
        return grants

    async def release(self) -> None:
        """End every lease."""
        if self._stream is not None:
            self._tell_delivered()
            await self._stream.close()


class AcquireCall(_PayloadCall):
    """One Acquire that must wait for something: `begin`, `next` until None, `close`.

    What `next` gave stays leased until the caller has the store release it.
    """

    verb = "acquire"

    def __init__(self, dispatcher: Dispatcher, caller: Caller) -> None:
        super().__init__(dispatcher, caller)
        self._stream: AcquireStreamPort | None = None

    async def begin(self, request: pb.AcquireRequest, room: Callable[[int], bool]) -> None:
        """Validate and open. `room(charged_bytes)`: see Store.open_acquire."""
        await self.step(lambda: self._begin(request, room))

    async def _begin(self, request: pb.AcquireRequest, room: Callable[[int], bool]) -> None:
        self.admit(request.run.namespace)
        run = self.dispatcher.run_of(request.run, request.ctx)
        _, deadline = self.dispatcher.deadlines(self.caller, request.ctx)
        self._stream = self.dispatcher.store.open_acquire(run, deadline, room)

    async def next(self) -> Leased | None:
        """Objects that are ready; None at the end."""
        return await self.step(self._next)

    async def _next(self) -> Leased | None:
        assert self._stream is not None, "begin comes first"
        leased = await self._stream.next()
        if leased is None:
            self.outcome = "ok"
        else:
            self.tier = max(self.tier, *leased.tiers)
        return leased

    @property
    def states(self) -> bytes:
        """One ChunkState per key; final once `next` gave None."""
        assert self._stream is not None, "begin comes first"
        return self._stream.states

    async def release(self) -> None:
        """Give up what was not handed out."""
        if self._stream is not None:
            await self._stream.close()


class PutCall(_PayloadCall):
    """One Put: `plan`, then the transport fills the wanted views, `commit`, `close`."""

    verb = "put"

    def __init__(self, dispatcher: Dispatcher, caller: Caller) -> None:
        super().__init__(dispatcher, caller)
        self._ticket: PutTicket | None = None

    async def plan(self, header: pb.PutHeader) -> Plan:
        """Validate, and reserve room for what is wanted."""
        return await self.step(lambda: self._plan(header))

    async def _plan(self, header: pb.PutHeader) -> Plan:
        dispatcher = self.dispatcher
        self.admit(header.run.namespace)
        run = dispatcher.run_of(header.run, header.ctx)
        end, deadline = dispatcher.deadlines(self.caller, header.ctx)
        offer = check.build_offer(header, run, deadline, dispatcher.limits)
        self._ticket = await dispatcher.store.begin_put(offer)
        return Plan(self._ticket, end)

    def publish_part(self, received: Sequence[Received]) -> None:
        """Publish what has come so far; `commit` is told of it again."""
        if self._ticket is not None and not self._closed:
            self.dispatcher.store.publish_part(self._ticket, received)

    async def commit(self, received: Sequence[Received]) -> bytes:
        """Publish; one PutState per object. Runs to its end once begun."""
        return await self.step(lambda: self._commit(received))

    async def _commit(self, received: Sequence[Received]) -> bytes:
        ticket, self._ticket = self._ticket, None
        assert ticket is not None, "plan comes first, commit only once"
        states = await self.dispatcher.finish(self._commit_or_abort(ticket, received))
        self.outcome = "ok"
        return states

    async def _commit_or_abort(self, ticket: PutTicket, received: Sequence[Received]) -> bytes:
        store = self.dispatcher.store
        try:
            return await store.commit_put(ticket, received)
        except BaseException:
            await store.abort_put(ticket)
            raise

    async def release(self) -> None:
        """Give back the room of a put that was not committed."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            await self.dispatcher.store.abort_put(ticket)
