"""Volumes for the tests of kvctl fsck, ways to damage them, and what it says of them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lmdb
import xxhash
from tiers.conformance import KIB, MIB, make_sample
from tiers.nvme_helpers import make_volume
from tiers.nvme_reader import Slot, read_volume

from kvstored.fsck.check import Options, check_volume
from kvstored.fsck.findings import Report
from kvstored.io.base import Buffer, RealFiles
from kvstored.tiers.nvme import format as disk
from kvstored.tiers.nvme import header, record
from kvstored.tiers.nvme.header import Where

SMALL = (4 * KIB, 5 * KIB, 6 * KIB, 7 * KIB, 64 * KIB)
LARGE = (100_000, 100_001, 300_000, 600_000, 600_001, 600_002, MIB, MIB + 1, MIB + 2, MIB + 3)


def whole_volume(directory: Path) -> None:
    """Make a volume with nothing wrong, with an object of each length."""
    asyncio.run(make_volume(directory, [*SMALL, *LARGE]))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    with path.open("rb") as file:
        file.seek(offset)
        byte = file.read(1)[0]
    overwrite(path, offset, bytes([byte ^ 0x10]))


def by_length(directory: Path) -> dict[int, Slot]:
    return {len(slot.payload): slot for slot in read_volume(directory)}


def place(slot: Slot) -> int:
    return slot.region << 32 | slot.slot


def check(directory: Path, files: RealFiles | None = None) -> Report:
    return check_volume(directory, Options(), lambda _: None, files)


def found(report: Report) -> set[tuple[str, int | None]]:
    """Kind and place of each finding; none is found twice."""
    pairs = [(finding.kind, finding.place) for finding in report.findings]
    assert sum(report.counts.values()) == len(pairs)
    assert len(set(pairs)) == len(pairs)
    return set(pairs)


def kinds(report: Report) -> dict[str, int]:
    return dict(report.counts)


def detail(report: Report, kind: str) -> str:
    (one,) = [f.detail for f in report.findings if f.kind == kind]
    return one


class Watched(RealFiles):
    """Notes how files are opened; a read that begins at `broken` fails."""

    def __init__(self, broken: int = -1) -> None:
        self.flags: list[int] = []
        self.broken = broken

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self.flags.append(flags)
        return super().open(path, flags, mode)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        if offset_bytes == self.broken:
            raise OSError(5, "Input/output error")
        return super().preadv(fd, buffers, offset_bytes)


def state(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Everything in a directory, with a hash of it and when it was changed."""
    return {
        str(path.relative_to(directory)): (
            path.stat().st_mtime_ns,
            path.stat().st_ctime_ns,
            xxhash.xxh3_64_intdigest(path.read_bytes()) if path.is_file() else 0,
        )
        for path in [directory, *directory.rglob("*")]
    }


def live_header(directory: Path, slot: Slot, seed: int) -> bytes:
    """Another whole header for the same slot, as an older write would have left it."""
    superblock = disk.Superblock.decode((directory / "superblock").read_bytes())
    raw = (directory / "data").read_bytes()[slot.offset : slot.offset + 4096]
    where = where_of(superblock.volume_id, slot, raw)
    meta = make_sample(len(slot.payload), seed).meta
    return header.encode(where, meta, 1, 0)


def where_of(volume_id: int, slot: Slot, raw: bytes) -> Where:
    (dedication,) = struct.unpack_from("<Q", raw, 40)
    return Where(volume_id, dedication, place(slot), slot.slot_bytes)


def void_header(directory: Path, slot: Slot) -> bytes:
    superblock = disk.Superblock.decode((directory / "superblock").read_bytes())
    raw = (directory / "data").read_bytes()[slot.offset : slot.offset + 4096]
    return header.encode_void(where_of(superblock.volume_id, slot, raw), 0)


@dataclass
class Records:
    """The records of an environment in a transaction, to be changed."""

    txn: lmdb.Transaction
    db: dict[bytes, lmdb._Database]
    volume_id: int

    def of_length(self, length: int) -> tuple[bytes, bytes]:
        for key, row in self.txn.cursor(self.db[b"records"]):
            if struct.unpack_from("<I", row, 112) == (length,):
                return key, row
        raise AssertionError(length)

    def remove(self, length: int) -> tuple[bytes, bytes]:
        key, row = self.of_length(length)
        self.txn.delete(key, row, db=self.db[b"records"])
        return key, row

    def put(self, key: bytes, row: bytes) -> None:
        self.txn.put(key, row, db=self.db[b"records"])

    def sealed(self, row: bytes, at: int = 0, value: bytes = b"") -> bytes:
        """The row with bytes replaced, and the check it then ought to carry."""
        changed = row[:at] + value + row[at + len(value) :]
        return record.seal([changed], self.volume_id).tobytes()


@contextmanager
def changing(directory: Path, name: str) -> Iterator[Records]:
    superblock = disk.Superblock.decode((directory / "superblock").read_bytes())
    names = (b"records", b"names", b"families", b"meta", b"payload")
    with lmdb.open(str(directory / name), max_dbs=5) as env:
        db = {n: env.open_db(n, dupsort=n == b"records", dupfixed=n == b"records") for n in names}
        with env.begin(write=True) as txn:
            yield Records(txn, db, superblock.volume_id)
