"""Sizes, plans, headers and records by themselves."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers.conformance import make_sample

from kvstored.tiers.base import MAX_OBJECT_BYTES, MIN_OBJECT_BYTES, padded_bytes
from kvstored.tiers.nvme import header, layout, record
from kvstored.tiers.nvme.format import (
    DamagedError,
    NewerFormatError,
    RegionEntry,
    RegionState,
    Superblock,
)
from kvstored.tiers.nvme.layout import GIB, KIB, MIB
from kvstored.tiers.nvme.slots import SlotTable, SmallTable

LENGTHS = st.integers(MIN_OBJECT_BYTES, MAX_OBJECT_BYTES)


@given(LENGTHS)
def test_slots_hold_their_object_and_lose_little(length: int) -> None:
    size = layout.slot_bytes(length)
    padded = padded_bytes(length)
    assert size % 4096 == 0
    assert (
        header.HEADER_BYTES + padded
        <= size
        <= header.HEADER_BYTES + max(padded + 4096, padded * 17 // 16)
    )
    assert layout.slot_bytes(size - header.HEADER_BYTES) == size, "sizes are stable"


@given(st.lists(LENGTHS, min_size=1))
def test_slot_sizes_of_arrays_are_the_same(lengths: list[int]) -> None:
    array = np.array(lengths, np.uint64)
    assert layout.slot_sizes(array).tolist() == [layout.slot_bytes(n) for n in lengths]


@pytest.mark.parametrize("length", [128 * KIB, 1 * MIB, 3 * MIB, 16 * MIB + MIB, 256 * MIB])
def test_sixteenths_of_powers_of_two_lose_nothing(length: int) -> None:
    assert layout.slot_bytes(length) == length + 4096


@given(st.integers(24 * MIB, 64 << 40))
@settings(max_examples=300)
def test_a_plan_stays_within_its_cap(cap: int) -> None:
    plan = layout.make_plan(cap, layout.default_region_bytes(cap), layout.default_small_bytes(cap))
    assert plan.total_bytes <= cap
    assert plan.regions >= 1
    assert plan.regions <= plan.table_regions
    if cap >= 4 * GIB:
        assert plan.regions * plan.region_bytes >= 0.9 * cap
    assert 0 < plan.small_capacity_bytes < plan.small_bytes


def test_largest_objects_fit_several_to_a_large_region() -> None:
    assert layout.default_region_bytes(1 << 40) // layout.slot_bytes(MAX_OBJECT_BYTES) == 4


@pytest.mark.parametrize(
    ("cap", "largest"),
    [(16 * MIB, 8 * MIB), (256 * MIB, 16 * MIB), (512 * MIB, 32 * MIB), (GIB, 64 * MIB),
     (2 * GIB, 128 * MIB), (4 * GIB, 256 * MIB), (10 * GIB, 256 * MIB), (1 << 42, 256 * MIB)],
)  # fmt: skip
def test_the_largest_object_that_a_cap_takes(cap: int, largest: int) -> None:
    """As docs/nvme-tier.md has it."""
    region = layout.default_region_bytes(cap)
    assert layout.slot_bytes(largest) <= region
    assert largest == MAX_OBJECT_BYTES or layout.slot_bytes(largest + 1) > region
    plan = layout.make_plan(cap, region, layout.default_small_bytes(cap))
    assert cap < 256 * MIB or plan.regions >= 13


def superblock(**change: int) -> Superblock:
    return dataclasses.replace(Superblock(bytes(range(16)), 8 * MIB, 64, 123), **change)


def test_superblock_round_trip_and_damage() -> None:
    block = superblock().encode()
    assert Superblock.decode(block) == superblock()
    for at in range(0, 4096, 31):
        with pytest.raises(DamagedError):
            Superblock.decode(block[:at] + bytes([block[at] ^ 8]) + block[at + 1 :])
    for change in ({"version": 2}, {"incompat": 1 << 63}):
        with pytest.raises(NewerFormatError):
            Superblock.decode(superblock(**change).encode())


def test_region_entry_round_trip_and_damage() -> None:
    entry = RegionEntry(5, RegionState.DEDICATED, 73728, 1 << 63, 9)
    raw = entry.encode(77)
    assert RegionEntry.decode(raw, 5, 77) == entry
    assert RegionEntry.decode(bytes(64), 5, 77) == RegionEntry(5)
    for number, volume, data in [(6, 77, raw), (5, 78, raw), (5, 77, raw[:-1] + b"\xff")]:
        with pytest.raises(DamagedError):
            RegionEntry.decode(data, number, volume)


WHERE = header.Where(
    volume_id=1, dedication=2, place=3 << 32 | 4, slot_bytes=layout.slot_bytes(MIB)
)


def test_header_round_trip_and_every_flipped_byte() -> None:
    meta = make_sample(MIB, 3, namespace="räume").meta
    block = header.encode(WHERE, meta, 9, 10, "writer")
    found = header.decode(block, WHERE)
    assert found == header.SlotHeader(meta, 9, 10, "writer")
    for at in range(4096):
        with pytest.raises(DamagedError):
            header.decode(block[:at] + bytes([block[at] ^ 1]) + block[at + 1 :], WHERE)


@pytest.mark.parametrize("change", ["volume_id", "dedication", "place", "slot_bytes"])
def test_header_belongs_to_one_place_only(change: str) -> None:
    block = header.encode(WHERE, make_sample(MIB, 3).meta, 9, 10)
    values = dataclasses.asdict(WHERE)
    with pytest.raises(DamagedError):
        header.decode(block, header.Where(**values | {change: 4096}))


def test_void_header() -> None:
    assert header.decode(header.encode_void(WHERE, 1), WHERE) is None


def test_header_of_the_largest_object() -> None:
    meta = dataclasses.replace(
        make_sample(MIB, 1).meta,
        length_bytes=MAX_OBJECT_BYTES,
        piece_checksums=random.Random(1).randbytes(8 * 256),
        namespace="n" * 255,
        part="p" * 64,
        tenant="t" * 64,
    )
    where = dataclasses.replace(WHERE, slot_bytes=layout.slot_bytes(MAX_OBJECT_BYTES))
    found = header.decode(header.encode(where, meta, 1, 2), where)
    assert found is not None
    assert found.meta == meta


def test_header_refuses_what_it_cannot_hold() -> None:
    meta = make_sample(MIB, 1).meta
    for change in ({"tenant": "t" * 2000}, {"piece_checksums": b""}, {"key": b"short"}):
        with pytest.raises(ValueError, match="B"):
            header.validate(dataclasses.replace(meta, **change))  # type: ignore[arg-type]


def test_records_check_themselves() -> None:
    metas = [make_sample(100_000, seed).meta for seed in range(50)]
    packed = [record.pack(m, i, i, (0, 1, 2, 3), 1 << 40) for i, m in enumerate(metas)]
    assert {len(p) for p in packed} == {record.RECORD_BYTES}
    records = record.seal(packed, volume_id=99)
    assert record.whole(records, 99).all()
    assert not record.whole(records, 98).any(), "of another volume"
    assert not record.whole(np.zeros(3, record.RECORD), 99).any()
    raw = bytearray(records.tobytes())
    for at in range(record.RECORD_BYTES):
        for bit in (0, 7):
            raw[at] ^= 1 << bit
            assert record.whole(record.from_bytes(bytes(raw)), 99).sum() == 49
            raw[at] ^= 1 << bit
    row = records[7]
    assert (int(row["place"]), int(row["sequence"]), row["key"].tobytes()) == (7, 7, metas[7].key)
    assert int(row["depth"]) == metas[7].depth


def test_a_region_changes_its_slot_size_only_when_empty() -> None:
    table = SlotTable([RegionEntry(0), RegionEntry(1)], MIB)
    assert table.take(100_000, 0, 1) == []
    for number, size in ((0, 102_400), (1, 204_800)):
        assert table.spare_region() == number
        table.claim(number)
        table.dedicated(RegionEntry(number, RegionState.DEDICATED, size, 1, 1))
        first = table.take(size, 0, 1)
        assert len(first) == 1
    assert table.spare_region() is None
    table.release(first)
    assert table.spare_region() == 1


def test_slots_come_from_the_fullest_region_lowest_first() -> None:
    entries = [RegionEntry(n, RegionState.DEDICATED, 102_400, 1, 1) for n in range(3)]
    table = SlotTable(entries, MIB)
    places = [place for _ in range(25) for place in table.take(102_400, 0, 1)]
    assert places == [r << 32 | s for r in range(3) for s in range(10)][:25]
    for place in (0 << 32 | 3, 1 << 32 | 5, 1 << 32 | 2):
        table.release([place])
    again = [place for _ in range(8) for place in table.take(102_400, 0, 1)]
    assert again[:5] == [2 << 32 | s for s in range(5, 10)], "the region in hand first"
    assert again[5:] == [3, 1 << 32 | 2, 1 << 32 | 5], "then the fuller one"
    assert table.take(102_400, 0, 1) == []


def test_small_numbers_are_reused_and_bounded() -> None:
    table = SmallTable(1000)
    numbers = [table.take(10, 0) for _ in range(100)]
    assert sorted(n for n in numbers if n is not None) == list(range(100))
    assert table.take(1, 0) is None
    table.release(42)
    assert table.take(10, 0) == 42
