"""kill -9 in the middle of writes and deletes: what was acknowledged holds, also without LMDB."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tiers.conformance import MIB, aligned_buffer, make_sample, store
from tiers.nvme_crash_child import sample_of
from tiers.nvme_helpers import CAP_BYTES, REGION_BYTES, examine, keys, make_tier, reopen
from tiers.nvme_reader import read_volume

from kvstored.io.base import RealFiles
from kvstored.tiers.base import NoRoom
from kvstored.tiers.nvme.volume import Settings, open_volume

ROOT = Path(__file__).resolve().parents[2]
SEEDS_A_RUN = 100_000


def child_environment() -> dict[str, str]:
    """Of a child that imports the package and the tests as this process does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}


@dataclass
class Journal:
    """What the child said of each object, by seed."""

    offered: set[int] = field(default_factory=set)
    stored: set[int] = field(default_factory=set)
    going: set[int] = field(default_factory=set)
    deleted: set[int] = field(default_factory=set)

    def note(self, line: str) -> None:
        said, verb, seed = line.split()
        {
            ("?", "put"): self.offered,
            ("ok", "put"): self.stored,
            ("?", "delete"): self.going,
            ("ok", "delete"): self.deleted,
        }[said, verb].add(int(seed))

    @property
    def must(self) -> set[int]:
        return self.stored - self.going

    @property
    def may(self) -> set[int]:
        return self.offered - self.deleted


async def storm(directory: Path, first_seed: int, lines: int, journal: Journal) -> None:
    """Run the child until it has said so many lines, then kill it."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tiers.nvme_crash_child", str(directory), str(first_seed),
        stdout=asyncio.subprocess.PIPE, cwd=ROOT / "tests",
        env=child_environment(),
    )  # fmt: skip
    assert child.stdout is not None
    assert await child.stdout.readline() == b"ready\n"
    for _ in range(lines):
        journal.note((await child.stdout.readline()).decode())
    child.kill()
    rest = (await child.stdout.read()).decode().splitlines(keepends=True)
    for line in rest:
        if line.endswith("\n"):
            journal.note(line)
    assert await child.wait() == -9


async def check(directory: Path, journal: Journal, small_too: bool = True) -> None:
    """Everything acknowledged is there, nothing else but what was under way."""
    samples = {seed: sample_of(seed) for seed in journal.offered}
    tier = make_tier(directory)
    recovered = await tier.open()
    found = await examine(tier, recovered, list(samples.values()))
    await tier.close()
    must = {s for s in journal.must if small_too or samples[s].meta.length_bytes > 65_536}
    missing = {s for s in must if samples[s].meta.key not in found.good}
    assert not missing, f"acknowledged, but gone: {sorted(missing)}"
    allowed = keys([samples[seed] for seed in journal.may])
    assert found.good <= allowed, "a deleted object came back"
    assert found.recovered.dropped.keys() <= {"header_damaged", "small_environment_lost"}


async def test_acknowledgements_hold_after_kill(tmp_path: Path) -> None:
    rng = random.Random(11)
    journal = Journal()
    for run in range(3):
        await storm(tmp_path, run * SEEDS_A_RUN, rng.randint(60, 250), journal)
        await check(tmp_path, journal)
    assert len(journal.deleted) > 20
    shutil.rmtree(tmp_path / "index")
    await check(tmp_path, journal)


async def test_deletes_hold_when_the_index_is_lost_with_the_crash(tmp_path: Path) -> None:
    journal = Journal()
    for run in range(2):
        await storm(tmp_path, run * SEEDS_A_RUN, 120, journal)
        shutil.rmtree(tmp_path / "index")
        await check(tmp_path, journal)
    shutil.rmtree(tmp_path / "small")
    await check(tmp_path, journal, small_too=False)


async def test_write_that_never_was_committed_cannot_come_back(tmp_path: Path) -> None:
    """Crash between fdatasync and commit; start; write it again; delete that; lose the index."""
    sample = make_sample(600_000, 1)
    tier = make_tier(tmp_path)
    await tier.open()
    (place,) = await store(tier, [sample])
    await tier.close()
    # Put the index back to where it stood between the slot's opening and its commit.
    volume = open_volume(RealFiles(), Settings(tmp_path, CAP_BYTES, REGION_BYTES))
    env = volume.environment("index")
    env.commit(removed=[place], opened={place >> 32: bytes([1 << (place & 7)])})
    env.close()
    volume.close()
    assert len(read_volume(tmp_path)) == 1, "the stale header is there"
    tier = make_tier(tmp_path)
    assert len((await tier.open()).place) == 0
    held = await tier.reserve("default", [600_000])  # so that the copy goes elsewhere
    (again,) = await store(tier, [sample])
    assert again != place
    await tier.delete([again])
    tier.cancel([p for p in held if not isinstance(p, NoRoom)])
    await tier.close()
    assert read_volume(tmp_path) == []
    shutil.rmtree(tmp_path / "index")
    assert len((await reopen(tmp_path, [sample])).recovered.place) == 0


DIE_BEFORE_COMMIT = """
import asyncio, os, signal, sys
from pathlib import Path
from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault, FaultyFiles
from tiers.conformance import make_sample, store
from tiers.nvme_helpers import make_tier

class Dying(FaultyFiles):
    slots_written = 0
    def pwritev(self, fd, buffers, offset):
        done = super().pwritev(fd, buffers, offset)
        self.slots_written += done > 8192
        return done
    def commit(self, path, action):
        if self.slots_written:
            os.kill(os.getpid(), signal.SIGKILL)
        super().commit(path, action)

async def main():
    tier = make_tier(Path(sys.argv[1]), Dying(RealFiles()))
    await tier.open()
    await store(tier, [make_sample(600_000, 1)])

asyncio.run(main())
"""


async def test_crash_before_the_commit_leaves_a_slot_that_was_open(tmp_path: Path) -> None:
    """So that the next start finds its header, and voids it."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DIE_BEFORE_COMMIT, str(tmp_path), env=child_environment()
    )
    assert await child.wait() == -9
    assert len(read_volume(tmp_path)) == 1
    found = await reopen(tmp_path, [])
    assert len(found.recovered.place) == 0
    assert read_volume(tmp_path) == []


async def test_payload_that_looks_like_a_header_is_none(tmp_path: Path) -> None:
    """A client's bytes at what later becomes a slot boundary do not forge an object."""
    victim = make_sample(100_000, 5, namespace="victim")
    tier = make_tier(tmp_path)
    await tier.open()
    await store(tier, [victim])
    await tier.close()
    (slot,) = read_volume(tmp_path)
    raw = (tmp_path / "data").read_bytes()
    forged = raw[slot.offset : slot.offset + slot.slot_bytes]
    carrier = make_sample(MIB, 6)
    for at in range(0, MIB - 8192, 4096):
        carrier.payload[at : at + 4096] = forged[:4096]
    tier = make_tier(tmp_path)
    recovered = await tier.open()
    await tier.delete([int(p) for p in recovered.place])
    places = await tier.reserve("default", [MIB] * 30)
    for place in places:
        if not isinstance(place, NoRoom):
            entry = tier._space.entry(place)
            assert entry is not None
            data = tier._volume.data
            data.write_at(data.offset(entry, place), [aligned_buffer(4096), carrier.payload])
    tier.cancel([p for p in places if not isinstance(p, NoRoom)])
    kept = make_sample(120_000, 7)
    await store(tier, [kept])  # a region is given to smaller slots
    await tier.close()
    (found,) = read_volume(tmp_path)
    (word,) = struct.unpack_from("<Q", raw, slot.offset + 40)
    assert word != struct.unpack_from("<Q", (tmp_path / "data").read_bytes(), found.offset + 40)[0]
    shutil.rmtree(tmp_path / "index")
    result = await reopen(tmp_path, [kept])
    assert result.good == {kept.meta.key}
    assert len(result.recovered.place) == 1
