"""Scripted runs of a volume whose power can be cut at every sync, and what must hold then.

A run notes what it offers, stores and deletes in the history of its `CrashFiles`, in order with
what became durable. From the notes up to any moment follows what each key may hold then.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import xxhash
from tiers.conformance import Sample, aligned_buffer, make_sample
from tiers.nvme_reader import read_volume

from kvstored.io.base import Files, RealFiles
from kvstored.io.crash import CrashFiles
from kvstored.io.crash_image import Everything, Nothing, Survival, Torn
from kvstored.io.faults import FaultyFiles
from kvstored.tiers.base import NoRoom, ObjectRead, ObjectWrite, ReadOutcome, WriteOutcome
from kvstored.tiers.nvme import walk, walker
from kvstored.tiers.nvme.volume_tier import DeleteNotDurable, VolumeTier

VOLUME = "volume"
CAP_BYTES = 12 << 20
REGION_BYTES = 1 << 20
SMALL_FILE_BYTES = 2 << 20
SMALL, SMALL_FULL, SLOT, MIDDLE, LARGE, HUGE = 4096, 65_536, 70_000, 150_000, 300_000, 900_000

Versions = dict[bytes, set[bytes | None]]
"""Of each key, the checksums it may have; None: it may be absent."""


def make_tier(directory: Path, files: Files | None = None) -> VolumeTier:
    """A tier with a handful of regions, not opened."""
    return VolumeTier(
        directory,
        CAP_BYTES,
        files=files,
        region_bytes=REGION_BYTES,
        small_bytes=SMALL_FILE_BYTES,
        walk_timeout_s=20,
    )


def walk_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the walker's code here: after a power loss LMDB files are whole, and hundreds of
    children would take minutes. That it is a child is shown by the tests of damage.
    """

    def run(
        volume: bytes,
        environments: Sequence[tuple[Path, int]],
        fd: int,
        timeout_s: float,
        payload: bool,
    ) -> list[list[int]]:
        del timeout_s
        try:
            return [walk.walk(path, volume, limit, fd, payload) for path, limit in environments]
        except Exception as error:
            raise walker.WalkError(str(error)) from error

    monkeypatch.setattr(walker, "_run", run)


@dataclass(frozen=True)
class Note:
    """What was said: "offer" or "stored" of a version, "going" or "gone" of a key."""

    what: str
    key: bytes
    version: bytes = b""


def versions_after(notes: Sequence[object]) -> Versions:
    """What each key may hold once so much has been said."""
    may: Versions = defaultdict(lambda: {None})
    for note in notes:
        assert isinstance(note, Note)
        if note.what == "offer":
            may[note.key].add(note.version)
        elif note.what == "stored":
            may[note.key] = {note.version}
        elif note.what == "going":
            may[note.key].add(None)
        else:
            may[note.key] = {None}
    return dict(may)


@dataclass
class Run:
    """Puts and deletes on a volume, noted as they are offered and acknowledged."""

    files: CrashFiles
    directory: Path
    held: dict[int, Sample] = field(default_factory=dict)  # by place, oldest first
    tier: VolumeTier = field(init=False)

    async def open(self) -> None:
        self.tier = make_tier(self.directory, self.files)
        recovered = await self.tier.open()
        by_key = {sample.meta.key: sample for sample in self.held.values()}
        self.held = {
            int(place): by_key[recovered.keys[row].tobytes()]
            for row, place in enumerate(recovered.place)
        }

    async def close(self) -> None:
        await self.tier.close()

    async def put(self, samples: Sequence[Sample], evict: bool = False) -> int:
        """Store in one batch what there is room for; says how many that was."""
        items = []
        for sample in samples:
            place = await self._reserve(sample, evict)
            if isinstance(place, NoRoom):
                break
            items.append(ObjectWrite(place, sample.meta, sample.payload))
            self.held[place] = sample
        for item in items:
            self.files.mark(Note("offer", item.meta.key, item.meta.checksum))
        outcomes = await self.tier.write(items)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome is WriteOutcome.OK:
                self.files.mark(Note("stored", item.meta.key, item.meta.checksum))
            else:
                del self.held[item.place]
        return len(items)

    async def _reserve(self, sample: Sample, evict: bool) -> int | NoRoom:
        while True:
            (place,) = await self.tier.reserve("default", [sample.meta.length_bytes])
            alike = [p for p, s in self.held.items() if s.meta.length_bytes > SMALL_FULL]
            if place is not NoRoom.TIER or not evict or not alike:
                return place
            await self.delete(alike[:1])

    async def delete(self, places: Sequence[int]) -> None:
        """Delete in one call; one that is not durable stays unsaid."""
        samples = [self.held.pop(place) for place in places]
        for sample in samples:
            self.files.mark(Note("going", sample.meta.key))
        try:
            await self.tier.delete(list(places))
        except DeleteNotDurable:
            return
        for sample in samples:
            self.files.mark(Note("gone", sample.meta.key))

    def places(self, length_bytes: int) -> list[int]:
        return [p for p, s in self.held.items() if s.meta.length_bytes == length_bytes]


def variant(sample: Sample, seed: int) -> Sample:
    """Other bytes for the same key."""
    other = make_sample(sample.meta.length_bytes, seed)
    return Sample(dataclasses.replace(other.meta, key=sample.meta.key), other.payload)


def new_run(folder: Path, faults: FaultyFiles | None = None) -> Run:
    """A run on a volume that does not exist yet: not even its directory is on the device.

    `faults` are the device's own, so that what its failed syncs covered is lost.
    """
    root = folder / "disk"
    root.mkdir()
    return Run(CrashFiles(faults or RealFiles(), root), root / VOLUME)


async def scripted(run: Run) -> None:
    """Everything a volume does: made, filled, emptied, dedicated again, restarted, rewritten."""
    seeds = iter(range(1000))

    def samples(*lengths: int) -> list[Sample]:
        return [make_sample(length, next(seeds)) for length in lengths]

    await run.open()
    await run.put(samples(SMALL, SMALL_FULL, SLOT, SLOT, LARGE, LARGE))
    await run.tier.remember_family("default", b"\x01" * 32, b"spec")
    await asyncio.gather(
        run.put(samples(MIDDLE, MIDDLE, SMALL)),
        run.delete(run.places(SLOT)[:1] + run.places(SMALL)[:1]),
        run.put(samples(SLOT)),
    )
    await run.close()
    await run.open()
    assert len(run.held) == 8
    while await run.put(samples(LARGE)):
        pass
    await run.put(samples(LARGE, LARGE), evict=True)
    await run.delete(run.places(LARGE))
    await run.put(samples(HUGE, MIDDLE, SLOT))  # regions are given other slot sizes
    for length in (SMALL_FULL, SLOT):
        (place,) = run.places(length)[:1]
        sample = run.held[place]
        for seed in (2000, 2001):
            (place,) = [p for p, s in run.held.items() if s.meta.key == sample.meta.key]
            await run.delete([place])
            await run.put([variant(sample, seed)])
    await run.close()


async def storm(run: Run, seed: int, rounds: int) -> None:
    """Anything, in any order; several things at a time."""
    rng = random.Random(seed)
    seeds = iter(range(seed * 100_000, (seed + 1) * 100_000))
    lengths = (SMALL, 30_000, SMALL_FULL, SLOT, MIDDLE, LARGE, HUGE)
    gone: list[Sample] = []

    async def put() -> None:
        batch = [make_sample(rng.choice(lengths), next(seeds)) for _ in range(rng.randint(1, 4))]
        if gone and rng.random() < 0.4:
            batch.append(variant(gone.pop(rng.randrange(len(gone))), next(seeds)))
        await run.put(batch, evict=True)

    async def delete() -> None:
        places = rng.sample(sorted(stored), min(len(stored), rng.randint(1, 4)))
        samples = [run.held[place] for place in places]
        await run.delete(places)
        gone.extend(samples)

    await run.open()
    for _ in range(rounds):
        stored = set(run.held)
        if stored and rng.random() < 0.6:
            await delete()
        await asyncio.gather(*(put() for _ in range(rng.randint(1, 2))))
        if rng.random() < 0.15:
            await run.close()
            await run.open()
    await run.close()


# ---- what must hold -----------------------------------------------------------------------------

Found = dict[bytes, ObjectRead]
"""What a volume holds, by key; read, and whole."""


async def found_in(directory: Path, files: Files | None = None, use: bool = True) -> Found:
    """Open a volume and read all it says it has. `use`: put and delete something as well.

    Without an index, headers of writes that were cut off are found and counted.
    """
    lost = not (directory / "index").exists()
    tier = make_tier(directory, files)
    recovered = await tier.open()
    try:
        items = [
            ObjectRead(
                int(place),
                recovered.keys[row].tobytes(),
                recovered.parts[recovered.part_id[row]],
                int(recovered.length_bytes[row]),
                recovered.checksums[row].tobytes(),
                aligned_buffer(int(recovered.length_bytes[row])),
            )
            for row, place in enumerate(recovered.place)
        ]
        # A delete cut off leaves a void header that the index still names, or half of one.
        outcomes = await tier.read(items)
        assert set(outcomes) <= {ReadOutcome.OK, ReadOutcome.GONE, ReadOutcome.CORRUPT}
        assert len({item.key for item in items}) == len(items)
        usage = tier.usage()
        assert usage.footprint_bytes <= usage.cap_bytes
        assert usage.charged_bytes == sum(tier.charge_bytes(i.length_bytes) for i in items)
        assert usage.objects == len(items)
        assert set(recovered.dropped) <= ({"header_damaged"} if lost else set()), recovered.dropped
        for length in (SMALL, SLOT) if use else ():  # unless it is full
            sample = make_sample(length, 999_999_999)
            (place,) = await tier.reserve("default", [length])
            if not isinstance(place, NoRoom):
                written = await tier.write([ObjectWrite(place, sample.meta, sample.payload)])
                assert written == [WriteOutcome.OK]
                await tier.delete([place])
    finally:
        await tier.close()
    pairs = zip(items, outcomes, strict=True)
    return {item.key: item for item, outcome in pairs if outcome is ReadOutcome.OK}


def assert_versions(found: Found, may: Versions) -> None:
    """Every key holds what it may: nothing acknowledged is gone, nothing deleted is back."""
    for key in may.keys() | found.keys():
        held = found[key].checksum if key in found else None
        assert held in may.get(key, {None}), f"key {key.hex()[:8]} has {held!r}"


def assert_headers(
    directory: Path, found: Found, abandoned: bool = False, torn: bool = False
) -> None:
    """Slot headers say the same as the index, should that be lost next.

    `abandoned`: some regions may be, and are looked at no more. `torn`: there may be headers of
    writes that did not end, with the index lost that would have said so.
    """
    slots = read_volume(directory, torn)
    live = {slot.key: xxhash.xxh3_128_digest(slot.payload) for slot in slots}
    large = {k: item.checksum for k, item in found.items() if item.length_bytes > SMALL_FULL}
    back = {key.hex()[:8] for key in live.keys() - large.keys()}
    gone = {key.hex()[:8] for key in large.keys() - live.keys()}
    assert not back, f"{back} only in headers"
    assert abandoned or not gone, f"{gone} only in the index"
    assert all(large[key] == checksum for key, checksum in live.items())


def moments(files: CrashFiles) -> list[int]:
    """Just before each sync took effect, and the end."""
    return [*files.sync_points, files.now]


async def check_volume(
    directory: Path, may: Sequence[Versions], abandoned: bool = False, torn: bool = False
) -> Found:
    """Start, and look at everything: all of `may` holds."""
    found = await found_in(directory)
    for versions in may:
        assert_versions(found, versions)
    assert_headers(directory, found, abandoned, torn)
    return found


@dataclass(frozen=True)
class Cut:
    """Power gone just before event `at` of a history.

    `since`: what is left is the same from that event on, so that what was said then holds as well.
    """

    files: CrashFiles
    at: int
    survival: Survival
    since: int

    @property
    def may(self) -> list[Versions]:
        return [versions_after(self.files.marks(moment)) for moment in (self.since, self.at)]

    @contextlib.contextmanager
    def left_in(self, folder: Path) -> Iterator[Path]:
        """The volume as it is then; errors say which cut it was."""
        target = folder / f"cut-{self.at}"
        self.files.restore(target, self.at, self.survival)
        try:
            yield target / VOLUME
        except Exception as error:
            how = type(self.survival).__name__
            error.add_note(f"power cut at event {self.at} of {self.files.now}, {how} left")
            raise
        finally:
            shutil.rmtree(target)


def cuts(files: CrashFiles, survival: str) -> Iterator[Cut]:
    """One at each sync point and one at the end. `survival`: "nothing", "everything" or a seed."""
    since = 0
    for at in moments(files):
        if survival == "nothing":
            yield Cut(files, at, Nothing(), since + 1)
        elif survival == "everything":
            yield Cut(files, at, Everything(), at)
        else:
            yield Cut(files, at, Torn(f"{survival}/{at}"), at)
        since = at


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """A directory for hundreds of small volumes: in memory where there is such a file system."""
    shared = Path("/dev/shm")
    parent = shared if os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kv", dir=parent) as folder:
        yield Path(folder)
