"""One local session, from accept to its end. Belongs to the verbs' loop.

    OPENING ── OPEN ──> OPEN ── client's end, death ──> OVER
       │                 └── fail ──> QUARANTINED ── client's end, death ──> OVER
       └── refused, too late, gone ──> OVER

Whatever the session has leased it has until OVER, and nothing from then on. docs/protocol.md,
"Local session".
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import socket
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Protocol

from google.protobuf.message import DecodeError, Message

from kvstored.errors import BadRequest, KvstoredError, ResourceExhausted, VersionUnsupported
from kvstored.server import validation as check
from kvstored.server.auth import Caller, Transport
from kvstored.server.dispatcher import Dispatcher
from kvstored.server.limits import Limits
from kvstored.server.local.awake import Awake
from kvstored.server.local.leases import Budget, Leases, Share
from kvstored.server.local.peer import Peer
from kvstored.server.local.puts import Puts
from kvstored.server.local.requests import Requests
from kvstored.server.local.staging import most_area_bytes
from kvstored.server.local.wire import Events, Inbox, Outbox
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import BadFrameError, Flag, Frame, Kind, pack
from kvstored_client.proto.methods import PROTOCOL_VERSION

_log = logging.getLogger(__name__)

MAX_OPEN_BYTES = 64 << 10
MAX_REQUEST_BYTES = 5 << 20
"""Above the longest request within the daemon's limits: a Hello of 64 families."""

HIGH_BYTES = 512 << 10
"""With so much waiting to be taken by the client, no further request of it is looked at."""

TURN_FRAMES = 64
TURN_S = 0.001


class State(enum.Enum):
    """See the module."""

    OPENING = "opening"
    OPEN = "open"
    QUARANTINED = "quarantined"
    OVER = "over"


class Segments(Protocol):
    """What sessions need of the RAM tier."""

    def segment_fd(self, segment_id: int) -> int:
        """Descriptor of a segment; it stays the tier's."""

    def segment_bytes(self, segment_id: int) -> int:
        """Size of a segment."""


class Host(Protocol):
    """What a session needs of the listener."""

    loop: asyncio.AbstractEventLoop
    dispatcher: Dispatcher
    segments: Segments
    awake: Awake

    def let_in(self, session: Session, namespace: str) -> Share:
        """Count the session for its namespace; ResourceExhausted when that has enough of them."""

    def share_bytes(self, namespace: str) -> int:
        """Cap on what one session of a namespace may keep in place."""

    def make_puts(self, session: Session) -> Puts:
        """The putting half of a session."""

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Run what must be run to its end although the session is over."""

    def ended(self, session: Session, reason: str) -> None:
        """The session serves no longer, for a reason that is counted. Called once."""

    def over(self, session: Session) -> None:
        """Nothing is left of the session. Called once."""

    def unmapped(self, session: Session, segment_ids: Iterable[int]) -> None:
        """The client maps these no longer, if it was asked to unmap them."""


def error_message(error: KvstoredError) -> pb.Error:
    """An error as it travels."""
    retry = error.retry_after_ms if isinstance(error, ResourceExhausted) else 0
    return pb.Error(code=error.code, message=error.message, hint=error.hint, retry_after_ms=retry)


class Session:
    """Serves one connection. `puts.SessionPort` for the putting half."""

    def __init__(self, host: Host, connection: socket.socket, peer: Peer, number: int) -> None:
        self.host = host
        self.number = number
        self.peer = peer
        self.born = host.loop.time()
        self.state = State.OPENING
        self.namespace = ""
        self.leases: Leases | None = None
        self.told: set[int] = set()
        """Ids of the segments that the client was told of and has not said to have unmapped."""
        self.has_room = asyncio.Event()
        """Set while the client takes what it is sent."""
        self.has_room.set()
        self._over = asyncio.Event()
        self._token: str | None = None
        self._connection = connection
        self._outbox = Outbox(
            host.loop, connection, self._client_ended, self._cannot_send, self._work
        )
        self._inbox = Inbox(
            host.loop, connection, MAX_OPEN_BYTES, self._work, self._client_ended, self._broken
        )
        self._events: Events | None = None
        self._puts: Puts | None = None
        self._requests = Requests(self)
        self._in_turn = False
        self._counted = False

    def start(self) -> None:
        """Serve."""
        if self.peer.pidfd is not None:
            self.host.loop.add_reader(self.peer.pidfd, self._client_died)
        self._inbox.start()

    @property
    def limits(self) -> Limits:
        """The daemon's."""
        return self.host.dispatcher.limits

    def serves(self) -> bool:
        """Whether frames are answered."""
        return self.state in (State.OPENING, State.OPEN)

    @property
    def caller(self) -> Caller:
        """For a request that has just come."""
        return Caller(Transport.LOCAL, self._token, f"pid:{self.peer.pid}")

    @property
    def puts(self) -> Puts:
        """The putting half, from the first use on."""
        if self._puts is None:
            self._puts = self.host.make_puts(self)
        return self._puts

    # ---- frames in -------------------------------------------------------------------------------

    def _work(self) -> None:
        """Handle what has come, but not so much of it that other sessions wait for long."""
        if self._in_turn or not self.serves():
            return
        self._in_turn = True
        self.host.awake.asked(self.number)
        try:
            done = self._take_turn()
        finally:
            self._in_turn = False
        self._outbox.flush()
        self.host.awake.answered()
        if not self.serves():
            return
        self._note_room()
        if not self.has_room.is_set():
            self._inbox.pause()  # the client's taking goes on with it
        elif done:
            self._inbox.start()
        else:
            self._inbox.pause()
            self.host.loop.call_soon(self._work)

    def _take_turn(self) -> bool:
        """Whether nothing is left to be handled."""
        frames = self._inbox.frames
        until = time.monotonic() + TURN_S
        for _ in range(TURN_FRAMES):
            if not frames or not self.serves():
                return True
            frame = frames.popleft()
            self._handle(frame)
            if frame.kind == Kind.ACQUIRE and frames:
                self._outbox.flush()  # the client copies what it has while the next is looked up
            if time.monotonic() > until:
                break
        return not frames

    def _handle(self, frame: Frame) -> None:
        try:
            if frame.flags:
                raise BadFrameError(f"a frame of kind {frame.kind} with flags {frame.flags}")
            if self.state is State.OPENING:
                self._open(frame)
            else:
                self._requests.handle(frame)
        except (BadFrameError, DecodeError) as error:
            self._broken(error)
        except Exception as error:
            _log.exception("a local session failed")
            self.fail(KvstoredError(f"internal error: {error}", "see the daemon's log"), "internal")

    def _open(self, frame: Frame) -> None:
        if frame.kind != Kind.OPEN:
            raise BadFrameError(f"the first frame is of kind {frame.kind} and not OPEN")
        request = pb.LocalOpen.FromString(frame.body)
        self._inbox.allow(MAX_REQUEST_BYTES)
        try:
            reply = self._opened(request)
            events = Events()
        except (KvstoredError, OSError) as error:
            known = error if isinstance(error, KvstoredError) else ResourceExhausted(str(error))
            self.reply_error(Kind.OPEN, frame.request_id, known)
            self._outbox.flush()
            self._finish("refused")
            return
        self._events = events
        self.state = State.OPEN
        flags = Flag.REPLY | Flag.LAST
        body = reply.SerializeToString()
        self._outbox.put_with_fds(
            pack(Kind.OPEN, flags, frame.request_id, body), [events.clients_fd]
        )
        events.hand_over()

    def _opened(self, request: pb.LocalOpen) -> pb.LocalOpened:
        dispatcher, local = self.host.dispatcher, self.limits.local
        if request.protocol_version < check.MIN_PROTOCOL_VERSION:
            raise VersionUnsupported(
                f"protocol_version {request.protocol_version} is not served",
                f"speak version {check.MIN_PROTOCOL_VERSION} or later: upgrade kvstored-client",
            )
        check.check_label("client", request.client, self.limits.max_hint_bytes)
        self._token = request.token or None
        dispatcher.admit(self.caller, request.namespace)
        share = self.host.let_in(self, request.namespace)
        self.namespace = request.namespace
        budget = Budget(share, self.host.share_bytes(request.namespace))
        self.leases = Leases(dispatcher.store, self.namespace, budget, local.max_leases)
        return pb.LocalOpened(
            protocol_version=min(request.protocol_version, PROTOCOL_VERSION),
            boot_epoch=dispatcher.store.boot_epoch,
            session_id=self.number,
            max_leased_bytes=budget.cap_bytes,
            max_staging_bytes=most_area_bytes(local),
            max_requests=local.max_requests,
        )

    # ---- frames out ------------------------------------------------------------------------------

    def reply(self, kind: int, request_id: int, body: bytes, last: bool = True) -> None:
        """Answer a request; one with id 0 is not answered."""
        flags = Flag.REPLY | Flag.LAST if last else Flag.REPLY
        self._answer(kind, flags, request_id, body)

    def reply_error(self, kind: int, request_id: int, error: KvstoredError) -> None:
        """Answer a request by an error."""
        flags = Flag.REPLY | Flag.LAST | Flag.ERROR
        self._answer(kind, flags, request_id, error_message(error).SerializeToString())

    def _answer(self, kind: int, flags: int, request_id: int, body: bytes) -> None:
        if request_id and self.serves():
            self._outbox.put(pack(kind, flags, request_id, body))
            self._flush()

    def _flush(self) -> None:
        if not self._in_turn:  # what is answered in one turn leaves together
            self._outbox.flush()
            self._note_room()

    def _note_room(self) -> None:
        if self._outbox.queued_bytes > HIGH_BYTES:
            self.has_room.clear()
        else:
            self.has_room.set()

    def notice(self, kind: Kind, body: bytes, fds: Sequence[int] = ()) -> None:
        """Send a notice, before whatever is answered later. The descriptors stay the caller's."""
        if self.state is State.OPEN:
            self._outbox.put_with_fds(pack(kind, 0, 0, body), fds)

    def tell_segments(self, segment_ids: Iterable[int]) -> None:
        """Send the segments that the client does not know yet."""
        segments = self.host.segments
        for segment_id in set(segment_ids) - self.told:
            self.told.add(segment_id)
            notice = pb.LocalSegment(
                segment_id=segment_id, size_bytes=segments.segment_bytes(segment_id)
            )
            fd = segments.segment_fd(segment_id)
            self.notice(Kind.SEGMENT, notice.SerializeToString(), [fd])

    # ---- retiring --------------------------------------------------------------------------------

    def retire_segment(self, segment_id: int) -> None:
        """Ask the client to unmap a segment that it was told of."""
        self._send_event(Kind.RETIRE, pb.LocalRetire(segment_ids=[segment_id]))

    def retire_areas(self, area_ids: list[int]) -> None:
        """Ask the client to unmap areas."""
        self._send_event(Kind.RETIRE, pb.LocalRetire(area_ids=area_ids))

    def retired(self, notice: pb.LocalRetire) -> None:
        """The client has unmapped something."""
        self.host.unmapped(self, notice.segment_ids)
        if self._puts is not None:
            for area_id in notice.area_ids:
                self._puts.area_retired(area_id)

    def _send_event(self, kind: Kind, message: Message) -> None:
        if self.state is not State.OPEN or self._events is None:
            return
        if not self._events.send(pack(kind, 0, 0, message.SerializeToString())):
            self.fail(
                ResourceExhausted("the events channel is full or closed", "read it at all times"),
                "events",
            )

    # ---- budgets of the putting half -------------------------------------------------------------

    def charge(self, nbytes: int) -> bool:
        """Let a reservation keep so much more; False where it may not."""
        return self.state is State.OPEN and self._leases.budget.charge(nbytes)

    def uncharge(self, nbytes: int) -> None:
        """The twin of `charge`."""
        self._leases.budget.uncharge(nbytes)

    @property
    def _leases(self) -> Leases:
        assert self.leases is not None, "the session has been opened"
        return self.leases

    @property
    def leased_bytes(self) -> int:
        """What the session keeps in place."""
        return self.leases.budget.used_bytes if self.leases is not None else 0

    # ---- the end ---------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """End the session if its client stands still in the middle of something. Called now and
        then; `now`: the loop's time.
        """
        stall_s = self.limits.stall_timeout_s
        stuck, half = self._outbox.stuck_since, self._inbox.half_since
        if self.state is State.OPENING and now - self.born > stall_s:
            self._finish("not opened")
        elif self.state is not State.OPEN:
            return
        elif stuck is not None and now - stuck > stall_s:
            self.fail(
                ResourceExhausted("the socket is not read", "read it at all times"), "stalled"
            )
        elif half is not None and stuck is None and now - half > stall_s:
            self.fail(
                BadRequest("a frame does not come to its end", "send whole frames"), "stalled"
            )

    def _broken(self, error: Exception) -> None:
        if self.state is State.OPENING:
            self._finish("broken frame")
            return
        hint = "mend the client: docs/protocol.md, Local session"
        self.fail(BadRequest(f"not a frame of this protocol: {error}", hint), "broken frame")

    def _cannot_send(self, error: OSError) -> None:
        if self.state is State.OPENING:
            self._finish("refused")
            return
        hint = "give the daemon more descriptors (LimitNOFILE)"
        self.fail(ResourceExhausted(f"cannot send: {error.strerror}", hint), "cannot send")

    def fail(self, error: KvstoredError, reason: str = "failed") -> None:
        """End the session for the client's view of it. What it has leased stays in place, and
        counted, until the client ends it or dies.
        """
        if self.state is not State.OPEN:
            return
        # All of them end with the daemon, which has said that it stops.
        _log.log(
            logging.DEBUG if reason == "stop" else logging.WARNING,
            "a local session was ended",
            extra={"fields": {"session": self.number, "pid": self.peer.pid, "why": str(error)}},
        )
        if self._events is not None:
            self._events.send(pack(Kind.GOODBYE, 0, 0, error_message(error).SerializeToString()))
        self._outbox.flush()
        if not self.serves():  # the client has ended it meanwhile
            return
        self.state = State.QUARANTINED
        self._outbox.close()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self._count(reason)
        self._inbox.discard()
        self._stop_working()

    def _client_ended(self) -> None:
        self._finish("client")

    def _client_died(self) -> None:
        self._finish("death")

    def _finish(self, reason: str) -> None:
        """Give everything back, now."""
        if self.state is State.OVER:
            return
        self.state = State.OVER
        self._over.set()
        self._inbox.pause()
        self._outbox.close()
        self._forget_peer()
        if self._events is not None:
            self._events.close()
        if self.leases is not None:
            self.leases.release_all()
        self._connection.close()
        self._count(reason)
        self._stop_working()
        self.host.over(self)

    def give_way(self) -> None:
        """Others want to open a session, and this one does not."""
        self._finish("not opened")

    def stop(self, error: KvstoredError) -> None:
        """The daemon is stopping: say so, and give everything back."""
        self.fail(error, "stop")
        self._finish("stop")

    def _count(self, reason: str) -> None:
        if not self._counted:
            self._counted = True
            self.host.ended(self, reason)

    def _stop_working(self) -> None:
        """End what runs for the session; what must end in order does so by itself."""
        self.has_room.set()
        tasks = self._requests.tasks
        for task in tasks:
            task.cancel()
        puts, self._puts = self._puts, None
        if tasks or puts is not None:
            self.host.spawn(_clean_up(tasks, puts, self._over))

    def _forget_peer(self) -> None:
        if self.peer.pidfd is not None:
            self.host.loop.remove_reader(self.peer.pidfd)
            os.close(self.peer.pidfd)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Of the requests under way."""
        return self._requests.tasks


async def _clean_up(
    tasks: list[asyncio.Task[None]], puts: Puts | None, over: asyncio.Event
) -> None:
    if puts is not None:
        await puts.stop()
    if tasks:
        await asyncio.wait(tasks)
    if puts is not None:
        await over.wait()  # until then the client may have ring and areas mapped
        await puts.close()
