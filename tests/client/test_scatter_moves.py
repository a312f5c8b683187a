"""Copies of many fragments against a naive model: the right bytes, and not one beside them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstored_client import fragments
from kvstored_client.buffers import Regions
from kvstored_client.fragments import FEW, LARGE_BYTES, PIECE_BYTES, move
from kvstored_client.memory import Cursor

GUARD = 0xA5
Column = NDArray[np.int64]


class Memory:
    """Bytes in which places can be taken that neither overlap nor touch the ends."""

    def __init__(self, nbytes: int, seed: int | None) -> None:
        self.bytes: NDArray[np.uint8] = np.full(nbytes, GUARD, np.uint8)
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 160, nbytes, dtype=np.uint8)
        self.address = self.bytes.ctypes.data

    def expected(self, offsets: Column, sources: list[bytes]) -> NDArray[np.uint8]:
        out = self.bytes.copy()
        for offset, data in zip(offsets.tolist(), sources, strict=True):
            out[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        return out


@st.composite
def placed(draw: st.DrawFn, lengths: list[int]) -> tuple[Column, int]:
    """Offsets for places of these lengths, in any order, with gaps or back to back."""
    order = draw(
        st.one_of(st.just(list(range(len(lengths)))), st.permutations(range(len(lengths))))
    )
    gaps = draw(st.sampled_from([0, 1, 7, 64, 4096]))
    ragged = draw(st.booleans())
    offsets = np.zeros(len(lengths), np.int64)
    at = 128
    for turn, i in enumerate(order):
        offsets[i] = at
        at += lengths[i] + (gaps if not ragged or turn % 3 else 0)
    return offsets, at + 128


@st.composite
def moves(draw: st.DrawFn) -> tuple[Column, Column, Column, int, int]:
    kinds = draw(
        st.lists(
            st.tuples(st.sampled_from([0, 1, 3, 64, 96, 1000, 4096]), st.integers(1, 3 * FEW)),
            max_size=4,
        )
    )
    lengths = [nbytes for nbytes, count in kinds for _ in range(count)]
    if draw(st.booleans()):
        lengths = draw(st.permutations(lengths))
    targets, target_bytes = draw(placed(lengths))
    sources, source_bytes = draw(placed(lengths))
    return targets, sources, np.array(lengths, np.int64), target_bytes, source_bytes


@settings(max_examples=300, deadline=None)
@given(case=moves())
def test_moves_are_those_of_a_naive_loop(case: tuple[Column, Column, Column, int, int]) -> None:
    targets, sources, lengths, target_bytes, source_bytes = case
    into, out = Memory(target_bytes, None), Memory(source_bytes, 3)
    pieces = [
        out.bytes[at : at + nbytes].tobytes()
        for at, nbytes in zip(sources.tolist(), lengths.tolist(), strict=True)
    ]
    expected = into.expected(targets, pieces)
    before = out.bytes.copy()
    assert move(targets + into.address, sources + out.address, lengths)
    assert np.array_equal(into.bytes, expected)
    assert np.array_equal(out.bytes, before)


@pytest.mark.parametrize("nbytes", [LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1])
@pytest.mark.parametrize("count", [FEW, FEW + 1, 3 * FEW])
def test_both_sides_of_every_threshold(nbytes: int, count: int) -> None:
    out = Memory(count * nbytes, 4)
    into = Memory(count * (nbytes + 100) + 100, None)
    order = np.random.default_rng(1).permutation(count).astype(np.int64)
    targets = order * (nbytes + 100) + 100
    sources = np.arange(count, dtype=np.int64) * nbytes
    rows = out.bytes.reshape(count, nbytes)
    expected = into.expected(targets, [row.tobytes() for row in rows])
    lengths = np.full(count, nbytes, np.int64)
    assert move(targets + into.address, sources + out.address, lengths)
    assert np.array_equal(into.bytes, expected)
    back = Memory(count * nbytes, None)
    assert move(sources + back.address, targets + into.address, lengths)
    assert np.array_equal(back.bytes, out.bytes)


def test_fragments_of_memories_that_lie_far_apart() -> None:
    # numpy counts the bytes between them as if items did not overlap; that must not wrap.
    count, nbytes = 40, 200_000
    nears, fars = np.zeros((count, nbytes), np.uint8), np.zeros((count, nbytes), np.uint8)
    source = Memory(2 * count * nbytes, 5)
    targets = np.concatenate(
        [m.ctypes.data + np.arange(count, dtype=np.int64) * nbytes for m in (nears, fars)]
    )
    sources = source.address + np.arange(2 * count, dtype=np.int64) * nbytes
    assert move(targets, sources, np.full(2 * count, nbytes, np.int64))
    assert np.array_equal(np.concatenate([nears, fars]).ravel(), source.bytes)
    wide = np.array([1 << 20, 1 << 46], np.int64)
    assert fragments._too_wide(wide, LARGE_BYTES)
    assert not fragments._too_wide(wide, 1024)


@pytest.mark.parametrize("nbytes", [16 << 10, 1 << 20, 20 << 20])
def test_stop_is_looked_at_before_every_piece(nbytes: int) -> None:
    count = (40 << 20) // nbytes
    out, into = Memory(count * nbytes, 6), Memory(count * nbytes, None)
    column = np.arange(count, dtype=np.int64) * nbytes
    lengths = np.full(count, nbytes, np.int64)
    looks: list[int] = []

    def stop() -> bool:
        written = int((into.bytes != GUARD).sum())
        looks.append(written)
        return len(looks) > 2

    assert not move(column + into.address, column + out.address, lengths, stop)
    assert looks[0] == 0
    assert all(b - a <= PIECE_BYTES for a, b in pairwise(looks))
    assert int((into.bytes != GUARD).sum()) == looks[-1] <= 2 * PIECE_BYTES


# ---- the stream of fragments -------------------------------------------------------------------


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """(fragment lengths per object, where the stream is cut)."""
    objects = draw(
        st.lists(
            st.lists(st.sampled_from([1, 5, 64, 1024]), max_size=40), min_size=1, max_size=6
        ).filter(lambda all_: any(all_))
    )
    total = sum(map(sum, objects))
    cuts = draw(st.lists(st.integers(0, total), max_size=6))
    return objects, sorted({0, total, *cuts})


@settings(max_examples=200, deadline=None)
@given(case=streams())
def test_a_cursor_goes_through_fragments_whatever_the_pieces(
    case: tuple[list[list[int]], list[int]],
) -> None:
    objects, cuts = case
    regions, memory, spots = scattered(objects)
    total = cuts[-1]
    data = np.random.default_rng(8).integers(0, 160, total, dtype=np.uint8)
    expected, at = memory.bytes.copy(), 0
    for offset, nbytes in spots:
        expected[offset : offset + nbytes] = data[at : at + nbytes]
        at += nbytes
    cursor = Cursor(regions)
    for begin, end in pairwise(cuts):
        cursor.write(data.ctypes.data + begin, end - begin)
    assert np.array_equal(memory.bytes, expected)
    back = np.full(total + 2, GUARD, np.uint8)
    cursor = Cursor(regions)
    for begin, end in pairwise(cuts):
        cursor.read(back.ctypes.data + 1 + begin, end - begin)
    assert np.array_equal(back[1:-1], data)
    assert back[0] == back[-1] == GUARD


@settings(max_examples=200, deadline=None)
@given(case=streams(), data=st.data())
def test_selected_objects_keep_their_first_bytes(
    case: tuple[list[list[int]], list[int]], data: st.DataObject
) -> None:
    objects, _ = case
    regions, memory, _ = scattered(objects)
    numbers = data.draw(st.lists(st.integers(0, len(objects) - 1), unique=True))
    nbytes = [data.draw(st.integers(0, sum(objects[i]))) for i in numbers]
    memory.bytes[:] = np.random.default_rng(9).integers(0, 160, len(memory.bytes), dtype=np.uint8)
    chosen = regions.select(np.array(numbers, np.int64), np.array(nbytes, np.int64))
    assert chosen.first[0] == 0
    assert chosen.first[-1] == len(chosen.lengths)
    for k, (number, count) in enumerate(zip(numbers, nbytes, strict=True)):
        here = slice(chosen.first[k], chosen.first[k + 1])
        got = b"".join(
            memory.bytes[a - memory.address : a - memory.address + n].tobytes()
            for a, n in zip(chosen.addresses[here], chosen.lengths[here], strict=True)
        )
        whole = b"".join(
            memory.bytes[a - memory.address : a - memory.address + n].tobytes()
            for a, n in zip(
                regions.addresses[regions.first[number] : regions.first[number + 1]],
                regions.lengths[regions.first[number] : regions.first[number + 1]],
                strict=True,
            )
        )
        assert got == whole[:count]


def scattered(objects: list[list[int]]) -> tuple[Regions, Memory, list[tuple[int, int]]]:
    """The objects' fragments in memory, last first, with gaps; (offset, bytes) in stream order."""
    lengths = [nbytes for one in objects for nbytes in one]
    spots: list[tuple[int, int]] = []
    at = 64
    for nbytes in reversed(lengths):
        spots.append((at, nbytes))
        at += nbytes + 3
    spots.reverse()
    memory = Memory(at + 64, None)
    first = np.cumsum([0, *map(len, objects)])
    regions = Regions(
        np.array([memory.address + offset for offset, _ in spots], np.int64),
        np.array(lengths, np.int64),
        first,
        np.array([sum(one) for one in objects], np.int64),
        [memory],
    )
    return regions, memory, spots
