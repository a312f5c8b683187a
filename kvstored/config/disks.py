"""What can be known of a volume's directory before it is used, without waiting for a dead device.

A directory that is missing or fails may come back: that is no fault of the configuration. One that
never could be used is.
"""

from __future__ import annotations

import errno
import os
import queue
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvstored.config import host

ANSWER_WITHIN_S = 5.0

_FULL = (errno.ENOSPC, errno.EDQUOT)
_MISTAKES = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


@dataclass(frozen=True, slots=True)
class Disk:
    """One directory. `real`: with symbolic links followed, as far as they are there.

    `missing`: why it cannot be used now, in words, `fault`: why it never can; at most one of them,
    and only where both are "" the rest is known. `device` and `inode` tell one directory under two
    names; `free_bytes` is what the whole file system has free and `held_bytes` what the directory
    holds already; `used`: there is a volume in it.
    """

    real: Path
    missing: str = ""
    fault: str = ""
    device: int = 0
    inode: int = 0
    free_bytes: int = 0
    held_bytes: int = 0
    used: bool = False

    @property
    def known(self) -> bool:
        """It is there and can be used."""
        return not (self.missing or self.fault)


def look_at(paths: Iterable[Path], within_s: float = ANSWER_WITHIN_S) -> dict[Path, Disk]:
    """What is known of each directory. Those that do not answer in time are missing."""
    found: dict[Path, Disk] = {
        path: Disk(
            Path(os.path.normpath(path)), f"does not answer within {within_s:g} s: see its device"
        )
        for path in paths
    }
    answers: queue.SimpleQueue[tuple[Path, Disk]] = queue.SimpleQueue()
    for path in found:
        # One each: a device that hangs keeps its thread for good, and nobody else's.
        threading.Thread(target=_look, args=(path, answers), name="look", daemon=True).start()
    end = time.monotonic() + within_s
    for _ in range(len(found)):
        try:
            path, disk = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        found[path] = disk
    return found


def _look(path: Path, answers: queue.SimpleQueue[tuple[Path, Disk]]) -> None:
    # Stop signals are for the stop watch, which does not run yet: they must not end up here.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    answers.put((path, _ask(path)))


def _ask(path: Path) -> Disk:
    real = Path(os.path.normpath(path))
    try:
        real = Path(os.path.realpath(path))
        try:
            found = os.stat(path)
        except FileNotFoundError:
            above = host.existing_ancestor(path)
            return Disk(real, f"is not there (and would be on the file system of {above})")
        return _known(path, real, found)
    except OSError as error:
        what = f"cannot be used: {error.strerror or error}"
        if error.errno in _MISTAKES:
            return Disk(real, fault=f"{what}; choose a directory of the daemon's")
        return Disk(real, what)


def _known(path: Path, real: Path, found: os.stat_result) -> Disk:
    if not stat.S_ISDIR(found.st_mode):
        return Disk(real, fault="is not a directory")
    _try(path)
    system = os.statvfs(path)
    return Disk(
        real,
        device=found.st_dev,
        inode=found.st_ino,
        free_bytes=system.f_bavail * system.f_frsize,
        held_bytes=host.held_bytes_below(path),
        used=holds_volume(path),
    )


def holds_volume(path: Path) -> bool:
    """Whether there is a volume in a directory already (docs/nvme-format.md)."""
    return any(os.path.exists(path / name) for name in ("superblock", "data"))


def _try(path: Path) -> None:
    """Raise OSError unless something can be made there; a full disk is usable."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".kvstored-probe-", dir=path))
    except OSError as error:
        if error.errno not in _FULL:
            raise
