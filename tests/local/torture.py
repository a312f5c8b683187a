"""`make local-torture`: clients killed 200 times, then a minute of clients that do anything.

The last line says how it went; the status is 1 if anything leaked. Whatever else is wrong (a byte,
above all) is raised.
"""

from __future__ import annotations

import argparse
import sys

from fuzz_rounds import fuzz
from kill_rounds import KillRounds, Report
from torture_daemon import MIB, small_daemon
from torture_pen import Pen
from torture_steps import STEPS

NVME = {"ram": (0, 0), "nvme": (192 * MIB, 32 * MIB)}
"""Sizes of the NVMe tier: for the kills, and for the fuzz."""


def _kills(pen: Pen, rounds: int, seed: int) -> Report:
    each = -(-rounds // (len(STEPS) * len(NVME)))
    total = Report()
    for name, (nvme_bytes, _) in NVME.items():
        with small_daemon(nvme_bytes=nvme_bytes) as daemon:
            report = KillRounds(daemon, pen, seed).run([*STEPS], each)
        print(
            f"{name}: {report.rounds} kills at {len(STEPS)} steps, {len(report.leaked)} leaks, "
            f"slowest {report.slowest_ms:.0f} ms, {report.survived} chunks stored",
            *report.leaked,
            sep="\n  ",
            flush=True,
        )
        total.rounds += report.rounds
        total.leaked += report.leaked
        total.freed_ms += report.freed_ms
    return total


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="kills, at least")
    parser.add_argument("--fuzz-seconds", type=float, default=60.0, help="in all")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with Pen() as pen:
        report = _kills(pen, asked.rounds, asked.seed)
        for name, (_, nvme_bytes) in NVME.items():
            with small_daemon(8 * MIB, nvme_bytes) as daemon:
                fuzzed = fuzz(daemon, pen, asked.fuzz_seconds / len(NVME), asked.seed)
            counts = ", ".join(f"{n} {name}" for name, n in fuzzed.counts.items())
            print(f"fuzz, {name}: {fuzzed.kills} kills, {counts}, none wrong", flush=True)
    print(
        f"rounds={report.rounds} leaked={len(report.leaked)} slowest_ms={report.slowest_ms:.0f}",
        flush=True,
    )
    return 1 if report.leaked else 0


if __name__ == "__main__":
    sys.exit(main())
