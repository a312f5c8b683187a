"""Background tasks that die are logged, counted, and restarted or fatal (invariant 11)."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvstored.supervise import (
    FIRST_PAUSE_S,
    HEALTHY_AFTER_S,
    LONGEST_PAUSE_S,
    OnDeath,
    Supervisor,
    TaskDeath,
    next_pause_s,
)


class Pauses:
    """A sleep that takes no time and is remembered."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.taken.append(seconds)


def _never(death: TaskDeath) -> None:
    raise AssertionError(death)


async def test_task_that_raises_is_logged_counted_and_restarted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lives = 0
    settled = asyncio.Event()

    async def body() -> None:
        nonlocal lives
        lives += 1
        if lives <= 3:
            raise OSError("disk on fire")
        settled.set()
        await asyncio.Event().wait()

    pauses = Pauses()
    supervisor = Supervisor(_never, pauses.sleep)
    with caplog.at_level(logging.ERROR):
        supervisor.start("worker", body)
        await asyncio.wait_for(settled.wait(), 5)
    assert supervisor.restarts == {"worker": 3}
    assert pauses.taken == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert [r.levelname for r in caplog.records] == ["ERROR"] * 3
    assert "disk on fire" in caplog.text
    await supervisor.stop()
    assert supervisor.restarts == {"worker": 3}


async def test_task_that_returns_has_died_too() -> None:
    lives = 0
    again = asyncio.Event()

    async def body() -> None:
        nonlocal lives
        lives += 1
        if lives == 2:
            again.set()
            await asyncio.Event().wait()

    supervisor = Supervisor(_never, Pauses().sleep)
    supervisor.start("worker", body)
    await asyncio.wait_for(again.wait(), 5)
    assert supervisor.restarts == {"worker": 1}
    await supervisor.stop()


async def test_cancellation_from_inside_is_a_death_and_not_an_end() -> None:
    lives = 0
    again = asyncio.Event()

    async def body() -> None:
        nonlocal lives
        lives += 1
        if lives == 1:
            raise asyncio.CancelledError  # as an await of a cancelled future does
        again.set()
        await asyncio.Event().wait()

    supervisor = Supervisor(_never, Pauses().sleep)
    supervisor.start("worker", body)
    await asyncio.wait_for(again.wait(), 5)
    assert supervisor.restarts == {"worker": 1}
    await supervisor.stop()


async def test_death_of_a_fatal_task_is_told_once() -> None:
    told: asyncio.Queue[TaskDeath] = asyncio.Queue()

    async def body() -> None:
        raise ValueError("no way on")

    supervisor = Supervisor(told.put_nowait, Pauses().sleep)
    supervisor.start("heart", body, OnDeath.FATAL)
    death = await asyncio.wait_for(told.get(), 5)
    assert str(death) == "background task heart died: ValueError: no way on"
    await supervisor.stop()
    assert told.empty()
    assert supervisor.restarts == {"heart": 0}


async def test_stop_cancels_and_waits_and_is_no_death() -> None:
    ended: list[str] = []

    async def body() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    supervisor = Supervisor(_never)
    supervisor.start("a", body)
    supervisor.start("b", body)
    await asyncio.sleep(0)
    await supervisor.stop()
    await supervisor.stop()
    assert ended == ["cleaned up"] * 2
    assert supervisor.restarts == {"a": 0, "b": 0}
    with pytest.raises(RuntimeError):
        supervisor.start("c", body)


async def test_names_are_unique() -> None:
    supervisor = Supervisor(_never)
    supervisor.start("a", asyncio.Event().wait)
    with pytest.raises(ValueError, match="runs already"):
        supervisor.start("a", asyncio.Event().wait)
    await supervisor.stop()


def test_pauses_grow_to_a_bound_and_begin_anew_after_a_long_life() -> None:
    pause_s = 0.0
    for _ in range(20):
        pause_s = next_pause_s(pause_s, lived_s=0.0)
    assert pause_s == LONGEST_PAUSE_S
    assert next_pause_s(pause_s, HEALTHY_AFTER_S) == FIRST_PAUSE_S
