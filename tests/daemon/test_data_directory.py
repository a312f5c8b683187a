"""The data directory: one daemon at a time, and a secret that stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstored.datadir import DataDirectory
from kvstored.errors import DataDirectoryError

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
