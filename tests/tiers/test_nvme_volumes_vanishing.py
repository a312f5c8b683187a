"""Files of a volume that go away before anything but the next commit can have noticed."""

from __future__ import annotations

import errno
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiers.conformance import KIB, make_sample
from tiers.nvme_volumes_helpers import PATIENCE, World, walk_here

from kvstored.io.faults import Fault
from kvstored.tiers.nvme import walker
from kvstored.tiers.nvme.status import VolumeState

BLIND = replace(PATIENCE, check_every_s=3600, look_every_s=3600)
"""Nobody looks by himself."""


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walker, "_run", walk_here)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path, 2, BLIND)
    await made.start()
    yield made
    await made.end()


def _replace(volume: Path) -> None:
    """By a copy of what there was, as another's restore would."""
    shutil.copytree(volume, volume.with_name("copy"))
    shutil.rmtree(volume)
    volume.with_name("copy").rename(volume)


TROUBLE: dict[str, Callable[[Path], object]] = {
    "all removed": shutil.rmtree,
    "data removed": lambda volume: (volume / "data").unlink(),
    "index removed": lambda volume: (volume / "index/data.mdb").unlink(),
    "small objects removed": lambda volume: (volume / "small/data.mdb").unlink(),
    "moved away": lambda volume: volume.rename(volume.with_name("elsewhere")),
    "replaced": _replace,
}


@pytest.mark.parametrize("length", [100 * KIB, 4 * KIB], ids=["slots", "small"])
@pytest.mark.parametrize("how", TROUBLE)
async def test_nothing_put_there_is_called_durable(world: World, how: str, length: int) -> None:
    await world.put_new(1, 12, length)
    before = set(world.on(1))
    assert before
    TROUBLE[how](world.root / "v1")
    samples = [make_sample(length, seed) for seed in range(100, 112)]
    done = await world.put(samples)
    assert set(world.on(1)) == before
    assert done == len(world.on(0)) - (12 - len(before)) < len(samples)
    assert world.status(1).state is VolumeState.SUSPECT, "and it is noticed with that"
    assert await world.put([make_sample(length, seed) for seed in range(200, 206)]) == 6
    assert set(world.on(1)) == before, "nothing more is placed there"
    safe = world.keys() - {world.held[p].meta.key for p in before}
    await world.restart()
    assert safe <= world.keys(), "all that was acknowledged is there"


async def test_deletes_hold_on_a_copy_that_took_its_place(world: World) -> None:
    samples = await world.put_new(1, 12)
    there = world.on(1)
    _replace(world.root / "v1")
    assert await world.delete(samples)
    assert world.status(1).state is VolumeState.SUSPECT
    await world.restart()  # fails if a deleted object comes back
    assert there
    assert world.status(1).state is VolumeState.OK
    assert not world.held


async def test_a_name_that_cannot_be_looked_up_is_no_removal(world: World) -> None:
    fault = world.files.inject(Fault("stat", f"{world.root}/v1/*", error=errno.EIO))
    await world.put_new(1, 12)
    assert world.on(1)
    assert fault.hits
    (world.root / "v1/data").unlink()
    assert await world.put([make_sample(100 * KIB, seed) for seed in range(100, 112)]) < 12
    assert world.status(1).state is VolumeState.SUSPECT, "but a file without a name is one"
