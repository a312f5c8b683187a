"""Volumes that die, at any moment, and come back: misses, nothing untrue, nobody else disturbed."""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tiers.conformance import KIB, MIB, make_sample
from tiers.nvme_volumes_helpers import CAP_BYTES, PATIENCE, World, make_volume, until, walk_here

from kvstored.errors import DataDirectoryError
from kvstored.io.faults import Fault
from kvstored.tiers.base import VOLUME_SHIFT, NoRoom, ObjectWrite, ReadOutcome, WriteOutcome
from kvstored.tiers.nvme import walker
from kvstored.tiers.nvme.drains import LastVolume, UnknownVolume
from kvstored.tiers.nvme.member import VolumeSpec
from kvstored.tiers.nvme.status import VolumeState
from kvstored.tiers.nvme.tier import NvmeTier


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walker, "_run", walk_here)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path, 3)
    await made.start()
    yield made
    await made.end()


@pytest.mark.parametrize(("how", "seed"), [("EIO", 1), ("ENODEV", 2), ("stuck", 3)])
async def test_dies_under_load_and_comes_back(world: World, how: str, seed: int) -> None:
    rng = random.Random(seed)
    release = threading.Event()
    numbers = iter(range(1, 100_000))
    halt = False

    async def puts() -> None:
        while not halt:
            samples = [make_sample(80 * KIB, next(numbers)) for _ in range(6)]
            for sample in samples:
                world.samples[sample.meta.key] = sample
            await world.put(samples)
            if len(world.held) > 120:
                await world.delete([world.held[p] for p in sorted(world.held)[:60:2]])

    async def gets() -> None:
        while not halt:
            if world.held:
                places = rng.sample(sorted(world.held), min(6, len(world.held)))
                await world.read(places)
            await asyncio.sleep(0)

    load = [asyncio.ensure_future(puts()), asyncio.ensure_future(gets())]
    await until(lambda: len(world.held) > rng.randint(10, 60))
    effect = {"stuck": release} if how == "stuck" else {"error": getattr(errno, how)}
    world.break_volume(1, **effect)
    await world.becomes(1, VolumeState.LOST)
    assert not world.on(1)
    while_away = len(world.held)
    # The others go on; but a read that is stuck in the kernel keeps its caller.
    await until(lambda: len(world.held) != while_away)
    assert await world.delete(list(world.samples.values())[:20])
    world.files.clear()
    release.set()
    await world.becomes(1, VolumeState.OK)
    halt = True
    await asyncio.gather(*load)
    await world.assert_all_read()
    assert len(await world.put_new(200_000, 9)) == 9
    assert world.on(1), "it is used again"
    if how == "stuck":
        before = world.keys()
        await world.restart()
        assert world.keys() >= before
        assert not world.keys() & world.deleted
        await world.assert_all_read()


async def test_what_it_held_is_put_again_elsewhere(world: World) -> None:
    samples = await world.put_new(1, 18)
    world.break_volume(0, error=errno.EIO)
    missing = len(world.on(0))
    await world.read(world.on(0))
    await world.becomes(0, VolumeState.LOST)
    held = world.keys()
    again = [s for s in samples if s.meta.key not in held]
    assert len(again) == missing
    assert await world.put(again) == missing
    assert not world.on(0)
    world.files.clear()
    await world.becomes(0, VolumeState.OK)
    await world.assert_all_read()
    assert len(world.held) == 18
    await until(lambda: world.status(0).objects == 0)  # its copies are of no use


async def test_delete_while_away_holds_over_restarts(world: World) -> None:
    samples = await world.put_new(1, 12)
    gone = [world.held[p] for p in world.on(1)]
    world.break_volume(1, error=errno.ENODEV)
    await world.read(world.on(1))
    await world.becomes(1, VolumeState.LOST)
    assert await world.delete(gone[:2])
    await world.restart()
    assert world.status(1).state is VolumeState.LOST
    assert await world.delete(gone[2:3])
    world.files.clear()
    await world.becomes(1, VolumeState.OK)
    left = {s.meta.key for s in samples} - {s.meta.key for s in gone[:3]}
    assert world.keys() == left
    await world.put(gone[:1])  # deleted once is not deleted for ever
    await world.restart()
    assert world.keys() == left | {gone[0].meta.key}
    await world.assert_all_read()


async def test_delete_just_before_it_stuck_holds(world: World) -> None:
    """The delete was under way when the device stopped answering; then the volume is gone."""
    await world.put_new(1, 12)
    gone = [world.held[p] for p in world.on(1)][:2]
    release = threading.Event()
    world.break_volume(1, stuck=release)
    assert await world.delete(gone), "noted elsewhere"
    await world.becomes(1, VolumeState.SUSPECT)
    # What a power loss would leave now, taken up by another process.
    shutil.copytree(world.root, world.root / "copy")
    copy = World(world.root / "copy", 3)
    copy.samples, copy.deleted = world.samples, world.deleted
    await copy.start()
    assert len(copy.held) == 10
    await copy.tier.close()
    release.set()
    world.files.clear()
    await world.becomes(1, VolumeState.OK)
    await until(lambda: world.tier.usage().objects == 10)
    assert await world.put(gone) == 2
    await world.restart()
    assert len(world.held) == 12, "what was put again is not taken for what was deleted"


async def test_short_trouble_costs_nothing_that_it_holds(world: World) -> None:
    await world.put_new(1, 12)
    release = threading.Event()
    held = dict(world.held)
    world.break_volume(1, stuck=release)
    waiting = asyncio.ensure_future(world.put([make_sample(100 * KIB, 50 + i) for i in range(6)]))
    await world.becomes(1, VolumeState.SUSPECT)
    assert 0 < await waiting < 6, "the others took theirs"
    outcomes = await world.read(world.on(0) + world.on(2))
    assert set(outcomes.values()) == {ReadOutcome.OK}
    assert await world.put_new(80, 4)
    release.set()
    world.files.clear()
    await world.becomes(1, VolumeState.OK)
    assert held.items() <= world.held.items()
    await world.assert_all_read()
    assert world.tier.usage().objects == len(world.held), "what was answered as failed is gone"


async def test_payload_of_a_stuck_write_is_in_use(world: World) -> None:
    """Until the device has let go of it; what it wrote of it is gone then."""
    await world.put_new(1, 6)
    release = threading.Event()
    world.files.inject(Fault("pwritev", f"{world.root}/v1/data", stuck=release))
    samples = [make_sample(100 * KIB, 50 + i) for i in range(3)]
    places = await world.tier.reserve("default", [100 * KIB] * 3)
    items = [
        ObjectWrite(place, s.meta, s.payload)
        for s, place in zip(samples, places, strict=True)
        if not isinstance(place, NoRoom)
    ]
    outcomes = await world.tier.write(items)
    assert outcomes.count(WriteOutcome.OK) == 2
    (stuck,) = [i.place for i, o in zip(items, outcomes, strict=True) if o is WriteOutcome.STUCK]
    held = asyncio.ensure_future(world.tier.released(stuck))
    await asyncio.sleep(0)
    assert not held.done()
    release.set()
    await held
    await world.becomes(1, VolumeState.OK)
    await until(lambda: world.tier.usage().objects == 8)
    await world.tier.released(stuck)


async def test_refused_writes_leave_it_readable(world: World) -> None:
    await world.put_new(1, 12)
    for operation in ("pwritev", "commit", "fdatasync"):
        world.files.inject(Fault(operation, f"{world.root}/v1*", error=errno.EROFS))
    for seed in range(50, 90):
        await world.put([make_sample(90 * KIB, seed)])
        if world.status(1).state is VolumeState.SUSPECT:
            break
    assert world.status(1).state is VolumeState.SUSPECT
    await until(lambda: "read all the same" in world.status(1).detail)
    await world.assert_all_read()
    assert await world.put_new(100, 6)
    assert await world.delete([world.held[p] for p in world.on(1)][:1])
    world.files.clear()
    await world.becomes(1, VolumeState.OK)
    assert world.losses == 0
    await until(lambda: world.tier.usage().objects == len(world.held))


async def test_missing_at_the_start_is_not_made_anew(world: World) -> None:
    samples = await world.put_new(1, 12)
    on_it = {s.meta.key for p in world.on(0) if (s := world.held[p])}
    await world.tier.close()
    (world.root / "v0").rename(world.root / "elsewhere")
    for mount_point in (False, True):
        if mount_point:
            (world.root / "v0").mkdir()
        await world.start()
        assert world.status(0).state is VolumeState.LOST
        assert world.tier.health.startswith("v0 is lost")
        assert "mount its device" in world.status(0).detail
        assert world.keys() == {s.meta.key for s in samples} - on_it
        if not mount_point:
            await world.tier.close()
    assert not list((world.root / "v0").iterdir())
    (world.root / "v0").rmdir()
    (world.root / "elsewhere").rename(world.root / "v0")
    await world.becomes(0, VolumeState.OK)
    assert len(world.held) == 12
    await world.assert_all_read()


@pytest.mark.parametrize("there", ["nothing", "a file"])
async def test_directory_of_a_new_volume_is_not_made(tmp_path: Path, there: str) -> None:
    """What is below an empty mount point is another file system, and soon full."""
    world = World(tmp_path, 2)
    (tmp_path / "v0").rmdir()
    if there == "a file":
        (tmp_path / "v0").touch()
    await world.start()
    assert world.status(0).state is VolumeState.LOST
    assert "mount its device, and make the directory on it" in world.status(0).detail
    assert await world.put_new(1, 4)
    assert not (tmp_path / "v0").is_dir()
    if there == "a file":
        (tmp_path / "v0").unlink()
    (tmp_path / "v0").mkdir()
    await world.becomes(0, VolumeState.OK)
    assert await world.put_new(10, 6)
    assert world.on(0)
    await world.tier.close()


async def test_directory_that_nobody_listed_is_made(tmp_path: Path) -> None:
    spec = VolumeSpec("nvme", tmp_path / "data" / "nvme", CAP_BYTES, guarded=False)
    for _ in range(2):
        tier = NvmeTier([spec], tmp_path / "registry", make=make_volume)
        await tier.open()
        assert tier.volumes()[0].state is VolumeState.OK
        await tier.close()
        shutil.rmtree(spec.directory)


async def test_all_away_at_the_start(world: World) -> None:
    await world.put_new(1, 6)
    await world.tier.close()
    for number in range(3):
        world.break_volume(number, error=errno.EIO)
    await world.start()
    assert not world.held
    assert await world.tier.reserve("default", [MIB]) == [NoRoom.DOWN]
    assert await world.put([make_sample(100 * KIB, 99)]) == 0
    world.files.clear()
    await until(lambda: len(world.held) == 6)
    await world.assert_all_read()


async def test_namespace_cap_is_over_all_volumes(tmp_path: Path) -> None:
    """Also for reservations that are under way at the same time."""
    tier = NvmeTier(
        [VolumeSpec(f"v{i}", tmp_path / f"v{i}", CAP_BYTES, guarded=False) for i in range(2)],
        tmp_path / "registry",
        lambda _: MIB,
        make=make_volume,
    )
    await tier.open()
    both = await asyncio.gather(*(tier.reserve("a", [200 * KIB] * 4) for _ in range(2)))
    answers = [answer for answers in both for answer in answers]
    places = [answer for answer in answers if isinstance(answer, int)]
    assert len(places) == MIB // tier.charge_bytes(200 * KIB)
    assert set(answers) - set(places) == {NoRoom.NAMESPACE}
    assert {place >> VOLUME_SHIFT for place in places} == {0, 1}
    tier.cancel(places)
    assert tier.usage().charged_bytes == 0
    await tier.close()


async def test_mistake_is_not_waited_for(tmp_path: Path) -> None:
    world = World(tmp_path, 1)
    (tmp_path / "v0" / "thesis.tex").write_text("do not touch")
    with pytest.raises(DataDirectoryError, match="a directory of its own"):
        await world.start()


@pytest.mark.parametrize("known", [True, False])
async def test_stuck_device_does_not_hold_the_stop_up(world: World, known: bool) -> None:
    await world.put_new(1, 9)
    release = threading.Event()
    world.break_volume(1, stuck=release)
    load = asyncio.ensure_future(world.put([make_sample(90 * KIB, 60 + i) for i in range(6)]))
    reading = asyncio.ensure_future(world.read(world.on(1)))
    if known:
        await world.becomes(1, VolumeState.SUSPECT)
    await asyncio.wait_for(world.tier.close(), 10)
    await load
    release.set()
    await reading
    world.files.clear()


async def test_stuck_at_the_start(world: World) -> None:
    await world.put_new(1, 9)
    await world.tier.close()
    release = threading.Event()
    world.break_volume(1, stuck=release)
    world.patience = replace(PATIENCE, open_timeout_s=1.5)
    await world.start()
    assert world.status(1).state is VolumeState.LOST
    assert len(world.held) == len(world.on(0) + world.on(2)) == 6
    assert await world.delete(list(world.samples.values())[:3])
    world.files.clear()
    release.set()
    await world.becomes(1, VolumeState.OK)
    assert len(world.held) == 6
    await world.assert_all_read()


async def test_drain_moves_what_has_room(world: World) -> None:
    samples = await world.put_new(1, 30)
    await world.tier.remember_family("default", b"\x01" * 32, b"spec")
    gone = [world.held[p] for p in world.on(1)][:3]
    gate = threading.Event()
    copying = world.files.inject(Fault("pwritev", f"{world.root}/v0/data", stuck=gate, times=1))
    await world.tier.drain("v1")
    assert await world.delete(gone[:1])
    await until(lambda: bool(copying.hits))
    assert await world.delete(gone[1:]), "while they are being copied"
    gate.set()
    await world.becomes(1, VolumeState.DRAINED)
    assert not world.on(1)
    assert world.keys() == {s.meta.key for s in samples} - {s.meta.key for s in gone}
    await world.assert_all_read()
    await world.restart()
    assert world.status(1).state is VolumeState.DRAINED
    assert len(world.held) == 27
    with pytest.raises(UnknownVolume, match="the volumes are: v0, v1, v2"):
        await world.tier.drain("v9")
    await world.tier.drain("v0")
    with pytest.raises(LastVolume):
        await world.tier.drain("v2")
    await world.becomes(0, VolumeState.DRAINED)
    assert len(world.held) == 27


@pytest.mark.parametrize("listed", [True, False])
async def test_drain_goes_on_after_a_restart(world: World, listed: bool) -> None:
    await world.put_new(1, 12)
    gate = threading.Event()
    copying = world.files.inject(Fault("pwritev", f"{world.root}/v[02]/data", stuck=gate, times=1))
    await world.tier.drain("v1")
    await until(lambda: bool(copying.hits))
    closing = asyncio.ensure_future(world.tier.close())
    await asyncio.sleep(0)  # it is cut off
    gate.set()
    await closing
    world.files.clear()
    if not listed:  # who takes it out of the configuration may list it again
        world.count = 1
        await world.start()
        await world.tier.close()
    world.count = 3
    await world.start()
    if listed:
        assert world.status(1).state is VolumeState.DRAINING
        await world.becomes(1, VolumeState.DRAINED)
    else:
        assert world.status(1).state is VolumeState.OK
    await until(lambda: len(world.held) == 12)
    await world.assert_all_read()


async def test_drain_that_cannot_be_noted_is_refused(world: World) -> None:
    await world.put_new(1, 6)
    world.files.inject(Fault("rename", "*known.json*", error=errno.EROFS))
    with pytest.raises(DataDirectoryError, match="drain once more"):
        await world.tier.drain("v1")
    world.files.clear()
    assert world.status(1).state is VolumeState.OK
    await world.assert_all_read()


async def test_drained_volume_comes_back_empty(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    await world.start()
    await world.put_new(1, 8)
    await world.tier.drain("v1")
    await world.becomes(1, VolumeState.DRAINED)
    world.count = 1
    await world.restart()
    world.count = 2
    await world.restart()
    assert world.status(1).state is VolumeState.OK
    assert world.status(1).objects == 0
    assert len(world.held) == 8
    assert await world.put_new(50, 6)
    assert world.on(1)
    await world.restart(drain=[1])
    await world.becomes(1, VolumeState.DRAINED)
    assert len(world.held) == 14
    await world.assert_all_read()
    await world.tier.close()
