"""How late the verbs' loop is, as a metric (invariant 9).

The probe sleeps for a fixed time and notes by how much it woke up late: that is what every verb
waits before its first instruction. Percentiles are over a sliding window of samples, so that they
are gauges and come back down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

INTERVAL_S = 0.05
WINDOW_SAMPLES = 1200  # one minute


@dataclass(frozen=True, slots=True)
class LoopLag:
    """Lateness of the loop over the window, in seconds. All zero before the first sample."""

    p50_s: float
    p99_s: float
    max_s: float
    samples: int


class LoopLagProbe:
    """Measures the loop that `run` runs on. `lag` and `silent_s` may be called from any thread."""

    def __init__(
        self,
        interval_s: float = INTERVAL_S,
        window_samples: int = WINDOW_SAMPLES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._ring = np.zeros(window_samples, np.float64)
        self._count = 0
        self._beat = clock()

    async def run(self) -> None:
        """Sample until cancelled."""
        self._beat = self._clock()
        while True:
            due = self._clock() + self._interval_s
            await asyncio.sleep(self._interval_s)
            self._beat = self._clock()
            self.record(self._beat - due)

    def record(self, late_s: float) -> None:
        """Note one sample; a timer that fired a little early counts as punctual."""
        self._ring[self._count % len(self._ring)] = max(0.0, late_s)
        self._count += 1

    def lag(self) -> LoopLag:
        """Percentiles of the window.

        A loop that is stuck right now counts with the lateness it has reached already.
        """
        window = self._ring[: min(self._count, len(self._ring))].copy()
        if not len(window):
            return LoopLag(0.0, 0.0, 0.0, 0)
        p50, p99 = np.percentile(window, (50, 99))
        overdue_s = self.silent_s() - self._interval_s
        return LoopLag(
            float(p50), float(p99), max(float(window.max()), overdue_s, 0.0), len(window)
        )

    def silent_s(self) -> float:
        """Time since the loop last showed a sign of life."""
        return self._clock() - self._beat
