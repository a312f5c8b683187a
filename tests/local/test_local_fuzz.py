"""Clients of the same-node path that do anything, and die, on a tiny daemon."""

from __future__ import annotations

import pytest
from fuzz_rounds import fuzz
from torture_daemon import MIB, small_daemon
from torture_pen import Pen

SECONDS = 3.0


@pytest.mark.parametrize("nvme_bytes", [0, 32 * MIB], ids=["ram", "nvme"])
def test_every_byte_is_what_its_key_says(nvme_bytes: int) -> None:
    with small_daemon(8 * MIB, nvme_bytes) as daemon, Pen() as pen:
        report = fuzz(daemon, pen, SECONDS, seed=7)
    assert report.kills
    assert all(report.counts[name] for name in ("done", "compared", "stored", "leased"))
