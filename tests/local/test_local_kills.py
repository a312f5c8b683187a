"""Clients killed with SIGKILL at each step leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kill_rounds import KillRounds
from torture_daemon import MIB, small_daemon
from torture_pen import Pen
from torture_steps import STEPS


@pytest.fixture(scope="module")
def pen() -> Iterator[Pen]:
    with Pen() as made:
        yield made


@pytest.mark.parametrize("nvme_bytes", [0, 192 * MIB], ids=["ram", "nvme"])
def test_killed_clients_leave_nothing(pen: Pen, nvme_bytes: int) -> None:
    with small_daemon(nvme_bytes=nvme_bytes) as daemon:
        report = KillRounds(daemon, pen, seed=1).run([*STEPS], each=1)
    assert report.leaked == []
    assert report.rounds == len(STEPS)
