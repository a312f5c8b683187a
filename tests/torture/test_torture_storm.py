"""A short form of `make torture`."""

from __future__ import annotations

from storm_loops import SCENARIOS, storms

LOOPS = 5  # as many as it takes to have each end once, and an index lost


def test_what_a_daemon_said_holds_though_it_is_killed() -> None:
    with storms(SCENARIOS[0], seed=1, longest_s=0.6) as running:
        running.run(LOOPS)
    assert running.report.good, (str(running.report), running.report.wrong)
    assert running.report.loops == LOOPS
    assert running.report.acks
