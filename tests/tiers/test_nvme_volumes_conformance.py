"""The NVMe tier over one, two and four volumes does what every tier must do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tiers.conformance import KIB, MIB, MakeTier, TierConformance

from kvstored.io.base import Files
from kvstored.tiers.base import Recovered, Tier
from kvstored.tiers.nvme.member import VolumeSpec
from kvstored.tiers.nvme.tier import NvmeTier
from kvstored.tiers.nvme.volume_tier import VolumeTier


def make_volume(spec: VolumeSpec, files: Files) -> VolumeTier:
    return VolumeTier(
        spec.directory, spec.cap_bytes, files=files, region_bytes=4 * MIB, walk_timeout_s=20
    )


class TestNvmeVolumesConformance(TierConformance):
    """Lengths are fewer than for a VolumeTier, which has them all."""

    model_steps = 24

    @pytest.mark.parametrize("length", [4 * KIB, 64 * KIB + 1, 3 * MIB + 4097])
    async def test_round_trip_and_exact_accounting(self, make_tier: MakeTier, length: int) -> None:
        await super().test_round_trip_and_exact_accounting(make_tier, length)

    @pytest.mark.parametrize("length", [4 * KIB, MIB + 5])
    async def test_wrong_expectation_is_corrupt(self, make_tier: MakeTier, length: int) -> None:
        await super().test_wrong_expectation_is_corrupt(make_tier, length)

    @pytest.mark.parametrize("seed", [1])
    async def test_against_a_dict(self, make_tier: MakeTier, seed: int) -> None:
        await super().test_against_a_dict(make_tier, seed)

    @pytest.fixture(params=[1, 2, 4])
    async def make_tier(
        self, tmp_path: Path, request: pytest.FixtureRequest
    ) -> AsyncIterator[MakeTier]:
        made: list[NvmeTier] = []
        count = int(request.param)

        async def make(
            *, cap_bytes: int = 64 * MIB, namespace_cap_bytes: int | None = None
        ) -> tuple[Tier, Recovered]:
            tier = NvmeTier(
                [
                    VolumeSpec(f"v{i}", tmp_path / f"v{i}", max(cap_bytes // count, 24 * MIB))
                    for i in range(count)
                ],
                tmp_path / "registry",
                None if namespace_cap_bytes is None else lambda _: namespace_cap_bytes,
                make=make_volume,
            )
            made.append(tier)
            return tier, await tier.open()

        yield make
        for tier in made:
            await tier.close()
