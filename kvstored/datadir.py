"""The data directory: made, locked against a second daemon, home of the deployment secret."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from kvstored.errors import DataDirectoryError
from kvstored.io.base import Files, RealFiles
from kvstored.io.whole import is_there, make_directory, read_whole, replace_file

LOCK_FILE = "lock"
DEPLOYMENT_FILE = "deployment_secret"
SECRET_BYTES = 32


class DataDirectory:
    """A data directory that this process alone uses. Made by `claim`; ended by `release`."""

    def __init__(self, files: Files, path: Path, lock_fd: int) -> None:
        self.path = path
        self._files = files
        self._lock_fd = lock_fd

    @classmethod
    def claim(cls, path: Path, files: Files | None = None) -> DataDirectory:
        """Make the directory (mode 0700) if need be, durably, and lock it.

        The lock is a flock on `lock`: the kernel drops it with the process, however that ends.
        Raises DataDirectoryError where the directory cannot be used, or another process uses it.
        """
        files = files or RealFiles()
        try:
            make_directory(files, path, parents_mode=0o777)
            fd = files.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            raise DataDirectoryError(
                f"the data directory {path} cannot be used: {error.strerror}",
                "set daemon.data_dir to a directory that this user may write",
            ) from error
        try:
            files.lock(fd)
        except OSError as error:
            held = bytearray(32)
            length = files.preadv(fd, [held], 0)
            holder = held[:length].decode("ascii", "replace").strip() or "unknown"
            files.close(fd)
            raise DataDirectoryError(
                f"the data directory {path} is in use by process {holder}",
                "stop that daemon, or set another daemon.data_dir",
            ) from error
        # For the message above only; a full disk is no reason not to start.
        with contextlib.suppress(OSError):
            files.truncate(fd, 0)
            files.pwritev(fd, [f"{os.getpid()}\n".encode()], 0)
        return cls(files, path, fd)

    def release(self) -> None:
        """Give the lock back. Idempotent."""
        if self._lock_fd >= 0:
            self._files.close(self._lock_fd)
            self._lock_fd = -1

    def deployment_secret(self) -> bytes:
        """The secret kept here; random, made and synced to disk at the first call ever.

        Keys depend on it: with another one, nothing stored before is found again. Raises
        DataDirectoryError where it can be neither read nor made.
        """
        file = self.path / DEPLOYMENT_FILE
        try:
            if is_there(self._files, file):
                # Whoever made it may not have come as far as to make its name durable.
                self._files.sync_directory(self.path)
            else:
                secret = secrets.token_hex(SECRET_BYTES) + "\n"
                replace_file(self._files, file, secret.encode("ascii"))
            text = read_whole(self._files, file).decode("ascii").strip()
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
