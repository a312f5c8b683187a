"""Ends calls that are late or do not move. On the stream loop.

A call says what it waits for and counts its moves; a timer looks at all of them now and then, so
that a frame costs an addition and no timer of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable, Iterator

from kvstored.errors import DeadlineExceeded, Draining, KvstoredError

LOOK_S = 1.0
DRAIN_LOOK_S = 0.25
DRAIN_STALL_S = 1.0
"""While the daemon drains, a call that stands still for so long is ended."""


class Waits(enum.Enum):
    """What a call waits for."""

    PEER = "peer"  # to send, or to take what is sent
    STORE = "store"  # for data or room
    OUTCOME = "outcome"  # of work that runs to its end whatever becomes of the call


class Watched:
    """One call. `moves` grows with every message; the call keeps `waits` true."""

    __slots__ = (
        "_cancelling",
        "_cause",
        "_late",
        "_task",
        "_timer",
        "moves",
        "seen_moves",
        "since",
        "waits",
    )

    def __init__(self, task: asyncio.Task[object], waits: Waits, now: float) -> None:
        self.moves = 0
        self.waits = waits
        self.seen_moves = 0
        self.since = now  # loop time at which `moves` was last seen to differ
        self._task = task
        self._cancelling = task.cancelling()
        self._cause: KvstoredError | None = None
        self._late = ("", "")
        self._timer: asyncio.TimerHandle | None = None

    def until(self, at: float, message: str, hint: str = "") -> None:
        """End the call at a time of the loop with DeadlineExceeded; replaces an earlier one."""
        if self._timer is not None:
            self._timer.cancel()
        self._late = (message, hint)
        loop = self._task.get_loop()
        self._timer = None if at == float("inf") else loop.call_at(at, self._expire)

    def _expire(self) -> None:
        self.end(DeadlineExceeded(*self._late))

    def end(self, cause: KvstoredError) -> None:
        """Let the call fail with `cause` wherever it waits. The first cause counts."""
        if self._cause is None:
            self._cause = cause
            self._task.cancel()

    def unwatch(self) -> KvstoredError | None:
        """No more of it. The cause, if that alone and nobody else has cancelled the call."""
        if self._timer is not None:
            self._timer.cancel()
        # Kept, it would make a cycle with its own traceback, and that keeps what its frames name.
        cause, self._cause = self._cause, None
        if cause is not None and self._task.uncancel() <= self._cancelling:
            return cause
        return None


class Watchdog:
    """Looks at the calls of all listeners. `draining` may be asked from any thread."""

    def __init__(self, stall_timeout_s: float, draining: Callable[[], bool]) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._draining = draining
        self._running: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def watch(self, waits: Waits = Waits.STORE) -> Iterator[Watched]:
        """Watch the running task until the end of the block.

        Raises DeadlineExceeded (late, or the peer stands still) or Draining there.
        """
        task = asyncio.current_task()
        assert task is not None, "a call runs in a task"
        call = Watched(task, waits, task.get_loop().time())
        self._running.add(call)
        cause = None
        try:
            yield call
        except asyncio.CancelledError:
            cause = call.unwatch()
            if cause is None:
                raise
        finally:
            self._running.discard(call)
            call.unwatch()
        if cause is not None:
            try:
                raise cause
            finally:
                cause = None

    def look(self) -> None:
        """End what stands still, and look again later. Call it once on the loop, and to hurry."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        draining = self._draining()
        for call in list(self._running):
            self._judge(call, loop.time(), draining)
        often = DRAIN_LOOK_S if draining else min(LOOK_S, self._stall_timeout_s / 4)
        self._timer = loop.call_later(often, self.look)

    def _judge(self, call: Watched, now: float, draining: bool) -> None:
        if call.moves != call.seen_moves:
            call.seen_moves, call.since = call.moves, now
            return
        still_s = now - call.since
        if draining and still_s >= DRAIN_STALL_S and call.waits is not Waits.OUTCOME:
            call.end(Draining("the daemon is stopping, and this call stood still", "call another"))
        elif call.waits is Waits.PEER and still_s >= self._stall_timeout_s:
            call.end(
                DeadlineExceeded(
                    f"the peer sent or took nothing for {still_s:.1f} s",
                    "send and read without pauses, or raise limits.stall_timeout_s",
                )
            )

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
