"""How fast each tier has been delivering, for `eta_ms`."""

from __future__ import annotations

from collections.abc import Mapping

from kvstored.tiers.base import TierKind

_START_BYTES_PER_S = {TierKind.RAM: 1.0e9, TierKind.NVME: 5.0e8, TierKind.OBJECT: 1.0e8}
_WEIGHT = 0.2
_SMALLEST_SAMPLE_BYTES = 1 << 20
CALL_MS = 1.0


class Rates:
    """Exponentially weighted rates per tier, from observed deliveries; a guess until there are."""

    def __init__(self) -> None:
        self.bytes_per_s = dict(_START_BYTES_PER_S)

    def observe(self, tier: TierKind, nbytes: int, seconds: float) -> None:
        """Learn from one delivery whose slowest tier was `tier`; small ones say nothing."""
        if nbytes >= _SMALLEST_SAMPLE_BYTES and seconds > 0:
            known = self.bytes_per_s[tier]
            self.bytes_per_s[tier] = known + _WEIGHT * (nbytes / seconds - known)

    def eta_ms(self, bytes_by_tier: Mapping[TierKind, int]) -> float:
        """Estimated time until so many bytes of each tier are in the client's hands; 0 for none."""
        if not any(bytes_by_tier.values()):
            return 0.0
        seconds = sum(n / self.bytes_per_s[tier] for tier, n in bytes_by_tier.items())
        return CALL_MS + 1000 * seconds
