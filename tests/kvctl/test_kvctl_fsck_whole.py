"""kvctl fsck: what it says and how it ends; it never writes, and what it cannot read is told."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from kvctl.fsck_helpers import (
    LARGE,
    SMALL,
    Watched,
    by_length,
    check,
    detail,
    flip,
    found,
    kinds,
    overwrite,
    place,
    state,
    whole_volume,
)
from tiers.conformance import MIB
from tiers.nvme_helpers import make_tier, make_volume

from kvstored.fsck import environment
from kvstored.fsck.findings import DAMAGE, NOTES
from kvstored.io.base import Buffer, RealFiles
from kvstored.kvctl import main
from kvstored.tiers.nvme import format as disk


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume with nothing wrong, not to be changed."""
    directory = tmp_path_factory.mktemp("whole")
    whole_volume(directory)
    return directory


@pytest.fixture
def volume(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "volume"))


def test_clean_volume(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = state(whole)
    assert main(["fsck", "--offline", str(whole), "--json"]) == 0
    out = capsys.readouterr()
    answer = json.loads(out.out)
    assert out.out.count("\n") == 1
    assert "regions" in out.err, "progress"
    assert (answer["clean"], answer["findings"], answer["counts"]) == (True, [], {})
    figures = answer["figures"]
    assert figures["objects_good"] == figures["records"] == len(SMALL) + len(LARGE)
    assert figures["bytes_good"] == sum(SMALL) + sum(LARGE)
    assert figures["regions_used"] >= 4
    assert answer["volume"] == (whole / "superblock").read_bytes()[32:48].hex()
    assert state(whole) == before, "not a byte, not a time stamp"


def test_device_that_does_not_answer(whole: Path) -> None:
    slots = by_length(whole)
    report = check(whole, Watched(slots[MIB].offset + 4096))
    assert found(report) == {("unreadable", place(slots[MIB]))}
    assert report.figures["objects_good"] == len(SMALL) + len(LARGE) - 1


def test_lmdb_file_that_kills_its_reader(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that is cut off while it is read, or whose device gives up."""
    (tmp_path / "dying.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGBUS)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(environment, "_CHILD", "dying")
    report = check(whole)
    assert kinds(report) == {"index_unreadable": 1, "small_unreadable": 1}
    assert detail(report, "index_unreadable") == "its reader died of SIGBUS"
    assert report.figures["objects_good"] == len(LARGE)


async def test_volume_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await make_volume(tmp_path, [MIB])
    tier = make_tier(tmp_path)
    await tier.open()
    try:
        assert main(["fsck", "--offline", str(tmp_path)]) == 2
        assert "--ignore-lock" in capsys.readouterr().err
        assert main(["fsck", "--offline", str(tmp_path), "--ignore-lock"]) == 0
        assert "a daemon has it locked" in capsys.readouterr().out
    finally:
        await tier.close()


def test_opens_for_reading_alone_and_no_daemon_can_start_meanwhile(whole: Path) -> None:
    refused = []

    class Meanwhile(Watched):
        def preadv(self, fd: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
            other = RealFiles.open(self, whole / "LOCK", os.O_RDWR)
            try:
                super().lock(other)
            except BlockingIOError:
                refused.append(True)
            finally:
                super().close(other)
            return super().preadv(fd, buffers, offset_bytes)

    files = Meanwhile()
    assert check(whole, files).clean
    assert len(refused) > len(LARGE)
    assert len(files.flags) >= 3
    assert {flags & os.O_ACCMODE for flags in files.flags} == {os.O_RDONLY}
    assert not any(flags & (os.O_CREAT | os.O_TRUNC) for flags in files.flags)


def newer(volume: Path) -> None:
    old = disk.Superblock.decode((volume / "superblock").read_bytes())
    block = replace(old, version=2).encode()
    (volume / "superblock").write_bytes(block)
    overwrite(volume / "data", 0, block)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (newer, "format version 2"),
        (shutil.rmtree, "No such file"),
        (lambda at: [(at / n).unlink() for n in ("superblock", "data")], "holds no volume"),
    ],
)
def test_what_cannot_be_checked(
    volume: Path,
    change: Callable[[Path], object],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(volume)
    assert main(["fsck", "--offline", str(volume), "--json"]) == 2
    out = capsys.readouterr()
    assert said in json.loads(out.out)["error"]
    assert said in out.err


def test_a_directory_that_is_no_volume_but_holds_some(
    volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = volume.parent / "node" / "data"  # a directory, named like a volume's file
    data.mkdir(parents=True)
    (data / "LOCK").touch()
    volume.rename(data / "nvme")
    for directory in (data, data.parent):
        assert main(["fsck", "--offline", str(directory)]) == 2
        err = capsys.readouterr().err
        assert "holds no volume" in err
        assert str(data / "nvme") in err


def test_damage_ends_with_1(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(volume / "superblock", 50)
    flip(volume / "data", 50)
    assert main(["fsck", "--offline", str(volume)]) == 1
    out = capsys.readouterr().out
    assert "DAMAGE" in out
    assert "superblock_lost" in out


def test_files_that_are_not_always_there(volume: Path) -> None:
    for name in ("formatting", "superblock.new", "notes.txt"):
        (volume / name).touch()
    (volume / "index.damaged-1").mkdir()
    report = check(volume)
    assert kinds(report) == {"formatting": 1, "leftover": 1, "unknown_file": 1, "set_aside": 1}
    assert report.clean


def test_page_lists_every_finding() -> None:
    page = (Path(__file__).parents[2] / "docs" / "nvme-format.md").read_text()
    missing = [kind for kind in [*DAMAGE, *NOTES] if f"`{kind}`" not in page]
    assert not missing
