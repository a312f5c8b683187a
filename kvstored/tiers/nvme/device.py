"""The data file of a volume: aligned transfers of slots, headers and the region table.

Every call blocks; callers are the tier's own threads. OSError means the device would not; what
comes back is not verified here.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from kvstored.io.base import Files
from kvstored.tiers.nvme.format import (
    BLOCK_BYTES,
    ENTRIES_PER_BLOCK,
    REGION_ENTRY_BYTES,
    DamagedError,
    RegionEntry,
    RegionState,
    Superblock,
    region_of,
    slot_of,
)
from kvstored.tiers.nvme.header import HEADER_BYTES, Where

_log = logging.getLogger(__name__)


def aligned_block(length_bytes: int = BLOCK_BYTES) -> memoryview:
    """Zeroed memory that O_DIRECT takes."""
    return memoryview(mmap.mmap(-1, length_bytes))


class _Scratch(threading.local):
    """A header block for each thread."""

    def __init__(self) -> None:
        self.block = aligned_block(HEADER_BYTES)


class DataFile:
    """An open data file. `mode` is "o_direct" or "buffered"."""

    def __init__(self, files: Files, path: Path, superblock: Superblock) -> None:
        """Open the file and find out whether the file system takes O_DIRECT.

        Raises OSError when the file cannot be opened at all.
        """
        self.files = files
        self.path = path
        self.superblock = superblock
        self._scratch = _Scratch()
        self._counting = threading.Lock()
        self.written_bytes = 0
        """What went to the device since the file was opened."""
        self.failed_syncs = 0
        self.fd, self.mode = self._open()

    def _open(self) -> tuple[int, str]:
        try:
            fd = self.files.open(self.path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return self._open_buffered()
        try:
            self.files.preadv(fd, [aligned_block()], 0)
        except OSError as error:
            self.files.close(fd)
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return self._open_buffered()
        return fd, "o_direct"

    def _open_buffered(self) -> tuple[int, str]:
        _log.warning(
            "%s: the file system refuses O_DIRECT; reads and writes are buffered", self.path
        )
        return self.files.open(self.path, os.O_RDWR), "buffered"

    def close(self) -> None:
        """Close the descriptor."""
        self.files.close(self.fd)

    def where(self, entry: RegionEntry, place: int) -> Where:
        """What a header at a place must agree with."""
        return Where(self.superblock.volume_id, entry.dedication, place, entry.slot_bytes)

    def offset(self, entry: RegionEntry, place: int) -> int:
        """Where a place begins in the file."""
        return self.superblock.region_offset(region_of(place)) + slot_of(place) * entry.slot_bytes

    def read(self, buffers: Sequence[memoryview], offset_bytes: int) -> None:
        """Fill buffers from one range of the file; all aligned, in memory and length too."""
        self._read(buffers, offset_bytes)

    def read_header(self, entry: RegionEntry, place: int) -> memoryview:
        """Read a header alone; memory of this thread, good until its next call."""
        self._read([self._scratch.block], self.offset(entry, place))
        return self._scratch.block

    def write_at(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        """Write aligned buffers one behind the other."""
        self._write(buffers, offset_bytes)

    def write_header(self, entry: RegionEntry, place: int, header: bytes) -> None:
        """Overwrite a header alone."""
        self._scratch.block[:] = header
        self._write([self._scratch.block], self.offset(entry, place))

    def sync(self) -> None:
        """Make everything written so far survive a power loss. What a sync that fails (they are
        counted in `failed_syncs`) has lost, no later one tells.
        """
        try:
            self.files.fdatasync(self.fd)
        except OSError:
            with self._counting:
                self.failed_syncs += 1
            raise

    def _read(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all buffers; a short read is continued, and the end of the file is an error."""
        left = list(buffers)
        while left:
            done = self.files.preadv(self.fd, left, offset)
            if done <= 0 or (done % BLOCK_BYTES and self.mode == "o_direct"):
                raise OSError(errno.EIO, "short read", str(self.path))
            offset += done
            left = _behind(left, done)

    def _write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write all buffers; a short write is continued."""
        left = list(buffers)
        while left:
            done = self.files.pwritev(self.fd, left, offset)
            if done <= 0 or (done % BLOCK_BYTES and self.mode == "o_direct"):
                raise OSError(errno.EIO, "short write", str(self.path))
            offset += done
            left = _behind(left, done)
            with self._counting:
                self.written_bytes += done

    # ---- region table -------------------------------------------------------------------------

    def read_table(self, regions: int) -> tuple[list[RegionEntry], int]:
        """The table entries of the first `regions` regions, and how many could not be told.

        Of the two copies of an entry the whole one with the higher sequence counts. One of which
        neither copy is whole is FREE: what was in the region is given up.
        """
        copies = []
        for offset in self.superblock.table_offsets:
            raw = aligned_block(self.superblock.table_bytes)
            self._read([raw], offset)
            copies.append(raw)
        found = [self._entry(number, copies) for number in range(regions)]
        lost = sum(entry is None for entry in found)
        return [entry or RegionEntry(n) for n, entry in enumerate(found)], lost

    def _entry(self, number: int, copies: Sequence[memoryview]) -> RegionEntry | None:
        best: RegionEntry | None = None
        for raw in copies:
            at = number * REGION_ENTRY_BYTES
            piece = bytes(raw[at : at + REGION_ENTRY_BYTES])
            try:
                entry = RegionEntry.decode(piece, number, self.superblock.volume_id)
            except DamagedError:
                continue
            if not self._usable(entry):
                continue
            if best is None or entry.sequence > best.sequence:
                best = entry
        return best

    def _usable(self, entry: RegionEntry) -> bool:
        if entry.state is not RegionState.DEDICATED:
            return True
        size = entry.slot_bytes
        return not size % BLOCK_BYTES and HEADER_BYTES < size <= self.superblock.region_bytes

    def write_entries(self, changed: Sequence[RegionEntry], table: Sequence[RegionEntry]) -> None:
        """Write the blocks of the table that hold `changed`, in one copy and then in the other,
        each synced.

        `table` has the entries of all regions; those of `changed` stand in for their own.
        """
        current = list(table)
        for entry in changed:
            current[entry.region] = entry
        firsts = sorted({e.region // ENTRIES_PER_BLOCK * ENTRIES_PER_BLOCK for e in changed})
        blocks = [(first, self._table_block(current, first)) for first in firsts]
        for offset in self.superblock.table_offsets:
            for first, block in blocks:
                self._write([block], offset + first * REGION_ENTRY_BYTES)
            self.sync()

    def _table_block(self, table: Sequence[RegionEntry], first: int) -> memoryview:
        block = aligned_block()
        for i, entry in enumerate(table[first : first + ENTRIES_PER_BLOCK]):
            if entry != RegionEntry(entry.region):
                at = i * REGION_ENTRY_BYTES
                block[at : at + REGION_ENTRY_BYTES] = entry.encode(self.superblock.volume_id)
        return block


def _behind(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers once their first `done` bytes are through."""
    left = []
    for buffer in buffers:
        if done >= len(buffer):
            done -= len(buffer)
        else:
            left.append(buffer[done:])
            done = 0
    return left
