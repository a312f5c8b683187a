"""Copies between many places of memory at once, in numpy's compiled loops.

A copy of one fragment by ctypes costs a third of a microsecond and gives the GIL up and takes it
again, which beside a busy Python thread may cost milliseconds; for fragments of 1 to 64 KiB that is
more than the bytes do. So fragments of equal length are moved together: the memory from the first
to the last of them is looked at as an array of overlapping items, one beginning at every byte, and
numpy's index assignment picks the items that begin where a fragment does. What lies between them is
never touched. Measured figures are in docs/client.md.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

copy = ctypes.memmove
"""copy(destination address, source address, bytes). Releases the GIL."""

PIECE_BYTES = 8 << 20
"""Most that is copied between two looks at `stop`."""

LARGE_BYTES = 256 << 10
"""From here on a fragment is worth a copy of its own."""

FEW = 16
"""Up to here the loops' preparation costs more than copies one by one."""

_MIN_GRAIN_BYTES = 64
_MAX_SPAN_BYTES = 1 << 62
Addresses = NDArray[np.int64]
Stop = Callable[[], bool]


def never() -> bool:
    """A `stop` that lets every copy come to its end."""
    return False


def move(targets: Addresses, sources: Addresses, lengths: Addresses, stop: Stop = never) -> bool:
    """Copy `lengths[i]` bytes from address `sources[i]` to `targets[i]`; all of shape [n].

    Targets overlap neither each other nor sources; lengths of 0 are passed over. In pieces of at
    most PIECE_BYTES, in any order; False as soon as `stop` says so before one of them.
    """
    large = lengths >= LARGE_BYTES
    if large.any():
        if not _one_by_one(targets[large], sources[large], lengths[large], stop):
            return False
        small = ~large
        targets, sources, lengths = targets[small], sources[small], lengths[small]
    if not len(lengths):
        return True
    if len(lengths) > FEW and (lengths[1:-1] == lengths[1]).all():  # all, or all but the outer ones
        ends = [0, -1]
        inner = slice(1, -1)
        return _one_by_one(targets[ends], sources[ends], lengths[ends], stop) and _group(
            targets[inner], sources[inner], int(lengths[1]), stop
        )
    order = np.argsort(lengths, kind="stable")
    targets, sources, lengths = targets[order], sources[order], lengths[order]
    edges = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    single: list[slice] = []
    for begin, end in pairwise(edges):
        here = slice(begin, end)
        if end - begin < FEW:
            single.append(here)
        elif not _group(targets[here], sources[here], int(lengths[begin]), stop):
            return False
    if not single:
        return True
    picked = np.concatenate([np.arange(here.start, here.stop) for here in single])
    return _one_by_one(targets[picked], sources[picked], lengths[picked], stop)


def joined(
    targets: Addresses, sources: Addresses, lengths: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """The same copies, those that follow on from one another on both sides as one."""
    ends = lengths[:-1]
    onward = (targets[1:] - targets[:-1] == ends) & (sources[1:] - sources[:-1] == ends)
    if not onward.any():
        return targets, sources, lengths
    begins = np.concatenate([[0], np.flatnonzero(~onward) + 1])
    return targets[begins], sources[begins], np.add.reduceat(lengths, begins)


def move_in_order(
    targets: Addresses, sources: Addresses, lengths: Addresses, stop: Stop = never
) -> int:
    """As `move`, one after the other, each by a copy of its own: for large fragments. Gives the
    bytes that were copied before `stop` said so: all, or those of the leading fragments.
    """
    done = 0
    since = PIECE_BYTES
    for target, source, nbytes in zip(
        targets.tolist(), sources.tolist(), lengths.tolist(), strict=True
    ):
        at = 0
        while at < nbytes:
            count = min(nbytes - at, PIECE_BYTES)
            if since + count > PIECE_BYTES:
                if stop():
                    return done + at
                since = 0
            copy(target + at, source + at, count)
            at += count
            since += count
        done += nbytes
    return done


def _one_by_one(targets: Addresses, sources: Addresses, lengths: Addresses, stop: Stop) -> bool:
    return move_in_order(targets, sources, lengths, stop) == int(lengths.sum())


def _group(targets: Addresses, sources: Addresses, nbytes: int, stop: Stop) -> bool:
    """Fragments of `nbytes` each."""
    if not nbytes:
        return True
    step = PIECE_BYTES // nbytes
    for at in range(0, len(targets), step):
        if stop():
            return False
        _piece(targets[at : at + step], sources[at : at + step], nbytes)
    return True


def _piece(targets: Addresses, sources: Addresses, nbytes: int) -> None:
    """Fragments of `nbytes` each; of one side at least, long runs lie back to back."""
    count = len(targets)
    if count <= FEW or _too_wide(targets, nbytes) or _too_wide(sources, nbytes):
        _one_by_one(targets, sources, np.full(count, nbytes, np.int64), never)
        return
    breaks = np.flatnonzero(np.diff(sources) != nbytes) + 1
    if len(breaks) * FEW <= count:
        for here in _runs(breaks, count):
            _scatter(targets[here], int(sources[here.start]), nbytes)
        return
    breaks = np.flatnonzero(np.diff(targets) != nbytes) + 1
    if len(breaks) * FEW <= count:
        for here in _runs(breaks, count):
            _gather(int(targets[here.start]), sources[here], nbytes)
        return
    scratch = np.empty(count * nbytes, np.uint8)
    _gather(scratch.ctypes.data, sources, nbytes)
    _scatter(targets, scratch.ctypes.data, nbytes)


def _runs(breaks: NDArray[np.intp], count: int) -> list[slice]:
    edges = [0, *breaks.tolist(), count]
    return [slice(a, b) for a, b in pairwise(edges)]


def _too_wide(addresses: Addresses, nbytes: int) -> bool:
    # numpy counts the bytes of an array as if its items did not overlap.
    return (int(addresses.max()) - int(addresses.min()) + 1) * nbytes > _MAX_SPAN_BYTES


def _scatter(targets: Addresses, source: int, nbytes: int) -> None:
    """From one stretch of memory to many places."""
    begin = int(targets.min())
    starts = targets - begin
    items = f"|V{nbytes}"
    everywhere = _array(begin, int(starts.max()) + 1, items, stride=1)
    everywhere[starts] = _array(source, len(targets), items, stride=nbytes)


def _gather(target: int, sources: Addresses, nbytes: int) -> None:
    """From many places to one stretch of memory."""
    begin = int(sources.min())
    starts = sources - begin
    count = len(sources)
    grain = int(np.gcd.reduce(starts, initial=nbytes))
    if grain < _MIN_GRAIN_BYTES:
        items = f"|V{nbytes}"
        everywhere = _array(begin, int(starts.max()) + 1, items, stride=1)
        _array(target, count, items, stride=nbytes)[:] = everywhere[starts]
        return
    # `take` writes in place where index assignment goes through an array of its own. It wants
    # memory without overlaps: cut into grains that all fragments are made up of.
    grains = nbytes // grain
    items = f"|V{grain}"
    memory = _array(begin, int(starts.max()) // grain + grains, items, stride=grain)
    index = (starts // grain)[:, None] + np.arange(grains)
    out = _array(target, count * grains, items, stride=grain)
    # "raise" would go through a buffer; the indices are right by construction.
    np.take(memory, index.ravel(), out=out, mode="clip")


class _Memory:
    """Tells numpy of memory that no object owns."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, count: int, items: str, stride: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "strides": (stride,),
            "typestr": items,
            "version": 3,
        }


def _array(address: int, count: int, items: str, *, stride: int) -> NDArray[np.void]:
    array: NDArray[np.void] = np.asarray(_Memory(address, count, items, stride))
    return array
