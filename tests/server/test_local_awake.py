"""When the verbs' loop stays awake for the next request."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from kvstored.server.local import awake as module
from kvstored.server.local.awake import Awake


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.soon: list[Callable[[], None]] = []

    def monotonic(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def turn(self) -> bool:
        """One turn of the loop; whether it was asked to turn again."""
        waiting, self.soon = self.soon, []
        for callback in waiting:
            callback()
        return bool(self.soon)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    return made


def made_awake(clock: Clock) -> Awake:
    loop: asyncio.AbstractEventLoop = clock  # type: ignore[assignment]
    return Awake(loop, 0.001)


def test_it_stays_awake_only_where_requests_come_in_succession(clock: Clock) -> None:
    awake = made_awake(clock)
    awake.asked(1)
    awake.answered()
    assert clock.soon == []  # the first: nobody knows yet
    clock.now += 0.0005
    awake.asked(1)
    awake.answered()
    assert clock.turn()
    clock.now += 0.0005
    assert clock.turn()
    clock.now += 0.0006
    assert not clock.turn()  # the moment is over
    clock.now += 0.01
    awake.asked(1)
    awake.answered()
    assert clock.soon == []  # that came late


def test_it_sleeps_where_every_processor_has_a_client(clock: Clock) -> None:
    awake = made_awake(clock)
    for _ in range(3):
        for session in (1, 2):
            awake.asked(session)
            awake.answered()
            clock.now += 0.0001
    clock.soon.clear()
    awake.asked(1)
    awake.answered()
    assert clock.soon == []
    clock.now += 1.0  # the other has gone quiet
    awake.asked(1)
    awake.answered()
    clock.now += 0.0001
    awake.asked(1)
    awake.answered()
    assert len(clock.soon) == 1
    awake.answered()
    assert len(clock.soon) == 1  # one turn at a time


def test_sessions_that_are_gone_are_forgotten(clock: Clock) -> None:
    awake = made_awake(clock)
    for session in range(1000):  # one after the other, none of them in succession
        clock.now += 0.1
        awake.asked(session)
        awake.answered()
    assert len(awake._seen) <= 2
