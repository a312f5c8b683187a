"""Clients of the same-node path that do anything, and die, on a tiny daemon."""

from __future__ import annotations

import pytest
from fuzz_rounds import fuzz
from torture_daemon import MIB, small_daemon
from torture_pen import Pen

SECONDS = 3.0
NEEDED = ("done", "compared", "stored", "leased")


@pytest.mark.parametrize("nvme_bytes", [0, 32 * MIB], ids=["ram", "nvme"])
def test_every_byte_is_what_its_key_says(nvme_bytes: int) -> None:
    with small_daemon(8 * MIB, nvme_bytes) as daemon, Pen() as pen:
        for seed in range(7, 12):  # on a busy machine one round may not come to everything
            report = fuzz(daemon, pen, SECONDS, seed)
            if report.kills and all(report.counts[name] for name in NEEDED):
                return
    raise AssertionError(f"{report.kills} kills, {report.counts}")
