"""Waiting for one's turn, with a deadline: one upload at a time, and so much lent at a time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable


class Turns:
    """One holder at a time, first come, first served."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()

    def take(self, check: Callable[[], None], deadline: float) -> Callable[[], None]:
        """Wait for the turn; what comes back gives it to the next.

        `check` raises when there is no point in waiting any more, at the deadline too.
        """
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                while self._queue[0] is not ticket:
                    check()
                    self._changed.wait(max(0.0, deadline - time.monotonic()))
            except BaseException:
                self._queue.remove(ticket)
                self._changed.notify_all()
                raise
        return lambda: self._give(ticket)

    def _give(self, ticket: object) -> None:
        with self._changed:
            if ticket in self._queue:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def look_again(self) -> None:
        """Let those who wait run their check."""
        with self._changed:
            self._changed.notify_all()


class Budget:
    """So many bytes at a time; one who wants more than there is at all gets it when alone."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._used = 0
        self._changed = threading.Condition()

    def take(self, nbytes: int, check: Callable[[], None], deadline: float) -> None:
        """Wait for room. `check` as for Turns."""
        with self._changed:
            while not self._fits(nbytes):
                check()
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            self._used += nbytes

    def try_take(self, nbytes: int) -> bool:
        """Take it if there is room now."""
        with self._changed:
            if not self._fits(nbytes):
                return False
            self._used += nbytes
            return True

    def give(self, nbytes: int) -> None:
        """What was taken."""
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        return not self._used or self._used + nbytes <= self.nbytes

    def look_again(self) -> None:
        """Let those who wait run their check."""
        with self._changed:
            self._changed.notify_all()
