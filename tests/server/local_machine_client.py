"""A client of the machine: sends at once, reads when told to, and remembers what it may see."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
import struct
import termios
from collections.abc import Callable
from pathlib import Path

import xxhash
from google.protobuf.message import Message
from server import local_wire as w
from server.local_machine_book import Book, Span
from server.local_machine_peers import Process
from server.local_machine_states import Asked, Held, Lease, Putting, Reservation, Row
from server.local_wire import Ended, Got, LocalWire, rows_of

from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import ABANDONED, POSITION

PROMPT, LATE, NEVER = "prompt", "late", "never"
STEP_BYTES = 24 << 10


class Client(LocalWire):
    """One session. Nothing here blocks; `until` waits for what the daemon sends."""

    def __init__(
        self, path: Path, connection: socket.socket, process: Process, book: Book, answers: str
    ) -> None:
        super().__init__(path, connection)
        self.socket.setblocking(False)
        self.process = process
        self.book = book
        self.namespace = ""
        self.answers = answers
        self.number = 0
        self.quarantined = False
        self.surprised = False  # ended while it was owed answers: it knows less than it has
        self.asked: dict[int, Asked] = {}
        self.leases: dict[int, Lease] = {}
        self.holds: dict[int, Held] = {}
        self.reservations: dict[int, Reservation] = {}
        self.unmapped: set[int] = set()
        self.retiring: list[pb.LocalRetire] = []  # told, and not obeyed yet
        self.areas: dict[int, mmap.mmap] = {}
        self.ring: mmap.mmap | None = None
        self.channel: socket.socket | None = None
        self.putting: Putting | None = None

    # ---- frames ----------------------------------------------------------------------------------

    async def start(self, namespace: str, token: str) -> None:
        """Open the session."""
        self.namespace = namespace
        request = pb.LocalOpen(
            protocol_version=1, namespace=namespace, client="machine", token=token
        )
        self.send(w.OPEN, 1 << 40, request)
        while (got := self._arrived()) is None:
            await self._readable(self.socket)
        assert got.flags == w.REPLY | w.LAST, pb.Error.FromString(got.body)
        self.opened = pb.LocalOpened.FromString(got.body)
        self.number = self.opened.session_id
        self.events = socket.socket(fileno=got.fds[0])
        self.events.setblocking(False)
        if self.answers == PROMPT:
            asyncio.get_running_loop().add_reader(self.events, self._events_came)

    def send_raw(self, data: bytes, fds: object = ()) -> None:
        assert self.socket.send(data) == len(data), "the daemon reads"

    def send(self, kind: int, request_id: int, message: Message | bytes = b"") -> None:
        self.send_raw(w.frame(kind, request_id, message))

    @property
    def unread_bytes(self) -> int:
        """What the daemon has not read of what was sent."""
        raw = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
        return int(struct.unpack("i", raw)[0])

    def _arrived(self) -> Got | None:
        """The next frame that is there; Ended at the end."""
        try:
            return self.receive()
        except BlockingIOError:
            return None
        except ConnectionResetError:
            raise Ended from None

    async def _readable(self, end: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(end, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            loop.remove_reader(end)

    def read(self) -> None:
        """Take in whatever has come."""
        while (got := self._arrived()) is not None:
            if not got.flags & w.REPLY:
                self.obey(got)
                continue
            asked = self.asked[got.request_id]
            assert got.kind == asked.kind
            if got.flags & w.LAST:
                del self.asked[got.request_id]
                asked.over = True
            if got.flags & w.ERROR:
                asked.error = pb.Error.FromString(got.body).code
                assert asked.error != pb.INTERNAL, got.body
            else:
                kind = pb.PutPlan if got.kind == w.PUT and not asked.over else _reply(got.kind)
                asked.take(kind.FromString(got.body))
            if asked.over:
                asked.end()

    async def until(self, so: Callable[[], object]) -> None:
        """Read until something is so."""
        self.read()
        while not so():
            await self._readable(self.socket)
            self.read()

    def ask(self, kind: int, request: Message) -> Asked:
        """Send a request."""
        asked = Asked(self.new_id(), kind, self.book.tick())
        self.asked[asked.request_id] = asked
        self.send(kind, asked.request_id, request)
        return asked

    async def answered(self, asked: Asked) -> Asked:
        """Read until its last answer."""
        await self.until(lambda: asked.over)
        return asked

    async def barrier(self) -> None:
        """Read all that was answered at once, to everything so far."""
        asked = await self.answered(self.ask(w.USAGE, pb.UsageRequest(namespace=self.namespace)))
        assert not asked.error

    # ---- notices ---------------------------------------------------------------------------------

    def obey(self, notice: Got) -> None:
        assert notice.request_id == 0
        if notice.kind == w.SEGMENT:
            segment_id = pb.LocalSegment.FromString(notice.body).segment_id
            self.book.told(segment_id, self.namespace)
            if segment_id not in self.unmapped:
                super().obey(notice)
                return
        elif notice.kind == w.RING:
            self.ring = mmap.mmap(notice.fds[0], pb.LocalRing.FromString(notice.body).size_bytes)
            self.channel = socket.socket(fileno=os.dup(notice.fds[1]))
            self.channel.setblocking(False)
        else:
            area = pb.LocalArea.FromString(notice.body)
            self.areas[area.area_id] = mmap.mmap(notice.fds[0], area.size_bytes)
        for fd in notice.fds:
            os.close(fd)

    def _events_came(self) -> None:
        self.read_events()
        self.unmap()

    def read_events(self) -> None:
        """Take in what the events channel has."""
        assert self.events is not None
        while True:
            try:
                kind, notice = self.event()
            except (BlockingIOError, Ended):
                break
            if kind == w.GOODBYE:
                assert self.quarantined, notice
                break
            assert isinstance(notice, pb.LocalRetire)
            self.retiring.append(notice)
            for lease in self.leases.values():
                looked_at = {row.segment_id for row in lease.rows if not lease.released}
                assert not looked_at & {*notice.segment_ids}, "it is leased"
            used = {reservation.area_id for reservation in self.reservations.values()}
            assert not used & {*notice.area_ids}
        if self.quarantined and self.answers == PROMPT:
            asyncio.get_running_loop().remove_reader(self.events)

    def unmap(self) -> None:
        """Obey what was told, and say so."""
        if self.quarantined:
            return
        for notice in self.retiring:
            for segment_id in notice.segment_ids:
                self.unmapped.add(segment_id)
                if segment_id in self.segments:
                    self.segments.pop(segment_id).close()
            for area_id in notice.area_ids:
                self.areas.pop(area_id).close()
            self.send(w.RETIRED, 0, notice)
        self.retiring.clear()

    # ---- leases ----------------------------------------------------------------------------------

    def free_id(self) -> int:
        """The lowest id that is free, so that ids are used again."""
        taken = self.leases.keys() | self.holds.keys() | self.reservations.keys()
        return next(i for i in range(1, 1000) if i not in taken)

    def acquire_span(self, span: Span, deadline_ms: int) -> Asked:
        """Begin an Acquire under a new id."""
        lease_id = self.free_id()
        lease = self.leases[lease_id] = Lease()
        for held in self.holds.values():
            held.used.update(span.keys)
        request = pb.AcquireRequest(run=span.run(self.namespace), lease_id=lease_id)
        request.ctx.deadline_ms = deadline_ms
        asked = self.ask(w.ACQUIRE, request)
        granted: set[int] = set()

        def take(reply: Message) -> None:
            assert isinstance(reply, pb.AcquireReply)
            granted.update(reply.indices)
            if not lease.released:
                self._granted(lease, span, asked.began, reply)
            for i, state in enumerate(reply.states):
                mine = {*range(i * len(span.parts), (i + 1) * len(span.parts))}
                assert mine <= granted or not 0 < state < pb.NOT_NEEDED

        def end() -> None:
            lease.under_way = False
            if lease.released or not lease.rows:
                del self.leases[lease_id]
            assert asked.error in (0, pb.DEADLINE, pb.RESOURCE_EXHAUSTED)

        asked.take, asked.end = take, end
        return asked

    def _granted(self, lease: Lease, span: Span, began: int, reply: pb.AcquireReply) -> None:
        objects = span.objects
        for index, segment_id, offset, length, checksum, _ in rows_of(reply):
            data = self.segments[segment_id][offset : offset + length]
            assert xxhash.xxh3_128_digest(data) == checksum
            key, part = objects[index]
            assert self.book.may_be((self.namespace, key, part), data, began)
            lease.rows.append(Row(key, segment_id, offset, data))

    def let_go(self, lease_id: int, quietly: bool) -> Asked | None:
        """Release whatever has this id, if anything has."""
        lease = self.leases.get(lease_id)
        if lease is not None:
            lease.released = True
            if not lease.under_way:
                del self.leases[lease_id]
        self.holds.pop(lease_id, None)
        self.reservations.pop(lease_id, None)
        request = pb.ReleaseRequest(lease_ids=[lease_id])
        if not quietly:
            return self.ask(w.RELEASE, request)
        self.send(w.RELEASE, 0, request)
        return None

    async def hold(self, span: Span) -> None:
        """Match, and hold what was found."""
        hold_id = self.free_id()
        request = pb.MatchRequest(
            run=span.run(self.namespace), mode=pb.EACH, hold=True, hold_id=hold_id
        )
        asked = await self.answered(self.ask(w.MATCH, request))
        if asked.error:
            assert asked.error == pb.RESOURCE_EXHAUSTED
            return
        (reply,) = asked.replies
        assert isinstance(reply, pb.MatchReply)
        found = [k for k, s in zip(span.keys, reply.states, strict=True) if 0 < s < pb.NOT_NEEDED]
        if found:
            self.holds[hold_id] = Held(frozenset(found))

    def delete(self, span: Span) -> Asked:
        """Begin a delete."""
        asked = self.ask(w.DELETE, pb.DeleteRequest(run=span.run(self.namespace)))

        def end() -> None:
            assert asked.error in (0, pb.RESOURCE_EXHAUSTED)  # with many under way
            if not asked.error:
                self.book.deleted(self.namespace, span, asked.began)

        asked.end = end
        return asked

    # ---- puts ------------------------------------------------------------------------------------

    async def begin_put(self, span: Span, odd_bytes: int, wait_ms: int) -> Putting | None:
        """Begin a put, and read its plan; None where it is refused."""
        header = pb.PutHeader(run=span.run(self.namespace), when_full=pb.REFUSE)
        offers = self.book.make(self.namespace, span, odd_bytes)
        header.lengths_bytes.extend(len(offer.data) for offer in offers)
        if wait_ms:
            header.when_full, header.ctx.deadline_ms = pb.WAIT, wait_ms
        busy = self.putting is not None and not self.putting.asked.over
        putting = Putting(self.ask(w.PUT, header))
        asked = putting.asked
        await self.until(lambda: asked.replies or asked.over)
        if not asked.replies:
            codes = {pb.DEADLINE, pb.RESOURCE_EXHAUSTED} | ({pb.BAD_REQUEST} if busy else set())
            assert asked.error in codes
            return None
        (plan, *_) = asked.replies
        assert isinstance(plan, pb.PutPlan)
        putting.offers = [o for o, s in zip(offers, plan.states, strict=True) if s == pb.WANTED]
        putting.payload = b"".join(offer.data for offer in putting.offers)
        assert len(putting.payload) == plan.payload_bytes
        wanted = [i for i, state in enumerate(plan.states) if state == pb.WANTED]

        def end() -> None:
            if putting.whole:
                *_, reply = asked.replies
                known = isinstance(reply, pb.PutReply)
                self.book.answered(
                    putting.offers, [reply.states[i] for i in wanted] if known else None
                )

        asked.end = end
        if asked.over:
            end()
        self.putting = putting
        return putting

    async def write(self, putting: Putting, stop: int) -> None:
        """Write the payload through the ring, up to there or until nobody takes it."""
        ring, channel = self.ring, self.channel
        assert ring is not None
        assert channel is not None
        while putting.written < stop:
            self._hear(putting)
            if putting.abandoned:
                return
            end = min(stop, putting.taken + len(ring), putting.written + STEP_BYTES)
            if end == putting.written:
                await self._readable(channel)
                continue
            for at in range(putting.written, end, 4096):
                piece = putting.payload[at : min(at + 4096, end)]
                offset = at % len(ring)
                first = piece[: len(ring) - offset]
                ring[offset : offset + len(first)] = first
                ring[: len(piece) - len(first)] = piece[len(first) :]
            putting.written = end
            if putting.whole:
                self.book.tick()
                self.book.sent(putting.offers)
            channel.send(POSITION.pack(putting.asked.request_id, end))

    def _hear(self, putting: Putting) -> None:
        assert self.channel is not None
        while True:
            try:
                request_id, position = POSITION.unpack(self.channel.recv(64))
            except BlockingIOError:
                return
            if request_id == putting.asked.request_id and position == ABANDONED:
                putting.abandoned = True
            elif request_id == putting.asked.request_id:
                putting.taken = position

    async def reserve(self, span: Span, odd_bytes: int, in_one_breath: bool) -> None:
        """Reserve; `in_one_breath`: and release it again."""
        lease_id = self.free_id()
        offers = self.book.make(self.namespace, span, odd_bytes)
        request = pb.ReserveRequest(
            run=span.run(self.namespace), lease_id=lease_id, when_full=pb.REFUSE
        )
        request.lengths_bytes.extend(len(offer.data) for offer in offers)
        asked = self.ask(w.RESERVE, request)
        if in_one_breath:
            self.let_go(lease_id, quietly=True)
        await self.answered(asked)
        if asked.error or in_one_breath:
            given_up = (0, pb.DEADLINE, pb.BAD_REQUEST) if in_one_breath else ()
            assert asked.error in (pb.RESOURCE_EXHAUSTED, *given_up)
            return
        (reply,) = asked.replies
        assert isinstance(reply, pb.ReserveReply)
        wanted = [i for i, state in enumerate(reply.states) if state == pb.WANTED]
        self.reservations[lease_id] = Reservation(
            reply.area_id,
            {i: offers[i] for i in wanted},
            {i: reply.offsets_bytes[i] for i in wanted},
        )

    async def commit(self, lease_id: int, chosen: list[int]) -> None:
        """Write the chosen objects of a reservation, commit them, and spoil the area."""
        reservation = self.reservations.pop(lease_id)
        offers = [reservation.offers[i] for i in chosen or reservation.offers]
        area = self.areas.get(reservation.area_id)
        for i, offer in reservation.offers.items():
            assert area is not None
            if offer in offers:
                at = reservation.offsets[i]
                area[at : at + len(offer.data)] = offer.data
        self.book.tick()
        self.book.sent(offers)
        request = pb.CommitRequest(lease_id=lease_id, indices=chosen)
        asked = await self.answered(self.ask(w.COMMIT, request))
        if asked.error == pb.RESOURCE_EXHAUSTED:  # with many under way: it stays
            self.book.answered(offers, [pb.PUT_UNSPECIFIED] * len(offers))
            self.reservations[lease_id] = reservation
            return
        assert not asked.error
        (reply,) = asked.replies
        assert isinstance(reply, pb.PutReply)
        self.book.answered(offers, [reply.states[i] for i in chosen or reservation.offers])
        left = reservation.offers.keys() - chosen if chosen else ()
        assert all(reply.states[i] == pb.NOT_OFFERED for i in left)
        if area is not None and reservation.area_id in self.areas:
            for at in reservation.offsets.values():
                area[at : at + 4096] = b"\xee" * 4096

    # ---- the end ---------------------------------------------------------------------------------

    def lost_its_answers(self) -> None:
        """No answer will come any more."""
        if self.putting is not None and self.putting.whole and not self.putting.asked.over:
            self.book.answered(self.putting.offers, None)
        self.surprised |= bool(self.asked)
        self.asked.clear()
        self.putting = None
        self.reservations.clear()

    def close(self) -> None:
        super().close()
        for mapped in [*self.areas.values(), *([self.ring] if self.ring else [])]:
            mapped.close()
        if self.channel is not None:
            self.channel.close()


def _reply(kind: int) -> type[Message]:
    return pb.PutReply if kind == w.PUT else w.REPLIES[kind]
