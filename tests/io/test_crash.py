"""What the simulated power loss keeps and what it loses: by POSIX's word, not by this kernel's."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from kvstored.io.base import RealFiles
from kvstored.io.crash import CrashFiles
from kvstored.io.crash_image import Everything, Nothing, Survival, Torn
from kvstored.io.faults import Fault, FaultyFiles

BLOCK = 4096


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def files(root: Path) -> CrashFiles:
    return CrashFiles(RealFiles(), root)


@pytest.fixture
def after(files: CrashFiles, tmp_path: Path) -> Callable[..., dict[str, bytes]]:
    """Contents of all files after a power loss, by path; directories as b"/"."""
    made = 0

    def look(survival: Survival | None = None, at: int | None = None) -> dict[str, bytes]:
        nonlocal made
        made += 1
        target = tmp_path / f"after{made}"
        files.restore(target, files.now if at is None else at, survival or Nothing())
        return {
            str(path.relative_to(target)): path.read_bytes() if path.is_file() else b"/"
            for path in target.rglob("*")
        }

    return look


Look = Callable[..., dict[str, bytes]]


def made(files: CrashFiles, root: Path, name: str = "f", content: bytes = b"") -> int:
    """An open file whose name and content are durable."""
    fd = files.open(root / name, os.O_RDWR | os.O_CREAT)
    if content:
        files.pwritev(fd, [content], 0)
    files.fdatasync(fd)
    files.sync_directory(root)
    return fd


def test_what_was_there_before_is_durable(root: Path, tmp_path: Path) -> None:
    (root / "a").mkdir()
    content = bytes(3 << 20) + b"x" + bytes(5000)
    (root / "a" / "f").write_bytes(content)
    (root / "empty").touch()
    files = CrashFiles(RealFiles(), root)
    assert files.sync_points == []
    files.restore(tmp_path / "t", files.now, Nothing())
    assert (tmp_path / "t" / "a" / "f").read_bytes() == content
    assert (tmp_path / "t" / "empty").read_bytes() == b""


def test_bytes_need_a_sync_of_the_file(files: CrashFiles, root: Path, after: Look) -> None:
    fd = made(files, root, content=b"old")
    files.pwritev(fd, [b"n", b"ew"], 0)
    assert after() == {"f": b"old"}
    assert after(Everything()) == {"f": b"new"}
    files.fdatasync(fd)
    assert after() == {"f": b"new"}
    # Just before that sync it was still open.
    assert after(Nothing(), files.sync_points[-1]) == {"f": b"old"}
    assert after(Everything(), files.sync_points[-1]) == {"f": b"new"}
    files.close(fd)


def test_names_need_a_sync_of_the_directory(files: CrashFiles, root: Path, after: Look) -> None:
    files.mkdir(root / "d")
    fd = files.open(root / "d" / "f", os.O_RDWR | os.O_CREAT)
    files.pwritev(fd, [b"x"], 0)
    files.fdatasync(fd)
    assert after() == {}
    files.sync_directory(root / "d")
    assert after() == {}, "the directory itself has no name yet"
    files.sync_directory(root)
    assert after() == {"d": b"/", "d/f": b"x"}
    files.unlink(root / "d" / "f")
    assert after() == {"d": b"/", "d/f": b"x"}
    assert after(Everything()) == {"d": b"/"}
    files.sync_directory(root / "d")
    files.rmdir(root / "d")
    assert after() == {"d": b"/"}
    files.sync_directory(root)
    assert after() == {}
    files.close(fd)


def test_rename_is_atomic_and_needs_a_sync(files: CrashFiles, root: Path, after: Look) -> None:
    old, new = made(files, root, "f", b"old"), made(files, root, "f.new", b"new")
    files.rename(root / "f.new", root / "f")
    assert after() == {"f": b"old", "f.new": b"new"}
    for seed in range(8):
        assert after(Torn(seed)) in ({"f": b"old", "f.new": b"new"}, {"f": b"new"})
    files.sync_directory(root)
    assert after() == {"f": b"new"}
    files.pwritev(new, [b"N"], 0)
    files.fdatasync(new)
    assert after() == {"f": b"New"}, "descriptors follow the file, not the name"
    for fd in (old, new):
        files.close(fd)


def test_length_needs_a_sync(files: CrashFiles, root: Path, after: Look) -> None:
    fd = made(files, root, content=b"abc")
    files.fallocate(fd, 0, 10)
    assert after() == {"f": b"abc"}
    files.fdatasync(fd)
    assert after() == {"f": b"abc" + bytes(7)}
    files.fallocate(fd, 0, 5)
    files.fdatasync(fd)
    assert after() == {"f": b"abc" + bytes(7)}, "never shorter by that"
    files.truncate(fd, 2)
    assert after() == {"f": b"abc" + bytes(7)}
    files.fdatasync(fd)
    assert after() == {"f": b"ab"}
    files.close(files.open(root / "f", os.O_RDWR | os.O_TRUNC))
    assert after() == {"f": b"ab"}
    assert after(Everything()) == {"f": b""}
    files.close(fd)


def test_sync_of_one_file_says_nothing_of_another(
    files: CrashFiles, root: Path, after: Look
) -> None:
    first, second = made(files, root, "1"), made(files, root, "2")
    files.pwritev(first, [b"first"], 0)
    files.pwritev(second, [b"second"], 0)
    files.fdatasync(second)
    assert after() == {"1": b"", "2": b"second"}
    for fd in (first, second):
        files.close(fd)


class Meanwhile(RealFiles):
    """Does something while a sync is under way."""

    def __init__(self) -> None:
        self.action: Callable[[], None] | None = None

    def fdatasync(self, fd: int) -> None:
        if self.action is not None:
            self.action()
        super().fdatasync(fd)


def test_write_during_a_sync_is_not_covered(root: Path, tmp_path: Path) -> None:
    inner = Meanwhile()
    files = CrashFiles(inner, root)
    fd = made(files, root, content=b"aaaa")
    files.pwritev(fd, [b"b"], 0)

    def write() -> None:
        files.pwritev(fd, [b"c"], 1)

    inner.action = write
    files.fdatasync(fd)
    files.restore(tmp_path / "t", files.now, Nothing())
    assert (tmp_path / "t" / "f").read_bytes() == b"baaa"
    inner.action = None
    files.fdatasync(fd)
    files.restore(tmp_path / "u", files.now, Nothing())
    assert (tmp_path / "u" / "f").read_bytes() == b"bcaa"
    files.close(fd)


def test_failed_sync_loses_what_it_covered_for_good(root: Path, tmp_path: Path) -> None:
    """As Linux has it: the pages are clean afterwards, and the next sync succeeds."""
    faulty = FaultyFiles(RealFiles())
    files = CrashFiles(faulty, root)
    fd = made(files, root, content=b"aaaa")
    files.pwritev(fd, [b"b"], 0)
    faulty.inject(Fault("fdatasync", error=errno.EIO, times=1))
    with pytest.raises(OSError, match="Input/output"):
        files.fdatasync(fd)
    files.pwritev(fd, [b"c"], 1)
    files.fdatasync(fd)
    files.restore(tmp_path / "t", files.now, Nothing())
    assert (tmp_path / "t" / "f").read_bytes() == b"acaa"
    files.restore(tmp_path / "u", files.now, Everything())
    assert (tmp_path / "u" / "f").read_bytes() == b"bcaa"
    files.close(fd)


def test_failed_write_may_have_happened(root: Path, tmp_path: Path) -> None:
    faulty = FaultyFiles(RealFiles())
    files = CrashFiles(faulty, root)
    fd = made(files, root, content=b"aaaa")
    faulty.inject(Fault("pwritev", error=errno.EIO, times=1))
    with pytest.raises(OSError, match="Input/output"):
        files.pwritev(fd, [b"b"], 0)
    files.fdatasync(fd)
    found = set()
    for seed in range(20):
        files.restore(tmp_path / str(seed), files.now, Torn(seed))
        found.add((tmp_path / str(seed) / "f").read_bytes())
    assert found == {b"aaaa", b"baaa"}
    files.close(fd)


def test_short_write_is_what_was_written(root: Path, tmp_path: Path) -> None:
    faulty = FaultyFiles(RealFiles())
    files = CrashFiles(faulty, root)
    fd = made(files, root)
    faulty.inject(Fault("pwritev", short=0.5, unit_bytes=1))
    assert files.pwritev(fd, [b"ab", b"cd"], 0) == 2
    files.fdatasync(fd)
    files.restore(tmp_path / "t", files.now, Nothing())
    assert (tmp_path / "t" / "f").read_bytes() == b"ab"
    files.close(fd)


def test_torn_writes(files: CrashFiles, root: Path, after: Look) -> None:
    """Sectors are old or new, each for itself; now and then a write is whole or gone."""
    old, new = b"o" * 8 * BLOCK, b"n" * 8 * BLOCK
    fd = made(files, root, content=old)
    files.pwritev(fd, [new], 0)
    seen = set()
    for seed in range(40):
        got = after(Torn(seed))["f"]
        assert len(got) == len(old)
        sectors = [got[at : at + 512] for at in range(0, len(got), 512)]
        assert set(sectors) <= {b"o" * 512, b"n" * 512}
        blocks = [set(sectors[at : at + 8]) for at in range(0, len(sectors), 8)]
        whole = all(len(block) == 1 for block in blocks)
        seen.add("all" if got == new else "none" if got == old else "4096" if whole else "512")
        assert after(Torn(seed)) == {"f": got}, "to be repeated by its seed"
    assert seen == {"all", "none", "512", "4096"}
    files.fdatasync(fd)
    assert after(Torn(1)) == {"f": new}
    files.close(fd)


def test_marks_are_in_order_with_events(files: CrashFiles, root: Path) -> None:
    files.mark("before")
    fd = made(files, root)
    files.mark("after")
    assert len(files.sync_points) == 1, "a sync of nothing is none"
    assert files.marks(files.sync_points[0]) == ["before"]
    assert files.marks(files.now) == ["before", "after"]
    files.close(fd)


def test_elsewhere_is_left_alone(files: CrashFiles, tmp_path: Path, after: Look) -> None:
    files.mkdir(tmp_path / "other")
    fd = files.open(tmp_path / "other" / "f", os.O_RDWR | os.O_CREAT)
    files.pwritev(fd, [b"x"], 0)
    files.fdatasync(fd)
    files.close(fd)
    files.sync_directory(tmp_path / "other")
    files.unlink(tmp_path / "other" / "f")
    files.rmdir(tmp_path / "other")
    assert after(Everything()) == {}


def test_passes_the_rest_on(files: CrashFiles, root: Path) -> None:
    fd = made(files, root, content=b"abc")
    into = bytearray(3)
    assert files.preadv(fd, [into], 0) == 3
    assert into == b"abc"
    assert files.listdir(root) == ["f"]
    assert files.stat(root / "f").st_size == 3
    assert files.statvfs(root).f_bsize > 0
    files.lock(fd)
    files.mkdir(root / "d")
    with pytest.raises(NotImplementedError):
        files.rename(root / "f", root / "d" / "f")
    files.close(fd)


# ---- LMDB ---------------------------------------------------------------------------------------


def entries(path: Path) -> dict[bytes, bytes]:
    with lmdb.open(str(path), lock=False, readonly=True) as env, env.begin() as txn:
        return dict(txn.cursor().iternext())


def test_lmdb_is_as_of_its_last_commit(files: CrashFiles, root: Path, tmp_path: Path) -> None:
    files.mkdir(root / "env")
    expected: list[dict[bytes, bytes]] = [{}]
    with lmdb.open(str(root / "env"), map_size=1 << 20) as env:
        files.sync_directory(root / "env")
        assert _names(files, tmp_path / "x") == [], "its name is not durable yet"
        files.sync_directory(root)
        for i in range(6):
            txn = env.begin(write=True)
            for key in range(40):
                txn.put(b"%d" % key, b"%d" % i * 50)
            files.commit(root / "env", txn.commit)
            expected.append({b"%d" % key: b"%d" % i * 50 for key in range(40)})
        txn = env.begin(write=True)
        txn.put(b"0", b"not committed")
        txn.abort()
    # Just before a commit was through, the one before it holds.
    for i, at in enumerate([*files.sync_points[-5:], files.now], start=1):
        files.restore(tmp_path / str(i), at, Nothing())
        assert entries(tmp_path / str(i) / "env") == expected[i]
        assert not (tmp_path / str(i) / "env" / "lock.mdb").exists()


def test_lmdb_commit_that_was_cut_off(files: CrashFiles, root: Path, tmp_path: Path) -> None:
    """Some of its pages are there, and the meta page is not: the commit before holds."""
    files.mkdir(root / "env")
    with lmdb.open(str(root / "env"), map_size=1 << 20) as env:
        fd = files.open(root / "env" / "data.mdb", os.O_RDWR)
        files.fdatasync(fd)
        files.close(fd)
        files.sync_directory(root / "env")
        files.sync_directory(root)
        for i in range(2):
            txn = env.begin(write=True)
            for key in range(200):
                txn.put(b"%d" % key, b"%d" % i * 50)
            files.commit(root / "env", txn.commit)
    at = files.sync_points[-1]
    files.restore(tmp_path / "old", at, Nothing())
    files.restore(tmp_path / "new", at, Everything())
    assert set(entries(tmp_path / "old" / "env").values()) == {b"0" * 50}
    assert set(entries(tmp_path / "new" / "env").values()) == {b"1" * 50}
    files.restore(tmp_path / "end", files.now, Nothing())
    assert entries(tmp_path / "end" / "env") == entries(tmp_path / "new" / "env")
    old = (tmp_path / "old" / "env" / "data.mdb").read_bytes()
    torn = 0
    for seed in range(12):
        files.restore(tmp_path / str(seed), at, Torn(seed))
        found = set(entries(tmp_path / str(seed) / "env").values())
        assert found in ({b"0" * 50}, {b"1" * 50})
        raw = (tmp_path / str(seed) / "env" / "data.mdb").read_bytes()
        torn += found == {b"0" * 50} and raw.rstrip(b"\0") != old.rstrip(b"\0")
    assert torn > 2


def test_lmdb_commits_that_nobody_told_of(files: CrashFiles, root: Path, tmp_path: Path) -> None:
    """As LMDB makes some when databases are opened: all of them are there, or none."""
    files.mkdir(root / "env")
    with lmdb.open(str(root / "env"), map_size=1 << 20) as env:
        files.sync_directory(root / "env")
        files.sync_directory(root)
        for i in range(8):
            txn = env.begin(write=True)
            for key in range(200):
                txn.put(b"%d" % key, b"%d" % i * 50)
            if i in (0, 7):
                files.commit(root / "env", txn.commit)
            else:
                txn.commit()
    seen = set()
    for seed in range(12):
        files.restore(tmp_path / str(seed), files.sync_points[-1], Torn(seed))
        seen |= set(entries(tmp_path / str(seed) / "env").values())
    assert seen == {b"0" * 50, b"6" * 50, b"7" * 50}


def test_lmdb_commit_that_failed_is_open_until_the_next(root: Path, tmp_path: Path) -> None:
    faulty = FaultyFiles(RealFiles())
    files = CrashFiles(faulty, root)
    files.mkdir(root / "env")
    with lmdb.open(str(root / "env"), map_size=1 << 20) as env:
        files.sync_directory(root / "env")
        files.sync_directory(root)
        for i in range(3):
            if i == 1:
                faulty.inject(Fault("commit", error=errno.EIO, after=True, times=1))
            txn = env.begin(write=True)
            txn.put(b"k", b"%d" % i)
            try:
                files.commit(root / "env", txn.commit)
            except OSError:
                assert i == 1
                files.restore(tmp_path / "none", files.now, Nothing())
                files.restore(tmp_path / "all", files.now, Everything())
    assert entries(tmp_path / "none" / "env") == {b"k": b"0"}
    assert entries(tmp_path / "all" / "env") == {b"k": b"1"}
    files.restore(tmp_path / "end", files.now, Nothing())
    assert entries(tmp_path / "end" / "env") == {b"k": b"2"}


def _names(files: CrashFiles, target: Path) -> list[str]:
    files.restore(target, files.now, Nothing())
    return sorted(os.listdir(target))
