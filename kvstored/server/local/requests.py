"""The verbs of one local session: frames to the dispatcher, answers back. On the verbs' loop.

What can be answered at once is, inside the read callback and without a task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from kvstored.errors import (
    BadRequest,
    DeadlineExceeded,
    KvstoredError,
    ResourceExhausted,
    TooLarge,
)
from kvstored.server.auth import Caller
from kvstored.server.dispatcher import outcome_of
from kvstored.server.local.leases import Grants, Leases, Loan
from kvstored.server.payload_calls import AcquireCall
from kvstored.store.api import Leased
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import BadFrameError, Frame, Kind

if TYPE_CHECKING:
    from kvstored.server.local.session import Session

_log = logging.getLogger(__name__)

_MESSAGES: dict[int, type[Message]] = {
    Kind.HELLO: pb.HelloRequest,
    Kind.MATCH: pb.MatchRequest,
    Kind.ACQUIRE: pb.AcquireRequest,
    Kind.RELEASE: pb.ReleaseRequest,
    Kind.RESERVE: pb.ReserveRequest,
    Kind.COMMIT: pb.CommitRequest,
    Kind.PUT: pb.PutHeader,
    Kind.PREFETCH: pb.PrefetchRequest,
    Kind.PIN: pb.PinRequest,
    Kind.UNPIN: pb.UnpinRequest,
    Kind.TOUCH: pb.TouchRequest,
    Kind.DELETE: pb.DeleteRequest,
    Kind.LIST: pb.ListRequest,
    Kind.USAGE: pb.UsageRequest,
}
_NO_RUN = {Kind.HELLO, Kind.LIST, Kind.USAGE}  # they name the namespace themselves
_NO_NAMESPACE = {Kind.RELEASE, Kind.COMMIT}  # they name an id of the session
_RELEASED = pb.ReleaseReply()
_ENDS_WITHOUT_HARM = {Kind.MATCH, Kind.HELLO, Kind.PREFETCH, Kind.RESERVE, Kind.ACQUIRE, Kind.PUT}


class _Running:
    """A request that a task answers. `given_up`: the client wants no more of it. `finish` is called
    once, before its last answer.
    """

    __slots__ = ("finish", "given_up", "kind", "request_id", "task")

    def __init__(self, kind: int, request_id: int) -> None:
        self.kind = kind
        self.request_id = request_id
        self.given_up = False
        self.finish: Callable[[], None] | None = None
        self.task: asyncio.Task[None] | None = None

    def give_up(self) -> None:
        """End it; its last answer says so."""
        self.given_up = True
        if self.task is not None:
            self.task.cancel()


_Work = Callable[[_Running], Coroutine[object, object, None]]


class Requests:
    """Requests of one session that has been opened."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._dispatcher = session.host.dispatcher
        self._running: set[_Running] = set()
        self._by_id: dict[int, _Running] = {}
        dispatcher = self._dispatcher
        self._at_once: dict[int, Callable[[Any, Caller], Message]] = {
            Kind.MATCH: self._match,
            Kind.RELEASE: self._release,
            Kind.PIN: dispatcher.pin_now,
            Kind.UNPIN: dispatcher.unpin_now,
            Kind.TOUCH: dispatcher.touch_now,
            Kind.LIST: dispatcher.list_now,
            Kind.USAGE: dispatcher.usage_now,
        }
        self._by_task: dict[int, Callable[[Any, Caller], Coroutine[object, object, Message]]] = {
            Kind.HELLO: dispatcher.hello,
            Kind.PREFETCH: dispatcher.prefetch,
            Kind.DELETE: dispatcher.delete,
            Kind.COMMIT: self._commit,
        }

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Those that answer requests."""
        return [running.task for running in self._running if running.task is not None]

    def handle(self, frame: Frame) -> None:
        """Answer one frame, or begin to. Raises BadFrameError or DecodeError when it is none of
        this protocol.
        """
        if frame.kind == Kind.RETIRED:
            self._session.retired(pb.LocalRetire.FromString(frame.body))
            return
        if frame.kind == Kind.CANCEL:
            self._cancel(frame)
            return
        message = _MESSAGES.get(frame.kind)
        if message is None:
            raise BadFrameError(f"no request has kind {frame.kind}")
        if frame.request_id in self._by_id:
            raise BadFrameError(f"request id {frame.request_id} is in use")
        request = message.FromString(frame.body)
        try:
            self._check_namespace(frame.kind, request)
            self._answer(frame, request, self._session.caller)
        except KvstoredError as error:
            self._session.reply_error(frame.kind, frame.request_id, error)
        except Exception as error:
            self._session.reply_error(frame.kind, frame.request_id, _unexpected(error))

    def _check_namespace(self, kind: int, request: Any) -> None:
        if kind in _NO_NAMESPACE:
            return
        named = request.namespace if kind in _NO_RUN else request.run.namespace
        if named != self._session.namespace:
            raise BadRequest(
                "the request does not name the session's namespace",
                "open a session for each namespace",
            )

    def _answer(self, frame: Frame, request: Any, caller: Caller) -> None:
        kind, request_id = frame.kind, frame.request_id
        if kind == Kind.ACQUIRE:
            self._acquire(request, caller, request_id)
        elif kind == Kind.MATCH and request.depth == pb.DEPTH_POOL:
            self._start(
                kind,
                request_id,
                lambda running: self._whole(running, self._match_pool, request, caller),
            )
        elif (verb := self._at_once.get(kind)) is not None:
            reply = verb(request, caller)
            if request_id:
                self._session.reply(kind, request_id, reply.SerializeToString())
        elif kind == Kind.PUT:
            self._start(kind, request_id, lambda running: self._put(running, request, caller))
        elif kind == Kind.RESERVE:
            self._reserve(request, caller, request_id)
        else:
            verb_by_task = self._by_task[kind]
            self._start(
                kind,
                request_id,
                lambda running: self._whole(running, verb_by_task, request, caller),
            )

    @property
    def _leases(self) -> Leases:
        leases = self._session.leases
        assert leases is not None, "the session has been opened"
        return leases

    # ---- tasks -----------------------------------------------------------------------------------

    def _start(self, kind: int, request_id: int, work: _Work) -> _Running:
        """Answer by a task. Raises ResourceExhausted beyond the session's bound."""
        limits = self._session.limits
        if len(self._running) >= limits.local.max_requests:
            raise ResourceExhausted(
                f"{len(self._running)} requests of the session are under way, which is its limit",
                "wait for an answer",
                retry_after_ms=limits.retry_after_ms,
            )
        running = _Running(kind, request_id)
        self._running.add(running)
        if request_id:
            self._by_id[request_id] = running
        running.task = asyncio.ensure_future(work(running))
        running.task.add_done_callback(lambda task: self._done(running, task))
        return running

    def _last(self, running: _Running) -> None:
        """Its last answer is about to be given: its id may be used again."""
        self._running.discard(running)
        if self._by_id.get(running.request_id) is running:
            del self._by_id[running.request_id]
        finish, running.finish = running.finish, None
        if finish is not None:
            finish()

    def _done(self, running: _Running, task: asyncio.Task[None]) -> None:
        self._last(running)
        if task.cancelled():
            error: BaseException | None = None
            if running.given_up:
                error = DeadlineExceeded("the client gave the request up")
        else:
            error = task.exception()
        if error is not None:
            known = error if isinstance(error, KvstoredError) else _unexpected(error)
            self._session.reply_error(running.kind, running.request_id, known)

    async def _whole(
        self,
        running: _Running,
        verb: Callable[[Any, Caller], Coroutine[object, object, Message]],
        request: Message,
        caller: Caller,
    ) -> None:
        reply = await verb(request, caller)
        self._last(running)
        self._session.reply(running.kind, running.request_id, reply.SerializeToString())

    def _cancel(self, frame: Frame) -> None:
        running = self._by_id.get(frame.request_id)
        if running is not None and running.kind in _ENDS_WITHOUT_HARM:
            running.give_up()

    # ---- match, acquire, release -----------------------------------------------------------------

    def _match(self, request: pb.MatchRequest, caller: Caller) -> pb.MatchReply:
        return self._dispatcher.match_now(request, caller, self._leases)

    async def _match_pool(self, request: pb.MatchRequest, caller: Caller) -> pb.MatchReply:
        return await self._dispatcher.match(request, caller, self._leases)

    def _release(self, request: pb.ReleaseRequest, _caller: Caller) -> pb.ReleaseReply:
        # More cannot be in use; passing over very many takes time that others wait for.
        most = self._session.limits.local.max_leases
        if len(request.lease_ids) > most:
            raise TooLarge(f"{len(request.lease_ids)} ids", f"release at most {most} per call")
        if not request.lease_ids:
            self._session.host.awake.expect()
        self._leases.release(request.lease_ids)
        return _RELEASED

    def _acquire(self, request: pb.AcquireRequest, caller: Caller, request_id: int) -> None:
        leases = self._leases
        loan = None
        try:
            leases.check_new(request.lease_id)
            loan = leases.lend(request.run.keys)
            found = self._dispatcher.acquire_now(request, caller, leases.budget.room_bytes)
            if found is None:
                self._acquire_by_task(request, caller, request_id, loan)
                return
        except Exception as error:
            if loan is not None:
                leases.settle(loan)
            self._dispatcher.report("acquire", outcome_of(error), caller, "")
            raise
        leased, states = found
        leases.take(request.lease_id, leased)
        leases.settle(loan, request.run.keys, states)
        self._grant(request_id, leased, states)

    def _grant(self, request_id: int, leased: Leased, states: bytes = b"") -> None:
        self._session.tell_segments(leased.segment_ids)
        reply = pb.AcquireReply(
            indices=leased.indices,
            segment_ids=leased.segment_ids,
            offsets_bytes=leased.offsets_bytes,
            lengths_bytes=leased.lengths_bytes,
            checksums=leased.checksums,
            tiers=leased.tiers,
            states=states,
        )
        self._session.reply(Kind.ACQUIRE, request_id, reply.SerializeToString(), last=bool(states))

    def _acquire_by_task(
        self, request: pb.AcquireRequest, caller: Caller, request_id: int, loan: Loan
    ) -> None:
        acquiring = _Acquiring(self._leases, request, loan, AcquireCall(self._dispatcher, caller))
        running = self._start(
            Kind.ACQUIRE, request_id, lambda running: self._acquire_in_order(running, acquiring)
        )
        acquiring.begin(running)
        assert running.task is not None
        # A call is closed from outside of the task that ran its steps.
        running.task.add_done_callback(lambda _: self._session.host.spawn(acquiring.call.close()))

    async def _acquire_in_order(self, running: _Running, acquiring: _Acquiring) -> None:
        call, session = acquiring.call, self._session
        await call.begin(acquiring.request, acquiring.room)
        while (leased := await call.next()) is not None:
            if acquiring.take(leased):
                self._grant(running.request_id, leased)
            await session.has_room.wait()
        acquiring.states = call.states
        self._last(running)
        reply = pb.AcquireReply(states=acquiring.states)
        session.reply(Kind.ACQUIRE, running.request_id, reply.SerializeToString())

    # ---- puts ------------------------------------------------------------------------------------

    async def _put(self, running: _Running, request: pb.PutHeader, caller: Caller) -> None:
        def reply(body: bytes, last: bool) -> None:
            if last:
                self._last(running)
            self._session.reply(Kind.PUT, running.request_id, body, last)

        await self._session.puts.put(request, running.request_id, caller, reply)

    def _reserve(self, request: pb.ReserveRequest, caller: Caller, request_id: int) -> None:
        leases, puts, lease_id = self._leases, self._session.puts, request.lease_id
        leases.check_new(lease_id)
        running = self._start(
            Kind.RESERVE,
            request_id,
            lambda running: self._reserve_by_task(running, request, caller),
        )

        def give_up() -> None:
            if running.finish is not None:
                running.give_up()
            puts.release(lease_id)

        running.finish = lambda: leases.unreserve(lease_id)
        leases.reserve(lease_id, give_up)

    async def _reserve_by_task(
        self, running: _Running, request: pb.ReserveRequest, caller: Caller
    ) -> None:
        reply = await self._session.puts.reserve(request, caller)
        running.finish = None  # the id stands for the reservation from now on
        self._last(running)
        self._session.reply(Kind.RESERVE, running.request_id, reply.SerializeToString())

    async def _commit(self, request: pb.CommitRequest, caller: Caller) -> pb.PutReply:
        reply = await self._session.puts.commit(request, caller)
        self._leases.unreserve(request.lease_id)  # after an error it is the client's to release
        return reply


class _Acquiring:
    """One Acquire that a task answers."""

    def __init__(
        self, leases: Leases, request: pb.AcquireRequest, loan: Loan, call: AcquireCall
    ) -> None:
        self.request = request
        self.call = call
        self.states = b""
        self._leases = leases
        self._loan = loan
        self._grants = Grants()
        self._granted_bytes = 0

    def begin(self, running: _Running) -> None:
        """Take the id; the task has not begun yet."""
        self._grants = self._leases.begin(self.request.lease_id)
        self._grants.stop = running.give_up
        running.finish = self._finish

    def room(self, nbytes: int) -> bool:
        """See AcquireCall."""
        return self._leases.room(self._grants, nbytes)

    def take(self, leased: Leased) -> bool:
        """False where the client has released the id: the lease has ended."""
        self._granted_bytes += leased.charged_bytes
        return self._leases.add(self._grants, leased)

    def _finish(self) -> None:
        self._leases.end(self.request.lease_id, self._grants, self._granted_bytes)
        self._leases.settle(self._loan, self.request.run.keys, self.states)


def _unexpected(error: BaseException) -> KvstoredError:
    _log.error("a request of a local session failed", exc_info=error)
    return KvstoredError("internal error", "see the daemon's log")
