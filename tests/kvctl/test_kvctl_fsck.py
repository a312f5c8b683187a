"""kvctl fsck: it finds each kind of damage, calls nothing damage that is none, and never writes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import lmdb
import pytest
import xxhash
from tiers.conformance import KIB, MIB, make_sample
from tiers.nvme_helpers import make_tier, make_volume
from tiers.nvme_reader import Slot, read_volume

from kvstored.fsck import environment
from kvstored.fsck.check import Options, check_volume
from kvstored.fsck.findings import DAMAGE, NOTES, Report
from kvstored.io.base import Buffer, RealFiles
from kvstored.kvctl import main
from kvstored.tiers.nvme import format as disk
from kvstored.tiers.nvme import header, record
from kvstored.tiers.nvme.header import Where

SMALL = (4 * KIB, 5 * KIB, 6 * KIB, 7 * KIB, 64 * KIB)
LARGE = (100_000, 100_001, 300_000, 600_000, 600_001, 600_002, MIB, MIB + 1, MIB + 2, MIB + 3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume with nothing wrong, not to be changed."""
    directory = tmp_path_factory.mktemp("whole")
    asyncio.run(make_volume(directory, [*SMALL, *LARGE]))
    return directory


@pytest.fixture
def volume(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "volume"))


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


def test_clean_volume(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = state(whole)
    assert main(["fsck", "--offline", str(whole), "--json"]) == 0
    out = capsys.readouterr()
    answer = json.loads(out.out)
    assert out.out.count("\n") == 1
    assert "regions" in out.err, "progress"
    assert (answer["clean"], answer["findings"], answer["counts"]) == (True, [], {})
    figures = answer["figures"]
    assert figures["objects_good"] == figures["records"] == len(SMALL) + len(LARGE)
    assert figures["bytes_good"] == sum(SMALL) + sum(LARGE)
    assert figures["regions_used"] >= 4
    assert answer["volume"] == (whole / "superblock").read_bytes()[32:48].hex()
    assert state(whole) == before, "not a byte, not a time stamp"


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


def test_slots(volume: Path) -> None:
    """Each kind of damage a slot can have, in a slot of its own."""
    slots = by_length(volume)
    data = volume / "data"
    flip(data, slots[100_000].offset + 200)  # the key
    overwrite(data, slots[100_001].offset, bytes(8))
    flip(data, slots[MIB + 1].offset + 4096 + MIB)
    flip(data, slots[MIB].offset + 4096 + 7)
    flip(data, slots[MIB + 2].offset + 4096 + MIB + 2)  # behind the end
    overwrite(data, slots[300_000].offset, void_header(volume, slots[300_000]))
    overwrite(data, slots[MIB + 3].offset, live_header(volume, slots[MIB + 3], 77))
    raw = data.read_bytes()
    first, second = slots[600_000], slots[600_001]
    for source, target in ((first, second), (second, first)):
        overwrite(data, target.offset, raw[source.offset : source.offset + source.slot_bytes])
    report = check(volume)
    assert found(report) == {
        ("header_damaged", place(slots[100_000])),
        ("header_missing", place(slots[100_001])),
        ("payload_rotten", place(slots[MIB + 1])),
        ("payload_rotten", place(slots[MIB])),
        ("padding_not_zero", place(slots[MIB + 2])),
        ("unfinished_delete", place(slots[300_000])),
        ("header_disagrees", place(slots[MIB + 3])),
        ("header_damaged", place(first)),
        ("header_damaged", place(second)),
    }
    assert {f.detail for f in report.findings if f.kind == "payload_rotten"} == {
        "piece 1 of 2 rotten",
        "piece 0 of 1 rotten",
    }
    assert "key" in detail(report, "header_disagrees")
    assert all(f.namespace == "default" and f.key for f in report.findings), "each names its object"
    assert report.figures["objects_good"] == len(SMALL) + 2
    assert not report.clean


def test_padding_is_no_damage(volume: Path) -> None:
    """No checksum covers it, no reader gets it, and a scrub says nothing of it."""
    slot = by_length(volume)[MIB + 2]
    flip(volume / "data", slot.offset + 4096 + MIB + 2)
    report = check(volume)
    assert found(report) == {("padding_not_zero", place(slot))}
    assert report.clean
    assert report.figures["objects_good"] == len(SMALL) + len(LARGE)


def test_device_that_does_not_answer(whole: Path) -> None:
    slots = by_length(whole)
    report = check(whole, Watched(slots[MIB].offset + 4096))
    assert found(report) == {("unreadable", place(slots[MIB]))}
    assert report.figures["objects_good"] == len(SMALL) + len(LARGE) - 1


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


def test_records(volume: Path) -> None:
    """Each kind of damage the index can have, to a record of its own."""
    slots = by_length(volume)
    with changing(volume, "index") as index:
        key, row = index.remove(100_000)
        index.put(key, row[:33] + b"\xff" + row[34:])
        key, row = index.remove(100_001)
        index.put((1000).to_bytes(4, "big"), row)
        key, row = index.remove(300_000)
        nowhere = (5000 << 32).to_bytes(8, "big")
        index.put(nowhere[:4], index.sealed(row, 0, nowhere))
        key, row = index.remove(600_000)
        index.put(key, index.sealed(row, 136, b"\1\2\3\4"))  # the dedication
        key, row = index.remove(600_001)
        index.put(key, index.sealed(row, 112, struct.pack("<I", 100)))
        key, row = index.of_length(MIB)
        older = index.sealed(row[:8] + bytes(8) + row[16:], 32, b"\7" * 32)  # and of another key
        index.put(key, older)
        key, row = index.remove(MIB + 1)
        index.put(key, index.sealed(row, 128, struct.pack("<I", 99)))  # the part
        key, row = index.remove(MIB + 2)  # nothing but its header is left
        key, row = index.remove(MIB + 3)
        bits = bytearray(slots[MIB + 3].slot // 8 + 1)
        bits[-1] = 1 << slots[MIB + 3].slot % 8
        index.txn.put(b"opened/" + key, bytes(bits), db=index.db[b"meta"])
    report = check(volume)
    assert found(report) == {
        ("record_damaged", place(slots[100_000])),
        ("record_misfiled", place(slots[100_001])),
        ("record_astray", 5000 << 32),
        ("record_astray", place(slots[600_000])),
        ("record_astray", place(slots[600_001])),
        ("record_twin", place(slots[MIB])),
        ("name_missing", place(slots[MIB + 1])),
        ("unindexed_header", place(slots[MIB + 2])),
        ("unfinished_write", place(slots[MIB + 3])),
        *(("unindexed_header", place(slots[n])) for n in (100_000, 100_001, 300_000)),
        *(("unindexed_header", place(slots[n])) for n in (600_000, 600_001)),
    }
    assert report.figures["objects_good"] == len(SMALL) + 3, "600,002, 1 MiB and the nameless"
    assert {f.detail for f in report.findings if f.kind == "record_astray"} == {
        "its region does not exist",
        "its region was dedicated anew",
        "its length does not belong to the slots of its region",
    }


def test_two_records_for_one_object(volume: Path) -> None:
    slots = by_length(volume)
    with changing(volume, "index") as index:
        key, row = index.of_length(600_000)
        _, other = index.remove(600_001)
        index.put(key, index.sealed(row, 0, other[:16]))  # at its place, and younger
    report = check(volume)
    assert found(report) == {
        ("record_twin", place(slots[600_000])),
        ("unindexed_header", place(slots[600_000])),
        ("header_disagrees", place(slots[600_001])),
    }


def test_small_objects(volume: Path) -> None:
    numbers = {}
    with changing(volume, "small") as small:
        payload = small.db[b"payload"]
        for length in SMALL:
            _, row = small.of_length(length)
            numbers[length] = int.from_bytes(row[:8], "big")

        def chunk(length: int, number: int) -> bytes:
            return row_number(length).to_bytes(4, "big") + number.to_bytes(2, "big")

        def row_number(length: int) -> int:
            return numbers[length] & 0xFFFFFFFF

        def flip_chunk(length: int, number: int, at: int) -> None:
            value = bytearray(small.txn.get(chunk(length, number), db=payload))
            value[at] ^= 1
            small.txn.put(chunk(length, number), bytes(value), db=payload)

        flip_chunk(4 * KIB, 0, 56)  # the sequence in its header
        flip_chunk(5 * KIB, 1, 9)
        small.txn.delete(chunk(6 * KIB, 1), db=payload)
        small.remove(7 * KIB)
    report = check(volume)
    assert found(report) == {
        ("header_damaged", numbers[4 * KIB]),
        ("payload_rotten", numbers[5 * KIB]),
        ("payload_missing", numbers[6 * KIB]),
        ("payload_orphan", numbers[7 * KIB]),
    }
    assert report.figures["objects_good"] == len(LARGE) + 1


def test_records_that_say_something_else_than_headers(volume: Path) -> None:
    fields = {"sequence": 8, "end_token": 16, "expires_ms": 24, "key": 32, "depth": 116}
    with changing(volume, "small") as small:
        for length, at in zip(SMALL, fields.values(), strict=True):
            key, row = small.remove(length)
            small.put(key, small.sealed(row, at, b"\7\7\7"))
    report = check(volume)
    assert kinds(report) == {"header_disagrees": len(fields)}
    assert {f.detail for f in report.findings} == {f"they differ in {name}" for name in fields}


def test_superblock_and_region_table(volume: Path) -> None:
    superblock = disk.Superblock.decode((volume / "superblock").read_bytes())
    first, second = superblock.table_offsets
    data = volume / "data"
    slots = by_length(volume)
    regions = sorted({slot.region for slot in slots.values()})
    raw = data.read_bytes()[first:second]
    entries = [
        disk.RegionEntry.decode(raw[64 * n : 64 * n + 64], n, superblock.volume_id) for n in regions
    ]
    flip(volume / "superblock", 50)
    flip(data, first + 64 * regions[0] + 9)
    for table in (first, second):
        flip(data, table + 64 * regions[1] + 9)
    old = replace(entries[2], slot_bytes=8192, dedication=5, sequence=0)
    overwrite(data, first + 64 * old.region, old.encode(superblock.volume_id))
    newer = replace(entries[3], sequence=1001)
    overwrite(data, first + 64 * newer.region, newer.encode(superblock.volume_id))
    report = check(volume)
    lost = [slot for slot in slots.values() if slot.region == regions[1]]
    assert kinds(report) == {
        "superblock_damaged": 1,
        "region_copy_damaged": 1,
        "region_lost": 1,
        "record_astray": len(lost),
        "region_copy_ahead": 1,
        "region_copies_differ": 1,
    }
    wheres = {f.kind: f.where for f in report.findings}
    assert wheres["region_copy_ahead"] == f"region {regions[2]}"
    assert wheres["region_copies_differ"] == f"region {regions[3]}"
    assert report.figures["objects_good"] == len(SMALL) + len(LARGE) - len(lost)


def test_abandoned_region(volume: Path) -> None:
    """What the index names in it is checked; a live header it does not name is no damage."""
    superblock = disk.Superblock.decode((volume / "superblock").read_bytes())
    slots = by_length(volume)
    entry = slots[600_000].region
    for table in superblock.table_offsets:
        raw = (volume / "data").read_bytes()[table + 64 * entry :][:64]
        old = disk.RegionEntry.decode(raw, entry, superblock.volume_id)
        abandoned = replace(old, state=disk.RegionState.ABANDONED, sequence=900)
        overwrite(volume / "data", table + 64 * entry, abandoned.encode(superblock.volume_id))
    with changing(volume, "index") as index:
        index.remove(600_000)
    report = check(volume)
    assert kinds(report) == {"region_abandoned": 1}
    assert report.clean
    assert report.figures["objects_good"] == len(SMALL) + len(LARGE) - 1


def test_copy_of_the_table_that_is_all_zeros(volume: Path) -> None:
    superblock = disk.Superblock.decode((volume / "superblock").read_bytes())
    overwrite(volume / "data", superblock.table_offsets[1], bytes(superblock.table_bytes))
    report = check(volume)
    assert kinds(report)["region_copy_behind"] == 1
    assert report.figures["objects_good"] == len(SMALL) + len(LARGE)


async def test_lmdb_files_that_are_cut_off_or_of_others(volume: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    await make_volume(other, [MIB])
    os.truncate(volume / "index" / "data.mdb", 3 * 4096)
    os.truncate(volume / "small" / "data.mdb", 0)
    report = check(volume)
    assert kinds(report) == {"index_unreadable": 1, "small_unreadable": 1}
    assert "are in use, the file has 12288 B" in detail(report, "index_unreadable")
    assert report.figures["objects_good"] == len(LARGE), "by their headers"
    shutil.copy(other / "small" / "data.mdb", volume / "small" / "data.mdb")
    report = Report("")
    uuid = (volume / "superblock").read_bytes()[32:48]
    assert environment.read_environment(volume, "small", uuid, report) is None
    assert "another volume" in detail(report, "small_unreadable")


def test_lmdb_file_that_kills_its_reader(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that is cut off while it is read, or whose device gives up."""
    (tmp_path / "dying.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGBUS)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(environment, "_CHILD", "dying")
    report = check(whole)
    assert kinds(report) == {"index_unreadable": 1, "small_unreadable": 1}
    assert detail(report, "index_unreadable") == "its reader died of SIGBUS"
    assert report.figures["objects_good"] == len(LARGE)


async def test_volume_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await make_volume(tmp_path, [MIB])
    tier = make_tier(tmp_path)
    await tier.open()
    try:
        assert main(["fsck", "--offline", str(tmp_path)]) == 2
        assert "--ignore-lock" in capsys.readouterr().err
        assert main(["fsck", "--offline", str(tmp_path), "--ignore-lock"]) == 0
        assert "a daemon has it locked" in capsys.readouterr().out
    finally:
        await tier.close()


def test_opens_for_reading_alone_and_no_daemon_can_start_meanwhile(whole: Path) -> None:
    refused = []

    class Meanwhile(Watched):
        def preadv(self, fd: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
            other = RealFiles.open(self, whole / "LOCK", os.O_RDWR)
            try:
                super().lock(other)
            except BlockingIOError:
                refused.append(True)
            finally:
                super().close(other)
            return super().preadv(fd, buffers, offset_bytes)

    files = Meanwhile()
    assert check(whole, files).clean
    assert len(refused) > len(LARGE)
    assert len(files.flags) >= 3
    assert {flags & os.O_ACCMODE for flags in files.flags} == {os.O_RDONLY}
    assert not any(flags & (os.O_CREAT | os.O_TRUNC) for flags in files.flags)


def newer(volume: Path) -> None:
    old = disk.Superblock.decode((volume / "superblock").read_bytes())
    block = replace(old, version=2).encode()
    (volume / "superblock").write_bytes(block)
    overwrite(volume / "data", 0, block)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (newer, "format version 2"),
        (shutil.rmtree, "No such file"),
        (lambda at: [(at / n).unlink() for n in ("superblock", "data")], "holds no volume"),
    ],
)
def test_what_cannot_be_checked(
    volume: Path,
    change: Callable[[Path], object],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(volume)
    assert main(["fsck", "--offline", str(volume), "--json"]) == 2
    out = capsys.readouterr()
    assert said in json.loads(out.out)["error"]
    assert said in out.err


def test_a_directory_that_is_no_volume_but_holds_some(
    volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = volume.parent / "node" / "data"  # a directory, named like a volume's file
    data.mkdir(parents=True)
    (data / "LOCK").touch()
    volume.rename(data / "nvme")
    for directory in (data, data.parent):
        assert main(["fsck", "--offline", str(directory)]) == 2
        err = capsys.readouterr().err
        assert "holds no volume" in err
        assert str(data / "nvme") in err


def test_damage_ends_with_1(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(volume / "superblock", 50)
    flip(volume / "data", 50)
    assert main(["fsck", "--offline", str(volume)]) == 1
    out = capsys.readouterr().out
    assert "DAMAGE" in out
    assert "superblock_lost" in out


def test_files_that_are_not_always_there(volume: Path) -> None:
    for name in ("formatting", "superblock.new", "notes.txt"):
        (volume / name).touch()
    (volume / "index.damaged-1").mkdir()
    report = check(volume)
    assert kinds(report) == {"formatting": 1, "leftover": 1, "unknown_file": 1, "set_aside": 1}
    assert report.clean


def test_data_file_that_ends_early(volume: Path) -> None:
    os.truncate(volume / "data", 8192)
    report = check(volume)
    assert kinds(report) == {"data_short": 1, "record_astray": len(LARGE)}


def test_page_lists_every_finding() -> None:
    page = (Path(__file__).parents[2] / "docs" / "nvme-format.md").read_text()
    missing = [kind for kind in [*DAMAGE, *NOTES] if f"`{kind}`" not in page]
    assert not missing
