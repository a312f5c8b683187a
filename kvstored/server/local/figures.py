"""What operators see of local sessions, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LocalFigures:
    """`quarantined_sessions`: ended by the daemon, their process may still look at what they held.
    `leased_bytes`: what leases, holds and reservations keep in place, quarantined ones included.
    `staging_bytes`: memory of rings and areas. `ended`: sessions that are over, by reason.
    """

    sessions: int = 0
    quarantined_sessions: int = 0
    leased_bytes: int = 0
    staging_bytes: int = 0
    ended: Mapping[str, int] = field(default_factory=dict)
