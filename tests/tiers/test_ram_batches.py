"""Many places at once do what one after the other would, or nothing."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiers.ram_helpers import KIB, MIB, Bookkeeper, audit, content, meta_of, put

from kvstored.tiers.base import PIECE_BYTES
from kvstored.tiers.ram import PlaceError, RamTier
from kvstored.tiers.ram.slabs import Slabs
from kvstored.tiers.ram.table import PlaceTable

PAGE = 4096
LENGTHS = (PAGE, PAGE + 1, 40_000)


def batch(*places: int) -> NDArray[np.int64]:
    return np.array(places, np.int64)


@pytest.fixture
async def tier() -> AsyncIterator[RamTier]:
    tier = RamTier(4 * MIB)
    await tier.open()
    yield tier
    await tier.close()


class Twins:
    """The same objects twice: one set of books is led in batches, one place by place."""

    def __init__(self) -> None:
        self.batches, self.singles = Bookkeeper(Slabs(MIB)), Bookkeeper(Slabs(MIB))
        self.places: list[int] = []
        for i in range(24):
            length_bytes = LENGTHS[i % len(LENGTHS)]
            place = self.batches.reserve("one", length_bytes)
            assert isinstance(place, int)
            assert place == self.singles.reserve("one", length_bytes)
            for books in (self.batches, self.singles):
                books.publish(place, length_bytes)
            self.places.append(place)

    def figures(self, books: Bookkeeper) -> object:
        audit(books.slabs, books.places)
        table = books.places._table
        return (
            books.places.leased_bytes,
            books.places.charged_bytes,
            list(table.readers),
            list(table.state),
            {s.segment_id: s.pinned for s in books.slabs.segments.values()},
        )

    def compare(self) -> None:
        assert self.figures(self.batches) == self.figures(self.singles)


def raised(attempt: Callable[..., object], argument: object) -> bool:
    try:
        attempt(argument)
    except PlaceError:
        return True
    return False


def all_or_nothing(
    do: Callable[[int], None], undo: Callable[[int], None], places: list[int]
) -> bool:
    """Do it to each place in turn; undone when one is refused. True: it was."""
    for i, place in enumerate(places):
        if raised(do, place):
            for done in places[:i]:
                undo(done)
            return True
    return False


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_batches_do_what_single_calls_do(data: st.DataObject) -> None:
    """Deletes in between doom what is leased; refused batches change nothing."""
    twins = Twins()
    batches, singles = twins.batches.places, twins.singles.places
    for _ in range(data.draw(st.integers(1, 12), "steps")):
        action = data.draw(st.sampled_from(["lease", "release", "delete"]))
        chosen = data.draw(st.lists(st.sampled_from(twins.places), max_size=40))
        if action == "lease":
            refused = all_or_nothing(singles.lease, singles.release, chosen)
            assert raised(batches.lease_many, batch(*chosen)) == refused
        elif action == "release":
            # A release that frees cannot be undone, so see first that each has its readers.
            refused = any(_readers(twins.singles, p) < chosen.count(p) for p in chosen)
            assert raised(batches.release_many, batch(*chosen)) == refused
            for place in () if refused else chosen:
                singles.release(place)
        else:
            for place in set(chosen):
                assert raised(batches.delete, place) == raised(singles.delete, place)
        twins.compare()
        leased = [p for p in twins.places if _readers(twins.singles, p)]
        _compare_locations(twins, leased)


def _readers(books: Bookkeeper, place: int) -> int:
    table = books.places._table
    try:
        return table.readers[table.row(place)]
    except PlaceError:
        return 0


def _compare_locations(twins: Twins, leased: list[int]) -> None:
    found = twins.batches.places.locate_many(batch(*leased))
    where = [twins.singles.places.locate(place) for place in leased]
    assert found.segment_ids.tolist() == [w.segment_id for w in where]
    assert found.offsets.tolist() == [w.offset for w in where]
    assert found.lengths.tolist() == [w.length_bytes for w in where]
    assert (found.segment_ids.dtype, found.offsets.dtype, found.lengths.dtype) == (
        np.uint32,
        np.uint64,
        np.uint64,
    )
    assert len(found.checksums) == 16 * len(leased)


@pytest.mark.parametrize("bad", [0, -1, 1 << 62, (1 << 32) + 5000, "reserved", "freed", "doomed"])
async def test_a_batch_with_one_bad_place_leases_nothing(tier: RamTier, bad: int | str) -> None:
    good = [await put(tier, i, PAGE) for i in range(3)]
    if bad == "reserved":
        (answer,) = await tier.reserve("default", [PAGE])
        assert isinstance(answer, int)
        bad = answer
    elif bad in ("freed", "doomed"):
        place = await put(tier, 9, PAGE)
        if bad == "doomed":
            tier.lease(place)
        await tier.delete([place])
        bad = place
    assert isinstance(bad, int)
    before = tier.leased_bytes
    with pytest.raises(PlaceError, match=f"{bad:#x}"):
        tier.lease_many(batch(*good, bad, *good))
    assert tier.leased_bytes == before
    assert not any(tier.leased(place) for place in good)


async def test_a_place_never_given_is_not_in_use(tier: RamTier) -> None:
    """Also when its row exists, made in advance."""
    place = await put(tier, 0, PAGE)
    never = place + 1
    for attempt in (tier.lease_many, tier.release_many, tier.locate_many):
        with pytest.raises(PlaceError, match=f"{never:#x} is not in use"):
            attempt(batch(never))
    with pytest.raises(PlaceError, match="not in use"):
        tier.leased(never)


async def test_releasing_more_often_than_leased_releases_nothing(tier: RamTier) -> None:
    one, other = [await put(tier, i, PAGE) for i in range(2)]
    tier.lease_many(batch(one, other, one))
    with pytest.raises(PlaceError, match=f"{other:#x} is released more often"):
        tier.release_many(batch(one, other, other))
    assert tier.leased_bytes == 2 * PAGE
    tier.release_many(batch(one, other, one))
    assert tier.leased_bytes == 0


async def test_only_leased_places_are_located(tier: RamTier) -> None:
    leased, other = [await put(tier, i, PAGE) for i in range(2)]
    tier.lease_many(batch(leased))
    with pytest.raises(PlaceError, match=f"{other:#x} is looked at without a lease"):
        tier.locate_many(batch(leased, other))
    tier.release_many(batch(leased))


async def test_rows_lead_to_the_bytes_and_checksums(tier: RamTier) -> None:
    lengths = [PAGE, 5000, 40_000, MIB + 5, PAGE]
    places = batch(*[await put(tier, seed, length) for seed, length in enumerate(lengths)])
    tier.lease_many(places)
    rows = tier.locate_many(places)
    assert rows.lengths.tolist() == lengths
    for i, length_bytes in enumerate(lengths):
        segment_id = int(rows.segment_ids[i])
        with memoryview(bytearray(tier.segment_bytes(segment_id))) as memory:
            assert os.preadv(tier.segment_fd(segment_id), [memory], 0) == len(memory)
            start = int(rows.offsets[i])
            data = memory[start : start + length_bytes]
            assert data == content(i, length_bytes)
            assert rows.checksums[16 * i : 16 * i + 16] == xxhash.xxh3_128_digest(data)
    tier.release_many(places)


@given(st.binary(min_size=241, max_size=5000))
def test_the_only_pieces_checksum_is_half_of_the_objects(data: bytes) -> None:
    """What lets objects of one piece go without a column of their own."""
    whole = xxhash.xxh3_128_digest(data)
    assert xxhash.xxh3_64_digest(data) == whole[8:]


@pytest.mark.parametrize("length_bytes", [PAGE, PAGE + 1, 400 * KIB + 3, PIECE_BYTES])
async def test_one_piece_has_no_column_and_is_known_all_the_same(
    tier: RamTier, length_bytes: int
) -> None:
    place = await put(tier, 3, length_bytes)
    meta = meta_of(content(3, length_bytes))
    assert tier.checksums(place) == (meta.checksum, meta.piece_checksums)
    assert not any(segment.pieces for segment in tier._slabs.segments.values())


async def test_checksums_that_contradict_each_other_are_refused(tier: RamTier) -> None:
    (place,) = await tier.reserve("default", [PAGE])
    assert isinstance(place, int)
    right, wrong = meta_of(bytes(PAGE)), meta_of(b"\1" * PAGE)
    with pytest.raises(PlaceError, match="only piece"):
        tier._places.publish(place, PAGE, 0, right.checksum, wrong.piece_checksums)
    tier.publish(place, right)


def test_the_table_grows_while_a_traceback_holds_its_columns() -> None:
    table = PlaceTable()
    table.add(1, 0, PAGE)
    kept: list[PlaceError] = []
    try:
        table.rows(batch(7))
    except PlaceError as error:
        kept.append(error)
    held = table.columns
    rows = [table.add(1, 0, PAGE) for _ in range(5000)]
    assert len(set(rows)) == 5000
    assert len(table) >= 5001
    assert held.state[0] == table.state[0]
    assert not np.shares_memory(held.state, table.columns.state)
    table.state[rows[0]] = 3
    assert table.columns.state[rows[0]] == 3, "arrays and columns are the same memory"
    del kept, held
    gc.collect()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(LENGTHS), st.sampled_from([1, 2, 9, 10, 30, 200])), max_size=8
    ),
    st.integers(2, 5),
)
def test_many_reserved_at_once_are_as_if_one_by_one(
    calls: list[tuple[int, int]], keep: int
) -> None:
    """The same slots, and the same figures, with gaps left by what is given back in between."""
    many, single = Bookkeeper(Slabs(4 * MIB)), Bookkeeper(Slabs(4 * MIB))
    for books in (many, single):
        for length_bytes in LENGTHS:
            slabs = books.slabs
            for _ in range(3):
                slabs.activate(slabs.begin_segment("one", -(-length_bytes // PAGE) * PAGE, 17))
    held: list[int] = []
    for length_bytes, count in calls:
        reserved = many.places.reserve_many("one", length_bytes, count)
        singly = [single.places.reserve("one", length_bytes) for _ in range(count)]
        assert reserved.places == [place for place in singly if place is not None]
        located = [many.places.locate(place) for place in reserved.places]
        extents = [(s, offset) for s, offsets in reserved.extents for offset in offsets]
        assert [(where.segment_id, where.offset) for where in located] == extents
        assert located == [single.places.locate(place) for place in reserved.places]
        held += reserved.places
        for place in held[::keep]:
            many.places.cancel(place)
            single.places.cancel(place)
        del held[::keep]
        for books in (many, single):
            audit(books.slabs, books.places)
        assert many.places.charged_bytes == single.places.charged_bytes


@pytest.mark.parametrize("count", [3, 200])
async def test_padding_is_clean_however_many_are_reserved(tier: RamTier, count: int) -> None:
    lengths = [PAGE + 1] * count + [PAGE] * 2 + [2 * PAGE - 1] * count
    for _ in range(2):
        places = await tier.reserve("default", lengths)
        assert len(places) == len(lengths)
        for place, length_bytes in zip(places, lengths, strict=True):
            assert isinstance(place, int)
            view = tier.view(place, padded=True)
            assert len(tier.view(place)) == length_bytes
            assert not any(view[length_bytes:])
            view[:] = b"\xff" * len(view)
        tier.cancel([place for place in places if isinstance(place, int)])
    assert tier.usage().charged_bytes == 0


@pytest.mark.parametrize("count", [1, 10])
async def test_places_come_in_order_up_to_the_first_without_room(tier: RamTier, count: int) -> None:
    """What comes after it gets none, also where there is a free slot for it."""
    answers = await tier.reserve("default", [PAGE] * 940)
    tier.cancel([place for place in answers[:40] if isinstance(place, int)])
    lengths = [PAGE] * 10 + [2 * MIB] * count + [PAGE] * 10
    answers = await tier.reserve("default", lengths)
    assert [isinstance(answer, int) for answer in answers] == [True] * 10 + [False] * (count + 10)
    assert tier.usage().charged_bytes == 910 * PAGE
