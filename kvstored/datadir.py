"""The data directory: made, locked against a second daemon, home of the deployment secret."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path

from kvstored.errors import DataDirectoryError

LOCK_FILE = "lock"
DEPLOYMENT_FILE = "deployment_secret"
SECRET_BYTES = 32


class DataDirectory:
    """A data directory that this process alone uses. Made by `claim`; ended by `release`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def claim(cls, path: Path) -> DataDirectory:
        """Make the directory (mode 0700) if need be, and lock it.

        The lock is a flock on `lock`: the kernel drops it with the process, however that ends.
        Raises DataDirectoryError where the directory cannot be used, or another process uses it.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(path / LOCK_FILE, flags, 0o600)
        except OSError as error:
            raise DataDirectoryError(
                f"the data directory {path} cannot be used: {error.strerror}",
                "set daemon.data_dir to a directory that this user may write",
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise DataDirectoryError(
                f"the data directory {path} is in use by process {holder}",
                "stop that daemon, or set another daemon.data_dir",
            ) from error
        # For the message above only; a full disk is no reason not to start.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return cls(path, fd)

    def release(self) -> None:
        """Give the lock back. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def deployment_secret(self) -> bytes:
        """The secret kept here; random, made and synced to disk at the first call.

        Keys depend on it: with another one, nothing stored before is found again. Raises
        DataDirectoryError where it can be neither read nor made.
        """
        file = self.path / DEPLOYMENT_FILE
        try:
            if not file.exists():
                _write_once(file, secrets.token_hex(SECRET_BYTES))
            text = file.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise DataDirectoryError(
                f"the deployment secret {file} cannot be used: {error}",
                "restore it from a backup, or remove it to begin with an empty cache",
            ) from error
        if len(text) < SECRET_BYTES:
            raise DataDirectoryError(
                f"the deployment secret {file} is cut short",
                "restore it from a backup, or remove it to begin with an empty cache",
            )
        return text.encode()


def _write_once(file: Path, text: str) -> None:
    """Make a file of mode 0600 whole or not at all, also at power loss."""
    draft = file.with_suffix(".new")
    draft.unlink(missing_ok=True)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, text.encode("ascii") + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)
    draft.rename(file)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
