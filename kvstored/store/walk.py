"""The objects of many chunks, by a step per object of the fullest chunk rather than per object."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstored.store.index import NONE, ChunkIndex
from kvstored.tiers.base import ALIGNMENT_BYTES

_Item = TypeVar("_Item", bound=np.generic)


def column(values: memoryview[int], dtype: type[_Item]) -> NDArray[_Item]:
    """A column of the index as an array over its memory; not to be kept across an ``await``."""
    return np.frombuffer(values, dtype)


def objects_of(
    index: ChunkIndex, chunks: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Position in `chunks` and row of every object of these chunks, sorted by position, those of
    one chunk in the order of `ChunkIndex.object_rows`; shapes [objects]. A chunk may be NONE.
    """
    following = column(index.object_next, np.int32)
    at = (chunks != NONE).nonzero()[0]
    rows = column(index.first_object, np.int32)[chunks[at]]
    all_at, all_rows = [], []
    while len(at):
        there = rows != NONE
        if not there.all():
            at, rows = at[there], rows[there]
        all_at.append(at)
        all_rows.append(rows)
        rows = following[rows]
        if (rows == NONE).all():
            break
    if not all_at:
        return np.zeros(0, np.int64), np.zeros(0, np.int32)
    if len(all_at) == 1:
        return all_at[0], all_rows[0]
    positions, found = np.concatenate(all_at), np.concatenate(all_rows)
    order = np.argsort(positions, kind="stable")
    return positions[order], found[order]


def padded(index: ChunkIndex, objects: NDArray[np.int32]) -> NDArray[np.int64]:
    """What each object takes up in RAM, in bytes; `tiers.base.padded_bytes` of many."""
    lengths = column(index.object_length, np.uint32)[objects].astype(np.int64)
    return -(-lengths // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
