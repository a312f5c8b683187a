"""The file seam against the kernel, and each fault the wrapper can inject."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault, FaultyFiles


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles(RealFiles())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some" / "data"


@pytest.fixture
def fd(files: FaultyFiles, path: Path) -> Iterator[int]:
    files.mkdir(path.parent)
    opened = files.open(path, os.O_RDWR | os.O_CREAT)
    yield opened
    files.close(opened)


def test_passes_everything_on(files: FaultyFiles, fd: int, path: Path) -> None:
    files.fallocate(fd, 0, 8192)
    assert files.stat(path).st_size == 8192
    assert files.stat(path).st_blocks * 512 >= 8192
    assert files.pwritev(fd, [b"ab", b"cd"], 100) == 4
    files.fdatasync(fd)
    one, two = bytearray(3), bytearray(3)
    assert files.preadv(fd, [one, two], 99) == 6
    assert one + two == b"\0abcd\0"
    files.truncate(fd, 101)
    assert files.stat(path).st_size == 101
    files.rename(path, path.with_name("moved"))
    assert files.listdir(path.parent) == ["moved"]
    files.sync_directory(path.parent)
    files.unlink(path.with_name("moved"))
    files.mkdir(path.with_name("folder"))
    files.rmdir(path.with_name("folder"))
    assert files.listdir(path.parent) == []
    assert files.statvfs(path.parent).f_bsize > 0
    done: list[int] = []
    files.commit(path, lambda: done.append(1))
    assert done == [1]


def test_lock_is_exclusive(files: FaultyFiles, fd: int, path: Path) -> None:
    files.lock(fd)
    other = files.open(path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        files.lock(other)
    files.close(other)


def test_descriptors_do_not_leak_to_children(files: FaultyFiles, fd: int) -> None:
    assert not os.get_inheritable(fd)


def test_error_by_operation_path_and_count(files: FaultyFiles, fd: int, path: Path) -> None:
    fault = files.inject(Fault("fdatasync", "*/data", error=errno.EIO, skip=1, times=2))
    elsewhere = files.inject(Fault("fdatasync", "*/other", error=errno.EIO))
    files.fdatasync(fd)
    for _ in range(2):
        with pytest.raises(OSError, match="data") as caught:
            files.fdatasync(fd)
        assert caught.value.errno == errno.EIO
    files.fdatasync(fd)
    assert (fault.hits, elsewhere.hits) == (2, 0)
    assert files.calls["fdatasync"] == 4
    files.inject(Fault("*", error=errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        files.mkdir(path.with_name("x"))
    files.clear()
    files.mkdir(path.with_name("x"))


def test_error_after_the_deed(files: FaultyFiles, fd: int) -> None:
    files.inject(Fault("pwritev", error=errno.EIO, after=True))
    with pytest.raises(OSError, match="Input/output"):
        files.pwritev(fd, [b"done"], 0)
    back = bytearray(4)
    files.preadv(fd, [back], 0)
    assert back == b"done"


def test_own_exception(files: FaultyFiles, path: Path) -> None:
    files.inject(Fault("commit", exception=lambda: KeyError("panic")))
    with pytest.raises(KeyError):
        files.commit(path, lambda: pytest.fail("must not run"))


def test_short_transfers(files: FaultyFiles, fd: int, path: Path) -> None:
    files.inject(Fault("pwritev", short=0.5, unit_bytes=1, times=1))
    assert files.pwritev(fd, [b"abcdef", b"gh"], 0) == 4
    assert files.stat(path).st_size == 4
    files.pwritev(fd, [b"abcdefgh"], 0)
    files.inject(Fault("preadv", short=0.75, unit_bytes=1, times=1))
    one, two = bytearray(4), bytearray(4)
    assert files.preadv(fd, [one, two], 0) == 6
    assert one + two == b"abcdef\0\0"


def test_flips(files: FaultyFiles, fd: int) -> None:
    data = b"\0" * 10
    files.inject(Fault("pwritev", flip=8 * 7 + 2, times=1))
    assert files.pwritev(fd, [data[:5], data[5:]], 0) == 10
    assert data == bytes(10), "the caller's buffer is not touched"
    one, two = bytearray(5), bytearray(5)
    files.preadv(fd, [one, two], 0)
    assert one + two == bytes(7) + b"\x04\0\0"
    files.inject(Fault("preadv", flip=0, times=1))
    files.preadv(fd, [one, two], 0)
    assert one[0] == 1


def test_stuck_until_released_without_holding_others_up(files: FaultyFiles, fd: int) -> None:
    release = threading.Event()
    files.inject(Fault("fdatasync", stuck=release))
    thread = threading.Thread(target=lambda: files.fdatasync(fd))
    thread.start()
    assert files.pwritev(fd, [b"x"], 0) == 1
    assert thread.is_alive()
    release.set()
    thread.join()


def test_slow(files: FaultyFiles, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("kvstored.io.faults.time.sleep", slept.append)
    files.inject(Fault("fdatasync", delay_s=0.5))
    files.fdatasync(fd)
    assert slept == [0.5]
