"""Fills the index of a volume with objects whose bytes were never written: quick, and as real as a
restart can tell, which reads the index and no slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np

from kvstored.bench.payloads import random_bytes
from kvstored.bench.processes import BenchError
from kvstored.io.base import Files
from kvstored.tiers.nvme import index, index_wire, layout, record
from kvstored.tiers.nvme.format import RegionEntry, RegionState, place_of
from kvstored.tiers.nvme.volume import INDEX, Settings, Volume, open_volume

OBJECT_BYTES = 68 << 10
"""Of every object: what the smallest slot holds."""

CHAIN_CHUNKS = 64
CHUNK_TOKENS = 64
_KEY_BYTES = 32


def cap_bytes(objects: int) -> int:
    """Cap of a volume that has slots for so many objects."""
    return objects * layout.slot_bytes(OBJECT_BYTES) * 9 // 8 + (256 << 20)


def fill(files: Files, directory: Path, objects: int, seed: int) -> None:
    """Enter `objects` more in the index of a volume that has one name of each kind already.

    They are prefixes of CHAIN_CHUNKS chunks, one behind the other. Raises BenchError when the
    volume has no room.
    """
    volume = open_volume(files, Settings(directory, cap_bytes(objects)))
    try:
        table, _ = volume.data.read_table(volume.regions)
        env = lmdb.open(
            str(directory / INDEX),
            map_size=files.stat(directory / INDEX / "data.mdb").st_size,
            max_dbs=len(index_wire.DATABASES),
            sync=False,
        )
        with env:
            names = {db: env.open_db(db, create=False) for db in index_wire.DATABASES[1:]}
            with env.begin() as txn:
                kinds = [key[:1] for key, _ in txn.cursor(names[index_wire.NAMES])]
                if sorted(kinds) != sorted(kind.encode() for kind in index.KINDS):
                    raise BenchError("the volume has more names than one of each kind")
            db = env.open_db(index_wire.RECORDS, dupsort=True, dupfixed=True, create=False)
            for entry, rows in _regions(volume, table, objects, seed):
                volume.data.write_entries([entry], table)
                table[entry.region] = entry
                key = index_wire.shelf_key(place_of(entry.region, 0))
                size = record.RECORD_BYTES
                packed = rows.tobytes()
                with env.begin(write=True) as txn, txn.cursor(db) as cursor:
                    cursor.putmulti(
                        [(key, packed[at : at + size]) for at in range(0, len(packed), size)]
                    )
            env.sync(True)
    finally:
        volume.close()


def _regions(
    volume: Volume, table: list[RegionEntry], objects: int, seed: int
) -> Iterator[tuple[RegionEntry, record.Records]]:
    """The table entry and the records of each region that is filled."""
    slot = layout.slot_bytes(OBJECT_BYTES)
    slots = volume.superblock.region_bytes // slot
    free = [entry for entry in table if entry.state is RegionState.FREE]
    last = max((entry.sequence for entry in table), default=0)
    first = 0
    for number, entry in enumerate(free, 1):
        if first >= objects:
            return
        count = min(slots, objects - first)
        dedicated = replace(
            entry,
            state=RegionState.DEDICATED,
            slot_bytes=slot,
            dedication=int.from_bytes(random_bytes(8, seed + number).tobytes(), "little") | 1,
            sequence=last + number,
        )
        rows = _records(dedicated, first, count, seed)
        rows["check"] = record.checks(rows, volume.superblock.volume_id)
        yield dedicated, rows
        first += count
    if first < objects:
        raise BenchError(f"the volume has room for {first} objects, not for {objects}")


def _records(entry: RegionEntry, first: int, count: int, seed: int) -> record.Records:
    rows = np.zeros(count, record.RECORD)
    number = np.arange(first, first + count, dtype=np.uint64)
    rows["place"] = place_of(entry.region, 0) + np.arange(count)
    rows["sequence"] = number + np.uint64(1000)
    keys = random_bytes(count * _KEY_BYTES, seed + 1000 + entry.region).reshape(-1, _KEY_BYTES)
    depth = np.arange(count) % CHAIN_CHUNKS  # chains do not go on in the next region
    rows["key"] = keys
    rows["parent"][1:] = keys[:-1]
    rows["parent"][depth == 0] = 0
    rows["flags"] = np.where(depth == 0, 0, record.PARENT_KNOWN)
    rows["depth"] = depth
    rows["end_token"] = (depth + 1) * CHUNK_TOKENS
    rows["checksum"] = random_bytes(count * 16, seed + 2000 + entry.region).reshape(-1, 16)
    rows["length_bytes"] = OBJECT_BYTES
    rows["dedication"] = entry.dedication & 0xFFFFFFFF
    return rows
