"""What a prefetch brings into RAM: the run's leading chunks, as far as half of the RAM cap goes."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from kvstored.store.api import Run
from kvstored.store.index import NONE
from kvstored.store.loader import Loaded, Loader
from kvstored.store.namespace import Namespace
from kvstored.store.pooling import Pooling
from kvstored.store.residency import now_ms
from kvstored.store.walk import column, objects_of, padded
from kvstored.tiers.base import TierKind


def begin(
    ns: Namespace,
    run: Run,
    most_bytes: int,
    deadline: float,
    loader: Loader | None,
    pooling: Pooling | None,
) -> list[asyncio.Future[Loaded]]:
    """Have the run's leading objects that are not in RAM loaded, at most so many bytes. The caller
    ends the leases of what the futures give. `deadline` (time.monotonic()): for the bucket.
    """
    rows = _below_ram(ns, run, most_bytes)
    futures: list[asyncio.Future[Loaded]] = []
    if rows and loader is not None:
        futures += loader.want(ns, rows, time.monotonic())
    if pooling is not None:
        futures += pooling.prefetch(ns, run, most_bytes, deadline)
    return futures


def _below_ram(ns: Namespace, run: Run, most_bytes: int) -> list[int]:
    """Object rows of the run's leading chunks that are not in RAM; those that are count as well."""
    index, at_ms = ns.index, now_ms()
    _, objects = objects_of(index, ns.find_many(run.packed, at_ms))
    wanted = np.zeros(len(run.family.parts), np.bool_)
    wanted[list(run.parts)] = True
    objects = objects[wanted[column(index.object_part, np.uint16)[objects]]]
    fit = int(np.searchsorted(np.cumsum(padded(index, objects)), most_bytes, side="right"))
    objects = objects[:fit]
    there = column(index.place[TierKind.RAM], np.int64)[objects] != NONE
    rows: list[int] = objects[~there].tolist()
    return rows
