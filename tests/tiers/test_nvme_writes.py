"""Writing a prefix: where it lies, in how many transfers, syncs and commits, and what fails."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers.conformance import KIB, MIB, Sample, assert_holds, make_sample, reserve_one, store
from tiers.nvme_helpers import keys, make_tier, reopen
from tiers.nvme_volumes_helpers import until
from tiers.test_nvme_faults import Gate

from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault, FaultyFiles
from kvstored.tiers.base import NoRoom, ObjectWrite, WriteOutcome
from kvstored.tiers.nvme import committer
from kvstored.tiers.nvme.extents import MOST_BUFFERS, SlotImage, plan, transfer_bytes
from kvstored.tiers.nvme.format import RegionEntry, RegionState, region_of, slot_of
from kvstored.tiers.nvme.header import HEADER_BYTES
from kvstored.tiers.nvme.slots import SlotTable
from kvstored.tiers.nvme.volume_tier import VolumeTier

LENGTH = 100_000
"""Of which a region holds 19; its slot has no gap behind the payload."""


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles(RealFiles())


@pytest.fixture
async def tier(tmp_path: Path, files: FaultyFiles) -> AsyncIterator[VolumeTier]:
    made = make_tier(tmp_path / "volume", files)
    await made.open()
    yield made
    files.clear()
    await made.close()


def samples_of(count: int, length: int = LENGTH, first: int = 0) -> list[Sample]:
    return [make_sample(length, first + i) for i in range(count)]


async def put(tier: VolumeTier, samples: Sequence[Sample]) -> list[int]:
    """Reserve for all of them at once, and write."""
    places = []
    for place in await tier.reserve("default", [s.meta.length_bytes for s in samples]):
        assert not isinstance(place, NoRoom), place
        places.append(place)
    items = [ObjectWrite(p, s.meta, s.payload) for p, s in zip(places, samples, strict=True)]
    assert set(await tier.write(items)) == {WriteOutcome.OK}
    return places


# ---- transfers ----------------------------------------------------------------------------------


@st.composite
def images(draw: st.DrawFn) -> list[SlotImage]:
    """Slots in any order, some side by side, payloads of 1 to 40 blocks."""
    at = 0
    found = []
    for blocks, gap in draw(
        st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0, 0, 0, 1, 7])), max_size=20)
    ):
        header, payload = (memoryview(bytes(n * 4096)) for n in (1, blocks))
        found.append(SlotImage(at, header, payload))
        at += (1 + blocks + gap) * 4096
    draw(st.randoms()).shuffle(found)
    return found


@given(images(), st.integers(1, 30))
def test_transfers_write_every_byte_once(found: list[SlotImage], most_blocks: int) -> None:
    most = most_blocks * 4096
    extents = plan(found, most)
    wanted = {}
    for image in found:
        wanted[image.offset_bytes] = image.header
        wanted[image.offset_bytes + HEADER_BYTES] = image.payload
    covered: dict[int, int] = {}
    for extent in extents:
        assert extent.nbytes == sum(map(len, extent.buffers)) <= most + HEADER_BYTES
        assert len(extent.buffers) <= MOST_BUFFERS
        at = extent.offset_bytes
        for buffer in extent.buffers:
            start = max(offset for offset in wanted if offset <= at)
            assert buffer.obj is wanted[start].obj
            assert at + len(buffer) <= start + len(wanted[start])
            covered[start] = covered.get(start, 0) + len(buffer)
            at += len(buffer)
        inside = [
            row
            for row, image in enumerate(found)
            if image.offset_bytes < extent.end_bytes
            and image.offset_bytes + HEADER_BYTES + len(image.payload) > extent.offset_bytes
        ]
        assert sorted(extent.members) == inside
    assert covered == {start: len(buffer) for start, buffer in wanted.items()}
    assert sorted(i for e in extents for i in e.headers) == list(range(len(found)))


def test_side_by_side_is_one_transfer_and_a_large_object_many() -> None:
    def slot(at: int, length: int) -> SlotImage:
        memory = memoryview(mmap.mmap(-1, HEADER_BYTES + length))
        return SlotImage(at, memory[:HEADER_BYTES], memory[HEADER_BYTES:])

    step = HEADER_BYTES + 64 * KIB
    assert len(plan([slot(i * step, 64 * KIB) for i in range(16)], 2 * MIB)) == 1
    assert len(plan([slot(i * (step + 4096), 64 * KIB) for i in range(16)], 2 * MIB)) == 16
    assert [e.nbytes for e in plan([slot(0, 20 * MIB)], 8 * MIB)] == [
        8 * MIB + HEADER_BYTES,
        8 * MIB,
        4 * MIB,
    ]
    assert transfer_bytes(64 * MIB, 4) == 8 * MIB
    assert transfer_bytes(100, 4) == MIB


# ---- slots --------------------------------------------------------------------------------------


def dedicated(regions: int, slots: int) -> SlotTable:
    size = 4 * MIB // slots // 4096 * 4096
    entries = [RegionEntry(n, RegionState.DEDICATED, size, 1, 1) for n in range(regions)]
    return SlotTable(entries, size * slots)


def test_what_is_asked_for_together_lies_together() -> None:
    table = dedicated(3, 20)
    size = table.regions[0].entry.slot_bytes
    places = table.take(size, 0, 60)
    table.release(places[2:4] + places[25:35] + places[50:55])
    assert table.take(size, 0, 6) == places[25:31], "the only region with six side by side"
    assert table.take(size, 0, 5) == places[50:55], "of the fuller region"
    assert table.take(size, 0, 9) == places[2:4] + places[31:35], "else the fullest's holes"
    assert table.take(size, 0, 1) == []
    table.release(places[2:9] + places[12:16])
    assert table.take(size, 0, 3) == places[12:15], "the smallest run that will do"


@pytest.mark.parametrize("seed", range(5))
def test_no_slot_is_given_to_two(seed: int) -> None:
    rng = random.Random(seed)
    table = dedicated(4, 16)
    size = table.regions[0].entry.slot_bytes
    held: set[int] = set()
    for _ in range(300):
        if rng.random() < 0.55:
            count = rng.randint(1, 12)
            taken = table.take(size, 0, count)
            assert len(taken) == min(count, 64 - len(held)), "as many as there are"
            assert held.isdisjoint(taken)
            assert len(set(taken)) == len(taken)
            held.update(taken)
        elif held:
            gone = rng.sample(sorted(held), rng.randint(1, min(8, len(held))))
            table.release(gone)
            held.difference_update(gone)
        assert sum(region.free for region in table.regions) == 64 - len(held)


# ---- a prefix -----------------------------------------------------------------------------------


async def test_a_prefix_is_written_in_few_transfers_one_sync_and_one_commit(
    tier: VolumeTier, files: FaultyFiles
) -> None:
    await put(tier, samples_of(1))
    before = files.calls.copy()
    samples = samples_of(16, first=1)
    places = await put(tier, samples)
    assert [slot_of(place) for place in places] == list(range(1, 17))
    assert len({region_of(place) for place in places}) == 1
    calls = files.calls - before
    assert calls["pwritev"] <= 2
    assert calls["fdatasync"] == 1
    assert calls["commit"] == 1, "the slots were open already"
    for place, sample in zip(places, samples, strict=True):
        await assert_holds(tier, place, sample)


async def test_writes_that_end_soon_share_a_sync(
    tier: VolumeTier, files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "PATIENCE_S", 10.0)
    await put(tier, samples_of(1))
    before = files.calls.copy()
    async with _stuck_write(tier, files) as gate:
        others = asyncio.ensure_future(put(tier, samples_of(2, first=3)))
        await until(lambda: (files.calls - before)["pwritev"] == 2)
        gate.set()
        await asyncio.gather(others, gate.write)
    assert (files.calls - before)["fdatasync"] == (files.calls - before)["commit"] == 1


async def test_a_write_that_is_stuck_keeps_no_others_waiting(
    tier: VolumeTier, files: FaultyFiles
) -> None:
    await put(tier, samples_of(1))
    async with _stuck_write(tier, files) as gate:
        await put(tier, samples_of(2, first=3))
        assert not gate.write.done()


class _StuckWrite(Gate):
    write: asyncio.Future[list[int]]


@contextlib.asynccontextmanager
async def _stuck_write(tier: VolumeTier, files: FaultyFiles) -> AsyncIterator[_StuckWrite]:
    """A write whose transfer is stuck until the gate is set, at the end of this at the latest."""
    gate = _StuckWrite()
    files.inject(Fault("pwritev", "*/data", stuck=gate, times=1))
    gate.write = asyncio.ensure_future(put(tier, samples_of(2, first=1)))
    try:
        async with asyncio.timeout(10):
            await gate.entered.wait()
        yield gate
    finally:
        gate.set()
    await gate.write


async def test_regions_are_made_ready_before_they_are_needed(
    tmp_path: Path, files: FaultyFiles
) -> None:
    """Where the next region begins, a put needs no table and no commit but its own."""
    tier = make_tier(tmp_path / "volume", files, ahead_bytes=MIB)
    await tier.open()
    first = await put(tier, samples_of(10))
    second = await put(tier, samples_of(9, first=10))
    assert {region_of(place) for place in second} == {region_of(first[0])}
    await until(lambda: not tier.making_ready)
    before = files.calls.copy()
    (place,) = await put(tier, samples_of(1, first=19))
    assert region_of(place) != region_of(first[0])
    calls = files.calls - before
    assert (calls["pwritev"], calls["fdatasync"], calls["commit"]) == (1, 1, 1)
    await tier.close()


async def test_regions_made_ready_are_no_more_than_those_in_use(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "volume", ahead_bytes=512 * MIB)
    await tier.open()
    for seed, length in enumerate((LENGTH, 2 * LENGTH, 3 * LENGTH)):
        await put(tier, samples_of(1, length=length, first=seed))
    await until(lambda: not tier.making_ready)
    free = tier.regions[0] - 6
    assert free > 0
    for seed in range(free):
        await put(tier, samples_of(1, length=(4 + seed) * LENGTH, first=100 + seed))
    await tier.close()


async def test_slots_that_are_used_again_are_open(tier: VolumeTier, files: FaultyFiles) -> None:
    """On a full volume, where every write follows an eviction, opening costs nothing."""
    places = await put(tier, samples_of(19 * 3))
    (region,) = {region_of(place) for place in places[:19]}
    await tier.delete(places[4:14])
    before = files.calls["commit"]
    again = await put(tier, samples_of(10, first=100))
    assert again == places[4:14]
    assert files.calls["commit"] - before == 1
    assert {region_of(place) for place in again} == {region}


async def test_large_and_small_and_odd_lengths_in_one_call(tmp_path: Path) -> None:
    lengths = [MIB + 5, 4 * KIB, LENGTH, 1_900_000, 64 * KIB, LENGTH, 70_001]
    samples = [make_sample(length, seed) for seed, length in enumerate(lengths)]
    tier = make_tier(tmp_path)
    await tier.open()
    places = await put(tier, samples)
    for place, sample in zip(places, samples, strict=True):
        await assert_holds(tier, place, sample)
    await tier.close()
    assert (await reopen(tmp_path, samples)).good == keys(samples)


async def test_one_bad_transfer_fails_what_was_in_it(
    tmp_path: Path, tier: VolumeTier, files: FaultyFiles
) -> None:
    kept = samples_of(2)
    await put(tier, kept)
    lengths = [1_900_000, LENGTH]  # a region each, so that they do not go together
    samples = [make_sample(length, 10 + i) for i, length in enumerate(lengths)]
    places = [p for p in await tier.reserve("default", lengths) if not isinstance(p, NoRoom)]
    files.inject(Fault("pwritev", "*/data", error=errno.EIO, times=1))
    outcomes = await tier.write(
        [ObjectWrite(p, s.meta, s.payload) for p, s in zip(places, samples, strict=True)]
    )
    assert sorted(o.value for o in outcomes) == ["failed", "ok"]
    good = {s.meta.key for s, o in zip(samples, outcomes, strict=True) if o is WriteOutcome.OK}
    await tier.close()
    assert (await reopen(tmp_path / "volume", kept + samples)).good == keys(kept) | good


async def test_a_failed_sync_is_not_forgotten_by_the_next(
    tmp_path: Path, tier: VolumeTier, files: FaultyFiles
) -> None:
    """What another write had brought to the device by then may be lost as well, and the sync of its
    own says nothing of that.
    """
    first, second = make_sample(LENGTH, 1), make_sample(600_000, 2)
    kept = await store(tier, [make_sample(LENGTH, 50), make_sample(600_000, 51)])
    items = [
        ObjectWrite(await reserve_one(tier, sample), sample.meta, sample.payload)
        for sample in (first, second)
    ]
    gate = Gate()
    files.inject(Fault("fdatasync", "*/data", stuck=gate, error=errno.EIO, times=1))
    writing = asyncio.ensure_future(tier.write(items[:1]))
    await gate.entered.wait()
    passed = Gate()
    passed.set()
    files.inject(Fault("pwritev", "*/data", stuck=passed, times=1))
    late = asyncio.ensure_future(tier.write(items[1:]))
    await passed.entered.wait()
    gate.set()
    assert await writing == [WriteOutcome.FAILED]
    assert await late == [WriteOutcome.FAILED]
    assert tier.problems == ("2 regions are abandoned: a sync of them failed",)
    after = await store(tier, [make_sample(LENGTH, 3), make_sample(600_000, 4)])
    assert {region_of(p) for p in after}.isdisjoint({region_of(p) for p in kept})
    await tier.close()
    samples = [make_sample(LENGTH, 50), make_sample(600_000, 51), first, second]
    samples += [make_sample(LENGTH, 3), make_sample(600_000, 4)]
    found = await reopen(tmp_path / "volume", samples)
    assert found.good == keys(samples) - keys([first, second])
    assert not found.corrupt, "nothing of them is in the index"


# ---- figures ------------------------------------------------------------------------------------


async def test_what_is_written_and_what_for(tier: VolumeTier) -> None:
    assert tier.accepted_bytes == 0
    before = tier.written_bytes
    places = await put(tier, samples_of(8, MIB))
    assert tier.accepted_bytes == 8 * MIB
    slots = 8 * (MIB + HEADER_BYTES)
    assert tier.written_bytes - before > slots, "the index is written, too"
    middle = tier.written_bytes
    await tier.delete(places)
    assert tier.written_bytes - middle > 8 * HEADER_BYTES
    assert tier.accepted_bytes == 8 * MIB
