"""Reserve and Commit of one session: objects that a client writes in place before they are taken.

Belongs to the verbs' loop. A reservation lives until it is committed or released or its session
ends; nothing else ends it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvstored.errors import BadRequest, ResourceExhausted
from kvstored.server import validation as check
from kvstored.server.auth import Caller
from kvstored.server.dispatcher import Dispatcher
from kvstored.server.local.carrying import Carrier, loop_time
from kvstored.server.local.filling import Filling
from kvstored.server.local.ports import SessionPort
from kvstored.server.local.staging import RETRY_MS, Area, Areas
from kvstored.server.local.works import AreaWork
from kvstored.server.watch import Waits, Watched
from kvstored.store.api import PutTicket, Received, WantedObject
from kvstored.tiers.base import padded_bytes
from kvstored_client.proto import kvstore_pb2 as pb

_LATE_RESERVE = ("no room for the reservation within the deadline", "reserve less, or wait longer")
_LATE_COMMIT = ("the commit took longer than its deadline", "commit again what is missing")


@dataclass(slots=True, eq=False)
class _Reservation:
    """`offsets_bytes`: of the ticket's wanted objects, in the area."""

    ticket: PutTicket
    area: Area | None
    offsets_bytes: list[int]
    charged_bytes: int


class Reservations:
    """Those of one session, by lease id."""

    def __init__(
        self, dispatcher: Dispatcher, carrier: Carrier, areas: Areas, session: SessionPort
    ) -> None:
        self._dispatcher = dispatcher
        self._carrier = carrier
        self._areas = areas
        self._session = session
        self._open: dict[int, _Reservation] = {}
        self._planning: dict[int, Watched] = {}
        self._aborting: set[asyncio.Future[None]] = set()

    # ---- Reserve ---------------------------------------------------------------------------------

    async def reserve(self, request: pb.ReserveRequest, caller: Caller) -> pb.ReserveReply:
        """Take room in RAM and in an area. Raises BadRequest, TooLarge, ResourceExhausted."""
        dispatcher, lease_id = self._dispatcher, request.lease_id
        with dispatcher.serving("reserve", caller, request.run.namespace):
            if not lease_id or lease_id in self._open or lease_id in self._planning:
                raise BadRequest(f"lease_id {lease_id} is 0 or in use", "choose one that is unique")
            async with self._carrier.running(_nothing) as watched:
                self._planning[lease_id] = watched
                try:
                    reservation = await self._plan(request, caller, watched)
                finally:
                    del self._planning[lease_id]
                self._open[lease_id] = reservation
            return _reply(reservation)

    async def _plan(
        self, request: pb.ReserveRequest, caller: Caller, watched: Watched
    ) -> _Reservation:
        dispatcher = self._dispatcher
        run = dispatcher.run_of(request.run, request.ctx)
        end, deadline = dispatcher.deadlines(caller, request.ctx)
        header = pb.PutHeader(
            lengths_bytes=request.lengths_bytes,
            when_full=request.when_full,
            ttl_ms=request.ttl_ms,
        )
        offer = check.build_offer(header, run, deadline, dispatcher.limits)
        offer = dataclasses.replace(offer, claims_at_commit=True)
        watched.until(loop_time(end), *_LATE_RESERVE)
        ticket = await dispatcher.store.begin_put(offer)
        try:
            return await self._place(ticket)
        except BaseException:
            await dispatcher.store.abort_put(ticket)
            raise

    async def _place(self, ticket: PutTicket) -> _Reservation:
        """Lay the wanted objects out in an area."""
        padded = [padded_bytes(wanted.length_bytes) for wanted in ticket.wanted]
        total = sum(padded)
        if not total:
            return _Reservation(ticket, None, [], 0)
        if not self._session.charge(total):
            raise ResourceExhausted(
                f"a reservation of {total} bytes is more than leases and reservations may cover",
                "commit or release others first",
                retry_after_ms=RETRY_MS,
            )
        try:
            area = await self._areas.take(total)
        except BaseException:
            self._session.uncharge(total)
            raise
        offsets = [*itertools.accumulate(padded[:-1], initial=0)]
        return _Reservation(ticket, area, offsets, total)

    # ---- Commit ----------------------------------------------------------------------------------

    async def commit(self, request: pb.CommitRequest, caller: Caller) -> pb.PutReply:
        """Take what was written. Raises BadRequest, and the reservation stays, where the request
        cannot be; after any other error it is over.
        """
        dispatcher, namespace = self._dispatcher, self._session.namespace
        with dispatcher.observed("commit", caller):
            dispatcher.admit(caller, namespace)
            check.check_commit(request, dispatcher.limits)
            reservation = self._open.get(request.lease_id)
            if reservation is None:
                raise BadRequest(
                    f"no reservation {request.lease_id}: unknown, committed or released",
                    "reserve first, and commit once",
                )
            chosen = _chosen(reservation, request.indices)
            dispatcher.streams.take(namespace)
            dispatcher.payload_call_began()
            try:
                states = await self._commit(reservation, chosen, request, caller)
            finally:
                dispatcher.payload_call_ended()
                dispatcher.streams.give_back(namespace)
            return pb.PutReply(states=states)

    async def _commit(
        self,
        reservation: _Reservation,
        chosen: Sequence[int],
        request: pb.CommitRequest,
        caller: Caller,
    ) -> bytes:
        store, ticket = self._dispatcher.store, reservation.ticket
        end, deadline = self._dispatcher.deadlines(caller, request.ctx)
        handed_over = False

        async def close(_error: BaseException | None) -> None:
            self._give_area(reservation)
            self._session.uncharge(reservation.charged_bytes)
            if not handed_over:
                await store.abort_put(ticket)

        async with self._carrier.running(close) as watched:
            del self._open[request.lease_id]
            watched.until(loop_time(end), *_LATE_COMMIT)
            received = await self._copy(reservation, chosen, watched)
            ticket.offer = dataclasses.replace(
                ticket.offer, durable=request.durability == pb.DURABLE, deadline=deadline
            )
            watched.waits = Waits.OUTCOME
            handed_over = True
            return await self._dispatcher.finish(self._commit_or_abort(ticket, received))

    async def _commit_or_abort(self, ticket: PutTicket, received: Sequence[Received]) -> bytes:
        store = self._dispatcher.store
        try:
            return await store.commit_put(ticket, received)
        except BaseException:
            await store.abort_put(ticket)
            raise

    async def _copy(
        self, reservation: _Reservation, chosen: Sequence[int], watched: Watched
    ) -> list[Received]:
        """Copy the chosen of the wanted objects; the others are offered no longer."""
        ticket, area = reservation.ticket, reservation.area
        for wanted in ticket.wanted:
            ticket.states[wanted.index] = pb.NOT_OFFERED
        sources: list[tuple[int, int]] = []
        objects: list[WantedObject] = []
        for i in chosen:
            wanted = ticket.wanted[i]
            ticket.states[wanted.index] = pb.WANTED
            objects.append(wanted)
            assert area is not None, "what is wanted has a place"
            sources.append((area.address + reservation.offsets_bytes[i], wanted.length_bytes))
        if not objects:
            return []
        work = AreaWork(Filling(objects), watched, sources)
        ending, received = await self._carrier.carry(work)
        self._give_area(reservation)
        if ending.cause is not None:
            raise ending.cause
        return received

    # ---- the end ---------------------------------------------------------------------------------

    def release(self, lease_id: int) -> bool:
        """Give a reservation up; False where there is none (any more)."""
        watched = self._planning.get(lease_id)
        if watched is not None:
            watched.end(BadRequest("the reservation was released before its answer"))
            return True
        reservation = self._open.pop(lease_id, None)
        if reservation is None:
            return False
        self._give_up(reservation)
        return True

    async def close(self) -> None:
        """Give all of them up. The carrier must be closed."""
        for reservation in self._open.values():
            self._give_up(reservation)
        self._open.clear()
        if self._aborting:
            await asyncio.wait(list(self._aborting))

    def _give_up(self, reservation: _Reservation) -> None:
        self._give_area(reservation)
        self._session.uncharge(reservation.charged_bytes)
        abort = self._dispatcher.store.abort_put(reservation.ticket)
        aborting = asyncio.ensure_future(abort)
        self._aborting.add(aborting)
        aborting.add_done_callback(self._aborting.discard)

    def _give_area(self, reservation: _Reservation) -> None:
        area, reservation.area = reservation.area, None
        if area is not None:
            self._areas.give(area)


async def _nothing(_error: BaseException | None) -> None:
    """What to do at the end of a request that cleans up by itself."""


def _reply(reservation: _Reservation) -> pb.ReserveReply:
    ticket = reservation.ticket
    offsets = [0] * len(ticket.states)
    for wanted, offset in zip(ticket.wanted, reservation.offsets_bytes, strict=True):
        offsets[wanted.index] = offset
    return pb.ReserveReply(
        area_id=reservation.area.area_id if reservation.area is not None else 0,
        offsets_bytes=offsets,
        states=bytes(ticket.states),
    )


def _chosen(reservation: _Reservation, indices: Sequence[int]) -> Sequence[int]:
    """Positions among the wanted objects. Raises BadRequest."""
    wanted = reservation.ticket.wanted
    if not indices:
        return range(len(wanted))
    position = {one.index: i for i, one in enumerate(wanted)}
    last = -1
    for index in indices:
        if index <= last or index not in position:
            raise BadRequest(
                f"indices: {index} after {last} is not rising, or not wanted",
                "name each object that was reserved at most once, in order",
            )
        last = index
    return [position[index] for index in indices]
