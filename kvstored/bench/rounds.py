"""How a value and its ceiling are taken in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstored.bench.report import Case, Json

PERCENTILES = (50, 99)
BLOCK_SAMPLES = 50
"""Latencies are sampled by so many of one kind at a time: taken one by one in turn, each call would
find the processor busy with, or its caches full of, the other kind's server.
"""


def seconds(work: Callable[[], None]) -> float:
    """How long it takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def pair(
    value: Callable[[], float], ceiling: Callable[[], float], flipped: bool
) -> tuple[float, float]:
    """(value, ceiling), one right after the other; the ceiling first if `flipped`.

    In turn, so that neither is always the one that finds caches warm.
    """
    if flipped:
        second = ceiling()
        return value(), second
    return value(), ceiling()


def rates(
    case: Case,
    rounds: int,
    work: Callable[[int, bool], tuple[float, float]],
    say: Callable[[str], None],
) -> None:
    """One round that does not count, then those that do. `work`: of round number and `flipped`,
    value and ceiling.
    """
    work(0, False)
    case.verified_bytes = 0
    for number in range(1, rounds + 1):
        value, ceiling = work(number, number % 2 == 0)
        case.add(value, ceiling)
        say(
            f"{case.op}, objects of {int(str(case.params['object_bytes'])) >> 20} MiB, round "
            f"{number} of {rounds}: {value:.2f} of {ceiling:.2f} {case.unit}"
        )


@dataclass(frozen=True, slots=True)
class Latencies:
    """One case per percentile of the same samples."""

    cases: list[Case]

    @classmethod
    def of(cls, op: str, params: dict[str, Json]) -> Latencies:
        """Cases without rounds yet."""
        return cls([Case(op, {**params, "percentile": p}, "us") for p in PERCENTILES])

    def round(
        self,
        samples: int,
        value: Callable[[int], float],
        ceiling: Callable[[int], float],
        *,
        counts: bool = True,
    ) -> str:
        """One round of as many samples, in blocks that alternate; what it came to, in words.

        `value` and `ceiling`: of a sample's number, its seconds.
        """
        taken = np.empty((samples, 2))
        for begin in range(0, samples, BLOCK_SAMPLES):
            block = range(begin, min(begin + BLOCK_SAMPLES, samples))
            flipped = begin // BLOCK_SAMPLES % 2 == 1
            for column in (1, 0) if flipped else (0, 1):
                take = (value, ceiling)[column]
                for number in block:
                    taken[number, column] = take(number)
        figures = np.percentile(taken, PERCENTILES, axis=0) * 1e6
        if counts:
            for case, (mine, bare) in zip(self.cases, figures, strict=True):
                case.add(float(mine), float(bare))
        return ", ".join(
            f"p{p} {mine:.0f} of {bare:.0f} us"
            for p, (mine, bare) in zip(PERCENTILES, figures, strict=True)
        )
