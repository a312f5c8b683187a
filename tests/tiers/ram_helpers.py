"""What the tests of the RAM tier share: small objects, a bookkeeper without memory, an audit."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import xxhash

from kvstored.tiers.base import PIECE_BYTES, NoRoom, ObjectMeta, padded_bytes
from kvstored.tiers.ram import RamTier
from kvstored.tiers.ram.places import MOVER, Places
from kvstored.tiers.ram.slabs import Create, Reclaim, Slabs
from kvstored.tiers.ram.table import FREE, RESERVED

KIB = 1 << 10
MIB = 1 << 20


def content(seed: int, length_bytes: int) -> bytes:
    """Bytes that differ between seeds from the first on."""
    word = (seed * 0x9E37_79B9_7F4A_7C15 + 1) & 0xFFFF_FFFF_FFFF_FFFF
    count = -(-length_bytes // 8)
    return np.arange(word, word + count, dtype=np.uint64).tobytes()[:length_bytes]


def meta_of(data: bytes | memoryview, *, namespace: str = "default", key: int = 0) -> ObjectMeta:
    """What is known of an object with these bytes."""
    pieces = (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))
    return ObjectMeta(
        namespace=namespace,
        family=bytes(32),
        key=key.to_bytes(32, "big"),
        part="kv",
        tenant="",
        parent=b"",
        depth=0,
        end_token=64,
        expires_ms=0,
        length_bytes=len(data),
        checksum=xxhash.xxh3_128_digest(data),
        piece_checksums=b"".join(
            xxhash.xxh3_64_intdigest(piece).to_bytes(8, "little") for piece in pieces
        ),
    )


async def put(tier: RamTier, seed: int, length_bytes: int, namespace: str = "default") -> int:
    """Reserve, fill in place, publish; there must be room."""
    (place,) = await tier.reserve(namespace, [length_bytes])
    assert not isinstance(place, NoRoom), place
    data = content(seed, length_bytes)
    tier.view(place)[:] = data
    tier.publish(place, meta_of(data, namespace=namespace, key=seed))
    return place


def holds(tier: RamTier, place: int, seed: int, length_bytes: int) -> bool:
    """True when a readable place has the content, and zeros behind it."""
    tier.lease(place)
    try:
        view = tier.view(place, padded=True)
        data = content(seed, length_bytes)
        return view[:length_bytes] == data and not any(view[length_bytes:])
    finally:
        del view
        tier.release(place)


class Bookkeeper:
    """The tier's books without its memory: what growth does, done at once."""

    def __init__(self, slabs: Slabs) -> None:
        self.slabs = slabs
        self.places = Places(slabs)
        self.moved_bytes = 0

    def reserve(self, namespace: str, length_bytes: int) -> int | NoRoom:
        """A place, after as many steps as it takes."""
        place = self.places.reserve(namespace, length_bytes)
        while place is None:
            slot_bytes = self.slabs.slot_bytes(namespace, length_bytes)
            step = self.slabs.plan(namespace, slot_bytes, slot_bytes)
            if isinstance(step, NoRoom):
                return step
            if isinstance(step, Create):
                self.slabs.activate(self.slabs.begin_segment(namespace, slot_bytes, step.slots))
            else:
                self._reclaim(step)
            place = self.places.reserve(namespace, length_bytes)
        return place

    def publish(self, place: int, length_bytes: int) -> None:
        """Publish without bytes."""
        pieces = bytes(8 * -(-length_bytes // PIECE_BYTES))
        self.places.publish(place, length_bytes, 0, bytes(16), pieces)

    def _reclaim(self, step: Reclaim) -> None:
        self.slabs.drain(step.segment)
        while step.segment.used:
            moves = self.places.begin_moves(step.segment, 256, 64 * MIB)
            assert moves, "what was planned can be done when nobody interferes"
            for move in moves:
                self.moved_bytes += move.length_bytes
                self.places.end_move(move)
        self.slabs.retire(step.segment)
        self.slabs.retired(step.segment)


def audit(slabs: Slabs, places: Places) -> None:
    """Every total against the details it sums up, walked from scratch."""
    sizes: Counter[str] = Counter()
    for segment in slabs.segments.values():
        sizes[segment.namespace] += segment.size_bytes
        assert segment.used == sum(segment.busy)
        assert segment.used + segment.free == segment.slots
        assert 0 <= segment.pinned <= segment.used
    assert slabs.footprint_bytes == sum(sizes.values()) <= slabs.cap_bytes
    _audit_classes(slabs, sizes)
    _audit_rows(slabs, places)


def _audit_classes(slabs: Slabs, sizes: Counter[str]) -> None:
    assert set(slabs.spaces) == set(sizes)
    for name, space in slabs.spaces.items():
        assert space.footprint_bytes == sizes[name] <= slabs.cap_of(name)
        for slot_bytes, size_class in space.classes.items():
            members = size_class.segments.values()
            serving = [s for s in members if not s.draining]
            assert all(s.slot_bytes == slot_bytes and s.namespace == name for s in members)
            assert size_class.free_slots == sum(s.free for s in serving)
            assert set(size_class.open) == {s.segment_id for s in serving if s.free}
            assert size_class.size_bytes == sum(s.size_bytes for s in members)
            assert size_class.smallest_slots == min(s.slots for s in members)


def _audit_rows(slabs: Slabs, places: Places) -> None:
    table = places._table
    charged: Counter[str] = Counter()
    objects = leased_bytes = 0
    owned: Counter[int] = Counter()
    pinned: Counter[int] = Counter()
    for row in range(len(table)):
        if table.state[row] == FREE:
            continue
        segment = slabs.segments[table.segment[row]]
        assert segment.busy[table.slot[row]]
        assert segment.owners[table.slot[row]] == row
        size_bytes = padded_bytes(table.length_bytes[row])
        charged[segment.namespace] += size_bytes
        owned[segment.segment_id] += 1
        pinned[segment.segment_id] += table.state[row] == RESERVED or table.readers[row] > 0
        objects += table.state[row] != RESERVED
        leased_bytes += size_bytes if table.readers[row] else 0
    assert places.charged_bytes == sum(charged.values())
    assert (places.objects, places.leased_bytes) == (objects, leased_bytes)
    for name, space in slabs.spaces.items():
        assert space.charged_bytes == charged[name]
    # A slot whose object was freed while it was being moved stays busy until the copy has ended.
    copying = any(
        segment.busy[slot] and segment.owners[slot] == MOVER
        for segment in slabs.segments.values()
        for slot in range(segment.slots)
    )
    if not copying:
        for segment in slabs.segments.values():
            assert (segment.used, segment.pinned) == (
                owned[segment.segment_id],
                pinned[segment.segment_id],
            )


def audit_tier(tier: RamTier) -> None:
    """The books, and that the kernel holds what they say."""
    audit(tier._slabs, tier._places)
    for segment_id, record in tier._slabs.segments.items():
        segment = tier._growth.memory.get(segment_id)
        if segment is not None:
            held = os.fstat(segment.fd)
            assert held.st_size == held.st_blocks * 512 == record.size_bytes
