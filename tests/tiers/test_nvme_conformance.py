"""The NVMe tier does what every tier must do; with O_DIRECT, and without."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tiers.conformance import MakeTier, TierConformance, make_sample, store

from kvstored.io.base import Files, RealFiles
from kvstored.tiers.base import Recovered, Tier
from kvstored.tiers.nvme.tier import NvmeTier


class NoDirectFiles(RealFiles):
    """A file system that refuses O_DIRECT."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here", str(path))
        return super().open(path, flags, mode)


class TestNvmeConformance(TierConformance):
    expected_mode = "o_direct"

    @pytest.fixture
    def files(self) -> Files:
        return RealFiles()

    @pytest.fixture
    async def make_tier(self, tmp_path: Path, files: Files) -> AsyncIterator[MakeTier]:
        made: list[NvmeTier] = []

        async def make(
            *, cap_bytes: int = 64 << 20, namespace_cap_bytes: int | None = None
        ) -> tuple[Tier, Recovered]:
            tier = NvmeTier(
                tmp_path / "volume",
                cap_bytes,
                None if namespace_cap_bytes is None else lambda _: namespace_cap_bytes,
                files=files,
                walk_timeout_s=20,
            )
            made.append(tier)
            return tier, await tier.open()

        yield make
        for tier in made:
            await tier.close()


class TestNvmeBufferedConformance(TestNvmeConformance):
    expected_mode = "buffered"
    model_steps = 60

    @pytest.fixture
    def files(self) -> Files:
        return NoDirectFiles()


@pytest.mark.parametrize("suite", [TestNvmeBufferedConformance])
async def test_mode_says_that_io_is_buffered(
    suite: type[TestNvmeBufferedConformance], tmp_path: Path
) -> None:
    tier = NvmeTier(tmp_path / "volume", 64 << 20, files=NoDirectFiles())
    assert tier.mode == "closed"
    await tier.open()
    assert tier.mode == suite.expected_mode
    await store(tier, [make_sample(1 << 20, 1)])
    await tier.close()
