"""The one seam for file operations: everything the daemon does to a file goes through a `Files`.

`RealFiles` asks the kernel. `kvstored.io.faults` wraps any `Files` and injects failures. All calls
block and raise OSError as the kernel does (LMDB commits raise lmdb.Error); callers run them in
threads of their own and decide what a failure means.
"""

from __future__ import annotations

import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

Buffer = memoryview | bytearray
"""What reads fill."""


class Files(ABC):
    """File operations by path and by descriptor. Every method may raise OSError."""

    @abstractmethod
    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Open a file, close-on-exec, and give its descriptor; `flags` as for os.open."""

    @abstractmethod
    def close(self, fd: int) -> None:
        """Close a descriptor."""

    @abstractmethod
    def preadv(self, fd: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        """Read into the buffers in turn; the number of bytes read, which may be short."""

    @abstractmethod
    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset_bytes: int) -> int:
        """Write the buffers in turn; the number of bytes written, which may be short."""

    @abstractmethod
    def fdatasync(self, fd: int) -> None:
        """Make what was written, and the file's length, survive a power loss."""

    @abstractmethod
    def sync_directory(self, path: Path) -> None:
        """Make the entries of a directory (created, renamed, removed) survive a power loss."""

    @abstractmethod
    def fallocate(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        """Give the range real blocks, reading as zeros where there were none; ENOSPC if not."""

    @abstractmethod
    def truncate(self, fd: int, length_bytes: int) -> None:
        """Set a file's length."""

    @abstractmethod
    def rename(self, source: Path, target: Path) -> None:
        """Rename, replacing the target if it is a file or an empty directory."""

    @abstractmethod
    def unlink(self, path: Path) -> None:
        """Remove a file."""

    @abstractmethod
    def mkdir(self, path: Path, mode: int = 0o700) -> None:
        """Make one directory."""

    @abstractmethod
    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""

    @abstractmethod
    def listdir(self, path: Path) -> list[str]:
        """Names in a directory."""

    @abstractmethod
    def stat(self, path: Path) -> os.stat_result:
        """What the kernel says of a path."""

    @abstractmethod
    def fstat(self, fd: int) -> os.stat_result:
        """What the kernel says of an open file, whether or not it has a name."""

    @abstractmethod
    def statvfs(self, path: Path) -> os.statvfs_result:
        """What the kernel says of the file system that a path is on."""

    @abstractmethod
    def lock(self, fd: int) -> None:
        """Take the exclusive flock of an open file; BlockingIOError at once if another has it."""

    @abstractmethod
    def commit(self, path: Path, action: Callable[[], None]) -> None:
        """Run an LMDB commit, which does its own writes; `path` is the environment's directory.

        A hook: LMDB cannot be given a file layer, but its commits can be failed, slowed and
        counted like any other write.
        """


class RealFiles(Files):
    """The kernel's files."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """See Files."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """See Files."""
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        """See Files."""
        return os.preadv(fd, buffers, offset_bytes)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset_bytes: int) -> int:
        """See Files."""
        return os.pwritev(fd, buffers, offset_bytes)

    def fdatasync(self, fd: int) -> None:
        """See Files."""
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        """See Files."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def fallocate(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        """See Files."""
        os.posix_fallocate(fd, offset_bytes, length_bytes)

    def truncate(self, fd: int, length_bytes: int) -> None:
        """See Files."""
        os.ftruncate(fd, length_bytes)

    def rename(self, source: Path, target: Path) -> None:
        """See Files."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """See Files."""
        os.unlink(path)

    def mkdir(self, path: Path, mode: int = 0o700) -> None:
        """See Files."""
        os.mkdir(path, mode)

    def rmdir(self, path: Path) -> None:
        """See Files."""
        os.rmdir(path)

    def listdir(self, path: Path) -> list[str]:
        """See Files."""
        return os.listdir(path)

    def stat(self, path: Path) -> os.stat_result:
        """See Files."""
        return os.stat(path)

    def fstat(self, fd: int) -> os.stat_result:
        """See Files."""
        return os.fstat(fd)

    def statvfs(self, path: Path) -> os.statvfs_result:
        """See Files."""
        return os.statvfs(path)

    def lock(self, fd: int) -> None:
        """See Files."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def commit(self, path: Path, action: Callable[[], None]) -> None:
        """See Files."""
        del path
        action()
