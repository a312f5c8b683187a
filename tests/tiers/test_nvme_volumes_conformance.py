"""The NVMe tier over one, two and four volumes does what every tier must do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tiers.conformance import KIB, MIB, MakeTier, TierConformance
from tiers.nvme_volumes_helpers import walk_here

from kvstored.io.base import Files
from kvstored.tiers.base import Recovered, Tier
from kvstored.tiers.nvme import walker
from kvstored.tiers.nvme.member import VolumeSpec
from kvstored.tiers.nvme.tier import NvmeTier
from kvstored.tiers.nvme.volume_tier import VolumeTier


def make_volume(spec: VolumeSpec, files: Files) -> VolumeTier:
    return VolumeTier(
        spec.directory, spec.cap_bytes, files=files, region_bytes=4 * MIB, walk_timeout_s=20
    )


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walker, "_run", walk_here)


async def tiers_of(count: int, directory: Path) -> AsyncIterator[MakeTier]:
    """What a fixture `make_tier` for so many volumes does."""
    made: list[NvmeTier] = []

    async def make(
        *, cap_bytes: int = 64 * MIB, namespace_cap_bytes: int | None = None
    ) -> tuple[Tier, Recovered]:
        cap = max(cap_bytes // count, 24 * MIB)
        tier = NvmeTier(
            [VolumeSpec(f"v{i}", directory / f"v{i}", cap) for i in range(count)],
            directory / "registry",
            None if namespace_cap_bytes is None else lambda _: namespace_cap_bytes,
            make=make_volume,
            measure=lambda data, region: (1e9, 1e9),
        )
        made.append(tier)
        return tier, await tier.open()

    yield make
    for tier in made:
        await tier.close()


class TestFourVolumes(TierConformance):
    """Lengths and steps are fewer than for a VolumeTier, which has them all."""

    model_steps = 12

    @pytest.mark.parametrize("length", [4 * KIB, 64 * KIB + 1, 3 * MIB + 4097])
    async def test_round_trip_and_exact_accounting(self, make_tier: MakeTier, length: int) -> None:
        await super().test_round_trip_and_exact_accounting(make_tier, length)

    @pytest.mark.parametrize("length", [4 * KIB, MIB + 5])
    async def test_wrong_expectation_is_corrupt(self, make_tier: MakeTier, length: int) -> None:
        await super().test_wrong_expectation_is_corrupt(make_tier, length)

    @pytest.mark.parametrize("seed", [1])
    async def test_against_a_dict(self, make_tier: MakeTier, seed: int) -> None:
        await super().test_against_a_dict(make_tier, seed)

    @pytest.fixture
    async def make_tier(self, tmp_path: Path) -> AsyncIterator[MakeTier]:
        async for make in tiers_of(4, tmp_path):
            yield make


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        "test_mixed_sizes_in_one_call",
        "test_namespace_cap",
        "test_delete_waits_for_readers",
        "test_cancelled_write_leaves_accounts_right",
        "test_restart_knows_everything",
        "test_against_a_dict",
    ],
)
async def test_few_volumes(tmp_path: Path, name: str, count: int) -> None:
    """What may go another way where there is one volume, or are two."""
    suite = TestFourVolumes()
    more = {"test_against_a_dict": [2]}
    async for make in tiers_of(count, tmp_path):
        await getattr(suite, name)(make, *more.get(name, []))
