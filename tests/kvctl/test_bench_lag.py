"""The lag that `bench lookup` tells is what the loop has beyond the control."""

from __future__ import annotations

import pytest

from kvstored.bench.lookup import later_us


@pytest.mark.parametrize(
    ("lag_us", "control_us", "later"), [(900.0, 300.0, 600.0), (300.0, 900.0, 0.0)]
)
def test_the_lag_is_never_below_nothing(lag_us: float, control_us: float, later: float) -> None:
    assert later_us(lag_us, control_us) == later
