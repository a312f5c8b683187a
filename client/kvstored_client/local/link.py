"""One session: its requests and answers, what it has lent, and its end.

Many threads share it, by request id. There is no reader thread on the hot path: whoever waits for
an answer and finds nobody reading becomes the reader, and hands to the others what is theirs. So a
small call costs one send and one receive. When nobody waits, the session's own thread (events.py)
reads what still comes for requests that were given up.

`_lock` guards the tables and who reads; nobody waits for the socket with it. Finalisers do not take
it: see wake.Outbox.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from google.protobuf.message import DecodeError

from kvstored_client.failures import (
    CANCELLED,
    DEADLINE_PASSED,
    Failure,
    FailureKind,
    GarbageError,
    failure_of_error,
)
from kvstored_client.local.errors import LinkOverError, StepError
from kvstored_client.local.maps import Table
from kvstored_client.local.ring import Ring
from kvstored_client.local.segments import MapError
from kvstored_client.local.stream import Stream, StreamOverError
from kvstored_client.local.turns import Budget, Turns
from kvstored_client.local.use import Use
from kvstored_client.local.wake import Outbox, Released
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import BadFrameError, Flag, Frame, Kind, pack
from kvstored_client.stopping import StopFlag

_MAX_ORPHANS = 1024
_MAP_PATIENCE_S = 1.0
_RELEASE_PATIENCE_S = 5.0
_IDLE_S = 0.0004  # by then the daemon looks for requests no longer without sleeping
_NUDGE = pack(Kind.RELEASE, 0, 0, b"")
_FIRST_NOTICE = 64
_ERROR, _LAST, _REPLY = int(Flag.ERROR), int(Flag.LAST), int(Flag.REPLY)


def _nothing() -> None:
    pass


class Request:
    """One request under way. `answered`: some of its answer has come; `done`: all of it."""

    __slots__ = ("answered", "done", "frames", "id", "kind", "on_done", "stop", "turn")

    def __init__(self, request_id: int, kind: Kind, stop: StopFlag | None) -> None:
        self.id = request_id
        self.kind = kind
        self.stop = stop
        self.frames: deque[Frame] = deque()
        self.turn: threading.Condition | None = None
        self.answered = False
        self.done = False
        self.on_done: Callable[[], None] = _nothing


class Lent(Protocol):
    """What is lent under one id."""

    id: int


class Link:
    """One connected session. Made by opening.open_link.

    `users` are steps that run on it, `live` the ids of what it has lent. When it is over and has
    neither, its thread ends and closes everything. `closing`: the client itself is being closed.
    `served`: that thread runs, or has run.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.stream = Stream(sock)
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._requests: dict[int, Request] = {}
        self._orphans: dict[int, Request] = {}
        self._followers: dict[Request, None] = {}
        self._reading = False
        self._next_id = 1
        self._over: Failure | None = None
        self._mute = False
        self._draining = False
        self.closing = False
        self.served = False
        self._live: set[int] = set()
        self._users: set[int] = set()
        self._pid = os.getpid()
        self.max_requests = 1
        self.opened = pb.LocalOpened()
        self.outbox = Outbox()
        self.segments = Table(self.outbox, areas=False)
        self.areas = Table(self.outbox, areas=True)
        self.ring: Ring | None = None
        self.turns = Turns()
        self.budget = Budget(0)
        self._heard_at = 0.0
        self.events_fd = -1
        self.last_words: Callable[[], None] = _nothing
        """Looks for what the daemon has said before its end; called before that becomes known."""
        self.on_child: Callable[[], None] = _nothing
        """Closes what others hold of it, in a forked child."""

    # ---- life ------------------------------------------------------------------------------------

    @property
    def over(self) -> Failure | None:
        """Why no step can run on it any more."""
        return self._over

    @property
    def of_this_process(self) -> bool:
        """False in a forked child of the process that opened it."""
        return os.getpid() == self._pid

    def enter(self, use: Use) -> bool:
        """A step begins; False if the session is over."""
        with self._lock:
            if self._over is not None:
                return False
            self._enter(use)
            return True

    def _enter(self, use: Use) -> None:
        use.link = self  # first: then `use` ends it, whatever happens
        self._users.add(id(use))

    def leave(self, use: Use) -> None:
        """The step has ended. Called by `Use.end` only, in finalisers too: takes no lock."""
        self._users.discard(id(use))
        if self._over is not None:
            self.outbox.wake.set()

    def end(self, failure: Failure, *, mute: bool = True) -> None:
        """No step runs on it from now on; those that are running fail. Views stay good.

        `mute`: nothing is sent any more either.
        """
        with self._lock:
            self._mute = self._mute or mute
            self.closing = self.closing or failure.kind is FailureKind.CLOSED
            if self._over is None:
                self._over = failure
        self.wake_all()
        self.outbox.wake.set()

    def wake_all(self) -> None:
        """Let whoever waits for anything look whether there is a point in it."""
        with self._lock:
            for request in self._requests.values():
                if request.turn is not None:
                    request.turn.notify()
            self._room.notify_all()
            ring = self.ring
        self.stream.wake.set()
        self.turns.look_again()
        self.budget.look_again()
        if ring is not None:
            ring.wake.set()

    def finished(self) -> bool:
        """Whether it is over and nobody needs it."""
        with self._lock:
            idle = not self._users and not self._live and not self._reading
            return self._over is not None and idle

    def close(self) -> None:
        """Let go of everything; the session's thread does that when it is finished."""
        self.stream.shutdown()
        self._close_descriptors()
        self.segments.clear()
        self.areas.clear()
        self.ring = None

    def _close_descriptors(self) -> None:
        self.stream.close()
        if self.ring is not None:
            self.ring.close()
        if self.events_fd >= 0:
            os.close(self.events_fd)
            self.events_fd = -1

    def after_fork_in_child(self) -> None:
        """The session is the parent's; here are only copies of its descriptors."""
        self.on_child()
        self._close_descriptors()
        self.stream.wake.close_in_child()
        self.outbox.wake.close_in_child()
        if self.ring is not None:
            self.ring.wake.close_in_child()

    # ---- grants ----------------------------------------------------------------------------------

    def lend(self, grant: Lent) -> None:
        """Give a lease, a hold or a reservation its id; `release` or the outbox ends it."""
        with self._lock:
            grant.id = self._next_id  # first: then the grant ends it, whatever happens
            self._next_id += 1
            self._live.add(grant.id)

    def release(self, lease_ids: list[int]) -> None:
        """End grants, at once if the socket has room for the words. Never raises."""
        use = Use()
        with self._lock:
            mine = [number for number in lease_ids if number in self._live]
            if not mine:
                return
            mute = self._mute
            self._enter(use)
        try:
            if not mute:
                self._send_release(mine, 0.0)
        except StepError:
            for number in mine:
                self.outbox.post(Released(number))
        else:
            with self._lock:
                self._live.difference_update(mine)
        finally:
            use.end()

    def release_now(self, lease_ids: list[int]) -> None:
        """What finalisers have released; called by the session's thread."""
        with self._lock:
            self._live.difference_update(lease_ids)
            mute = self._mute
        if mute:
            return
        try:
            self._send_release(lease_ids, _RELEASE_PATIENCE_S)
        except StepError as error:
            # What is not told is leaked; the end of the session tells it all.
            self.end(error.failure)

    def _send_release(self, lease_ids: list[int], patience_s: float) -> None:
        body = pb.ReleaseRequest(lease_ids=lease_ids).SerializeToString()
        self.send(pack(Kind.RELEASE, 0, 0, body), time.monotonic() + patience_s, patient=True)

    def nudge(self) -> None:
        """Let the daemon know that a request comes at once: it wakes up while that is being made.

        A release of nothing, if the daemon may have gone to sleep since it last answered.
        """
        if self._over is None and time.monotonic() - self._heard_at > _IDLE_S:
            try:
                self.stream.try_send(_NUDGE)
            except StreamOverError as error:
                self.end(error.failure)

    # ---- requests --------------------------------------------------------------------------------

    def begin(
        self, kind: Kind, body: bytes, deadline: float, stop: StopFlag | None = None
    ) -> Request:
        """Send a request. Each needs a `finish`. Raises StepError."""
        request = self._admitted(kind, deadline, stop)
        try:
            self.send(pack(kind, 0, request.id, body), deadline)
        except StepError:
            # None of it was sent, or the session is over. After anything else, perhaps: whoever
            # runs the step ends the session.
            with self._lock:
                self._requests.pop(request.id, None)
                self._room.notify()
            raise
        return request

    def _admitted(self, kind: Kind, deadline: float, stop: StopFlag | None) -> Request:
        with self._lock:
            self.check(stop, deadline)
            while not self.has_room():
                self._room.wait(max(0.0, deadline - time.monotonic()))
                self.check(stop, deadline)
            request = Request(self._next_id, kind, stop)
            self._next_id += 1
            self._requests[request.id] = request
            return request

    def has_room(self) -> bool:
        """Whether one more request would be sent without waiting."""
        return len(self._requests) + len(self._orphans) < self.max_requests

    def send(self, data: bytes, deadline: float, *, patient: bool = False) -> None:
        """Send a frame; see Stream.send. Raises StepError."""
        if self._mute and self._over is not None:
            raise LinkOverError(self._over, unanswered=True)
        try:
            self.stream.send(data, deadline, patient=patient)
        except StreamOverError as error:
            self.last_words()
            self.end(error.failure)
            raise LinkOverError(self._over or error.failure, unanswered=True) from error

    def wait(self, request: Request, deadline: float) -> Frame:
        """The next frame of its answer. Raises StepError; an ERROR frame is one too."""
        with self._lock:
            try:
                while not request.frames:
                    self.check(request.stop, deadline, unanswered=not request.answered)
                    if self._reading:
                        self._follow(request, deadline)
                    else:
                        self._lead(request, deadline)
                frame = request.frames.popleft()
            finally:
                self._hand_over()
        self._heard_at = time.monotonic()
        if frame.flags & _ERROR:
            raise StepError(failure_of_error(pb.Error.FromString(frame.body)))
        return frame

    def check(self, stop: StopFlag | None, deadline: float, *, unanswered: bool = True) -> None:
        """Raises StepError if there is no point in waiting. See LinkOverError for `unanswered`."""
        if stop is not None and stop.is_set():
            raise StepError(CANCELLED)
        if self._over is not None:
            raise LinkOverError(self._over, unanswered=unanswered)
        if time.monotonic() >= deadline:
            raise StepError(DEADLINE_PASSED)

    def finish(self, request: Request, on_done: Callable[[], None] = _nothing) -> None:
        """Nobody waits for it any more. What still comes for it is dropped.

        `on_done`: called when its last answer has come; at once if it has, or never will.
        """
        with self._lock:
            request.frames.clear()
            orphan = self._requests.pop(request.id, None) is not None and self._over is None
            if orphan:
                request.on_done = on_done
                self._orphans[request.id] = request
            many = len(self._orphans) > _MAX_ORPHANS
            self._room.notify()
        if many:
            self.end(Failure(FailureKind.DEADLINE, f"{_MAX_ORPHANS} requests were never answered"))
        elif orphan:
            self.outbox.wake.set()
        else:
            on_done()

    def call(self, kind: Kind, body: bytes, deadline: float, stop: StopFlag | None) -> bytes:
        """One request, one answer. Raises StepError."""
        request = self.begin(kind, body, deadline, stop)
        try:
            return self.wait(request, deadline).body
        finally:
            self.finish(request)

    # ---- reading ---------------------------------------------------------------------------------

    def _follow(self, request: Request, deadline: float) -> None:
        """Wait until the reader has something, or lets go. With the lock."""
        if request.turn is None:
            request.turn = threading.Condition(self._lock)
        self._followers[request] = None
        try:
            request.turn.wait(max(0.0, deadline - time.monotonic()))
        finally:
            del self._followers[request]

    def _lead(self, request: Request, deadline: float) -> None:
        """Read until something of this request has come. With the lock, which is free meanwhile."""
        self._reading = True
        try:
            while not request.frames and self._over is None:
                if request.stop is not None and request.stop.is_set():
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._lock.release()
                try:
                    if self.stream.wait(left):
                        self._read()
                finally:
                    self._lock.acquire()
        finally:
            self._reading = False

    def _hand_over(self) -> None:
        """Whoever stops reading, or waiting, sees to it that somebody reads. With the lock."""
        if self._reading:
            return
        for request in self._followers:
            if request.turn is not None:
                request.turn.notify()
                return
        if self._orphans or self._draining or self._over is not None:
            self.outbox.wake.set()

    def drain(self) -> None:
        """The daemon says no more on the events channel: find out by the socket how it ended."""
        with self._lock:
            self._draining = True
            self._hand_over()

    def begin_reading(self) -> bool:
        """Whether the session's thread is to read; if so, it ends with `end_reading`."""
        with self._lock:
            wanted = self._orphans or self._draining
            if self._reading or self._mute or not wanted:
                return False
            self._reading = True
            return True

    def end_reading(self, *, readable: bool) -> None:
        """Take what there is, and let others read."""
        try:
            if readable:
                self._read()
        finally:
            with self._lock:
                self._reading = False
                self._hand_over()

    def _read(self) -> None:
        """Take what one receive brings; only the reader. What is wrong with it ends the session."""
        try:
            for frame in self.stream.receive():
                if frame.flags & _REPLY:
                    self._take_answer(frame)
                else:
                    self._take_notice(frame)
            self.stream.check_fds()
        except StreamOverError as error:
            self.last_words()
            self.end(error.failure)
        except (GarbageError, BadFrameError, DecodeError) as error:
            self.end(GarbageError(str(error)).failure())
        except (MapError, OSError) as error:
            self.end(Failure(FailureKind.NOT_LOCAL, str(error)))
        except BaseException:
            # A half-taken frame would make nonsense of all that follows.
            self.end(Failure(FailureKind.UNREACHABLE, "reading was interrupted"))
            raise

    def _take_answer(self, frame: Frame) -> None:
        last = bool(frame.flags & _LAST)
        if frame.flags & _ERROR and not last:
            raise GarbageError("an error that is not the last answer")
        on_done = _nothing
        with self._lock:
            request = self._requests.get(frame.request_id)
            if request is None:
                orphan = self._orphans.get(frame.request_id)
                if orphan is not None and last:
                    del self._orphans[frame.request_id]
                    on_done = orphan.on_done
                    self._room.notify()
            elif request.kind != frame.kind:
                raise GarbageError(f"a request of kind {request.kind} is answered by {frame.kind}")
            else:
                if frame.kind == Kind.OPEN and not frame.flags & _ERROR:
                    (self.events_fd,) = self.stream.take_fds(1)
                request.frames.append(frame)
                request.answered = True
                if last:
                    request.done = True
                    del self._requests[frame.request_id]
                    self._room.notify()
                if request.turn is not None:
                    request.turn.notify()
        on_done()

    def _take_notice(self, frame: Frame) -> None:
        deadline = time.monotonic() + _MAP_PATIENCE_S
        if frame.kind == Kind.SEGMENT:
            segment = pb.LocalSegment.FromString(frame.body)
            with self._descriptors(1) as (fd,):
                self.segments.add(segment.segment_id, fd, segment.size_bytes, deadline)
        elif frame.kind == Kind.AREA:
            area = pb.LocalArea.FromString(frame.body)
            with self._descriptors(1) as (fd,):
                self.areas.add(area.area_id, fd, area.size_bytes, deadline)
        elif frame.kind == Kind.RING:
            if self.ring is not None:
                raise GarbageError("a second ring came")
            size = pb.LocalRing.FromString(frame.body).size_bytes
            with self._descriptors(2) as (memory, data):
                self.ring = Ring.made_of(memory, data, size, self.outbox, deadline)
        elif frame.kind < _FIRST_NOTICE:
            raise GarbageError(f"a frame of kind {frame.kind} that answers nothing")

    @contextlib.contextmanager
    def _descriptors(self, count: int) -> Iterator[list[int]]:
        fds = self.stream.take_fds(count)
        try:
            yield fds
        finally:
            for fd in fds:
                os.close(fd)
