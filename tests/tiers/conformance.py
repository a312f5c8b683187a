"""What every tier must do. A tier's tests inherit `TierConformance` and give it `make_tier`.

    class TestRamConformance(TierConformance):
        @pytest.fixture
        async def make_tier(self) -> AsyncIterator[MakeTier]: ...

The factory opens a tier of `cap_bytes` (over the same directory each time, where it is persistent:
closing one and making another is a restart) and hands out `namespace_cap_bytes` to each namespace.
"""

from __future__ import annotations

import asyncio
import mmap
import random
from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol

import numpy as np
import pytest
from tiers.conformance_model import Model, assert_row
from tiers.samples import (
    KIB,
    MIB,
    Arrivals,
    Sample,
    aligned_buffer,
    assert_holds,
    assert_within_cap,
    make_sample,
    read_outcome,
    reserve_one,
    store,
    want,
)

from kvstored.tiers.base import (
    ALIGNMENT_BYTES,
    NoRoom,
    ObjectWrite,
    ReadOutcome,
    Recovered,
    Tier,
    WriteOutcome,
)

__all__ = [
    "BORDER_LENGTHS",
    "KIB",
    "MIB",
    "Arrivals",
    "MakeTier",
    "Sample",
    "TierConformance",
    "aligned_buffer",
    "assert_holds",
    "assert_within_cap",
    "make_sample",
    "read_outcome",
    "reserve_one",
    "store",
    "want",
]

BORDER_LENGTHS = (
    4 * KIB,
    4 * KIB + 1,
    12_345,
    64 * KIB - 1,
    64 * KIB,
    64 * KIB + 1,
    100_000,
    MIB - 1,
    MIB,
    MIB + 1,
    3 * MIB + 4097,
)


class MakeTier(Protocol):
    """Opens a tier; also says what it recovered."""

    def __call__(
        self, *, cap_bytes: int = 64 * MIB, namespace_cap_bytes: int | None = None
    ) -> Awaitable[tuple[Tier, Recovered]]: ...


class TierConformance:
    """Inherit, and provide the fixture `make_tier`."""

    fill_bytes = MIB
    """Object size used to fill the tier."""

    model_steps = 250
    """Operations in the comparison with a dict."""

    async def test_starts_empty(self, make_tier: MakeTier) -> None:
        tier, recovered = await make_tier()
        usage = tier.usage()
        assert (usage.objects, usage.charged_bytes) == (0, 0)
        assert len(recovered.place) == 0
        assert tier.health == "ok"
        assert tier.mode
        assert_within_cap(tier)

    @pytest.mark.parametrize("length", BORDER_LENGTHS)
    async def test_round_trip_and_exact_accounting(self, make_tier: MakeTier, length: int) -> None:
        tier, _ = await make_tier()
        sample = make_sample(length, seed=length)
        charge = tier.charge_bytes(length)
        assert charge >= length
        place = await reserve_one(tier, sample)
        assert tier.usage().charged_bytes == charge, "charged from the reservation on"
        outcome = await tier.write([ObjectWrite(place, sample.meta, sample.payload)])
        assert outcome == [WriteOutcome.OK]
        assert (tier.usage().charged_bytes, tier.usage().objects) == (charge, 1)
        await assert_holds(tier, place, sample)
        assert_within_cap(tier)
        await tier.delete([place])
        assert (tier.usage().charged_bytes, tier.usage().objects) == (0, 0)

    async def test_mixed_sizes_in_one_call(self, make_tier: MakeTier) -> None:
        tier, _ = await make_tier()
        samples = [make_sample(length, seed=i) for i, length in enumerate(BORDER_LENGTHS)]
        places = await tier.reserve("default", [s.meta.length_bytes for s in samples])
        assert len(set(places)) == len(samples), "places are distinct"
        items = []
        for place, sample in zip(places, samples, strict=True):
            assert not isinstance(place, NoRoom)
            items.append(ObjectWrite(place, sample.meta, sample.payload))
        assert await tier.write(items) == [WriteOutcome.OK] * len(items)
        reads = [want(w.place, s) for w, s in zip(items, samples, strict=True)]
        assert await tier.read(reads) == [ReadOutcome.OK] * len(reads)
        for read, sample in zip(reads, samples, strict=True):
            assert read.into[: read.length_bytes] == sample.payload[: read.length_bytes]
        assert tier.usage().charged_bytes == sum(
            tier.charge_bytes(s.meta.length_bytes) for s in samples
        )

    async def test_cancelled_reservation_is_room_again(self, make_tier: MakeTier) -> None:
        tier, _ = await make_tier()
        places = await self.fill(tier)
        assert places
        tier.cancel(places)
        assert tier.usage().charged_bytes == 0
        again = await self.fill(tier)
        assert len(again) == len(places)

    async def fill(self, tier: Tier, namespace: str = "default") -> list[int]:
        """Reserve until TIER says no; the reserved places."""
        places: list[int] = []
        while True:
            (place,) = await tier.reserve(namespace, [self.fill_bytes])
            if isinstance(place, NoRoom):
                assert place is NoRoom.TIER
                return places
            places.append(place)
            assert_within_cap(tier)

    async def test_cap_is_hard_and_delete_gives_room(self, make_tier: MakeTier) -> None:
        tier, _ = await make_tier()
        samples: list[Sample] = []
        places: list[int] = []
        for seed in range(10_000):
            sample = make_sample(self.fill_bytes, seed)
            (place,) = await tier.reserve("default", [self.fill_bytes])
            if isinstance(place, NoRoom):
                break
            await tier.write([ObjectWrite(place, sample.meta, sample.payload)])
            places.append(place)
            samples.append(sample)
        assert place is NoRoom.TIER
        assert_within_cap(tier)
        assert len(places) * self.fill_bytes >= tier.usage().cap_bytes // 2, "the cap is usable"
        await tier.delete(places[:2])
        fresh = [make_sample(self.fill_bytes, 20_000 + i) for i in range(2)]
        new = await store(tier, fresh)
        (place,) = await tier.reserve("default", [self.fill_bytes])
        assert place is NoRoom.TIER
        for where, sample in zip(places[2:] + new, samples[2:] + fresh, strict=True):
            await assert_holds(tier, where, sample)

    async def test_first_refusal_ends_the_call(self, make_tier: MakeTier) -> None:
        tier, _ = await make_tier()
        places = await self.fill(tier)
        tier.cancel(places[:2])
        answers = await tier.reserve("default", [self.fill_bytes] * 4)
        assert [isinstance(a, NoRoom) for a in answers] == [False, False, True, True]
        assert answers[2:] == [NoRoom.TIER] * 2

    async def test_never_for_what_cannot_fit(self, make_tier: MakeTier) -> None:
        tier, _ = await make_tier()
        cap = tier.usage().cap_bytes
        answers = await tier.reserve("default", [4 * KIB, cap + 1, 4 * KIB])
        assert not isinstance(answers[0], NoRoom)
        assert answers[1:] == [NoRoom.NEVER] * 2
        assert tier.usage().charged_bytes == tier.charge_bytes(4 * KIB)

    async def test_namespace_cap(self, make_tier: MakeTier) -> None:
        tier, _ = await make_tier(namespace_cap_bytes=8 * MIB)
        assert await tier.reserve("a", [9 * MIB]) == [NoRoom.NEVER]
        answers = await tier.reserve("a", [MIB] * 9)
        kept = [a for a in answers if not isinstance(a, NoRoom)]
        assert answers[len(kept)] is NoRoom.NAMESPACE
        assert tier.usage().charged_bytes <= 8 * MIB
        (other,) = await tier.reserve("b", [MIB])
        assert not isinstance(other, NoRoom), "another namespace is not disturbed"
        tier.cancel(kept)
        assert not isinstance((await tier.reserve("a", [MIB]))[0], NoRoom)

    @pytest.mark.parametrize("length", [4 * KIB, 64 * KIB, 64 * KIB + 1, MIB + 5])
    async def test_wrong_expectation_is_corrupt(self, make_tier: MakeTier, length: int) -> None:
        tier, _ = await make_tier()
        sample = make_sample(length, 1)
        (place,) = await store(tier, [sample])
        item = want(place, sample)
        wrong = [
            replace(item, checksum=bytes(16)),
            replace(item, key=bytes(32)),
            replace(item, length_bytes=length - 1),
            replace(item, part="kv2"),
        ]
        for bad in wrong:
            assert await read_outcome(tier, bad) is ReadOutcome.CORRUPT
        await assert_holds(tier, place, sample)

    @pytest.mark.parametrize("length", [4 * KIB, MIB])
    async def test_deleted_and_cancelled_places_do_not_read(
        self, make_tier: MakeTier, length: int
    ) -> None:
        tier, _ = await make_tier()
        gone, kept = make_sample(length, 1), make_sample(length, 2)
        place_gone, place_kept = await store(tier, [gone, kept])
        await tier.delete([place_gone])
        assert await read_outcome(tier, want(place_gone, gone)) is not ReadOutcome.OK
        await assert_holds(tier, place_kept, kept)
        reserved = await reserve_one(tier, gone)
        assert await read_outcome(tier, want(reserved, gone)) is not ReadOutcome.OK
        tier.cancel([reserved])
        assert await read_outcome(tier, want(reserved, gone)) is not ReadOutcome.OK

    async def test_reused_place_is_not_the_old_object(self, make_tier: MakeTier) -> None:
        tier, _ = await make_tier()
        places = await self.fill(tier)
        tier.cancel(places[1:])
        tier.cancel(places[:1])
        old, new = make_sample(self.fill_bytes, 1), make_sample(self.fill_bytes, 2)
        (place,) = await store(tier, [old])
        await tier.delete([place])
        for _ in range(len(places)):
            (again,) = await store(tier, [new])
            assert await read_outcome(tier, want(again, old)) is not ReadOutcome.OK
            await assert_holds(tier, again, new)
            if again == place:
                break
            new = make_sample(self.fill_bytes, again % 1000 + 3)

    async def test_delete_waits_for_readers(self, make_tier: MakeTier) -> None:
        tier, _ = await make_tier()
        samples = [make_sample(MIB, i) for i in range(16)]
        places = await store(tier, samples)
        reads = [want(p, s) for p, s in zip(places, samples, strict=True)]
        reading = asyncio.ensure_future(tier.read(reads))
        await asyncio.sleep(0)  # the read is under way
        await tier.delete(places)
        outcomes = await reading
        for read, sample, outcome in zip(reads, samples, outcomes, strict=True):
            if outcome is ReadOutcome.OK:
                assert read.into[: read.length_bytes] == sample.payload[: read.length_bytes]
        assert tier.usage().charged_bytes == 0

    async def test_each_item_arrives_once_before_the_read_returns(
        self, make_tier: MakeTier
    ) -> None:
        tier, _ = await make_tier()
        samples = [make_sample(length, seed=i) for i, length in enumerate(BORDER_LENGTHS)]
        places = await store(tier, samples)
        await tier.delete(places[3:4])
        reads = [want(p, s) for p, s in zip(places, samples, strict=True)]
        reads[1] = replace(reads[1], key=bytes(32))
        seen = Arrivals(reads)
        outcomes = await tier.read(reads, seen)
        assert sorted(seen.found) == list(range(len(reads))), "each of them, and no more later"
        assert outcomes == [seen.found[i][0] for i in range(len(reads))]
        assert [i for i, o in enumerate(outcomes) if o is not ReadOutcome.OK] == [1, 3]
        for i, (outcome, pieces, data) in seen.found.items():
            if outcome is ReadOutcome.OK:
                assert pieces == samples[i].meta.piece_checksums
                assert data == bytes(samples[i].payload), "all is there, padding too"
            else:
                assert pieces == b""

    async def test_items_of_a_cancelled_read_arrive_too(self, make_tier: MakeTier) -> None:
        tier, _ = await make_tier()
        samples = [make_sample(MIB, i) for i in range(16)]
        places = await store(tier, samples)
        for turns in range(4):
            reads = [want(p, s) for p, s in zip(places, samples, strict=True)]
            seen = Arrivals(reads)
            task = asyncio.ensure_future(tier.read(reads, seen))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert turns == 0 or sorted(seen.found) == list(range(16))
            for i, (outcome, _, data) in seen.found.items():
                assert outcome is not ReadOutcome.CORRUPT
                if outcome is ReadOutcome.OK:
                    assert data == samples[i].data

    async def test_cancelled_read_leaves_buffers_alone(self, make_tier: MakeTier) -> None:
        tier, _ = await make_tier()
        samples = [make_sample(MIB, i) for i in range(16)]
        places = await store(tier, samples)
        for turns in range(4):
            reads = [want(p, s) for p, s in zip(places, samples, strict=True)]
            task = asyncio.ensure_future(tier.read(reads))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for read in reads:
                np.frombuffer(read.into, np.uint8)[:] = 0x5A
            for place, sample in zip(places[:2], samples[:2], strict=True):
                await assert_holds(tier, place, sample)
            for read in reads:
                assert np.all(np.frombuffer(read.into, np.uint8) == 0x5A)

    async def test_cancelled_write_leaves_accounts_right(self, make_tier: MakeTier) -> None:
        tier, _ = await make_tier()
        samples = [make_sample(MIB, i) for i in range(4)]
        places = [await reserve_one(tier, s) for s in samples]
        items = [ObjectWrite(p, s.meta, s.payload) for p, s in zip(places, samples, strict=True)]
        task = asyncio.ensure_future(tier.write(items))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        usage = tier.usage()
        assert usage.objects == 4, "the write was finished, not cut short"
        for place, sample in zip(places, samples, strict=True):
            await assert_holds(tier, place, sample)

    @pytest.mark.parametrize("seed", [1, 2])
    async def test_against_a_dict(self, make_tier: MakeTier, seed: int) -> None:
        tier, _ = await make_tier()
        model = Model(random.Random(seed), tier)
        for _ in range(self.model_steps):
            await model.step()
        await model.check_all()
        if not tier.persistent:
            return
        await tier.close()
        tier, recovered = await make_tier()
        model.restarted(tier, recovered)
        await model.check_all()
        for _ in range(self.model_steps // 2):
            await model.step()
        await model.check_all()

    async def test_restart_knows_everything(self, make_tier: MakeTier) -> None:
        tier, _ = await make_tier()
        if not tier.persistent:
            pytest.skip("this tier forgets")
        samples = [
            make_sample(length, seed=i, namespace=f"ns{i % 2}", part=f"part-{i % 3}")
            for i, length in enumerate(BORDER_LENGTHS)
        ]
        places = await store(tier, samples)
        await tier.remember_family("ns0", b"\x01" * 32, b"a family spec")
        await tier.delete(places[:1])
        before = tier.usage()
        await tier.close()
        tier, recovered = await make_tier()
        assert tier.usage() == before, "usage is right before the first request"
        assert recovered.dropped == {}
        assert recovered.family_specs == {("ns0", b"\x01" * 32): b"a family spec"}
        rows = {int(place): row for row, place in enumerate(recovered.place)}
        assert sorted(rows) == sorted(places[1:])
        for place, sample in zip(places[1:], samples[1:], strict=True):
            assert_row(recovered, rows[place], sample.meta)
            await assert_holds(tier, place, sample)
        sequence = [int(recovered.sequence[rows[place]]) for place in places[1:]]
        assert len(set(sequence)) == len(sequence)

    async def test_cap_holds_after_restart(self, make_tier: MakeTier) -> None:
        tier, _ = await make_tier()
        if not tier.persistent:
            pytest.skip("this tier forgets")
        reserved = await self.fill(tier)
        tier.cancel(reserved)
        await store(tier, [make_sample(self.fill_bytes, i) for i in range(len(reserved))])
        await tier.close()
        tier, recovered = await make_tier()
        assert len(recovered.place) == len(reserved)
        assert await tier.reserve("default", [self.fill_bytes]) == [NoRoom.TIER]
        assert_within_cap(tier)
        await tier.delete([int(recovered.place[0])])
        assert not isinstance((await tier.reserve("default", [self.fill_bytes]))[0], NoRoom)

    async def test_namespace_cap_holds_after_restart(self, make_tier: MakeTier) -> None:
        tier, _ = await make_tier(namespace_cap_bytes=4 * MIB)
        if not tier.persistent:
            pytest.skip("this tier forgets")
        answers = await tier.reserve("a", [MIB] * 5)
        kept = [a for a in answers if not isinstance(a, NoRoom)]
        tier.cancel(kept)
        await store(tier, [make_sample(MIB, i, namespace="a") for i in range(len(kept))])
        await tier.close()
        tier, _ = await make_tier(namespace_cap_bytes=4 * MIB)
        assert await tier.reserve("a", [MIB]) == [NoRoom.NAMESPACE]
        assert not isinstance((await tier.reserve("b", [MIB]))[0], NoRoom)


assert ALIGNMENT_BYTES == mmap.PAGESIZE, "aligned_buffer relies on it"
