"""The NVMe tier does what every tier must do."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tiers.conformance import (
    BORDER_LENGTHS,
    MakeTier,
    TierConformance,
    assert_holds,
    make_sample,
    store,
)

from kvstored.io.base import RealFiles
from kvstored.tiers.base import Recovered, Tier
from kvstored.tiers.nvme.volume_tier import VolumeTier


class NoDirectFiles(RealFiles):
    """A file system that refuses O_DIRECT."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here", str(path))
        return super().open(path, flags, mode)


class TestNvmeConformance(TierConformance):
    model_steps = 150

    @pytest.fixture
    async def make_tier(self, tmp_path: Path) -> AsyncIterator[MakeTier]:
        made: list[VolumeTier] = []

        async def make(
            *, cap_bytes: int = 64 << 20, namespace_cap_bytes: int | None = None
        ) -> tuple[Tier, Recovered]:
            tier = VolumeTier(
                tmp_path / "volume",
                cap_bytes,
                None if namespace_cap_bytes is None else lambda _: namespace_cap_bytes,
                walk_timeout_s=20,
            )
            made.append(tier)
            return tier, await tier.open()

        yield make
        for tier in made:
            await tier.close()


async def test_works_buffered_and_says_so(tmp_path: Path) -> None:
    tier = VolumeTier(tmp_path / "volume", 64 << 20, files=NoDirectFiles())
    assert tier.mode == "closed"
    await tier.open()
    assert tier.mode == "buffered"
    samples = [make_sample(length, length) for length in BORDER_LENGTHS]
    places = await store(tier, samples)
    await tier.delete(places[:3])
    await tier.close()
    tier = VolumeTier(tmp_path / "volume", 64 << 20)
    assert len((await tier.open()).place) == len(places) - 3
    assert tier.mode == "o_direct"
    for place, sample in zip(places[3:], samples[3:], strict=True):
        await assert_holds(tier, place, sample)
    await tier.close()
