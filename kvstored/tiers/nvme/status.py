"""What is known of one volume at a moment: for operators, metrics and the planner."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class VolumeState(enum.Enum):
    """What a volume is good for. docs/nvme-tier.md says how it gets from one to another."""

    OK = "ok"
    SUSPECT = "suspect"  # errors or no answer: reads answer DOWN, nothing new goes there; probed
    LOST = "lost"  # not there, or suspect for too long: its objects have left the store's index
    DRAINING = "draining"  # its objects are being moved elsewhere
    DRAINED = "drained"  # holds nothing, and can be removed


@dataclass(frozen=True, slots=True)
class VolumeStatus:
    """One volume. Sizes are in bytes; counters grow from the daemon's start on."""

    number: int
    """0 to 63, by order of configuration; the top of each of its places."""
    name: str
    directory: Path
    state: VolumeState
    detail: str
    """Why it is in that state, in words; "" for a volume that is simply ok."""
    mode: str
    """How bytes move: "o_direct", "buffered" or "closed"."""
    cap_bytes: int
    footprint_bytes: int
    charged_bytes: int
    objects: int
    read_bytes_per_s: float = 0.0
    """What it was measured to give when it was busy; 0.0: not measured yet."""
    write_bytes_per_s: float = 0.0
    errors: Mapping[str, int] = field(default_factory=dict)
    """Failures by stage ("read", "write", "sync", "commit", "open", "stuck", ...)."""
    read_bytes: int = 0
    """What was read for readers: payload of objects that were verified."""
    written_bytes: int = 0
    """What was written to the device, index and headers included."""
    accepted_bytes: int = 0
    """Payload of the objects written."""
    regions_total: int = 0
    regions_free: int = 0
    regions_abandoned: int = 0
