"""Steps over local sessions: one session at a time, opened with the first step that needs it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from kvstored_client.failures import (
    CLIENT_CLOSED,
    DEADLINE_PASSED,
    NOT_LOCAL,
    Failure,
    FailureKind,
    GarbageError,
)
from kvstored_client.local import forking
from kvstored_client.local.copying import Copying, acquire
from kvstored_client.local.errors import LinkOverError, StepError
from kvstored_client.local.grants import Grant, Held, Reserved
from kvstored_client.local.link import Link
from kvstored_client.local.maps import OFFSET_ALIGNMENT
from kvstored_client.local.opening import open_link
from kvstored_client.local.uploading import upload
from kvstored_client.local.use import Use
from kvstored_client.local.wake import Closing
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import Kind
from kvstored_client.proto.methods import KVSTORE_SERVICE, METHODS, Method
from kvstored_client.steps import (
    Acquire,
    Answer,
    Commit,
    Download,
    Hold,
    Reserve,
    Step,
    Unary,
    Upload,
)
from kvstored_client.stopping import StopFlag

_KINDS = {
    method: Kind[method.name.upper()]
    for method in METHODS
    if method.service == KVSTORE_SERVICE and method.name.upper() in Kind.__members__
}
_INTERRUPTED = Failure(FailureKind.UNREACHABLE, "a call was interrupted")


def serves(step: Step) -> bool:
    """Whether a local session knows such a step at all."""
    if isinstance(step, Unary):
        return step.method in _KINDS
    if isinstance(step, Download):
        # An Acquire would bring into RAM what is to go past it.
        return not step.request.bypass_ram and hasattr(step.receiver, "take_rows")
    return True


class LocalTransport:
    """Runs steps, from any number of threads.

    A session that breaks is replaced, and the step run once more, if it had not been answered: the
    daemon was restarted since the last call. In a forked child begins a session of its own.
    """

    def __init__(self, path: Path, beside: Path, namespace: str, token: str | None) -> None:
        """`path`: the local socket. `beside`: the gRPC one."""
        self._path = path
        self._beside = beside
        self._namespace = namespace
        self._token = token
        self._link: Link | None = None
        self._opening = threading.RLock()
        self._closed = False
        self._pid = os.getpid()
        forking.join(self)

    def run(self, step: Step, stop: StopFlag | None = None) -> Answer:
        """Run one step to its end; at the latest at its deadline, or soon after `stop` is set.

        Never raises for the peer. A failure of the kind NOT_LOCAL: there can be no session.
        """
        again = True
        while True:
            use = Use()
            try:
                answer = self._run(step, stop, use)
            except LinkOverError as error:
                if not (again and error.unanswered):
                    return CLIENT_CLOSED if self._closed else error.failure
                again = False
            except BaseException:
                # KeyboardInterrupt, or whatever else a signal handler raises, comes between any two
                # statements: the daemon may have been asked, and may have lent, what nobody here
                # knows of. It forgets all that with the session.
                if use.link is not None:
                    use.link.end(_INTERRUPTED)
                raise
            else:
                return answer
            finally:
                use.end()

    def _run(self, step: Step, stop: StopFlag | None, use: Use) -> Answer:
        """Once. Raises LinkOverError; `unanswered` if it may be run again, on another session."""
        unhook = None
        fresh = True  # one that is over before it could be used was opened just now
        try:
            link, fresh = self._entered(step, use)
            unhook = None if stop is None else stop.on_set(link.wake_all)
            return _attempt(link, step, stop)
        except LinkOverError as error:
            stale = error.unanswered and error.failure.kind is FailureKind.UNREACHABLE
            raise LinkOverError(error.failure, unanswered=stale and not fresh) from error
        except StepError as error:
            return error.failure
        except (GarbageError, DecodeError) as error:
            failure = GarbageError(str(error)).failure()
            if use.link is not None:
                use.link.end(failure)
            return failure
        finally:
            if unhook is not None:
                unhook()

    def nudge(self) -> None:
        """A step will soon be run, most likely; see Link.nudge. Opens nothing, never raises."""
        link = self._link
        if link is not None and link.of_this_process:
            use = Use()
            try:
                if link.enter(use):
                    link.nudge()
            except BaseException:  # of a signal handler; see `run`
                link.end(_INTERRUPTED)
                raise
            finally:
                use.end()

    def close(self) -> None:
        """End running steps (they fail as CLOSED). The session lasts until no view of it lives."""
        self._closed = True
        link, self._link = self._link, None
        if link is not None:
            link.end(CLIENT_CLOSED, mute=False)

    def __del__(
        self, getpid: Callable[[], int] = os.getpid, closing: Callable[[], Closing] = Closing
    ) -> None:
        # A client that was dropped without a close. A finaliser takes no lock.
        link = getattr(self, "_link", None)
        if link is not None and getpid() == self._pid:
            link.outbox.post(closing())

    def after_fork_in_child(self) -> None:
        """See forking.Forked."""
        self._link = None
        self._opening = threading.RLock()
        self._pid = os.getpid()

    def _is_closed(self) -> bool:
        return self._closed

    def _entered(self, step: Step, use: Use) -> tuple[Link, bool]:
        """A link on which the step runs, and whether it was opened just now. Raises StepError."""
        if isinstance(step, Commit):
            # What was reserved in another session is not there any more.
            link = step.grant.link
            if not link.of_this_process:
                raise StepError(NOT_LOCAL)
            if link.enter(use):
                return link, True
            raise StepError(link.over or CLIENT_CLOSED)
        known = self._link
        if known is not None and not self._closed and known.enter(use):
            return known, False
        try:
            if not self._opening.acquire(timeout=max(0.0, step.deadline - time.monotonic())):
                raise StepError(DEADLINE_PASSED)
            if self._is_closed():
                raise StepError(CLIENT_CLOSED)
            if time.monotonic() >= step.deadline:
                raise StepError(DEADLINE_PASSED)
            known = self._link
            if known is not None and known.enter(use):
                return known, False
            link = open_link(
                self._path, self._beside, self._namespace, self._token, step.deadline, use
            )
            self._link = link
        finally:
            with contextlib.suppress(RuntimeError):  # this thread does not have it
                self._opening.release()
        if self._is_closed():  # meanwhile
            self.close()
        return link, True


def _attempt(link: Link, step: Step, stop: StopFlag | None) -> Answer:
    if isinstance(step, Unary):
        kind = _KINDS[step.method]
        body = link.call(kind, step.request.SerializeToString(), step.deadline, stop)
        return _message(step.method, body)
    if isinstance(step, Download):
        Copying(link, step, stop).run()
        return None
    if isinstance(step, Upload):
        upload(link, step, stop)
        return None
    if isinstance(step, Acquire):
        return acquire(link, step, stop)
    if isinstance(step, Hold):
        return _hold(link, step, stop)
    if isinstance(step, Reserve):
        return _reserve(link, step, stop)
    step.request.lease_id = step.grant.id
    body = link.call(Kind.COMMIT, step.request.SerializeToString(), step.deadline, stop)
    return pb.PutReply.FromString(body)


def _message(method: Method, body: bytes) -> Message:
    parse = method.reply_deserializer
    if parse is None:
        raise GarbageError(f"{method.name} has no single answer")
    return parse(body)


def _hold(link: Link, step: Hold, stop: StopFlag | None) -> Held:
    grant = Grant(link)
    try:
        step.request.hold = True
        step.request.hold_id = grant.id
        body = link.call(Kind.MATCH, step.request.SerializeToString(), step.deadline, stop)
        return Held(grant, pb.MatchReply.FromString(body))
    except BaseException:
        grant.end()
        raise


def _reserve(link: Link, step: Reserve, stop: StopFlag | None) -> Reserved:
    grant = Grant(link)
    try:
        step.request.lease_id = grant.id
        body = link.call(Kind.RESERVE, step.request.SerializeToString(), step.deadline, stop)
        reply = pb.ReserveReply.FromString(body)
        return Reserved(grant, _addresses(link, grant, step.request, reply), reply.states)
    except BaseException:
        grant.end()
        raise


def _addresses(
    link: Link, grant: Grant, request: pb.ReserveRequest, reply: pb.ReserveReply
) -> NDArray[np.int64]:
    """Where the wanted objects go; 0 for the others. Raises GarbageError unless all is in the area,
    apart from each other.
    """
    count = len(request.lengths_bytes)
    if len(reply.states) != count:
        raise GarbageError(f"{len(reply.states)} states for {count} objects")
    wanted = np.frombuffer(reply.states, np.uint8) == int(pb.WANTED)
    addresses = np.zeros(count, np.int64)
    if not wanted.any():
        return addresses
    if len(reply.offsets_bytes) != count:
        raise GarbageError(f"{len(reply.offsets_bytes)} offsets for {count} objects")
    area = link.areas.get(reply.area_id)
    offsets = np.array(reply.offsets_bytes, np.uint64)[wanted]
    lengths = np.array(request.lengths_bytes, np.uint64)[wanted]
    size = np.uint64(area.nbytes)
    if (lengths > size).any() or (offsets > size - lengths).any():
        raise GarbageError("a reserved object lies outside its area")
    order = np.argsort(offsets)
    ends = (offsets + lengths)[order]
    overlap = (offsets[order][1:] < ends[:-1]).any()
    if overlap or (offsets % np.uint64(OFFSET_ALIGNMENT)).any() or not lengths.all():
        raise GarbageError("reserved objects overlap")
    addresses[wanted] = offsets.astype(np.int64) + area.address
    grant.mappings.append(area)
    return addresses
