"""Writes and deletes objects for ever, saying on stdout what it is about to do and what was
acknowledged. Killed by the test that runs it.

    python nvme_crash_child.py DIRECTORY FIRST_SEED

Lines: "? put SEED", "ok put SEED", "? delete SEED", "ok delete SEED". The length of an object
follows from its seed.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from tiers.conformance import Sample, make_sample
from tiers.nvme_helpers import make_tier

from kvstored.tiers.base import NoRoom, ObjectWrite, WriteOutcome

LENGTHS = (4096, 30_000, 65_536, 70_000, 150_000, 300_000, 600_000)


def sample_of(seed: int) -> Sample:
    return make_sample(LENGTHS[seed % len(LENGTHS)], seed)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def storm(directory: Path, first_seed: int) -> None:
    tier = make_tier(directory)
    recovered = await tier.open()
    say("ready")
    rng = random.Random(first_seed)
    held = {int(place): int(place) for place in recovered.place}
    seeds: dict[int, int] = {}
    next_seed = first_seed

    async def put() -> None:
        nonlocal next_seed
        batch = []
        for _ in range(rng.randint(1, 6)):
            seed, next_seed = next_seed, next_seed + 1
            sample = sample_of(seed)
            (place,) = await tier.reserve("default", [sample.meta.length_bytes])
            if not isinstance(place, NoRoom):
                batch.append((seed, ObjectWrite(place, sample.meta, sample.payload)))
        for seed, _ in batch:
            say(f"? put {seed}")
        outcomes = await tier.write([item for _, item in batch])
        for (seed, item), outcome in zip(batch, outcomes, strict=True):
            assert outcome is WriteOutcome.OK
            say(f"ok put {seed}")
            held[item.place] = item.place
            seeds[item.place] = seed

    async def delete() -> None:
        mine = [place for place in held if place in seeds]
        places = rng.sample(mine, min(len(mine), rng.randint(1, 5)))
        for place in places:
            del held[place]
            say(f"? delete {seeds[place]}")
        await tier.delete(places)
        for place in places:
            say(f"ok delete {seeds.pop(place)}")

    while True:
        await asyncio.gather(put(), delete(), put())


if __name__ == "__main__":
    asyncio.run(storm(Path(sys.argv[1]), int(sys.argv[2])))
