"""The loop's lateness: measured on a real loop, counted over a window."""

from __future__ import annotations

import asyncio
import select

from kvstored.looplag import LoopLagProbe


def test_no_samples_no_lag() -> None:
    lag = LoopLagProbe().lag()
    assert (lag.p50_s, lag.p99_s, lag.max_s, lag.samples) == (0.0, 0.0, 0.0, 0)


def test_percentiles_are_of_the_window_and_come_back_down() -> None:
    probe = LoopLagProbe(window_samples=100, clock=lambda: 0.0)
    for _ in range(98):
        probe.record(0.001)
    probe.record(0.5)
    probe.record(-0.3)
    lag = probe.lag()
    assert lag.p50_s == 0.001
    assert lag.max_s == 0.5
    assert 0.001 < lag.p99_s < 0.5
    for _ in range(100):
        probe.record(0.002)
    lag = probe.lag()
    assert (lag.p50_s, lag.p99_s, lag.max_s) == (0.002, 0.002, 0.002)
    assert lag.samples == 100


def test_a_loop_that_is_stuck_now_shows() -> None:
    now = [100.0]
    probe = LoopLagProbe(interval_s=0.05, clock=lambda: now[0])
    probe.record(0.001)
    now[0] = 107.05
    assert abs(probe.silent_s() - 7.05) < 1e-9
    assert abs(probe.lag().max_s - 7.0) < 1e-9


class _Told(LoopLagProbe):
    """A probe that tells when it has sampled."""

    def __init__(self) -> None:
        super().__init__(interval_s=0.001)
        self.sampled = asyncio.Event()

    def record(self, late_s: float) -> None:
        super().record(late_s)
        self.sampled.set()


async def test_blocking_the_loop_is_measured() -> None:
    probe = _Told()
    task = asyncio.create_task(probe.run())
    for _ in range(2):
        probe.sampled.clear()
        await asyncio.wait_for(probe.sampled.wait(), 10)
    select.select([], [], [], 0.2)  # what nothing may do on the verbs' loop
    probe.sampled.clear()
    await asyncio.wait_for(probe.sampled.wait(), 10)
    assert probe.lag().max_s >= 0.19
    task.cancel()
    await asyncio.wait([task])
