"""Asks a volume's device something outside of any object: whether it answers, and how fast it is.

Everything blocks and is meant for a thread.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstored.io.base import Files
from kvstored.tiers.nvme.device import DataFile, aligned_block
from kvstored.tiers.nvme.format import BLOCK_BYTES, DamagedError, Superblock
from kvstored.tiers.nvme.volume import DATA, SUPERBLOCK

SCRATCH = "probe"
_MIB = 1 << 20
_MOST_BYTES = 16 * _MIB
_LEAST_BYTES = 4 * _MIB  # less says nothing
_MOST_S = 0.4
_AT_ONCE = 4


class AnotherVolumeError(OSError):
    """The directory holds another volume than it did."""


def is_there(files: Files, directory: Path) -> bool:
    """Whether a directory holds a volume. Raises OSError where that cannot be told."""
    try:
        names = files.listdir(directory)
    except FileNotFoundError:
        return False
    return SUPERBLOCK in names or DATA in names


def ask(files: Files, directory: Path, uuid: bytes) -> None:
    """Read the superblock and write a scratch file. Raises OSError when the device does not do it,
    AnotherVolumeError when it is not the volume of that UUID.
    """
    check_reads(files, directory, uuid)
    check_writes(files, directory)


def check_reads(files: Files, directory: Path, uuid: bytes) -> None:
    """The first half of `ask`."""
    block = aligned_block()
    fd = _open(files, directory / DATA, os.O_RDONLY)
    try:
        if files.preadv(fd, [block], 0) != BLOCK_BYTES:
            raise OSError(errno.EIO, "short read", str(directory / DATA))
    finally:
        files.close(fd)
    try:
        found = Superblock.decode(bytes(block))
    except DamagedError as error:
        raise OSError(errno.EIO, str(error), str(directory / DATA)) from error
    if found.volume != uuid:
        raise AnotherVolumeError(errno.ENODEV, "another volume is there", str(directory))


def check_writes(files: Files, directory: Path) -> None:
    """The second half of `ask`."""
    path = directory / SCRATCH
    fd = _open(files, path, os.O_RDWR | os.O_CREAT)
    try:
        if files.pwritev(fd, [aligned_block()], 0) != BLOCK_BYTES:
            raise OSError(errno.EIO, "short write", str(path))
        files.fdatasync(fd)
    finally:
        files.close(fd)
    files.unlink(path)


def _open(files: Files, path: Path, flags: int) -> int:
    """Open past the page cache, where that can be had."""
    try:
        return files.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    return files.open(path, flags)


def measure(data: DataFile, region: int) -> tuple[float, float]:
    """Bytes per second that the device reads and writes, several transfers at a time, in a region
    that nothing is in; 0.0 where that is too small. Takes about a second at most; raises OSError.

    What is written there is random, so that nobody compresses it away, and no slot header.
    """
    offset = data.superblock.region_offset(region)
    size = min(data.superblock.region_bytes, _MOST_BYTES) // _MIB * _MIB
    if size < _LEAST_BYTES:
        return 0.0, 0.0
    block = aligned_block(_MIB)
    block[:] = secrets.token_bytes(_MIB)
    buffers = [aligned_block(_MIB) for _ in range(_AT_ONCE)]

    def write(at: int) -> None:
        data.files.pwritev(data.fd, [block], offset + at)

    def read(at: int) -> None:
        data.files.preadv(data.fd, [buffers[at // _MIB % _AT_ONCE]], offset + at)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="nvme-probe") as pool:
        begun = time.monotonic()
        done = 0
        while done < size and (not done or time.monotonic() - begun < _MOST_S):
            step = min(_AT_ONCE * _MIB, size - done)
            list(pool.map(write, range(done, done + step, _MIB)))
            done += step
        data.sync()
        written = done / max(1e-6, time.monotonic() - begun)
        begun, at = time.monotonic(), 0
        while at < done and (not at or time.monotonic() - begun < _MOST_S):
            step = min(_AT_ONCE * _MIB, done - at)
            list(pool.map(read, range(at, at + step, _MIB)))
            at += step
        return at / max(1e-6, time.monotonic() - begun), written
