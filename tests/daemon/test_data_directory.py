"""The data directory: one daemon at a time, and a secret that stays."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstored.datadir import DataDirectory
from kvstored.errors import DataDirectoryError
from kvstored.io.base import RealFiles
from kvstored.io.crash import CrashFiles
from kvstored.io.crash_image import Everything, Nothing, Torn
from kvstored.io.faults import Fault, FaultyFiles

HOLD = """
import sys
from pathlib import Path
from kvstored.datadir import DataDirectory
data = DataDirectory.claim(Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
"""


def test_a_second_daemon_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "a/data"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"claimed\n"
        with pytest.raises(DataDirectoryError, match=f"in use by process {holder.pid}"):
            DataDirectory.claim(path)
        holder.kill()
    DataDirectory.claim(path).release()  # the kernel dropped the lock with the process


def test_released_is_free_again_and_modes_are_narrow(tmp_path: Path) -> None:
    path = tmp_path / "data"
    first = DataDirectory.claim(path)
    with pytest.raises(DataDirectoryError, match=f"process {os.getpid()}"):
        DataDirectory.claim(path)
    first.release()
    first.release()
    second = DataDirectory.claim(path)
    second.deployment_secret()
    modes = {p.name: p.stat().st_mode & 0o777 for p in (path, *path.iterdir())}
    assert modes == {"data": 0o700, "lock": 0o600, "deployment_secret": 0o600}
    second.release()


def test_the_secret_stays_and_is_nobody_elses(tmp_path: Path) -> None:
    first, other = DataDirectory.claim(tmp_path / "a"), DataDirectory.claim(tmp_path / "b")
    secret = first.deployment_secret()
    assert len(secret) == 64
    assert first.deployment_secret() == secret
    assert other.deployment_secret() != secret
    first.release()
    again = DataDirectory.claim(tmp_path / "a")
    assert again.deployment_secret() == secret
    again.release()
    other.release()


def test_a_draft_left_by_a_crash_is_not_the_secret(tmp_path: Path) -> None:
    data = DataDirectory.claim(tmp_path)
    (tmp_path / "deployment_secret.new").write_text("half")
    assert len(data.deployment_secret()) == 64
    (tmp_path / "deployment_secret").write_text("cut")
    with pytest.raises(DataDirectoryError, match="cut short"):
        data.deployment_secret()
    data.release()


def test_a_directory_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        DataDirectoryError, match=r"file/data cannot be used: Not a directory .*set "
    ):
        DataDirectory.claim(tmp_path / "file/data")


def test_a_power_loss_takes_neither_directory_nor_secret(tmp_path: Path) -> None:
    """At no moment is there a part of it, and what was given out as the secret stays it."""
    root = tmp_path / "root"
    root.mkdir()
    files = CrashFiles(RealFiles(), root)
    data = DataDirectory.claim(root / "a/data", files)
    files.mark("claimed")
    secret = data.deployment_secret()
    files.mark("secret")
    data.release()
    for at in [*files.sync_points, files.now]:
        for survival in (Nothing(), Everything(), Torn(at)):
            target = tmp_path / f"{at}-{type(survival).__name__}"
            files.restore(target, at, survival)
            said = files.marks(at)
            assert (target / "a/data").is_dir() or "claimed" not in said
            again = DataDirectory.claim(target / "a/data")
            assert again.deployment_secret() == secret or "secret" not in said
            again.release()


def test_a_secret_whose_name_was_not_synced_yet_is_made_durable(tmp_path: Path) -> None:
    """Its maker died in between."""
    (tmp_path / "root").mkdir()
    files = CrashFiles(RealFiles(), tmp_path / "root")
    maker = DataDirectory.claim(tmp_path / "root", files)
    fd = files.open(tmp_path / "root/deployment_secret", os.O_RDWR | os.O_CREAT)
    files.pwritev(fd, [b"ab" * 32 + b"\n"], 0)
    files.fdatasync(fd)
    files.close(fd)
    maker.release()
    data = DataDirectory.claim(tmp_path / "root", files)
    secret = data.deployment_secret()
    data.release()
    files.restore(tmp_path / "now", files.now, Nothing())
    again = DataDirectory.claim(tmp_path / "now")
    assert again.deployment_secret() == secret == b"ab" * 32
    again.release()


@pytest.mark.parametrize("operation", ["mkdir", "open", "pwritev", "fdatasync", "sync_directory"])
def test_a_disk_that_fails_is_told_with_what_to_do(tmp_path: Path, operation: str) -> None:
    files = FaultyFiles(RealFiles())
    fault = files.inject(Fault(operation, error=errno.EIO, skip=int(operation == "pwritev")))
    with pytest.raises(DataDirectoryError, match=r"cannot be used: .*nput/output error"):
        DataDirectory.claim(tmp_path / "data", files).deployment_secret()
    assert fault.hits


def test_those_above_the_directory_are_made_as_wide_as_is_usual(tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    DataDirectory.claim(tmp_path / "a/b/data").release()
    usual = (tmp_path / "usual").stat().st_mode
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "a/b").stat().st_mode == usual
    assert usual != (tmp_path / "a/b/data").stat().st_mode
