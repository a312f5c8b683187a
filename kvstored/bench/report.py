"""What every benchmark prints (design, section 12). Pure, but for `host`."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import dataclass, field
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MIN_ROUNDS = 5


@dataclass(slots=True)
class Case:
    """One measured operation. `values` and `ceilings`: one figure per round, in `unit`."""

    op: str
    params: dict[str, Json]
    unit: str
    values: list[float] = field(default_factory=list)
    ceilings: list[float] = field(default_factory=list)
    verified_bytes: int = 0

    def add(self, value: float, ceiling: float) -> None:
        """Record one round."""
        self.values.append(value)
        self.ceilings.append(ceiling)

    def to_json(self) -> dict[str, Json]:
        """Medians; `ratio` is that of the rounds' ratios, None where a ceiling is nothing.

        Raises ValueError without rounds.
        """
        ratio: float | None = None
        if all(self.ceilings):
            ratios = [v / c for v, c in zip(self.values, self.ceilings, strict=True)]
            ratio = round(statistics.median(ratios), 4)
        return {
            "op": self.op,
            "params": self.params,
            "value": round(statistics.median(self.values), 4),
            "unit": self.unit,
            "ceiling": round(statistics.median(self.ceilings), 4),
            "ratio": ratio,
            "rounds": len(self.values),
            "verified_bytes": self.verified_bytes,
        }


def host() -> dict[str, Json]:
    """The machine."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
    }


def report(bench: str, cases: list[Case]) -> dict[str, Json]:
    """The one JSON object of a benchmark."""
    return {"bench": bench, "host": host(), "cases": [case.to_json() for case in cases]}


def table(cases: list[Case]) -> str:
    """The same for people."""
    lines = [f"{'op':12} {'value':>10} {'ceiling':>10} {'ratio':>8} {'unit':9} of"]
    for case in cases:
        row = case.to_json()
        of = ", ".join(f"{name} {value}" for name, value in case.params.items())
        lines.append(
            f"{case.op:12} {row['value']:>10} {row['ceiling']:>10} {row['ratio'] or '':>8} "
            f"{case.unit:9} {of}"
        )
    return "\n".join(lines)
