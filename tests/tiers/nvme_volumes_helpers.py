"""A tier of several small volumes that can be made to fail, and as much of a store as it needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from tiers.conformance import KIB, MIB, Sample, make_sample, want

from kvstored.io.base import Files, RealFiles
from kvstored.io.faults import Fault, FaultyFiles
from kvstored.tiers.base import (
    VOLUME_SHIFT,
    NoRoom,
    ObjectWrite,
    ReadOutcome,
    Recovered,
    WriteOutcome,
)
from kvstored.tiers.nvme import walk
from kvstored.tiers.nvme.breaker import Patience
from kvstored.tiers.nvme.device import DataFile
from kvstored.tiers.nvme.member import VolumeSpec
from kvstored.tiers.nvme.status import VolumeState, VolumeStatus
from kvstored.tiers.nvme.tier import NvmeTier
from kvstored.tiers.nvme.volume_tier import DeleteNotDurable, VolumeTier

CAP_BYTES = 16 * MIB
PATIENCE = Patience(
    stuck_after_s=1.5,
    failures=3,
    probe_first_s=0.02,
    probe_longest_s=0.05,
    lost_after_s=0.3,
    reopen_first_s=0.02,
    reopen_longest_s=0.05,
    open_timeout_s=20,
    look_every_s=0.02,
    check_every_s=0.02,
)


def make_volume(spec: VolumeSpec, files: Files) -> VolumeTier:
    return VolumeTier(
        spec.directory,
        spec.cap_bytes,
        files=files,
        region_bytes=MIB,
        small_bytes=2 * MIB,
        walk_timeout_s=20,
        make_directory=not spec.guarded,
    )


def walk_here(
    volume: bytes,
    environments: Sequence[tuple[Path, int]],
    fd: int,
    timeout_s: float,
    payload: bool,
) -> list[list[int]]:
    """What `walker._run` does, without a process for each volume that is opened again: that takes
    most of the time of these tests. Others show the process, and what it is for.
    """
    del timeout_s
    return [walk.walk(directory, volume, limit, fd, payload) for directory, limit in environments]


async def until(true: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for something that comes about by itself."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - anything may make it true
            await asyncio.sleep(0.005)


class World:
    """Volumes v0, v1, ... below `root`, their tier, and a store's knowledge of what they hold."""

    def __init__(
        self, root: Path, count: int, patience: Patience = PATIENCE, *, guarded: bool = True
    ) -> None:
        self.root = root
        self.count = count
        self.guarded = guarded
        self.patience = patience
        self.files = FaultyFiles(RealFiles())
        self.held: dict[int, Sample] = {}
        self.samples: dict[bytes, Sample] = {}
        self.deleted: set[bytes] = set()
        self.losses = 0
        self.measured: dict[str, tuple[float, float]] = {}
        """By folder: bytes per second read and written, of a volume not seen before."""
        for i in range(count):
            (root / f"v{i}").mkdir(exist_ok=True)

    async def start(self, drain: Sequence[int] = ()) -> Recovered:
        self.tier = NvmeTier(
            [
                VolumeSpec(f"v{i}", self.root / f"v{i}", CAP_BYTES, i in drain, self.guarded)
                for i in range(self.count)
            ],
            self.root / "registry",
            files=self.files,
            patience=self.patience,
            make=make_volume,
            measure=self._measure,
        )
        self.held = {}
        found = await self.tier.open()
        await self.adopt(found)
        self.tier.on_lost, self.tier.on_found = self.lost, self.adopt
        return found

    async def restart(self, drain: Sequence[int] = ()) -> Recovered:
        await self.tier.close()
        return await self.start(drain)

    def _measure(self, data: DataFile, region: int) -> tuple[float, float]:
        del region
        return self.measured.get(data.path.parent.name, (0.0, 0.0))

    async def end(self) -> None:
        """Close the tier; nothing is stuck any longer, or the interpreter could not end either."""
        for fault in self.files._faults:
            if fault.stuck is not None:
                fault.stuck.set()
        self.files.clear()
        await self.tier.close()

    # ---- the store's side ---------------------------------------------------------------------

    def lost(self, number: int) -> None:
        self.losses += 1
        self.held = {p: s for p, s in self.held.items() if p >> VOLUME_SHIFT != number}

    async def adopt(self, found: Recovered) -> None:
        there = {s.meta.key for s in self.held.values()}
        twins = []
        for row, place in enumerate(found.place.tolist()):
            key = found.keys[row].tobytes()
            assert key not in self.deleted, "a deleted object has come back"
            if key in there:
                twins.append(place)
            else:
                self.held[place] = self.samples[key]
                there.add(key)
        if twins:
            await self.tier.delete(twins)

    async def put(self, samples: Sequence[Sample]) -> int:
        """Put objects that are not held; how many are durable."""
        lengths = [s.meta.length_bytes for s in samples]
        places = await self.tier.reserve("default", lengths)
        items = [
            (s, ObjectWrite(p, s.meta, s.payload))
            for s, p in zip(samples, places, strict=True)
            if not isinstance(p, NoRoom)
        ]
        outcomes = await self.tier.write([item for _, item in items])
        done = 0
        for (sample, item), outcome in zip(items, outcomes, strict=True):
            if outcome is WriteOutcome.OK:
                done += 1
                self.held[item.place] = sample
                self.samples[sample.meta.key] = sample
                self.deleted.discard(sample.meta.key)
        return done

    async def put_new(self, first: int, count: int, length: int = 100 * KIB) -> list[Sample]:
        """Make objects and put them; all must be durable."""
        samples = [make_sample(length, seed) for seed in range(first, first + count)]
        for sample in samples:
            self.samples[sample.meta.key] = sample
        assert await self.put(samples) == count
        return samples

    async def delete(self, samples: Sequence[Sample]) -> bool:
        """Delete by key, as the store's verb does: False if it may not outlive the process."""
        keys = {s.meta.key for s in samples}
        places = [p for p, s in self.held.items() if s.meta.key in keys]
        for place in places:
            del self.held[place]
        by_family: dict[bytes, list[bytes]] = {}
        for sample in samples:
            by_family.setdefault(sample.meta.family, []).append(sample.meta.key)
        try:
            for family, some in by_family.items():
                await self.tier.forget("default", family, some)
            self.deleted |= keys
            await self.tier.delete(places)
        except DeleteNotDurable:
            return False
        return True

    async def read(self, places: Sequence[int]) -> dict[int, ReadOutcome]:
        """Read what is held; what is OK must be right."""
        items = [want(p, self.held[p]) for p in places]
        samples = [self.held[p] for p in places]
        outcomes = await self.tier.read(items)
        for item, sample, outcome in zip(items, samples, outcomes, strict=True):
            if outcome is ReadOutcome.OK:
                assert item.into[: item.length_bytes] == sample.data
        return dict(zip(places, outcomes, strict=True))

    async def assert_all_read(self) -> None:
        outcomes = await self.read(sorted(self.held))
        assert set(outcomes.values()) <= {ReadOutcome.OK}

    def keys(self) -> set[bytes]:
        return {s.meta.key for s in self.held.values()}

    def on(self, number: int) -> list[int]:
        return [p for p in self.held if p >> VOLUME_SHIFT == number]

    # ---- trouble ------------------------------------------------------------------------------

    def break_volume(self, number: int, **effect: object) -> Fault:
        return self.files.inject(Fault("*", f"{self.root}/v{number}*", **effect))  # type: ignore[arg-type]

    def status(self, number: int) -> VolumeStatus:
        return self.tier.volumes()[number]

    async def becomes(self, number: int, state: VolumeState) -> None:
        await until(lambda: self.status(number).state is state)
