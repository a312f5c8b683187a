"""How fast a device is, by what was seen of it. Pure.

A device may give more for a moment than it does for long: a cache takes what is written, a throttle
lets the first tenth of a second pass. So the beginning of a measurement does not count, and what is
seen later moves the figure both ways.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LEARNED_IN_S = 4.0
"""After so long of keeping the device busy, two thirds of a new speed have been taken over."""

SAME = 1.2
"""Speeds whose ratio is at most that count as equal: no measurement is better."""


def steady(ends: Sequence[tuple[float, int]], warm_up_s: float) -> float:
    """Bytes per second of transfers by when each ended (seconds from the beginning, in order) and
    how long it was; of those in the warm-up nothing counts. 0.0 where too few came after it.
    """
    counted = [end for end in ends if end[0] >= warm_up_s]
    if len(counted) < 2 or counted[-1][0] <= counted[0][0]:
        return 0.0
    nbytes = sum(length for _, length in counted[1:])  # since the first of them ended
    return nbytes / (counted[-1][0] - counted[0][0])


def followed(known_bytes_per_s: float, nbytes: int, seconds: float) -> float:
    """What is known of a speed after one more look: so many bytes while it was busy for so long."""
    seen = nbytes / seconds
    if not known_bytes_per_s:
        return seen
    part = 1 - math.exp(-seconds / LEARNED_IN_S)
    return known_bytes_per_s + part * (seen - known_bytes_per_s)


def differ(one: float, other: float) -> bool:
    """Whether two speeds count as different."""
    return max(one, other) > SAME * min(one, other)


def levelled(speeds: Sequence[float]) -> list[float]:
    """The same speeds, where those that are nearly the same are equal; 0.0, for one that is not
    known, is the mean of the others.
    """
    known = [speed for speed in speeds if speed > 0]
    mean = sum(known) / len(known) if known else 1.0
    filled = [speed if speed > 0 else mean for speed in speeds]
    level = dict.fromkeys(filled, 0.0)
    group: list[float] = []
    for speed in [*sorted(filled), math.inf]:
        if group and speed > SAME * group[0]:
            for member in group:
                level[member] = sum(group) / len(group)
            group = []
        group.append(speed)
    return [level[speed] for speed in filled]
