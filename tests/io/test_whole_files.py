"""Files replaced whole and directories made: durable on return, and never there in part."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvstored.io import whole
from kvstored.io.base import RealFiles
from kvstored.io.crash import CrashFiles
from kvstored.io.crash_image import Nothing, Torn
from kvstored.io.faults import Fault, FaultyFiles


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def test_short_reads_and_writes_are_gone_on_with(root: Path) -> None:
    files = FaultyFiles(RealFiles())
    content = bytes(range(256)) * 40
    files.inject(Fault("pwritev", short=0.4, unit_bytes=1, times=3))
    files.inject(Fault("preadv", short=0.4, unit_bytes=1, times=3))
    whole.replace_file(files, root / "f", content)
    assert whole.read_whole(files, root / "f") == content
    assert files.calls["pwritev"] == files.calls["preadv"] == 4


def test_a_replaced_file_is_the_old_or_the_new_one(root: Path, tmp_path: Path) -> None:
    files = CrashFiles(RealFiles(), root)
    contents = [bytes([number]) * (9000 - 2000 * number) for number in range(4)]
    for content in contents:
        whole.replace_file(files, root / "f", content)
        files.mark(content)
    for at in [*files.sync_points, files.now]:
        for survival in (Nothing(), Torn(at)):
            target = tmp_path / f"{at}-{type(survival).__name__}"
            files.restore(target, at, survival)
            said = len(files.marks(at))
            held = (target / "f").read_bytes() if (target / "f").exists() else None
            assert held in [None, *contents][said : said + 2]


def test_a_draft_that_a_crash_has_left_is_not_written_over(root: Path) -> None:
    """Its mode may be wider, or it may be a link to something else."""
    (root / "other").write_bytes(b"other")
    (root / "f.new").symlink_to(root / "other")
    whole.replace_file(RealFiles(), root / "f", b"new")
    assert (root / "other").read_bytes() == b"other"
    assert not (root / "f").is_symlink()
    (root / "f.new").write_bytes(b"a longer draft")
    (root / "f.new").chmod(0o644)
    whole.replace_file(RealFiles(), root / "f", b"newer")
    assert (root / "f").read_bytes() == b"newer"
    assert (root / "f").stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(root)) == ["f", "other"]


def test_directories_are_durable_when_made(root: Path, tmp_path: Path) -> None:
    files = CrashFiles(RealFiles(), root)
    whole.make_directory(files, root / "a" / "b" / "c", parents_mode=0o755)
    files.restore(tmp_path / "now", files.now, Nothing())
    assert (tmp_path / "now" / "a" / "b" / "c").is_dir()
    modes = [path.stat().st_mode & 0o777 for path in (root / "a", root / "a/b", root / "a/b/c")]
    assert modes == [0o755, 0o755, 0o700]
    events = files.now
    whole.make_directory(files, root / "a" / "b" / "c")
    assert files.now == events


def test_a_directory_that_another_has_just_made_is_taken(root: Path, tmp_path: Path) -> None:
    faults = FaultyFiles(RealFiles())
    files = CrashFiles(faults, root)
    faults.inject(Fault("mkdir", exception=lambda: _made_by_another(root / "a"), times=1))
    whole.make_directory(files, root / "a")
    files.restore(tmp_path / "now", files.now, Nothing())
    assert (tmp_path / "now" / "a").is_dir()


def _made_by_another(path: Path) -> OSError:
    path.mkdir()
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def test_what_cannot_be_made_is_said(root: Path) -> None:
    (root / "file").touch()
    with pytest.raises(NotADirectoryError):
        whole.make_directory(RealFiles(), root / "file" / "a")
    assert not whole.is_there(RealFiles(), root / "nothing")
