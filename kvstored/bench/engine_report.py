"""Figures of `kvctl bench engine`: percentiles of all answers of a cell, and a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstored.bench.report import Case, Json

CACHES = ("off", "own", "warm", "fresh_warm")
PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Answers(Case):
    """A percentile of the TTFT of all answers of all passes: those of one pass may be but one.
    `rounds` are passes; `ratio` is that of the two percentiles.
    """

    passes: int = 0

    def to_json(self) -> dict[str, Json]:
        """See Case."""
        value, ceiling = (
            float(np.percentile(samples, int(str(self.params["percentile"]))))
            for samples in (self.values, self.ceilings)
        )
        return {
            "op": self.op,
            "params": self.params,
            "value": round(value, 4),
            "unit": self.unit,
            "ceiling": round(ceiling, 4),
            "ratio": round(value / ceiling, 4),
            "rounds": self.passes,
            "verified_bytes": self.verified_bytes,
        }


@dataclass(slots=True)
class Cell:
    """One workload with one cache at one concurrency. `ttft_ms` of all answers; `rates`, tokens/s,
    one for each pass.
    """

    workload: str
    cache: str
    concurrency: int
    ttft_ms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    verified_bytes: int = 0

    def cases(self, off: Cell) -> list[Case]:
        """TTFT and throughput, against the same with the cache off."""
        params: dict[str, Json] = {
            "workload": self.workload,
            "cache": self.cache,
            "concurrency": self.concurrency,
            **self.counts,
        }
        ttft: list[Case] = [
            Answers(
                "ttft",
                {**params, "percentile": percentile},
                "ms",
                self.ttft_ms,
                off.ttft_ms,
                self.verified_bytes,
                len(self.rates),
            )
            for percentile in PERCENTILES
        ]
        rate = Case("throughput", params, "tokens/s", self.rates, off.rates, self.verified_bytes)
        return [*ttft, rate]


def table(cases: Sequence[Case]) -> str:
    """For people: a line per workload, cache and concurrency."""
    head = f"{'workload':10} {'at once':>7} {'cache':10} {'p50':>8} {'p90':>8} {'p99':>8}"
    lines = [f"{head} {'of off':>7} {'tokens/s':>9} {'of off':>7} {'hit tokens':>16}"]
    rows = [(case, case.to_json()) for case in cases]
    for case, row in rows:
        if case.op == "throughput":
            at = case.params
            ttft = [t for c, t in rows if c.op == "ttft" and _same_cell(c.params, at)]
            times = " ".join(f"{_number(t['value']):>8.0f}" for t in ttft)
            hits = f"{at['hit_tokens']} of {at['prompt_tokens']}"
            lines.append(
                f"{at['workload']:10} {at['concurrency']:>7} {at['cache']:10} {times} "
                f"{_number(ttft[0]['ratio']):>7.3f} {_number(row['value']):>9.1f} "
                f"{_number(row['ratio']):>7.2f} {hits:>16}"
            )
    for case, row in rows:
        if case.op in ("store_overhead", "load"):
            of = "" if case.op == "store_overhead" else f" of {row['ceiling']} (bare get)"
            lines.append(f"{case.op}: {row['value']}{of} {case.unit}")
    return "\n".join([*lines, "TTFT in ms"])


def _same_cell(a: dict[str, Json], b: dict[str, Json]) -> bool:
    return all(a[name] == b[name] for name in ("workload", "cache", "concurrency"))


def _number(value: Json) -> float:
    return float(str(value))
