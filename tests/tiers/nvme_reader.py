"""A reader of volumes written from docs/nvme-format.md, sharing no code with the tier.

    python nvme_reader.py DIRECTORY

It needs no LMDB: it lists the live objects in slots, and checks every byte of them.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import xxhash


@dataclass(frozen=True)
class Slot:
    """A live object."""

    region: int
    slot: int
    offset: int
    slot_bytes: int
    sequence: int
    namespace: str
    part: str
    tenant: str
    family: bytes
    key: bytes
    payload: bytes


def read_volume(directory: Path) -> list[Slot]:
    """All live objects in slots, the younger one of twins. Raises ValueError for bad payloads."""
    raw = (directory / "data").read_bytes()
    block = raw[:4096]
    assert block[:8] == b"KVSTVOL1"
    assert struct.unpack_from("<I", block, 8) == (1,)
    assert xxhash.xxh3_64_intdigest(block[:4088]) == struct.unpack_from("<Q", block, 4088)[0]
    (volume_id,) = struct.unpack_from("<Q", block, 32)
    region_bytes, entries, first, second, data = struct.unpack_from("<5Q", block, 48)
    best: dict[tuple[str, bytes, bytes, str], Slot] = {}
    for region in range(entries):
        known = [_entry(raw, at + 64 * region, region, volume_id) for at in (first, second)]
        entry = max((e for e in known if e is not None), key=lambda e: e[3], default=None)
        if entry is None or entry[0] != 1:
            continue
        _, slot_bytes, dedication, _ = entry
        for slot in range(region_bytes // slot_bytes):
            at = data + region * region_bytes + slot * slot_bytes
            found = _slot(raw, at, region, slot, slot_bytes, dedication, volume_id)
            if found is None:
                continue
            identity = (found.namespace, found.family, found.key, found.part)
            if identity not in best or best[identity].sequence < found.sequence:
                best[identity] = found
    return list(best.values())


def _entry(raw: bytes, at: int, region: int, volume_id: int) -> tuple[int, int, int, int] | None:
    """State, slot size, dedication and sequence of a region, if that copy is whole."""
    number, state, slot_bytes, dedication, sequence = struct.unpack_from("<IIQQQ", raw, at)
    (check,) = struct.unpack_from("<Q", raw, at + 56)
    if check != xxhash.xxh3_64_intdigest(raw[at : at + 56], volume_id) or number != region:
        return None
    return state, slot_bytes, dedication, sequence


def _slot(
    raw: bytes, at: int, region: int, slot: int, slot_bytes: int, dedication: int, volume_id: int
) -> Slot | None:
    header = raw[at : at + 4096]
    zeroed = header[:2040] + bytes(8) + header[2048:]
    (check,) = struct.unpack_from("<Q", header, 2040)
    if header[:8] != b"KVSTSLOT" or check != xxhash.xxh3_64_intdigest(zeroed, volume_id):
        return None
    _, state = struct.unpack_from("<HH", header, 8)
    tied = struct.unpack_from("<QQQ", header, 32)
    if state != 1 or tied != (volume_id, dedication, region << 32 | slot):
        return None
    (sequence,) = struct.unpack_from("<Q", header, 56)
    (length,) = struct.unpack_from("<Q", header, 72)
    (pieces,) = struct.unpack_from("<I", header, 116)
    lengths = struct.unpack_from("<5H", header, 256)
    names = []
    start = 272
    for size in lengths:
        names.append(header[start : start + size].decode())
        start += size
    payload = raw[at + 4096 : at + 4096 + length]
    if xxhash.xxh3_128_digest(payload) != header[224:240]:
        raise ValueError(f"payload of region {region} slot {slot}")
    for i in range(pieces):
        expected = struct.unpack_from("<Q", header, 2048 + 8 * i)[0]
        if xxhash.xxh3_64_intdigest(payload[i << 20 : (i + 1) << 20]) != expected:
            raise ValueError(f"piece {i} of region {region} slot {slot}")
    return Slot(
        region, slot, at, slot_bytes, sequence, names[0], names[1], names[2],
        header[128:160], header[160:192], payload,
    )  # fmt: skip


if __name__ == "__main__":
    for one in read_volume(Path(sys.argv[1])):
        print(one.region, one.slot, one.namespace, one.part, one.key.hex(), len(one.payload))
