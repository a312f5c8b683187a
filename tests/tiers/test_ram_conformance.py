"""The RAM tier against the suite that every tier inherits."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tiers.conformance import MIB, MakeTier, TierConformance

from kvstored.tiers.base import Recovered, Tier
from kvstored.tiers.ram import RamTier


class TestRamConformance(TierConformance):
    @pytest.fixture
    async def make_tier(self) -> AsyncIterator[MakeTier]:
        opened: list[RamTier] = []

        async def make(
            *, cap_bytes: int = 64 * MIB, namespace_cap_bytes: int | None = None
        ) -> tuple[Tier, Recovered]:
            cap = namespace_cap_bytes
            tier = RamTier(cap_bytes, None if cap is None else lambda _: cap)
            opened.append(tier)
            return tier, await tier.open()

        yield make
        for tier in opened:
            await tier.close()
            assert tier.usage().footprint_bytes == 0
