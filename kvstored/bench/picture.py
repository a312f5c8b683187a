"""The picture of `kvctl bench engine`. matplotlib is imported when one is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstored.bench.engine_report import CACHES
from kvstored.bench.processes import BenchError
from kvstored.bench.report import Case

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#9a9a9a", "#5b8dc9", "#e0a030", "#c0504d")
_LABELS = ("cache off", "own blocks", "kvstored, warm", "kvstored, fresh engine")


def check(file: Path) -> None:
    """Raise BenchError unless a picture could be drawn there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError(
            "a picture needs matplotlib: pip install 'kvstored[bench]', or leave out --png"
        )
    if not file.parent.is_dir():
        raise BenchError(f"there is no directory {file.parent} for the picture")


def draw(cases: Sequence[Case], file: Path) -> None:
    """Draw median TTFT and throughput of every workload into a PNG. Raises BenchError."""
    check(file)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    names = list(dict.fromkeys(str(c.params["workload"]) for c in cases if c.op == "ttft"))
    # Wide enough for the legend, also above one column.
    figure = Figure(figsize=(max(7.0, 3.4 * len(names)), 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(names), squeeze=False)
    for column, name in enumerate(names):
        of = [case for case in cases if case.params.get("workload") == name]
        _bars(panels[0][column], [c for c in of if c.params.get("percentile") == 50])
        _bars(panels[1][column], [c for c in of if c.op == "throughput"])
        panels[0][column].set_title(name)
        panels[0][column].set_yscale("log")
        panels[0][column].yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panels[0][column].yaxis.set_major_formatter("{x:g}")
        panels[0][column].yaxis.set_minor_formatter(NullFormatter())
        panels[1][column].set_xlabel("sessions at a time")
    panels[0][0].set_ylabel("TTFT p50, ms (log)")
    panels[1][0].set_ylabel("tokens/s")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(CACHES), frameon=False)
    try:
        figure.savefig(file, dpi=130, format="png")
    except OSError as error:
        raise BenchError(f"the picture could not be written: {error}") from error


def _bars(axes: Axes, cases: Sequence[Case]) -> None:
    concurrencies = list(dict.fromkeys(int(str(c.params["concurrency"])) for c in cases))
    width = 0.8 / len(CACHES)
    for number, (cache, colour, label) in enumerate(zip(CACHES, _COLOURS, _LABELS, strict=True)):
        heights = [float(str(c.to_json()["value"])) for c in cases if c.params["cache"] == cache]
        places = [at + (number - (len(CACHES) - 1) / 2) * width for at in range(len(heights))]
        axes.bar(places, heights, width, color=colour, label=label)
    axes.set_xticks(range(len(concurrencies)), [str(c) for c in concurrencies])
    axes.spines[["top", "right"]].set_visible(False)
