"""Keeps the loop turning for a moment where the next request comes sooner than a processor wakes.

A client that asks, looks and asks again leaves the daemon idle for a fraction of a millisecond: too
short to be of use to others, long enough for the processor to halt and its caches to go cold, which
costs more than the request itself. So after an answer the loop polls for a moment without sleeping,
if the last requests came in such succession and fewer sessions are at it than there are processors.
Other sessions are served meanwhile as ever. Belongs to the verbs' loop.
"""

from __future__ import annotations

import asyncio
import os
import time

AWAKE_S = 0.0004
"""How long the loop stays awake after an answer; a request that comes later was not worth it."""

_RECENT_S = 0.05


class Awake:
    """Whether, and until when, the loop does without sleep."""

    def __init__(self, loop: asyncio.AbstractEventLoop, awake_s: float = AWAKE_S) -> None:
        self._loop = loop
        self._awake_s = awake_s
        self._processors = len(os.sched_getaffinity(0))
        self._seen: dict[int, float] = {}  # session number -> when it last asked for something
        self._cleared_at = 0.0  # when sessions that had gone quiet were last forgotten
        self._answered_at = 0.0
        self._worth_it = False
        self._until = 0.0
        self._turning = False

    def asked(self, session: int) -> None:
        """A session's request has come."""
        now = time.monotonic()
        self._seen[session] = now
        few = self._few(now)
        self._worth_it = few and now - self._answered_at < self._awake_s

    def expect(self) -> None:
        """A session says that its request comes at once."""
        self._worth_it = self._few(time.monotonic())

    def answered(self) -> None:
        """An answer has gone out."""
        self._answered_at = now = time.monotonic()
        if self._worth_it:
            self._until = now + self._awake_s
            if not self._turning:
                self._turning = True
                self._loop.call_soon(self._turn)

    def _few(self, now: float) -> bool:
        """Whether fewer sessions than processors have asked for anything lately."""
        if len(self._seen) >= self._processors and now - self._cleared_at > _RECENT_S:
            self._cleared_at = now
            stale = [s for s, at in self._seen.items() if now - at > _RECENT_S]
            for session in stale:
                del self._seen[session]
        return len(self._seen) < self._processors

    def _turn(self) -> None:
        self._turning = time.monotonic() < self._until
        if self._turning:
            self._loop.call_soon(self._turn)
