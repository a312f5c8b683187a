"""Put, Reserve and Commit of one local session. Belongs to the verbs' loop; movers copy.

docs/protocol.md, "Put through the ring" and "Reserve and Commit".
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstored.errors import BadRequest, Draining, KvstoredError, ResourceExhausted
from kvstored.server.auth import Caller
from kvstored.server.dispatcher import Dispatcher
from kvstored.server.local.carrying import Carrier, loop_time
from kvstored.server.local.filling import Filling
from kvstored.server.local.mover import Movers
from kvstored.server.local.ports import SessionPort
from kvstored.server.local.reservations import Reservations
from kvstored.server.local.staging import RETRY_MS, Areas, Memory, Staging
from kvstored.server.local.works import Channel, Ending, RingWork
from kvstored.server.payload_calls import PutCall
from kvstored.server.watch import Waits, Watched
from kvstored.store.api import PutTicket, Received
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import Kind

__all__ = ["Puts", "SessionPort"]

Reply = Callable[[bytes, bool], None]
"""Sends a reply's body; the second argument says that it is the last."""

_LATE_PUT = ("the payload came too slowly for the deadline", "send faster, or give it more time")


@dataclass(frozen=True, slots=True)
class _Ring:
    memory: Memory
    channel: Channel


class Puts:
    """What one session puts. Errors are raised as KvstoredError."""

    def __init__(
        self, dispatcher: Dispatcher, movers: Movers, staging: Staging, session: SessionPort
    ) -> None:
        self._dispatcher = dispatcher
        self._staging = staging
        self._session = session
        self._carrier = Carrier(dispatcher, movers)
        self._areas = Areas(staging, session)
        self._reservations = Reservations(dispatcher, self._carrier, self._areas, session)
        self._ring: _Ring | None = None
        self._current: tuple[int, Watched] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    # ---- Put -------------------------------------------------------------------------------------

    async def put(
        self, request: pb.PutHeader, request_id: int, caller: Caller, reply: Reply
    ) -> None:
        """One Put to its end: PutPlan and PutReply go to `reply`, anything else is raised.

        Cancel the task to give it up; it ends when nothing of it is under way any more.
        """
        call = PutCall(self._dispatcher, caller)
        async with self._carrier.running(call.close) as watched:
            if self._current is not None:
                raise BadRequest(
                    f"put {self._current[0]} is still running", "one Put runs at a time"
                )
            self._current = request_id, watched
            try:
                await self._put(call, request, reply)
            finally:
                self._current = None

    async def _put(self, call: PutCall, request: pb.PutHeader, reply: Reply) -> None:
        assert self._current is not None
        _, watched = self._current
        ring = self._ring or await self._make_ring()
        # Steps in tasks of their own: `call.close` waits for them.
        plan = await asyncio.create_task(call.plan(request))
        watched.until(loop_time(plan.deadline), *_LATE_PUT)
        received = await self._carry(ring, plan.ticket, reply, call.publish_part)
        watched.waits = Waits.OUTCOME
        states = await asyncio.create_task(call.commit(received))
        reply(pb.PutReply(states=states).SerializeToString(), True)

    async def _carry(
        self,
        ring: _Ring,
        ticket: PutTicket,
        reply: Reply,
        publish: Callable[[Sequence[Received]], None],
    ) -> list[Received]:
        """Answer with the plan and take the payload; what has come is published now and then."""
        assert self._current is not None
        request_id, watched = self._current
        payload_bytes = sum(wanted.length_bytes for wanted in ticket.wanted)
        plan = pb.PutPlan(
            states=bytes(ticket.states),
            payload_bytes=payload_bytes,
            max_frame_bytes=self._dispatcher.limits.max_frame_bytes,
        )
        if not payload_bytes:
            reply(plan.SerializeToString(), False)
            return []
        watched.waits = Waits.PEER
        filling = Filling(ticket.wanted)
        work = RingWork(filling, watched, ring.channel, request_id, payload_bytes)
        work.on_part = lambda: publish(filling.received.copy())
        # The mover knows of the put before the client can send anything about it.
        ending, received = await self._carrier.carry(
            work, lambda: reply(plan.SerializeToString(), False)
        )
        if ending.cause is None:
            return received
        if ending.violation:
            self._session.fail(ending.cause)
        raise ending.cause

    async def _make_ring(self) -> _Ring:
        memory = await self._staging.make_ring(self._session.namespace)
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            self._staging.free(self._session.namespace, memory)
            raise ResourceExhausted(
                f"no data channel: {error.strerror}",
                "give the daemon more descriptors (LimitNOFILE)",
                retry_after_ms=RETRY_MS,
            ) from None
        channel = Channel(ours, memory.address, memory.size_bytes, self._broken)
        self._ring = _Ring(memory, channel)
        self._carrier.mover.attach(channel)
        announced = pb.LocalRing(size_bytes=memory.size_bytes).SerializeToString()
        with theirs:
            self._session.notice(Kind.RING, announced, [memory.descriptor, theirs.fileno()])
        memory.forget_descriptor()
        return self._ring

    def _broken(self, ending: Ending) -> None:
        if ending.violation and ending.cause is not None:
            self._session.fail(ending.cause)

    # ---- Reserve and Commit ----------------------------------------------------------------------

    async def reserve(self, request: pb.ReserveRequest, caller: Caller) -> pb.ReserveReply:
        """Places for objects to be written in place."""
        return await self._reservations.reserve(request, caller)

    async def commit(self, request: pb.CommitRequest, caller: Caller) -> pb.PutReply:
        """Take what was written there."""
        return await self._reservations.commit(request, caller)

    def release(self, lease_id: int) -> bool:
        """Give a reservation up, also one whose answer is not out yet; whether there was one."""
        return self._reservations.release(lease_id)

    def area_retired(self, area_id: int) -> None:
        """The client has unmapped an area that it was asked to."""
        self._areas.retired(area_id)

    # ---- the end ---------------------------------------------------------------------------------

    async def stop(self) -> None:
        """The session is served no longer. When this returns nothing reads ring or areas or writes
        an extent, and what was taken of RAM was given back. Ring and areas stay, and stay counted:
        the client may have them mapped. Idempotent.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def close(self) -> None:
        """The session is over: `stop`, and give ring and areas back. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _stop(self) -> None:
        self._areas.stop()
        cause: KvstoredError = Draining("the session is over", "open another")
        await self._carrier.close(cause)
        await self._reservations.close()
        if self._ring is not None:
            await self._carrier.mover.detach(self._ring.channel)
            self._ring.channel.end.close()
        self._carrier.forget_mover()

    async def _close(self) -> None:
        await self.stop()
        ring, self._ring = self._ring, None
        if ring is not None:
            self._staging.free(self._session.namespace, ring.memory)
        self._areas.close()
