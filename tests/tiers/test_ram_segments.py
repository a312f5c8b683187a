"""Segments of the RAM tier: their pages, their planning, and the rows that tell of places."""

from __future__ import annotations

import gc
import os
from array import array
from pathlib import Path

import pytest
from tiers.ram_helpers import KIB, MIB, audit

from kvstored.tiers.base import NoRoom
from kvstored.tiers.ram import PlaceError, RamTier, pages
from kvstored.tiers.ram.places import Places
from kvstored.tiers.ram.segment import Segment
from kvstored.tiers.ram.slabs import Create, Reclaim, Slabs
from kvstored.tiers.ram.table import ROW_BYTES, PlaceTable

PAGE = 4096
CAP_BYTES = 4 * MIB


async def test_nothing_is_kept_per_object_in_python() -> None:
    tier = RamTier(64 * MIB)
    await tier.open()
    places = await tier.reserve("default", [PAGE] * 8)
    gc.collect()
    before = len(gc.get_objects())
    more = await tier.reserve("default", [PAGE] * 4000)
    gc.collect()
    segments = tier.segments
    assert len(gc.get_objects()) - before < 100 + 40 * segments
    assert segments < 100
    del places, more
    await tier.close()


def test_a_row_is_as_small_as_promised() -> None:
    table = PlaceTable()
    for i in range(1000):
        table.add(1, i, PAGE)
    columns = [v for v in vars(table).values() if isinstance(v, array)]
    per_row = sum(memoryview(column).nbytes for column in columns) / len(table)
    assert per_row == ROW_BYTES <= 40


def test_generations_wrap_below_a_signed_64_bit_place() -> None:
    table = PlaceTable()
    row = table.add(1, 0, PAGE)
    table._generation[row] = (1 << 31) - 1
    place = table.place(row)
    assert place < 1 << 63
    table.remove(row)
    assert table.add(1, 0, PAGE) == row
    assert table.place(row) != place
    with pytest.raises(PlaceError):
        table.row(place)


def test_planning_names_the_cheapest_step() -> None:
    """Pure: an empty segment before one to be moved, and none without slack."""
    slabs = Slabs(16 * PAGE, lambda _: 16 * PAGE)
    places = Places(slabs)
    held = []
    for _ in range(4):
        slabs.activate(slabs.begin_segment("one", PAGE, 4))
        held.append([places.reserve("one", PAGE) for _ in range(4)])
    for group in held:
        for place in group:
            assert place is not None
            places.publish(place, PAGE, 0, bytes(16), bytes(8))
    assert slabs.plan("one", 2 * PAGE, 2 * PAGE) is NoRoom.TIER

    def free(group: int, count: int) -> None:
        for _ in range(count):
            place = held[group].pop()
            assert place is not None
            places.delete(place)

    free(0, 3)
    free(1, 2)
    assert slabs.plan("one", 2 * PAGE, 0) is NoRoom.TIER, "five free slots: no slack left over"
    free(2, 1)
    pinned = held[0][0]
    assert pinned is not None
    places.lease(pinned)
    step = slabs.plan("one", 2 * PAGE, 0)
    assert isinstance(step, Reclaim)
    assert step.segment.used == 2, "what is leased cannot be moved"
    places.release(pinned)
    step = slabs.plan("one", 2 * PAGE, 0)
    assert isinstance(step, Reclaim)
    assert step.segment.used == 1
    assert not isinstance(slabs.plan("one", 2 * PAGE, 0, {step.segment.segment_id}), NoRoom)
    free(3, 4)
    step = slabs.plan("one", 2 * PAGE, 0)
    assert isinstance(step, Reclaim)
    assert step.segment.used == 0
    slabs.drain(step.segment)
    slabs.retire(step.segment)
    slabs.retired(step.segment)
    assert slabs.plan("one", 2 * PAGE, 0) == Create(1)
    assert slabs.plan("one", 17 * PAGE, 0) is NoRoom.NEVER
    audit(slabs, places)


def test_retiring_a_segment_in_use_is_refused() -> None:
    slabs = Slabs(16 * PAGE)
    segment = slabs.begin_segment("one", PAGE, 4)
    slabs.activate(segment)
    assert slabs.take("one", PAGE, 0) is not None
    with pytest.raises(ValueError, match="in use"):
        slabs.retire(segment)
    slabs.drain(segment)
    with pytest.raises(ValueError, match="in use"):
        slabs.retire(segment)


def test_segments_grow_with_their_class() -> None:
    """A namespace that holds little takes little; no segment passes its share of the cap."""
    slabs = Slabs(1 << 30)
    sizes = []
    while isinstance(step := slabs.plan("one", 64 * KIB, 0), Create):
        sizes.append(slabs.begin_segment("one", 64 * KIB, step.slots).size_bytes)
    assert sizes[0] == (1 << 30) // 2048
    assert max(sizes) == (1 << 30) // 128
    assert sum(sizes) == 1 << 30
    assert len(sizes) < 128 + 64
    wanted = Slabs(1 << 30).plan("one", 64 * KIB, 4 * MIB)
    assert wanted == Create(64), "a call that says what it needs gets it in one"


def test_a_cap_below_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="less than a page"):
        Slabs(4095)


@pytest.mark.parametrize("hugepages", [False, True])
def test_a_segment_is_aligned_and_no_larger_than_asked(hugepages: bool) -> None:
    size_bytes = 4 * MIB + 3 * PAGE
    segment = Segment(size_bytes, hugepages)
    huge_bytes = segment.populate(0, size_bytes)
    segment.finish()
    held = os.fstat(segment.fd)
    assert held.st_size == held.st_blocks * 512 == size_bytes
    assert segment.address % (2 * MIB if hugepages else PAGE) == 0
    assert len(segment.memory) == size_bytes
    assert not any(segment.memory)
    segment.memory[-1] = 7
    assert os.pread(segment.fd, 1, size_bytes - 1) == b"\x07"
    assert huge_bytes <= huge_bytes_of(segment)
    assert hugepages or not huge_bytes
    assert segment.close()


async def test_mode_and_huge_bytes_say_what_was_had() -> None:
    for hugepages in (False, True):
        tier = RamTier(1024 * MIB, hugepages=hugepages)
        assert tier.mode == "closed"
        await tier.open()
        (place,) = await tier.reserve("default", [8 * MIB])
        assert isinstance(place, int)
        segment = tier._growth.memory[tier.locate(place).segment_id]
        assert tier.huge_bytes <= huge_bytes_of(segment)
        assert tier.mode in ("memfd", "memfd_huge")
        assert (tier.mode == "memfd_huge") >= (tier.huge_bytes > 0)
        del segment
        await tier.close()


def test_small_pages_serve_where_huge_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MADV_COLLAPSE", 9999)
    segment = Segment(4 * MIB, hugepages=True)
    assert segment.populate(0, 4 * MIB) == huge_bytes_of(segment) == 0
    segment.finish()
    assert os.fstat(segment.fd).st_blocks * 512 == 4 * MIB
    assert segment.close()


def huge_bytes_of(segment: Segment) -> int:
    """Bytes in huge pages, by the kernel's account; the segment may lie in several maps."""
    held_bytes, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = (
                segment.address
                <= int(line.split("-")[0], 16)
                < segment.address + len(segment.memory)
            )
        elif inside and line.startswith("ShmemPmdMapped:"):
            held_bytes += int(line.split()[1]) * KIB
    return held_bytes


def test_pages_are_touched_where_the_kernel_cannot_populate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "MADV_POPULATE_WRITE", 9999)
    segment = Segment(64 * PAGE, hugepages=False)
    assert os.fstat(segment.fd).st_blocks == 0
    segment.populate(0, 64 * PAGE)
    assert os.fstat(segment.fd).st_blocks * 512 == 64 * PAGE
    segment.finish()
    assert segment.close()
