"""Asks a volume's device something outside of any object: whether it answers, and how fast it is.

Everything blocks and is meant for a thread.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstored.io.base import Files
from kvstored.tiers.nvme import speed
from kvstored.tiers.nvme.device import DataFile, aligned_block
from kvstored.tiers.nvme.format import BLOCK_BYTES, DamagedError, Superblock
from kvstored.tiers.nvme.volume import DATA, SUPERBLOCK

SCRATCH = "probe"
_MIB = 1 << 20
_MOST_BYTES = 64 * _MIB
_LEAST_BLOCKS = 4  # fewer say nothing
_WRITE_S, _READ_S = 0.3, 0.6
_WARM_UP_S = 0.2  # of the reads, which count
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
    that nothing is in; 0.0 where that is too small. Takes a second, and what one transfer takes, at
    most; raises OSError.

    What is written there is random, so that nobody compresses it away, and no slot header.
    """
    offset = data.superblock.region_offset(region)
    blocks = min(data.superblock.region_bytes, _MOST_BYTES) // _MIB
    if blocks < _LEAST_BLOCKS:
        return 0.0, 0.0
    block = aligned_block(_MIB)
    block[:] = secrets.token_bytes(_MIB)
    buffers = [aligned_block(_MIB) for _ in range(_AT_ONCE)]

    def write(at: int, thread: int) -> None:
        del thread
        data.files.pwritev(data.fd, [block], offset + at)

    def read(at: int, thread: int) -> None:
        data.files.preadv(data.fd, [buffers[thread]], offset + at)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="nvme-probe") as pool:
        written = _ends(pool, write, blocks, _WRITE_S, once=True)
        data.sync()
        there = max(1, len(written))
        reads = _ends(pool, read, there, _READ_S, once=False)
    write_speed = speed.steady(written, _WARM_UP_S / 2) or speed.steady(written, 0.0)
    return speed.steady(reads, _WARM_UP_S), write_speed


def _ends(
    pool: ThreadPoolExecutor,
    transfer: Callable[[int, int], None],
    blocks: int,
    for_s: float,
    *,
    once: bool,
) -> list[tuple[float, int]]:
    """Move blocks for so long, one after the other and again from the first, or `once`. Gives the
    seconds from the beginning at which each ended, and its bytes.
    """
    begun = time.monotonic()
    numbers = itertools.count()
    ends: list[tuple[float, int]] = []

    def work(thread: int) -> None:
        while time.monotonic() - begun < for_s:
            number = next(numbers)
            if once and number >= blocks:
                return
            transfer(number % blocks * _MIB, thread)
            ends.append((time.monotonic() - begun, _MIB))

    for done in [pool.submit(work, thread) for thread in range(_AT_ONCE)]:
        done.result()
    return sorted(ends)
