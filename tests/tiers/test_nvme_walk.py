"""What the child that walks an index hands over, column by column."""

from __future__ import annotations

import json
import mmap
import os
import random
from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvstored.io.base import RealFiles
from kvstored.tiers.base import ObjectMeta
from kvstored.tiers.nvme import index, index_wire, layout, record, recovery, walk
from kvstored.tiers.nvme.format import place_of
from kvstored.tiers.nvme.index_process import IndexProcess

VOLUME = bytes(range(16))
_FIELDS = [name for name in record.RECORD.names or () if name != "check"]


def entries(count: int) -> list[index.Entry]:
    """Objects in five regions, whose slots ascend."""
    dice = random.Random(count)
    found = []
    for n in range(count):
        meta = ObjectMeta(
            namespace=dice.choice(("default", "other")),
            family=bytes([dice.randrange(3)]) * 32,
            key=dice.randbytes(32),
            part=dice.choice(("kv", "state")),
            tenant=dice.choice(("a", "b", "c")),
            parent=dice.choice((b"", dice.randbytes(32))),
            depth=dice.randrange(1 << 32),
            end_token=dice.randrange(1 << 64),
            expires_ms=dice.randrange(1 << 64),
            length_bytes=dice.randrange(1, 1 << 28),
            checksum=dice.randbytes(16),
            piece_checksums=b"",
        )
        place = place_of(n * 5 // count * 7, n)
        found.append(index.Entry(place, meta, dice.randrange(1 << 64), dice.randrange(1 << 64)))
    return found


def environment(directory: Path, objects: list[index.Entry]) -> record.Records:
    """An environment that holds them; its records."""
    directory.mkdir()
    process = IndexProcess(directory.parent)
    env = index.Environment(RealFiles(), process, directory, 4 << 20, VOLUME)
    env.commit(objects, families={("default", b"\x01" * 32): b"spec"})
    packed = [
        record.pack(e.meta, e.place, e.sequence, env.names.numbers(e.meta), e.dedication)
        for e in objects
    ]
    env.close()
    process.close()
    return record.seal(packed, int.from_bytes(VOLUME[:8], "little"))


def damage(directory: Path, rows: record.Records, which: list[int]) -> list[tuple[bytes, bytes]]:
    """Change one bit of these records; key and content of each as it is now."""
    changed = []
    with lmdb.open(str(directory), max_dbs=5, map_size=4 << 20) as env:
        db = env.open_db(index_wire.RECORDS, dupsort=True, dupfixed=True, create=False)
        with env.begin(write=True) as txn:
            for i in which:
                key, row = index_wire.shelf_key(int(rows[i]["place"])), rows[i].tobytes()
                txn.delete(key, row, db=db)
                other = row[:60] + bytes([row[60] ^ 4]) + row[61:]
                txn.put(key, other, db=db)
                changed.append((key, other))
    return changed


@pytest.mark.parametrize("at_once", [1, 30, 10_000])
def test_every_column_of_every_whole_record_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(walk, "_RECORDS_AT_ONCE", at_once)
    first = environment(tmp_path / "first", entries(200))
    second = environment(tmp_path / "second", entries(31))
    environment(tmp_path / "none", [])
    broken = damage(tmp_path / "first", first, [0, 17, 18, 120, 199])
    fd = os.memfd_create("test")
    try:
        sizes = [
            walk.walk(tmp_path / n, VOLUME, 300, fd, True) for n in ("first", "none", "second")
        ]
        assert [(most, count) for most, count, _ in sizes] == [(200, 195), (0, 0), (31, 31)]
        shared = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_READ))
    finally:
        os.close(fd)
    kept = np.delete(np.arange(200), [0, 17, 18, 120, 199])
    for (most, count, size), rows in zip(sizes, (first[kept], None, second), strict=True):
        table = record.table_over(shared, most, count)
        assert len(table) == count
        for name in _FIELDS if rows is not None else []:
            assert (table[name] == rows[name]).all(), name
            assert table[name].dtype.isnative
        _, columns = record.layout(most)
        document = json.loads(bytes(shared[columns : columns + size]))
        wrong = [[key.hex(), row.hex()] for key, row in broken] if most == 200 else []
        assert sorted(document["rejected"]) == sorted(wrong)
        assert document["damaged"] == len(wrong)
        shared = shared[columns + size :]
    assert not shared


def test_one_that_holds_more_than_there_can_be_is_not_trusted(tmp_path: Path) -> None:
    environment(tmp_path / "it", entries(20))
    fd = os.memfd_create("test")
    try:
        with pytest.raises(walk.ComplaintError, match="20 records, at most 19"):
            walk.walk(tmp_path / "it", VOLUME, 19, fd, False)
    finally:
        os.close(fd)


def test_a_table_is_chosen_from_column_by_column(tmp_path: Path) -> None:
    rows = environment(tmp_path / "it", entries(40))
    chosen = np.arange(40) % 3 == 0
    table = record.Table.of(rows).where(chosen)
    for name in _FIELDS:
        assert (table[name] == rows[name][chosen]).all()
    assert len(record.Table.of(record.from_bytes(b""))) == 0


def test_lengths_of_a_slot_are_those_that_belong_to_it() -> None:
    lengths = np.arange(1, 3 << 20, 1000, dtype=np.uint64)
    lengths = np.unique(
        np.concatenate([lengths, lengths // 4096 * 4096, lengths // 4096 * 4096 + 1])
    )
    lengths = lengths[lengths > 0]
    sizes = layout.slot_sizes(lengths)
    for size in np.unique(sizes).tolist():
        least, most = recovery.lengths_of(size)
        assert layout.slot_bytes(least) == layout.slot_bytes(most) == size
        assert least == 1 or layout.slot_bytes(least - 1) < size < layout.slot_bytes(most + 1)
        inside = (lengths >= least) & (lengths <= most)
        assert (sizes[inside] == size).all()
        assert not (sizes[~inside] == size).any()
    assert recovery.lengths_of(layout.slot_bytes(2 << 20) + 4096) == (1, 0)
    assert recovery.lengths_of(0) == (1, 0)
    assert recovery.lengths_of(1 << 40) == (1, 0)


def test_slots_that_a_region_holds_are_found_among_all() -> None:
    places = np.array([place_of(r, s) for r in (0, 3, 4) for s in (0, 5, 6)], np.uint64)
    assert recovery.slots_held(places, 3).tolist() == [0, 5, 6]
    assert recovery.slots_held(places, 2).tolist() == []
    assert recovery.slots_held(places, 9).tolist() == []
