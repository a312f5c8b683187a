"""A tier against a dict: what any sequence of calls may do, and what a restart must know."""

from __future__ import annotations

import random
from dataclasses import replace

from tiers.samples import KIB, MIB, Sample, assert_holds, assert_within_cap, make_sample, want

from kvstored.tiers.base import (
    NoRoom,
    ObjectMeta,
    ObjectWrite,
    ReadOutcome,
    Recovered,
    Tier,
    WriteOutcome,
)


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


class Model:
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
