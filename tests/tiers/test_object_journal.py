"""What is owed to the bucket survives a restart, and nothing about it can stop an upload."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from pathlib import Path

import pytest

from kvstored.io.base import RealFiles
from kvstored.io.crash import CrashFiles
from kvstored.io.crash_image import Everything, Nothing, Torn
from kvstored.io.faults import Fault, FaultyFiles
from kvstored.tiers.object import journal as module
from kvstored.tiers.object.api import ObjectName
from kvstored.tiers.object.journal import Journal, Owed


def name(number: int, namespace: str = "défault") -> ObjectName:
    return ObjectName(namespace, bytes([number % 3]) * 32, number.to_bytes(32, "big"), "kv/é")


def reopened(directory: Path) -> list[ObjectName]:
    return Journal(RealFiles(), directory).load()


def test_what_is_owed_comes_back_in_order(tmp_path: Path) -> None:
    journal = Journal(RealFiles(), tmp_path / "a" / "object")
    assert journal.load() == []
    journal.write([(True, name(1)), (True, name(2)), (True, name(3))])
    journal.write([(False, name(2)), (True, name(4)), (False, name(9))])
    again = Journal(RealFiles(), tmp_path / "a" / "object")
    assert again.load() == [name(1), name(3), name(4)]
    again.write([(False, name(1))])
    assert reopened(tmp_path / "a" / "object") == [name(3), name(4)]


@pytest.mark.parametrize("seed", range(4))
def test_a_file_cut_or_damaged_anywhere_gives_what_is_before(tmp_path: Path, seed: int) -> None:
    journal = Journal(RealFiles(), tmp_path)
    journal.load()
    states, ends = [], []
    for number in range(6):
        journal.write([(True, name(number))])
        states.append(list(journal.live))
        ends.append((tmp_path / "owed").stat().st_size)
    whole = (tmp_path / "owed").read_bytes()
    rng = random.Random(seed)
    for _ in range(8):
        at = rng.randrange(len(whole))
        expected = next(
            (state for state, end in zip(states[::-1], ends[::-1], strict=True) if end <= at), []
        )
        flipped = bytearray(whole)
        flipped[at] ^= 1 << seed
        for data in (whole[:at], bytes(flipped)):
            (tmp_path / "owed").write_bytes(data)
            damaged = Journal(RealFiles(), tmp_path)
            assert damaged.load() == expected
            assert bool(damaged.problem) == (
                data not in (whole[:0], whole[:8], *(whole[:end] for end in ends))
            )
            damaged.write([(True, name(77))])
            assert reopened(tmp_path) == [*expected, name(77)]


def test_history_does_not_pile_up(tmp_path: Path) -> None:
    journal = Journal(RealFiles(), tmp_path, rewrite_above_bytes=3_000)
    journal.load()
    journal.write([(True, name(5000))])
    for number in range(60):
        journal.write([(True, name(number))])
        journal.write([(False, name(number))])
        assert (tmp_path / "owed").stat().st_size < 3_200
    assert reopened(tmp_path) == [name(5000)]


def test_names_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OWED", 10)
    journal = Journal(RealFiles(), tmp_path)
    journal.load()
    journal.write([(True, name(number)) for number in range(25)])
    assert reopened(tmp_path) == [name(number) for number in range(15, 25)]


@pytest.mark.parametrize("operation", ["open", "pwritev", "fdatasync", "rename", "sync_directory"])
def test_after_a_failed_write_the_next_one_says_everything(tmp_path: Path, operation: str) -> None:
    files = FaultyFiles(RealFiles())
    journal = Journal(files, tmp_path)
    journal.load()
    changes = [(True, name(number)) for number in range(5)]
    fault = files.inject(Fault(operation, error=errno.ENOSPC, times=2, short=0.5, skip=1))
    failed = 0
    for change in changes:
        try:
            journal.write([change])
        except OSError:
            failed += 1
    assert failed == fault.hits > 0 or operation in ("rename", "sync_directory")
    files.clear()
    journal.write([(True, name(9))])
    assert reopened(tmp_path) == [*(n for _, n in changes), name(9)]


@pytest.mark.parametrize("seed", range(2))
def test_what_was_acknowledged_survives_a_power_loss(tmp_path: Path, seed: int) -> None:
    (tmp_path / "disk").mkdir()
    files = CrashFiles(RealFiles(), tmp_path / "disk")
    journal = Journal(files, tmp_path / "disk" / "object", rewrite_above_bytes=600)
    journal.load()
    rng = random.Random(seed)
    states: list[list[ObjectName]] = [[]]
    for number in range(9):
        journal.write([(True, name(number)), (False, name(rng.randrange(number + 1)))])
        states.append(list(journal.live))
        files.mark(number)
    for at in files.sync_points:
        for survival in (Nothing(), Everything(), Torn(rng.randrange(100))):
            target = tmp_path / f"{at}-{type(survival).__name__}"
            files.restore(target, at, survival)
            said = len(files.marks(at))
            assert reopened(target / "object") in states[said : said + 2]


async def test_owed_is_remembered_by_the_next_life(tmp_path: Path) -> None:
    owed = Owed(Journal(RealFiles(), tmp_path))
    assert list(await owed.open()) == []
    for number in range(100):
        owed.add(name(number))
        owed.add(name(number))
    for number in range(0, 100, 2):
        owed.drop(name(number))
        owed.drop(name(number))
    assert owed.count == 50
    assert name(1) in owed
    await owed.close()
    again = Owed(Journal(RealFiles(), tmp_path))
    assert list(await again.open()) == [name(number) for number in range(1, 100, 2)]
    assert again.count == 50
    await again.close()


async def test_a_stuck_disk_stops_nothing_and_fills_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_OWED", 50)
    files, go_on = FaultyFiles(RealFiles()), threading.Event()
    owed = Owed(Journal(files, tmp_path))
    await owed.open()
    files.inject(Fault("pwritev", stuck=go_on, times=1))
    for number in range(500):
        owed.add(name(number))
        await asyncio.sleep(0)  # or all of it would be one change
        if number >= 20:
            owed.drop(name(number - 20))
        assert len(owed._changes) <= 50
    go_on.set()
    await owed.close()
    assert reopened(tmp_path) == [name(number) for number in range(480, 500)]


async def test_a_disk_that_fails_is_said_and_forgiven(tmp_path: Path) -> None:
    files = FaultyFiles(RealFiles())
    owed = Owed(Journal(files, tmp_path))
    await owed.open()
    files.inject(Fault("*", error=errno.ENOSPC))
    owed.add(name(1))
    await owed.flush()
    assert owed.failures == 1
    assert "space" in owed.problem
    assert owed.count == 1
    files.clear()
    owed.add(name(2))
    await owed.close()
    assert owed.problem == ""
    assert reopened(tmp_path) == [name(1), name(2)]


async def test_a_disk_that_has_room_again_is_told_without_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRY_AGAIN_S", 0.01)
    files = FaultyFiles(RealFiles())
    owed = Owed(Journal(files, tmp_path))
    await owed.open()
    files.inject(Fault("*", error=errno.ENOSPC))
    owed.add(name(1))
    while owed.failures < 3:  # noqa: ASYNC110 (nothing tells of it)
        await asyncio.sleep(0.01)
    files.clear()
    async with asyncio.timeout(20):
        while owed.problem:  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0.01)
    assert reopened(tmp_path) == [name(1)]
    await owed.close()


async def test_a_disk_that_has_room_again_at_a_stop_is_told(tmp_path: Path) -> None:
    files = FaultyFiles(RealFiles())
    owed = Owed(Journal(files, tmp_path))
    await owed.open()
    files.inject(Fault("*", error=errno.ENOSPC))
    owed.add(name(1))
    await owed.flush()
    files.clear()
    await owed.close()
    assert reopened(tmp_path) == [name(1)]


async def test_a_directory_that_cannot_be_used_costs_the_memory_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    owed = Owed(Journal(RealFiles(), tmp_path / "file" / "object"))
    assert list(await owed.open()) == []
    assert owed.problem
    owed.add(name(1))
    assert name(1) in owed
    await owed.close()
