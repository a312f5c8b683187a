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
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pytest
import xxhash

from kvstored.tiers.base import (
    ALIGNMENT_BYTES,
    PIECE_BYTES,
    NoRoom,
    ObjectMeta,
    ObjectRead,
    ObjectWrite,
    ReadOutcome,
    Recovered,
    Tier,
    WriteOutcome,
    padded_bytes,
)

KIB = 1 << 10
MIB = 1 << 20

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


@dataclass(frozen=True)
class Sample:
    """An object as a client would offer it: what is known of it, and its padded bytes."""

    meta: ObjectMeta
    payload: memoryview

    @property
    def data(self) -> bytes:
        return bytes(self.payload[: self.meta.length_bytes])


def aligned_buffer(length_bytes: int, fill: int = 0) -> memoryview:
    """Page-aligned writable memory of the padded length."""
    view = memoryview(mmap.mmap(-1, padded_bytes(length_bytes)))
    if fill:
        np.frombuffer(view, np.uint8)[:] = fill
    return view


def make_sample(
    length_bytes: int, seed: int, *, namespace: str = "default", part: str = "kv"
) -> Sample:
    """An incompressible object; everything about it follows from the arguments."""
    rng = np.random.default_rng([seed, length_bytes])
    payload = aligned_buffer(length_bytes)
    np.frombuffer(payload, np.uint8)[:length_bytes] = rng.integers(
        0, 256, length_bytes, dtype=np.uint8
    )
    data = payload[:length_bytes]
    pieces = b"".join(
        xxhash.xxh3_64_intdigest(data[at : at + PIECE_BYTES]).to_bytes(8, "little")
        for at in range(0, length_bytes, PIECE_BYTES)
    )
    meta = ObjectMeta(
        namespace=namespace,
        family=bytes([seed % 3]) * 32,
        key=rng.bytes(32),
        part=part,
        tenant=f"tenant-{seed % 5}",
        parent=rng.bytes(32) if seed % 4 else b"",
        depth=seed % 1000,
        end_token=64 * (seed % 1000 + 1),
        expires_ms=0 if seed % 2 else 4_000_000_000_000 + seed,
        length_bytes=length_bytes,
        checksum=xxhash.xxh3_128_digest(data),
        piece_checksums=pieces,
    )
    return Sample(meta, payload)


async def reserve_one(tier: Tier, sample: Sample) -> int:
    """A place for the sample; there must be room."""
    (place,) = await tier.reserve(sample.meta.namespace, [sample.meta.length_bytes])
    assert not isinstance(place, NoRoom), place
    return place


async def store(tier: Tier, samples: Sequence[Sample]) -> list[int]:
    """Reserve and write; everything must go well."""
    places = [await reserve_one(tier, sample) for sample in samples]
    items = [
        ObjectWrite(place, sample.meta, sample.payload)
        for place, sample in zip(places, samples, strict=True)
    ]
    assert await tier.write(items) == [WriteOutcome.OK] * len(items)
    return places


def want(place: int, sample: Sample) -> ObjectRead:
    """A read of the sample at the place, into fresh memory full of 0xAA."""
    meta = sample.meta
    into = aligned_buffer(meta.length_bytes, fill=0xAA)
    return ObjectRead(place, meta.key, meta.part, meta.length_bytes, meta.checksum, into)


class Arrivals:
    """Collects what `read` tells of its items, with the bytes as they are at that moment."""

    def __init__(self, items: Sequence[ObjectRead]) -> None:
        self.items = items
        self.found: dict[int, tuple[ReadOutcome, bytes, bytes]] = {}

    def __call__(self, i: int, outcome: ReadOutcome, pieces: bytes) -> None:
        assert i not in self.found, "once only"
        self.found[i] = (outcome, pieces, bytes(self.items[i].into))


async def assert_holds(tier: Tier, place: int, sample: Sample) -> None:
    """The place gives back exactly the sample, and zeros behind its end."""
    item = want(place, sample)
    assert await tier.read([item]) == [ReadOutcome.OK]
    length = sample.meta.length_bytes
    assert item.into[:length] == sample.payload[:length]
    assert not any(item.into[length:]), "padding must be zero after a good read"


async def read_outcome(tier: Tier, item: ObjectRead) -> ReadOutcome:
    (outcome,) = await tier.read([item])
    return outcome


def assert_within_cap(tier: Tier) -> None:
    usage = tier.usage()
    assert usage.charged_bytes <= usage.cap_bytes
    assert usage.footprint_bytes <= usage.cap_bytes


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
        model = _Model(random.Random(seed), tier)
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


def assert_row(recovered: Recovered, row: int, meta: ObjectMeta) -> None:
    """Row of the recovered columns says what `meta` says (checksums of pieces apart)."""
    assert recovered.namespaces[recovered.namespace_id[row]] == meta.namespace
    assert recovered.families[recovered.family_id[row]] == meta.family
    assert recovered.parts[recovered.part_id[row]] == meta.part
    assert recovered.tenants[recovered.tenant_id[row]] == meta.tenant
    assert recovered.keys[row].tobytes() == meta.key
    assert recovered.parents[row].tobytes() == (meta.parent or bytes(32))
    assert recovered.checksums[row].tobytes() == meta.checksum
    assert int(recovered.depth[row]) == meta.depth
    assert int(recovered.end_token[row]) == meta.end_token
    assert int(recovered.expires_ms[row]) == meta.expires_ms
    assert int(recovered.length_bytes[row]) == meta.length_bytes


class _Model:
    """A tier and the dict it must equal, driven by random operations."""

    lengths = (4 * KIB, 5000, 30_000, 64 * KIB, 64 * KIB + 1, 200_000, MIB, MIB + 3, 2 * MIB)

    def __init__(self, rng: random.Random, tier: Tier) -> None:
        self.rng = rng
        self.tier = tier
        self.held: dict[int, Sample] = {}
        self.reserved: dict[int, int] = {}
        self.seed = 0

    def restarted(self, tier: Tier, recovered: Recovered) -> None:
        self.tier = tier
        self.reserved = {}
        assert sorted(self.held) == sorted(int(p) for p in recovered.place)
        for row, place in enumerate(recovered.place):
            assert_row(recovered, row, self.held[int(place)].meta)

    async def step(self) -> None:
        action = self.rng.choices(
            [self.put, self.read, self.drop, self.hold, self.let_go, self.crowd],
            [5, 4, 3, 1, 1, 0.3],
        )[0]
        await action()
        usage = self.tier.usage()
        charge = self.tier.charge_bytes
        expected = sum(charge(s.meta.length_bytes) for s in self.held.values())
        expected += sum(charge(length) for length in self.reserved.values())
        assert usage.charged_bytes == expected
        assert usage.objects == len(self.held)
        assert_within_cap(self.tier)

    async def put(self) -> None:
        count = self.rng.randint(1, 4)
        samples = []
        for _ in range(count):
            self.seed += 1
            namespace = self.rng.choice(["a", "b"])
            samples.append(make_sample(self.rng.choice(self.lengths), self.seed))
            samples[-1] = replace(samples[-1], meta=replace(samples[-1].meta, namespace=namespace))
        items: list[ObjectWrite] = []
        for sample in samples:
            (place,) = await self.tier.reserve(sample.meta.namespace, [sample.meta.length_bytes])
            if isinstance(place, NoRoom):
                assert place is NoRoom.TIER
                continue
            assert place not in self.held
            assert place not in self.reserved
            items.append(ObjectWrite(place, sample.meta, sample.payload))
        assert await self.tier.write(items) == [WriteOutcome.OK] * len(items)
        for item in items:
            self.held[item.place] = Sample(item.meta, item.payload)

    async def read(self) -> None:
        for place in self.rng.sample(sorted(self.held), min(3, len(self.held))):
            await assert_holds(self.tier, place, self.held[place])

    async def drop(self) -> None:
        places = self.rng.sample(sorted(self.held), min(self.rng.randint(1, 4), len(self.held)))
        await self.tier.delete(places)
        for place in places:
            del self.held[place]

    async def hold(self) -> None:
        length = self.rng.choice(self.lengths)
        (place,) = await self.tier.reserve("a", [length])
        if not isinstance(place, NoRoom):
            assert place not in self.held
            assert place not in self.reserved
            self.reserved[place] = length

    async def let_go(self) -> None:
        self.tier.cancel(list(self.reserved))
        self.reserved.clear()

    async def crowd(self) -> None:
        """Nearly everything goes, so that memory of one object size serves another."""
        places = self.rng.sample(sorted(self.held), len(self.held) * 4 // 5)
        await self.tier.delete(places)
        for place in places:
            del self.held[place]

    async def check_all(self) -> None:
        places = sorted(self.held)
        reads = [want(place, self.held[place]) for place in places]
        assert await self.tier.read(reads) == [ReadOutcome.OK] * len(reads)
        for place, read in zip(places, reads, strict=True):
            assert read.into[: read.length_bytes] == self.held[place].payload[: read.length_bytes]


assert ALIGNMENT_BYTES == mmap.PAGESIZE, "aligned_buffer relies on it"
