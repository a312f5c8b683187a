"""Leaf-first LRU over the chunks that one namespace holds in one tier. No I/O.

Recency is a tick per chunk, in a column of the index. Whoever uses chunks writes their ticks and
leaves the chunks above alone; a chunk that leaves the tier hands its tick up to its parent if that
is the older one (see `ChunkIndex`). A parent is only asked when its last resident child has gone,
so the order is that of a list in which a touch moves everything above, too.

Victims come from a sorted batch of the oldest leaves. Everything about a batch may change before
its turn comes, so an entry counts only if the tick still is the one noted. What becomes a leaf with
a tick that the batches have passed joins by a heap. Every leaf up to `_bound` has an entry.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstored.store.index import NONE, TIER_BIT, ChunkIndex
from kvstored.tiers.base import TierKind

_SLICE_ROWS = 65_536  # looked at together; bounds the memory that a scan takes
_SAMPLE_ROWS = 4_096
_BATCH_PART = 1 / 64  # of the chunks: a scan takes 1.5 ns per row, so a victim's share is 0.1 us

_NO_BATCH = memoryview(b"").cast("Q")


class LeafLru:
    """Which chunk of a tier goes next."""

    def __init__(self, index: ChunkIndex, tier: TierKind) -> None:
        self._index = index
        self._tier = tier
        self._bit = TIER_BIT[tier]
        self._random = np.random.default_rng()
        self._bound = 0
        self._ticks: memoryview[int] = _NO_BATCH  # of the batch, ascending, and its rows
        self._rows: memoryview[int] = _NO_BATCH
        self._at = 0  # entries of the batch that were used up
        self._joined: list[tuple[int, int]] = []  # heap of (tick, row)
        self._aside: list[tuple[int, int]] = []  # busy ones, until `put_back`
        index.on_leaf[tier] = self._join
        index.on_leaves[tier] = self._join_all

    def _join(self, row: int) -> None:
        """A resident chunk has become a leaf, or a leaf has come."""
        tick = self._index.tick[row]
        if tick <= self._bound:
            heapq.heappush(self._joined, (tick, row))

    def _join_all(self, rows: NDArray[np.int32]) -> None:
        """Many of them have."""
        ticks = np.frombuffer(self._index.tick, np.uint64)[rows]
        for row in rows[ticks <= self._bound].tolist():
            self._join(row)

    def victim(self, busy: Callable[[int], bool]) -> int:
        """The leaf used longest ago that is not busy, or NONE. It stays until it leaves the tier.

        Busy ones are not asked about again before `put_back`.
        """
        part = _BATCH_PART
        while True:
            while (entry := self._oldest()) is not None:
                tick, row = entry
                if not self._current(tick, row):
                    self._drop_oldest()
                elif busy(row):
                    self._drop_oldest()
                    self._aside.append(entry)
                else:
                    return row
            if not self._scan(part):
                return NONE
            part *= 2  # nothing but busy ones so far: look further

    def put_back(self) -> None:
        """Ask again about what was busy."""
        if self._aside:
            self._joined += self._aside
            heapq.heapify(self._joined)
            self._aside.clear()

    def inner(self, count: int) -> list[tuple[int, int]]:
        """Tick and row of the resident chunks that are no leaves, oldest first, at most `count`."""
        index, rows = self._index, self._index.chunk_rows
        there = np.frombuffer(index.tiers, np.uint8)[:rows] & self._bit > 0
        there &= np.frombuffer(index.children[self._tier], np.uint32)[:rows] > 0
        chosen = np.flatnonzero(there)
        ticks = np.frombuffer(index.tick, np.uint64)[chosen]
        if len(chosen) > count:
            oldest = np.argpartition(ticks, count)[:count]
            chosen, ticks = chosen[oldest], ticks[oldest]
        order = np.argsort(ticks)
        return list(zip(ticks[order].tolist(), chosen[order].tolist(), strict=True))

    def _oldest(self) -> tuple[int, int] | None:
        joined = self._joined[0] if self._joined else None
        if self._at < len(self._ticks):
            tick = self._ticks[self._at]
            if joined is None or tick < joined[0]:
                return tick, self._rows[self._at]
        return joined

    def _drop_oldest(self) -> None:
        if self._at < len(self._ticks) and (
            not self._joined or self._ticks[self._at] < self._joined[0][0]
        ):
            self._at += 1
        else:
            heapq.heappop(self._joined)

    def _current(self, tick: int, row: int) -> bool:
        """Whether an entry still speaks of a leaf; if only its tick is out of date, it is noted
        anew where no scan would come to it any more.
        """
        index = self._index
        if not index.tiers[row] & self._bit or index.children[self._tier][row]:
            return False
        if index.tick[row] != tick:
            self._join(row)
            return False
        return True

    # -- the next batch ------------------------------------------------------------------------

    def _scan(self, part: float) -> bool:
        """Make the oldest of the leaves beyond the bound the batch. False: there are none."""
        while True:
            upper = self._next_bound(part)
            ticks, rows = self._collect(upper)
            if len(ticks):
                order = np.argsort(ticks)
                ticks, rows = ticks[order], rows[order]
                self._ticks, self._rows, self._at = ticks.data, rows.data, 0
            if upper is None:
                if len(ticks):
                    self._bound = int(ticks[-1])
                return len(ticks) > 0
            self._bound = upper
            if len(ticks):
                return True

    def _next_bound(self, part: float) -> int | None:
        """A tick beyond the bound with about that part of the chunks, and of the leaves, before
        it; None: beyond all of them.
        """
        index, count = self._index, self._index.chunk_rows
        if count <= _SAMPLE_ROWS:
            rows = np.arange(count)
        else:
            rows = self._random.integers(0, count, _SAMPLE_ROWS)
        ticks = np.frombuffer(index.tick, np.uint64)[rows]
        there = (np.frombuffer(index.tiers, np.uint8)[rows] & self._bit > 0) & (ticks > self._bound)
        leaf = there & (np.frombuffer(index.children[self._tier], np.uint32)[rows] == 0)
        chunks, leaves = ticks[there], ticks[leaf]
        if not len(leaves) or part >= 1:
            return None
        return int(max(_quantile(chunks, part), _quantile(leaves, part)))

    def _collect(self, upper: int | None) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        """Ticks and rows of the leaves beyond the bound, up to `upper`; shapes [n] and [n]."""
        index, count = self._index, self._index.chunk_rows
        ticks = np.frombuffer(index.tick, np.uint64)
        tiers = np.frombuffer(index.tiers, np.uint8)
        children = np.frombuffer(index.children[self._tier], np.uint32)
        above = np.uint64(self._bound + 1)
        width = np.uint64((upper if upper is not None else np.iinfo(np.int64).max) - self._bound)
        found: list[NDArray[np.int64]] = []
        for begin in range(0, count, _SLICE_ROWS):
            part = ticks[begin : min(begin + _SLICE_ROWS, count)]
            rows = np.flatnonzero(part - above < width)  # what is older wraps around
            rows += begin
            found.append(rows[(tiers[rows] & self._bit > 0) & (children[rows] == 0)])
        chosen = np.concatenate(found) if found else np.empty(0, np.int64)
        return ticks[chosen], chosen.astype(np.int32)


def _quantile(ticks: NDArray[np.uint64], part: float) -> int:
    kth = int(len(ticks) * part)
    return int(np.partition(ticks, kth)[kth])
