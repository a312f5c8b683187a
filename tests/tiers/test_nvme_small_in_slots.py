"""Objects of at most 64 KiB beyond what LMDB takes of them: they lie in slots, as all others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiers.conformance import KIB, MIB, Sample, make_sample, store
from tiers.nvme_helpers import REGION_BYTES, keys, make_tier, reopen

from kvstored.fsck.check import Options, check_volume
from kvstored.tiers.base import NoRoom
from kvstored.tiers.nvme.format import is_small
from kvstored.tiers.nvme.layout import MIN_SLOT_BYTES
from kvstored.tiers.nvme.volume_tier import VolumeTier

CAP_BYTES = 20 * MIB


async def fill(tier: VolumeTier, length: int) -> dict[int, Sample]:
    """Put objects of one length until no more are taken; by place."""
    held: dict[int, Sample] = {}
    while True:
        places = await tier.reserve("default", [length] * 50)
        taken = [p for p in places if not isinstance(p, NoRoom)]
        tier.cancel(taken)
        if not taken:
            return held
        samples = [make_sample(length, len(held) + i) for i in range(len(taken))]
        held.update(zip(await store(tier, samples), samples, strict=True))


@pytest.mark.parametrize("length", [20_000, 64 * KIB])
async def test_they_fill_the_volume_and_outlive_a_restart(tmp_path: Path, length: int) -> None:
    tier = make_tier(tmp_path, cap_bytes=CAP_BYTES)
    await tier.open()
    held = await fill(tier, length)
    regions = tier.regions[0]
    in_slots = {place for place in held if not is_small(place)}
    assert len(in_slots) == regions * (REGION_BYTES // MIN_SLOT_BYTES)
    assert len(in_slots) < len(held)
    usage = tier.usage()
    assert usage.footprint_bytes <= usage.cap_bytes == CAP_BYTES
    assert await tier.reserve("default", [length]) == [NoRoom.TIER]
    gone = [p for p in held if is_small(p)][:3] + sorted(in_slots)[::7]
    await tier.delete(gone)
    kept = {place: sample for place, sample in held.items() if place not in gone}
    await tier.close()
    assert check_volume(tmp_path, Options(), lambda _: None).clean
    samples = list(held.values())
    found = await reopen(tmp_path, samples, cap_bytes=CAP_BYTES, full=True)
    assert found.good == keys(list(kept.values()))
    assert set(found.recovered.place.tolist()) == set(kept)
    shutil.rmtree(tmp_path / "index")
    found = await reopen(tmp_path, samples, cap_bytes=CAP_BYTES, full=True)
    assert found.good == keys(list(kept.values())), "headers are enough"


async def test_a_region_of_them_is_given_up_for_others_only_when_it_is_half_empty(
    tmp_path: Path,
) -> None:
    tier = make_tier(tmp_path, cap_bytes=CAP_BYTES)
    await tier.open()
    held = await fill(tier, 20_000)
    assert await tier.reserve("default", [300_000]) == [NoRoom.TIER]
    assert tier.crowded(300_000) == []
    region = min(p >> 32 for p in held if not is_small(p))
    there = [p for p in held if p >> 32 == region]
    await tier.delete(there[: len(there) // 2 + 1])
    assert [r.start >> 32 for r in tier.crowded(300_000)] == [region]
    await tier.delete(there[len(there) // 2 + 1 :])
    await store(tier, [make_sample(300_000, 9_999)])
    await tier.close()
