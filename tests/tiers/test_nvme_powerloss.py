"""Power cut at every sync of what a volume does: nothing that was said is untrue afterwards.

KVSTORED_POWERLOSS_LOOPS=100 (`make powerloss`) makes the random runs more.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiers.powerloss import (
    Cut,
    check_volume,
    cuts,
    found_in,
    in_memory,
    new_run,
    scripted,
    storm,
    walk_in_this_process,
)

from kvstored.io.base import RealFiles
from kvstored.io.crash import CrashFiles
from kvstored.io.faults import Fault, FaultyFiles

LOOPS = int(os.environ.get("KVSTORED_POWERLOSS_LOOPS", "1"))


@pytest.fixture(autouse=True)
def _quick_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    walk_in_this_process(monkeypatch)


@pytest.fixture
def folder() -> Iterator[Path]:
    with in_memory() as made:
        yield made


@pytest.mark.parametrize("survival", ["nothing", "everything", "1"])
async def test_power_cut_at_every_sync(folder: Path, survival: str) -> None:
    run = new_run(folder)
    await scripted(run)
    assert len(run.files.sync_points) > 70, "it does all that it did"
    every = 8 if survival == "everything" else 1  # test_nvme_crash.py does that as well
    for cut in itertools.islice(cuts(run.files, survival), 0, None, every):
        with cut.left_in(folder) as volume:
            await check_volume(volume, cut.may)


async def cut_again_while_it_starts(cut: Cut, folder: Path, lose_index: bool) -> int:
    """Cut the power, and once more at every sync of the start that follows; how many those are."""
    with cut.left_in(folder) as volume:
        if lose_index:
            shutil.rmtree(volume / "index", ignore_errors=True)
        again = CrashFiles(RealFiles(), volume.parent)
        await found_in(volume, again, use=False)
        (folder / "again").mkdir()
        for second in cuts(again, f"{cut.at}"):
            with second.left_in(folder / "again") as twice:
                await check_volume(twice, cut.may, torn=lose_index)
        (folder / "again").rmdir()
    return len(again.sync_points)


@pytest.mark.parametrize("lose_index", [False, True])
async def test_power_cut_again_while_it_starts(folder: Path, lose_index: bool) -> None:
    run = new_run(folder)
    await storm(run, 1, 6)
    points = 0
    for cut in itertools.islice(cuts(run.files, "1"), 20, None, 25 if lose_index else 9):
        points += await cut_again_while_it_starts(cut, folder, lose_index)
    assert points > 10


@pytest.mark.parametrize(
    ("operation", "path", "skips"),
    [
        ("fdatasync", "*/data", (9, 14, 15, 20)),
        ("pwritev", "*/data", (12, 18)),
        ("commit", "*/index", (4, 8)),
    ],
)
async def test_power_cut_after_the_device_failed(
    folder: Path, operation: str, path: str, skips: tuple[int, ...]
) -> None:
    """What a failed sync covered is lost for good, whatever later syncs say."""
    for skip in skips:
        fault = Fault(operation, path, error=errno.EIO, skip=skip, times=1)
        faults = FaultyFiles(RealFiles())
        faults.inject(fault)
        run = new_run(folder, faults)
        await storm(run, 2, 6)
        assert fault.hits == 1
        for cut in itertools.islice(cuts(run.files, "nothing"), 10, None, 4):
            with cut.left_in(folder) as volume:
                await check_volume(volume, cut.may, abandoned=True)
        shutil.rmtree(folder / "disk")


@pytest.mark.timeout(120 * LOOPS)
async def test_power_cut_in_random_runs(folder: Path) -> None:
    for seed in range(LOOPS):
        run = new_run(folder)
        await storm(run, 10 + seed, 3 if LOOPS == 1 else 12)
        for survival in ("nothing", f"{seed}"):
            for cut in cuts(run.files, survival):
                with cut.left_in(folder) as volume:
                    await check_volume(volume, cut.may)
        shutil.rmtree(folder / "disk")
