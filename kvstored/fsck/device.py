"""Reading a volume's files, and nothing else: descriptors are opened for reading only."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

from kvstored.errors import DataDirectoryError
from kvstored.fsck import ondisk
from kvstored.fsck.findings import Finding, Report
from kvstored.io.base import Files

BUFFER_BYTES = 4 << 20


class DataFile:
    """The data file, read past the page cache where the file system lets it (`mode`)."""

    def __init__(self, files: Files, path: Path) -> None:
        """Open it. Raises OSError."""
        self._files = files
        self._local = threading.local()
        self.size_bytes = files.stat(path).st_size
        self._fd, self.mode = self._open(path)

    def _open(self, path: Path) -> tuple[int, str]:
        fd = -1
        try:
            fd = self._files.open(path, os.O_RDONLY | os.O_DIRECT)
            self._files.preadv(fd, [memoryview(mmap.mmap(-1, ondisk.HEADER_BYTES))], 0)
        except OSError as error:
            if fd >= 0:
                self._files.close(fd)
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return self._files.open(path, os.O_RDONLY), "buffered"
        return fd, "o_direct"

    def read(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """Whole blocks, at most BUFFER_BYTES, good until this thread's next call.

        Raises OSError.
        """
        if not hasattr(self._local, "memory"):
            self._local.memory = memoryview(mmap.mmap(-1, BUFFER_BYTES))
        into: memoryview = self._local.memory[:length_bytes]
        done = 0
        while done < length_bytes:
            got = self._files.preadv(self._fd, [into[done:]], offset_bytes + done)
            if got <= 0 or got % ondisk.HEADER_BYTES:
                raise OSError(errno.EIO, f"only {done + max(0, got)} of {length_bytes} B are there")
            done += got
        return into

    def close(self) -> None:
        """Close the descriptor."""
        self._files.close(self._fd)


def take_lock(files: Files, directory: Path, *, needed: bool) -> int | None:
    """Lock the volume against daemons; the descriptor, or None where there is no lock to take.

    Raises DataDirectoryError if a daemon has it and the lock is `needed`.
    """
    try:
        fd = files.open(directory / "LOCK", os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        files.lock(fd)
    except BlockingIOError as error:
        files.close(fd)
        if not needed:
            return None
        raise DataDirectoryError(
            f"{directory} is in use by a daemon",
            "stop it, or pass --ignore-lock and expect findings that are only work under way",
        ) from error
    return fd


def read_block(files: Files, path: Path) -> bytes:
    """The first block of a file, or as much as there is. Raises OSError."""
    fd = files.open(path, os.O_RDONLY)
    try:
        block = bytearray(ondisk.HEADER_BYTES)
        return bytes(block[: files.preadv(fd, [block], 0)])
    finally:
        files.close(fd)


def read_superblock(files: Files, directory: Path, report: Report) -> ondisk.Superblock | None:
    """Of two whole copies the data file's. None: neither is whole.

    Raises DataDirectoryError for a volume of a later format.
    """
    found: dict[str, ondisk.Superblock] = {}
    for name in ("data", "superblock"):
        try:
            found[name] = ondisk.superblock(read_block(files, directory / name))
        except ondisk.Newer as error:
            raise DataDirectoryError(
                f"{directory}: {error}", "use the kvctl of the version that wrote it"
            ) from error
        except ondisk.Damage as damage:
            report.add(Finding("superblock_damaged", name, str(damage)))
        except OSError as error:
            report.add(Finding("superblock_damaged", name, error.strerror or str(error)))
    if not found:
        report.add(Finding("superblock_lost", "superblock, data", "neither copy is whole"))
        return None
    if len(found) == 2 and found["data"] != found["superblock"]:
        report.add(Finding("superblock_differs", "superblock", "the one in `data` counts"))
    return found.get("data") or found["superblock"]
