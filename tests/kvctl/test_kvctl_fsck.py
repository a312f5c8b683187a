"""kvctl fsck finds each kind of damage, and calls nothing damage that is none."""

from __future__ import annotations

import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from kvctl.fsck_helpers import (
    LARGE,
    SMALL,
    by_length,
    changing,
    check,
    detail,
    flip,
    found,
    kinds,
    live_header,
    overwrite,
    place,
    void_header,
    whole_volume,
)
from tiers.conformance import KIB, MIB
from tiers.nvme_helpers import make_volume

from kvstored.fsck import environment
from kvstored.fsck.findings import Report
from kvstored.tiers.nvme import format as disk


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume with nothing wrong, not to be changed."""
    directory = tmp_path_factory.mktemp("whole")
    whole_volume(directory)
    return directory


@pytest.fixture
def volume(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "volume"))


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


def test_data_file_that_ends_early(volume: Path) -> None:
    os.truncate(volume / "data", 8192)
    report = check(volume)
    assert kinds(report) == {"data_short": 1, "record_astray": len(LARGE)}
