"""Volumes whose files are removed, replaced, cut short or overwritten while they are in use."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiers.conformance import make_sample
from tiers.nvme_volumes_helpers import PATIENCE, World, until, walk_here

from kvstored.io.faults import Fault
from kvstored.tiers.base import ReadOutcome
from kvstored.tiers.nvme import walker
from kvstored.tiers.nvme.status import VolumeState


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walker, "_run", walk_here)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path, 2)
    await made.start()
    yield made
    await made.end()


def _replace(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


TROUBLE: dict[str, Callable[[Path], None]] = {
    "all removed": shutil.rmtree,
    "moved away": lambda volume: volume.rename(volume.with_name("elsewhere")),
    "superblock removed": lambda volume: (volume / "superblock").unlink(),
    "data replaced": lambda volume: _replace(volume / "data"),
    "data cut": lambda volume: os.truncate(volume / "data", 1 << 20),
    "index removed": lambda volume: (volume / "index/data.mdb").unlink(),
    "small objects replaced": lambda volume: _replace(volume / "small/data.mdb"),
}


@pytest.mark.parametrize("how", TROUBLE)
async def test_is_lost_at_once_without_any_use(world: World, how: str) -> None:
    await world.put_new(1, 12)
    there = len(world.on(1))
    TROUBLE[how](world.root / "v1")
    await until(lambda: world.losses == 1)
    assert there
    assert not world.on(1)
    await world.assert_all_read()


async def test_removed_files_are_not_made_anew(world: World) -> None:
    shutil.rmtree(world.root / "v1")
    (world.root / "v1").mkdir()
    await world.becomes(1, VolumeState.LOST)
    await world.put_new(100, 6)
    assert not world.on(1), "what is acknowledged is elsewhere"
    await until(lambda: "is not in" in world.status(1).detail)
    assert not list((world.root / "v1").iterdir())
    held = world.keys()
    await world.restart()
    assert world.keys() == held, "all that was acknowledged is there"
    assert world.status(1).state is VolumeState.LOST


async def test_is_back_once_its_files_are(world: World) -> None:
    await world.put_new(1, 12)
    volume, away = world.root / "v1", world.root / "elsewhere"
    gone = [world.held[p] for p in world.on(1)][:2]
    volume.rename(away)
    assert await world.delete(gone)
    await world.becomes(1, VolumeState.LOST)
    away.rename(volume)
    await world.becomes(1, VolumeState.OK)
    assert world.on(1)
    assert not world.keys() & {s.meta.key for s in gone}
    await world.assert_all_read()


async def test_the_volume_that_the_daemon_makes_is_not_made_anew_either(tmp_path: Path) -> None:
    world = World(tmp_path, 1, guarded=False)
    await world.start()
    try:
        await world.put_new(1, 3)
        shutil.rmtree(tmp_path / "v0")
        await world.becomes(0, VolumeState.LOST)
        await until(lambda: "is not in" in world.status(0).detail)
        assert await world.put([make_sample(1000, 9)]) == 0
        assert not (tmp_path / "v0").exists()
        await world.restart()
        assert len(await world.put_new(20, 3)) == 3
    finally:
        await world.end()


async def test_a_directory_that_does_not_answer_is_no_removal(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    await world.start()
    try:
        await world.put_new(1, 6)
        fault = world.files.inject(Fault("stat", f"{world.root}/v1*", error=errno.EIO))
        await until(lambda: fault.hits > 3)
        assert world.status(1).state is VolumeState.OK
        await world.assert_all_read()
    finally:
        await world.end()


async def test_transfers_that_come_to_an_end_count_as_failures(tmp_path: Path) -> None:
    """A read behind the end of a file brings nothing, and the kernel calls that a success."""
    never = replace(PATIENCE, check_every_s=3600, probe_first_s=3600, probe_longest_s=3600)
    world = World(tmp_path, 2, never)
    await world.start()
    try:
        await world.put_new(1, 12)
        there = world.on(1)
        await until(lambda: world.tier._members[1]._check_at > 0)  # the only check is over
        os.truncate(tmp_path / "v1/data", 4096)
        await world.read(there)
        await until(lambda: world.losses == 1)
        assert world.status(1).errors["read"] >= PATIENCE.failures
    finally:
        await world.end()


async def test_writes_that_move_nothing_count_as_failures(world: World) -> None:
    await world.put_new(1, 12)
    world.files.inject(Fault("pwritev", f"{world.root}/v1/data", short=0.0))
    seeds = iter(range(100, 10_000, 4))
    while world.status(1).state is VolumeState.OK:
        seed = next(seeds)
        await world.put([make_sample(100_000, seed + i) for i in range(4)])
    assert world.status(1).errors["write"] >= PATIENCE.failures
    world.files.clear()
    await world.becomes(1, VolumeState.OK)


async def test_errors_of_lmdb_are_shown(world: World) -> None:
    """Pages of small objects are read through a mapping, which no file operation shows."""
    await world.put_new(1, 40, length=20_000)
    there = world.on(1)
    with (world.root / "v1/small/data.mdb").open("r+b") as file:
        file.seek(2 * 4096)
        file.write(bytes(128 * 4096))
    outcomes = set((await world.read(there)).values())
    assert ReadOutcome.OK not in outcomes
    assert world.status(1).errors["read"] >= 1
    errors = dict(world.status(1).errors)
    shutil.rmtree(world.root / "v1")
    await world.becomes(1, VolumeState.LOST)
    assert world.status(1).errors.items() >= errors.items(), "also of a life that is over"
