"""Get on the same node: acquire, copy out of shared memory, release; in windows.

The next window is asked for before the present one is copied, so that the daemon works meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvstored_client.failures import CANCELLED, Failure, FailureKind
from kvstored_client.local.errors import StepError
from kvstored_client.local.grants import Grant, Granted, end_all
from kvstored_client.local.link import Link, Request
from kvstored_client.local.maps import Rows, resolve
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import Flag, Kind
from kvstored_client.steps import Acquire, Download, RowReceiver, remaining_ms
from kvstored_client.stopping import StopFlag

MAX_WINDOW_BYTES = 256 << 20
FIRST_WINDOW_BYTES = 8 << 20
"""The first window: as long to copy as the daemon takes to answer for the second."""

_KEY_BYTES = 32
_LAST = int(Flag.LAST)
_DECLINED = bytes([pb.MISS_DECLINED])


class Acquiring:
    """One Acquire under way. `rows` gives what comes; `states` is there afterwards."""

    def __init__(
        self, link: Link, request: pb.AcquireRequest, deadline: float, stop: StopFlag | None
    ) -> None:
        """Send it. Raises StepError."""
        self._link = link
        self._deadline = deadline
        self.grant = Grant(link)
        self.states = b""
        request.lease_id = self.grant.id
        request.ctx.deadline_ms = remaining_ms(deadline)
        try:
            self._request: Request = link.begin(
                Kind.ACQUIRE, request.SerializeToString(), deadline, stop
            )
        except BaseException:
            self.grant.end()
            raise

    def rows(self) -> Iterator[Rows]:
        """Answer by answer, up to the last. Raises StepError and GarbageError."""
        while True:
            frame = self._link.wait(self._request, self._deadline)
            reply = pb.AcquireReply.FromString(frame.body)
            if reply.indices:
                rows = resolve(self._link.segments, reply)
                self.grant.mappings += rows.mappings
                yield rows
            if frame.flags & _LAST:
                self.states = reply.states
                return

    def finish(self) -> None:
        """Nothing more is waited for. What was granted stays so until the grant ends."""
        self._link.finish(self._request)

    def close(self) -> None:
        """Nothing of it is looked at any more; what is still on its way is void."""
        self.finish()
        self.grant.end()


def acquire(link: Link, step: Acquire, stop: StopFlag | None) -> Granted:
    """Run an Acquire step. Raises StepError and GarbageError."""
    under_way = Acquiring(link, step.request, step.deadline, stop)
    try:
        came = list(under_way.rows())
    except BaseException:
        under_way.close()
        raise
    under_way.finish()
    return Granted(
        under_way.grant,
        _joined([rows.indices for rows in came]),
        _joined([rows.addresses for rows in came]),
        _joined([rows.lengths for rows in came]),
        np.frombuffer(b"".join([rows.tiers for rows in came]), np.uint8),
        under_way.states,
    )


def _joined(pieces: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Window:
    """Part of a get: its request, the number of its first object, and the bytes it may have."""

    request: pb.AcquireRequest
    first: int
    nbytes: int


def windows(
    request: pb.GetRequest, chunk_bytes: int, first_bytes: int, max_bytes: int
) -> list[Window]:
    """A get as acquires of at most `max_bytes`, the first of at most `first_bytes`, where it may be
    cut at all; each of at least one chunk.
    """
    run = request.run
    count = len(run.keys) // _KEY_BYTES
    first = max(1, first_bytes // chunk_bytes) if chunk_bytes else count
    if 2 * first > count:  # what is left for a second would not be worth it
        first = count
    step = max(1, max_bytes // chunk_bytes) if chunk_bytes else count
    first = min(first, step)
    if first >= count:
        whole = pb.AcquireRequest(ctx=request.ctx, run=run)
        return [Window(whole, 0, chunk_bytes * count or max_bytes)]
    found = []
    edges = [0, *range(first, count, step), count]
    for at, stop in pairwise(edges):
        piece = pb.ChunkRun(
            namespace=run.namespace,
            family=run.family,
            keys=run.keys[at * _KEY_BYTES : stop * _KEY_BYTES],
            start=run.start + at,
            parent=run.keys[(at - 1) * _KEY_BYTES : at * _KEY_BYTES] if at else run.parent,
            end_token=run.end_token if stop == count else 0,  # inner chunks are never short
            parts=run.parts,
        )
        acquire_request = pb.AcquireRequest(ctx=request.ctx, run=piece)
        found.append(Window(acquire_request, at * len(run.parts), chunk_bytes * (stop - at)))
    return found


def _rest(window: Window, at: int, first: int, chunk_bytes: int) -> Window:
    """A window from its chunk `at` on, whose first object has the number `first`."""
    request = pb.AcquireRequest()
    request.CopyFrom(window.request)
    run = request.run
    keys = run.keys
    run.start += at
    run.parent = keys[(at - 1) * _KEY_BYTES : at * _KEY_BYTES]
    run.keys = keys[at * _KEY_BYTES :]
    return Window(request, first, chunk_bytes * (len(run.keys) // _KEY_BYTES))


def chunks_of(request: pb.GetRequest) -> int:
    """How many chunks a get asks for."""
    return len(request.run.keys) // _KEY_BYTES


class Copying:
    """One get under way."""

    def __init__(self, link: Link, step: Download, stop: StopFlag | None) -> None:
        self._receiver = cast("RowReceiver", step.receiver)  # the transport serves no other
        self._link = link
        self._step = step
        self._stop = stop
        most = min(MAX_WINDOW_BYTES, link.opened.max_leased_bytes // 4)
        if step.chunk_bytes * chunks_of(step.request) <= min(MAX_WINDOW_BYTES, 2 * most):
            most = MAX_WINDOW_BYTES  # one window, and as much left for others
        self._todo = windows(step.request, step.chunk_bytes, FIRST_WINDOW_BYTES, most)
        self._open: list[tuple[Acquiring, Window]] = []
        self._copied: list[tuple[Acquiring, Window]] = []  # not given back yet
        self._next_index = 0  # after the last object that was copied
        self._scarce = False

    def run(self) -> None:
        """Raises StepError and GarbageError; what was copied until then is good."""
        self._receiver.restart()
        states = []
        try:
            while self._todo or self._open:
                if self._todo and self._copied:
                    self._give_back(self._copied)  # the next windows need the room
                if not self._open:
                    self._link.budget.take(self._todo[0].nbytes, self._check, self._step.deadline)
                    self._begin()
                ahead = self._todo and not self._scarce and self._link.has_room()
                if ahead and self._link.budget.try_take(self._todo[0].nbytes):
                    self._begin()
                states.append(self._copy())
            self._receiver.finish(b"".join(states))
        finally:
            self._give_back([*self._copied, *self._open])

    def _check(self) -> None:
        self._link.check(self._stop, self._step.deadline)

    def _begin(self) -> None:
        """Ask for the next window, whose bytes are taken off the budget."""
        window = self._todo.pop(0)
        try:
            under_way = Acquiring(self._link, window.request, self._step.deadline, self._stop)
        except BaseException:
            self._link.budget.give(window.nbytes)
            raise
        self._open.append((under_way, window))

    def _give_back(self, windows: list[tuple[Acquiring, Window]]) -> None:
        """Give windows back, all by one word, which costs as much as any."""
        try:
            for under_way, _ in windows:
                under_way.finish()
            end_all([under_way.grant for under_way, _ in windows])
        finally:
            for _, window in windows:
                self._link.budget.give(window.nbytes)
            windows.clear()

    def _copy(self) -> bytes:
        """Copy the oldest window, and give it back. Its states."""
        under_way, window = self._open[0]
        take = self._receiver.take_rows
        enough = self._enough()
        for rows in under_way.rows():
            indices = rows.indices + window.first
            if not take(indices, rows.addresses, rows.lengths, rows.checksums, rows.tiers, enough):
                self._check()
                raise StepError(CANCELLED)
            if len(indices):
                self._next_index = int(indices[-1]) + 1
        self._copied.append(self._open.pop(0))
        return self._served(window, under_way.states)

    def _served(self, window: Window, states: bytes) -> bytes:
        """The states of the chunks of a window that are settled. What was declined for want of room
        is asked for again, now that what was copied is given back; at each round less.

        Raises StepError if there is no room for anything: gRPC needs none.
        """
        if not self._next_index and states.count(_DECLINED) == len(states):
            raise StepError(Failure(FailureKind.OVERLOADED, "no room to lease any of the chunks"))
        settled = states.find(_DECLINED)
        first = window.first + settled * len(window.request.run.parts)
        if settled <= 0 or not self._step.chunk_bytes or self._next_index > first:
            return states
        self._scarce = True  # a window ahead would take the room that this one lacks
        self._todo[:0] = [window for _, window in self._open]
        self._give_back(self._open)
        self._todo.insert(0, _rest(window, settled, first, self._step.chunk_bytes))
        return states[:settled]

    def _enough(self) -> Callable[[], bool]:
        """Whether to stop copying: asked between pieces of it."""
        link, stop, deadline = self._link, self._stop, self._step.deadline

        def enough() -> bool:
            if stop is not None and stop.is_set():
                return True
            return link.closing or time.monotonic() >= deadline

        return enough
