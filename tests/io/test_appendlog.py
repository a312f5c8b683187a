"""What an append-only file says yes to is read again, whatever becomes of the power."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from kvstored.io.appendlog import FRAME_BYTES, AppendLog
from kvstored.io.base import RealFiles
from kvstored.io.crash import CrashFiles
from kvstored.io.crash_image import Everything, Nothing, Torn
from kvstored.io.faults import Fault, FaultyFiles

HEAD = b"LOGHEAD1"


def payload(number: int) -> bytes:
    return bytes([number % 251 + 1]) * (number * 37 % 900 + 1)


def read(path: Path, head: bytes = b"") -> list[bytes]:
    found = AppendLog(RealFiles(), path, head=head).load()
    assert not found.damaged
    return found.payloads


def test_the_bytes_on_disk_are_these(tmp_path: Path) -> None:
    """Files of earlier versions are of this shape."""
    log = AppendLog(RealFiles(), tmp_path / "log", head=HEAD)
    assert log.replace([b"one"]) == len(HEAD) + FRAME_BYTES + 3
    log.append(b"three")
    assert (tmp_path / "log").read_bytes() == (
        HEAD
        + bytes.fromhex("0300000000000000" "a0e11f32a7ab1f91") + b"one"
        + bytes.fromhex("0500000000000000" "85e3a3b35ef11dc1") + b"three"
    )  # fmt: skip


@pytest.mark.parametrize("head", [b"", HEAD])
def test_what_was_appended_comes_back_in_order(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "log"
    log = AppendLog(RealFiles(), path, head=head)
    assert log.load().payloads == []
    if head:
        with pytest.raises(FileNotFoundError):
            log.append(b"x")  # it would lack its head
        log.replace([])
    for number in range(5):
        assert log.append(payload(number), synced=number != 3) == path.stat().st_size
    assert read(path, head) == [payload(number) for number in range(5)]
    assert log.replace([payload(9)]) == path.stat().st_size
    log.append(payload(8))
    assert read(path, head) == [payload(9), payload(8)]
    log.remove()
    log.remove()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_payload_is_refused(tmp_path: Path) -> None:
    log = AppendLog(RealFiles(), tmp_path / "log")
    with pytest.raises(ValueError, match="empty"):
        log.append(b"")
    log.append(b"x")
    assert read(tmp_path / "log") == [b"x"]


@pytest.mark.parametrize("head", [b"", HEAD])
def test_a_tail_cut_anywhere_is_torn_and_goes(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "log"
    log = AppendLog(RealFiles(), path, head=head)
    first = log.replace([payload(7)])
    log.append(payload(8))
    whole = path.read_bytes()
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        found = log.load()
        assert (found.payloads, found.damaged) == ([payload(7)], False)
        assert (found.whole_bytes, found.length_bytes) == (first, length)
        log.cut(found.whole_bytes)
        log.append(b"after")
        assert read(path, head) == [payload(7), b"after"]


def test_a_tail_whose_bytes_never_came_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = AppendLog(RealFiles(), path)
    end = log.append(payload(7))
    path.write_bytes(path.read_bytes() + bytes(5000))
    assert (log.load().whole_bytes, log.load().damaged) == (end, False)


@pytest.mark.parametrize("at", [0, 3, 8, 20, 30])
def test_damage_before_the_last_frame_is_told(tmp_path: Path, at: int) -> None:
    path = tmp_path / "log"
    log = AppendLog(RealFiles(), path, head=HEAD)
    log.replace([payload(7), payload(8), payload(9)])
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    found = log.load()
    assert found.damaged
    assert found.payloads == []
    assert found.whole_bytes == (0 if at < len(HEAD) else len(HEAD))


@pytest.mark.parametrize("operation", ["open", "pwritev", "fdatasync"])
def test_a_failed_append_leaves_no_trace(tmp_path: Path, operation: str) -> None:
    files = FaultyFiles(RealFiles())
    log = AppendLog(files, tmp_path / "log")
    log.append(b"before")
    files.inject(Fault("pwritev", short=0.5, unit_bytes=1, times=1))
    fault = files.inject(Fault(operation, error=errno.ENOSPC, times=1))
    with pytest.raises(OSError, match="space"):
        log.append(payload(1))
    assert fault.hits == 1
    log.append(b"after")
    assert read(tmp_path / "log") == [b"before", b"after"]


@pytest.mark.parametrize("operation", ["open", "pwritev", "fdatasync", "rename", "sync_directory"])
def test_a_failed_replace_leaves_one_of_the_two(tmp_path: Path, operation: str) -> None:
    files = FaultyFiles(RealFiles())
    log = AppendLog(files, tmp_path / "log", head=HEAD)
    log.replace([b"old"])
    files.inject(Fault(operation, error=errno.EIO, times=1))
    with pytest.raises(OSError, match="Input/output"):
        log.replace([b"new"])
    assert read(tmp_path / "log", HEAD) == ([b"new"] if operation == "sync_directory" else [b"old"])
    log.replace([b"newer"])
    assert read(tmp_path / "log", HEAD) == [b"newer"]


@pytest.mark.parametrize("head", [b"", HEAD])
@pytest.mark.parametrize("seed", range(2))
def test_what_was_said_yes_to_survives_a_power_loss(tmp_path: Path, head: bytes, seed: int) -> None:
    """Over three lives, each of which begins with a torn tail or none, and rewrites now and then;
    at each moment what is read is what was said, or that and what was under way.
    """
    root = tmp_path / "root"
    root.mkdir()
    files = CrashFiles(RealFiles(), root)
    rng = random.Random(seed)
    states: list[list[bytes]] = [[]]
    for life in range(3):
        log = AppendLog(files, root / "log", head=head)
        if head and not life:
            log.replace([])
        assert log.load().payloads == states[-1]
        for number in range(6):
            fresh = payload(rng.randrange(1000))
            if number == 4:
                log.replace([*states[-1][-2:], fresh])
                states.append([*states[-1][-2:], fresh])
            else:
                log.append(fresh)
                states.append([*states[-1], fresh])
            files.mark(number)
    assert len(files.sync_points) > 18
    for at in [*files.sync_points, files.now]:
        for survival in (Nothing(), Everything(), Torn(rng.randrange(1000))):
            target = tmp_path / f"{at}-{type(survival).__name__}"
            files.restore(target, at, survival)
            said = len(files.marks(at))
            assert read(target / "log", head) in states[said : said + 2]


def test_an_append_that_is_not_synced_is_covered_by_the_next_that_is(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    files = CrashFiles(RealFiles(), root)
    log = AppendLog(files, root / "log")
    log.append(b"a")
    log.append(b"b", synced=False)
    files.restore(tmp_path / "then", files.now, Nothing())
    log.append(b"c")
    files.restore(tmp_path / "now", files.now, Nothing())
    assert read(tmp_path / "then" / "log") == [b"a"]
    assert read(tmp_path / "now" / "log") == [b"a", b"b", b"c"]


def test_the_name_of_a_file_another_life_made_is_made_durable(tmp_path: Path) -> None:
    """It may have died between the two syncs."""
    root = tmp_path / "root"
    root.mkdir()
    files = CrashFiles(RealFiles(), root)
    fd = files.open(root / "log", os.O_RDWR | os.O_CREAT)
    files.fdatasync(fd)
    files.close(fd)
    AppendLog(files, root / "log").append(b"b")
    files.restore(tmp_path / "now", files.now, Nothing())
    assert read(tmp_path / "now" / "log") == [b"b"]
