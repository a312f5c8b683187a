"""What the daemon needs per object beyond the object's bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("object_memory.py")


@pytest.mark.parametrize("ttl_ms", [0, 1 << 40])
def test_an_object_takes_at_most_300_bytes(ttl_ms: int) -> None:
    """In a process of its own, whose memory nothing else uses. The figure without a limit: 230."""
    command = [sys.executable, str(SCRIPT), "200000", str(ttl_ms)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 100 < float(done.stdout) <= 300
