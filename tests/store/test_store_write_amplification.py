"""What the device is made to write, on the beginning of a real trace, where that is at hand."""

from __future__ import annotations

import random
from pathlib import Path

from store.write_amplification import read_trace, replay

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_synthetic.jsonl.xz"


def chats() -> list[list[int]]:
    """Prefixes that grow, some of them used again: for where there is no trace."""
    rng = random.Random(1)
    known: list[list[int]] = []
    fresh = iter(range(1_000_000))
    for _ in range(60):
        before = rng.choice(known) if known and rng.random() < 0.6 else []
        known.append([*before, *(next(fresh) for _ in range(rng.randint(5, 40)))])
    return known


async def test_the_device_writes_hardly_more_than_was_put(tmp_path: Path) -> None:
    requests = read_trace(TRACE, 60) if TRACE.exists() else chats()
    outcome = await replay(tmp_path, requests, 512 << 10, share=0.1)
    assert outcome.evicted > outcome.capacity_blocks, "the tier was filled, and more"
    assert outcome.written >= outcome.capacity_blocks + outcome.evicted - 64
    assert 1.0 < outcome.ratio <= 1.05
