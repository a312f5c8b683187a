"""Reads of one volume: cut, joined, verified as they return; and what a sick device does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash
from tiers.conformance import MIB, Arrivals, Sample, assert_holds, make_sample, store, want
from tiers.nvme_gates import Gate, RangeFiles

from kvstored.io.faults import Fault, FaultyFiles
from kvstored.tiers.base import ObjectRead, ReadOutcome
from kvstored.tiers.nvme import verify
from kvstored.tiers.nvme.header import HEADER_BYTES
from kvstored.tiers.nvme.volume_tier import VolumeTier

OK, CORRUPT, FAILED, DOWN = (
    ReadOutcome.OK,
    ReadOutcome.CORRUPT,
    ReadOutcome.FAILED,
    ReadOutcome.DOWN,
)


@pytest.fixture
def ranges() -> RangeFiles:
    return RangeFiles()


@pytest.fixture
def files(ranges: RangeFiles) -> FaultyFiles:
    return FaultyFiles(ranges)


@pytest.fixture
async def tier(tmp_path: Path, files: FaultyFiles, ranges: RangeFiles) -> AsyncIterator[VolumeTier]:
    tier = VolumeTier(
        tmp_path, 192 * MIB, files=files, region_bytes=18 * MIB, read_threads=2, walk_timeout_s=20
    )
    await tier.open()
    with ranges.all_opened():
        yield tier
    await tier.close()


def where(tier: VolumeTier, place: int) -> int:
    """Where a slot begins in the data file."""
    entry = tier._space.entry(place)
    assert entry is not None
    return tier._volume.data.offset(entry, place)


def wants(places: Sequence[int], samples: Sequence[Sample]) -> list[ObjectRead]:
    return [want(p, s) for p, s in zip(places, samples, strict=True)]


def check(items: Sequence[ObjectRead], samples: Sequence[Sample]) -> None:
    for item, sample in zip(items, samples, strict=True):
        assert item.into == sample.payload


async def test_no_byte_is_hashed_twice(
    tier: VolumeTier, ranges: RangeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [70_000, 300_000, MIB, MIB, 2 * MIB, 3 * MIB + 5, 9 * MIB + 4097]
    samples = [make_sample(length, i) for i, length in enumerate(lengths)]
    places = await store(tier, samples)
    hashed: list[int] = []
    real = xxhash.xxh3_64_intdigest

    class Counting:
        @staticmethod
        def xxh3_64_intdigest(piece: memoryview) -> int:
            hashed.append(len(piece))
            return real(piece)

    monkeypatch.setattr(verify, "xxhash", Counting)
    ranges.reads.clear()
    items = wants(places, samples)
    assert await tier.read(items) == [OK] * len(items)
    check(items, samples)
    assert sum(hashed) == sum(lengths)
    assert tier.verified_bytes == sum(lengths)
    read = sum(end - begin for begin, end in ranges.reads)
    assert read < sum(lengths) * 1.02, "little but the objects is read"


async def test_a_large_object_is_read_in_parts_and_judged_as_a_whole(
    tier: VolumeTier, ranges: RangeFiles
) -> None:
    sample = make_sample(7 * MIB + 4097, 1)
    (place,) = await store(tier, [sample])
    ranges.reads.clear()
    await assert_holds(tier, place, sample)
    assert len(ranges.reads) == 2
    begin = where(tier, place)
    last = begin + HEADER_BYTES + 7 * MIB
    for at in (begin, begin + HEADER_BYTES + 3 * MIB, last):
        ranges.bad = {at}
        item = want(place, sample)
        assert await tier.read([item]) == [FAILED]
    ranges.bad = set()
    await assert_holds(tier, place, sample)
    for at in (begin + HEADER_BYTES, begin + HEADER_BYTES + 5 * MIB, last + 4096):
        with (tier._volume.directory / "data").open("r+b") as opened:
            opened.seek(at)
            (byte,) = opened.read(1)
            opened.seek(at)
            opened.write(bytes([byte ^ 4]))
        assert await tier.read([want(place, sample)]) == [CORRUPT]
        with (tier._volume.directory / "data").open("r+b") as opened:
            opened.seek(at)
            opened.write(bytes([byte]))
        await assert_holds(tier, place, sample)


async def test_a_large_object_arrives_only_when_all_of_it_is_there(
    tier: VolumeTier, ranges: RangeFiles
) -> None:
    large, other = make_sample(6 * MIB, 1), make_sample(2 * MIB, 2)
    places = await store(tier, [large, other])
    gate = ranges.gates[where(tier, places[0]) + HEADER_BYTES + 3 * MIB] = Gate()
    items = wants(places, [large, other])
    seen = Arrivals(items)
    reading = asyncio.ensure_future(tier.read(items, seen))
    await gate.reached.wait()
    await assert_holds(tier, places[1], other)  # the other thread does all the rest meanwhile
    assert list(seen.found) == [1]
    gate.set()
    assert await reading == [OK, OK]
    check(items, [large, other])


async def test_a_bad_block_costs_one_of_the_objects_that_are_read_together(
    tier: VolumeTier, ranges: RangeFiles
) -> None:
    samples = [make_sample(200_000, i) for i in range(8)]
    places = await store(tier, samples)
    ranges.reads.clear()
    assert await tier.read(wants(places, samples)) == [OK] * 8
    assert len(ranges.reads) < 8, "they are read together"
    ranges.bad = {where(tier, places[3]) + 50_000}
    items = wants(places, samples)
    assert await tier.read(items) == [OK] * 3 + [FAILED] + [OK] * 4
    check(items[4:], samples[4:])
    assert tier.errors["read"] > 0


async def test_short_reads_are_continued(tier: VolumeTier, files: FaultyFiles) -> None:
    samples = [make_sample(length, i) for i, length in enumerate([200_000] * 5 + [5 * MIB])]
    places = await store(tier, samples)
    files.inject(Fault("preadv", "*/data", short=0.4, times=3))
    items = wants(places, samples)
    assert await tier.read(items) == [OK] * 6
    check(items, samples)


async def test_the_same_object_twice_in_one_read(tier: VolumeTier) -> None:
    sample = make_sample(MIB, 1)
    (place,) = await store(tier, [sample])
    items = wants([place, place], [sample, sample])
    assert await tier.read(items) == [OK, OK]
    check(items, [sample, sample])
    await tier.delete([place])


async def test_a_stuck_transfer_holds_up_nothing_else(tier: VolumeTier, ranges: RangeFiles) -> None:
    samples = [make_sample(3 * MIB, i) for i in range(8)]
    places = await store(tier, samples)
    gate = ranges.gates[where(tier, places[2])] = Gate()
    items = wants(places, samples)
    seen = Arrivals(items)
    reading = asyncio.ensure_future(tier.read(items, seen))
    await gate.reached.wait()
    await assert_holds(tier, places[7], samples[7])  # queued behind all of them
    assert sorted(seen.found) == [0, 1, 3, 4, 5, 6, 7]
    assert not reading.done()
    gate.set()
    assert await reading == [OK] * 8


async def test_a_cancelled_read_does_not_wait_for_others(
    tier: VolumeTier, ranges: RangeFiles
) -> None:
    samples = [make_sample(2 * MIB, i) for i in range(4)]
    places = await store(tier, samples)
    gates = [ranges.gates.setdefault(where(tier, p), Gate()) for p in places[:2]]
    stuck = asyncio.ensure_future(tier.read(wants(places[:2], samples[:2])))
    for gate in gates:
        await gate.reached.wait()  # every thread is in the kernel
    items = wants(places[2:], samples[2:])
    seen = Arrivals(items)
    queued = asyncio.ensure_future(tier.read(items, seen))
    await asyncio.sleep(0)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    assert [seen.found[i][0] for i in range(2)] == [FAILED, FAILED]
    assert all(np.all(np.frombuffer(item.into, np.uint8) == 0xAA) for item in items)
    deleting = asyncio.ensure_future(tier.delete(places[2:]))
    await deleting  # no reader is left there
    for gate in gates:
        gate.set()
    assert await stuck == [OK, OK]


async def test_given_up_reads_answer_at_once_and_what_is_stuck_later(
    tier: VolumeTier, ranges: RangeFiles
) -> None:
    samples = [make_sample(2 * MIB, i) for i in range(3)] + [make_sample(6 * MIB, 3)]
    places = await store(tier, samples)
    gates = [
        ranges.gates.setdefault(at, Gate())
        for at in (where(tier, places[0]), where(tier, places[3]))
    ]
    items = wants(places, samples)
    seen = Arrivals(items)
    reading = asyncio.ensure_future(tier.read(items, seen))
    for gate in gates:
        await gate.reached.wait()
    tier.give_up_reads()
    given_up = {i: found[0] for i, found in seen.found.items()}
    for gate in gates:
        gate.set()
    outcomes = await reading
    assert outcomes[0] is OK
    assert outcomes[3] is DOWN, "parts of it were given up"
    assert set(given_up.values()) <= {OK, DOWN}
    assert 3 not in given_up, "its memory is in use"
    ranges.gates.clear()
    for place, sample in zip(places, samples, strict=True):
        await assert_holds(tier, place, sample)


async def test_a_reader_that_raises_harms_nobody_else(
    tier: VolumeTier, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [make_sample(MIB, i) for i in range(4)]
    places = await store(tier, samples)

    def arrived(i: int, outcome: ReadOutcome, pieces: bytes) -> None:
        raise RuntimeError("a bug in a reader")

    assert await tier.read(wants(places, samples), arrived) == [OK] * 4
    assert "could not take an object" in caplog.text
    await tier.delete(places)


async def test_the_rate_is_that_of_a_busy_device(tier: VolumeTier) -> None:
    samples = [make_sample(2 * MIB, i) for i in range(8)]
    places = await store(tier, samples)
    assert tier.read_rate.nbytes == 0
    await tier.read(wants(places, samples))
    rate = tier.read_rate
    assert 0 < rate.nbytes <= 8 * (2 * MIB + HEADER_BYTES)
    assert rate.seconds > 0
