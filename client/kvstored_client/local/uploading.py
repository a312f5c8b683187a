"""Put through the session's ring: plan, pieces, answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from kvstored_client.failures import GarbageError
from kvstored_client.local.errors import LinkOverError, StepError
from kvstored_client.local.link import Link, Request
from kvstored_client.proto.local import Flag, Frame, Kind, pack
from kvstored_client.steps import Upload
from kvstored_client.stopping import StopFlag

_LAST = int(Flag.LAST)
_CANCEL_PATIENCE_S = 0.1


def upload(link: Link, step: Upload, stop: StopFlag | None) -> None:
    """Run an Upload step. Raises StepError and GarbageError.

    A session takes one put at a time: the uploads of a client take turns. The turn of one that is
    given up ends when the daemon has said that it is over.
    """

    def check() -> None:
        link.check(stop, step.deadline)

    give_turn = link.turns.take(check, step.deadline)
    try:
        header = step.sender.header(announce=False)
        request = link.begin(Kind.PUT, header, step.deadline, stop)
    except BaseException:
        give_turn()
        raise
    try:
        _put(link, step, request, check)
    finally:
        if not request.done and link.over is None:
            until = max(step.deadline, time.monotonic() + _CANCEL_PATIENCE_S)
            with contextlib.suppress(StepError):
                link.send(pack(Kind.CANCEL, 0, request.id), until, patient=True)
        link.finish(request, give_turn)


def _put(link: Link, step: Upload, request: Request, check: Callable[[], None]) -> None:
    sender = step.sender
    ring = link.ring
    if ring is not None:
        sender.copy_ahead(ring.address, ring.piece_bytes)  # while the daemon plans
    frame = link.wait(request, step.deadline)
    _expect(frame, last=False)
    sender.plan(frame.body)
    if sender.wanted_bytes:
        ring = link.ring
        if ring is None:
            raise GarbageError("a put is wanted, and no ring has come")
        try:
            ring.pass_on(
                request.id,
                sender.wanted_bytes,
                sender.copied_ahead_bytes,
                sender.copy_to,
                check,
                step.deadline,
            )
        except LinkOverError as error:
            link.last_words()
            link.end(error.failure)
            raise LinkOverError(link.over or error.failure, unanswered=False) from error
    frame = link.wait(request, step.deadline)
    _expect(frame, last=True)
    sender.finish(frame.body)


def _expect(frame: Frame, *, last: bool) -> None:
    if bool(frame.flags & _LAST) is not last:
        raise GarbageError("a put is answered by a plan and a last answer, in that order")
