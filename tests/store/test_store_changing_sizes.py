"""Families come and go, and with them the sizes of objects: room stays usable, leaves go first."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from store.support_store import MIB, Client, client, fail_on_death, payload, settle, tokens

from kvstored.io.base import Files
from kvstored.store.store import Store, StoreSettings
from kvstored.supervise import Supervisor
from kvstored.tiers.nvme.member import VolumeSpec
from kvstored.tiers.nvme.slots import STRANDED
from kvstored.tiers.nvme.tier import NvmeTier
from kvstored.tiers.nvme.volume_tier import VolumeTier
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.identity import KVPart
from kvstored_client.proto import kvstore_pb2 as pb

SIZES = (100_000, 230_000, 450_000)
PAYLOADS = {size: payload(size, size) for size in SIZES}


@contextlib.asynccontextmanager
async def small_regions(directory: Path) -> AsyncIterator[tuple[Store, VolumeTier]]:
    """A store over 15 regions of 1 MiB."""
    tier = VolumeTier(directory, 20 * MIB, region_bytes=MIB)
    supervisor = Supervisor(fail_on_death)
    store = Store(RamTier(8 * MIB), tier, StoreSettings(), supervisor)
    await store.open()
    assert len(tier._space.slots.regions) == 15
    try:
        yield store, tier
    finally:
        await store.close(20.0)
        await supervisor.stop()


async def family(store: Store, size: int) -> Client:
    return await client(store, parts=[KVPart(f"kv{size}", nbytes=size)])


def total_bytes(tier: VolumeTier) -> int:
    return len(tier._space.slots.regions) * tier._space.slots.region_bytes


def stranded_bytes(tier: VolumeTier, size: int) -> int:
    """What is free in regions of other sizes."""
    slot = tier.charge_bytes(size)
    regions = [r for r in tier._space.slots.regions if r.slots and r.entry.slot_bytes != slot]
    return sum(r.free * r.entry.slot_bytes for r in regions)


async def put_some(store: Store, to: Client, size: int, chats: int, seed: int) -> None:
    """Chats of three chunks; old ones are used again at random, so that what is evicted lies all
    over the tier.
    """
    rng = random.Random(seed)
    for number in range(chats):
        run = to.run(tokens(3, seed * 1000 + number))
        assert set(await to.put(run, [PAYLOADS[size]] * 3)) == {pb.STORED}
        for _ in range(2):
            store.touch(to.run(tokens(3, seed * 1000 + rng.randrange(number + 1))), 0)
        if number % 4 == 3:
            await settle(store)
    await settle(store)


def all_written(store: Store) -> bool:
    return store.writer is not None and not store.writer.not_written


@pytest.mark.parametrize("order", [(0, 2), (2, 1)])
async def test_room_stays_usable_when_families_change(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    async with small_regions(tmp_path) as (store, tier):
        total = total_bytes(tier)
        first, second = (SIZES[which] for which in order)
        chats = -(-total // (3 * tier.charge_bytes(first)))
        await put_some(store, await family(store, first), first, chats, 1)
        to = await family(store, second)
        peak = 0
        for part in range(8):
            await put_some(store, to, second, -(-chats * first // (8 * second)), 10 + part)
            peak = max(peak, stranded_bytes(tier, second))
        assert all_written(store)
        # What may be stranded, and a region that is being emptied.
        assert peak <= total // STRANDED + tier._space.slots.region_bytes


async def test_two_families_at_a_time_share_the_tier(tmp_path: Path) -> None:
    async with small_regions(tmp_path) as (store, tier):
        small, large = await family(store, SIZES[0]), await family(store, SIZES[2])
        for turn in range(6):
            await put_some(store, small, SIZES[0], 16, 10 + turn)
            await put_some(store, large, SIZES[2], 5, 20 + turn)
            if turn > 2:
                assert tier.usage().charged_bytes >= 0.6 * total_bytes(tier)
        assert all_written(store)
        for to, last in ((small, 15 * 1000 + 15), (large, 25 * 1000 + 4)):
            held = to.store.match(to.run(tokens(3, last)), pb.PREFIX, pb.DEPTH_NODE)
            assert held.chunks == 3, "what came last is there"


async def test_no_region_is_emptied_of_what_somebody_keeps(tmp_path: Path) -> None:
    async with small_regions(tmp_path) as (store, tier):
        old, new = await family(store, SIZES[0]), await family(store, SIZES[2])
        await put_some(store, old, SIZES[0], 40, 1)
        pinned = [old.run(tokens(3, 1000 + number)) for number in range(0, 40, 3)]
        for run in pinned:  # something in every region
            store.pin(run, 60_000)
        await put_some(store, new, SIZES[2], 20, 2)
        for run in pinned:
            assert store.match(run, pb.PREFIX, pb.DEPTH_NODE).chunks == 3
        for run in pinned:
            store.unpin(run)
        await put_some(store, new, SIZES[2], 20, 3)
        assert stranded_bytes(tier, SIZES[2]) <= total_bytes(tier) // STRANDED + MIB


async def test_a_tier_of_several_volumes_is_no_different(tmp_path: Path) -> None:
    def make(spec: VolumeSpec, files: Files) -> VolumeTier:
        return VolumeTier(spec.directory, spec.cap_bytes, files=files, region_bytes=MIB)

    specs = [VolumeSpec(f"v{n}", tmp_path / f"v{n}", 14 * MIB) for n in range(2)]
    tier = NvmeTier(specs, tmp_path / "registry", make=make)
    supervisor = Supervisor(fail_on_death)
    store = Store(RamTier(8 * MIB), tier, StoreSettings(), supervisor)
    await store.open()
    try:
        to = await family(store, SIZES[0])
        await put_some(store, to, SIZES[0], 54, 1)
        # Of every region, and of both volumes, something is used again, and the rest is older.
        for number in range(0, 54, 2):
            store.touch(to.run(tokens(3, 1000 + number)), 0)
        await put_some(store, await family(store, SIZES[2]), SIZES[2], 4, 2)
        volumes = [volume for n in range(2) if (volume := tier.volume(n)) is not None]
        stranded = sum(stranded_bytes(volume, SIZES[2]) for volume in volumes)
        assert stranded <= sum(map(total_bytes, volumes)) // STRANDED + 2 * MIB
        assert all_written(store)
    finally:
        await store.close(20.0)
        await supervisor.stop()
