"""Life of places: who holds what, which slot it lies in, who reads it. Bookkeeping only.

Charges are exact at all times: a place is charged from `reserve` until it is free.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstored.tiers.base import padded_bytes, piece_count
from kvstored.tiers.ram.slabs import PIECE_CHECKSUM_BYTES, Slabs, SlabSegment
from kvstored.tiers.ram.table import (
    CHECKSUM_BYTES,
    DOOMED,
    READABLE,
    RESERVED,
    PlaceError,
    PlaceTable,
)

MOVER = 0xFFFF_FFFF  # owner of a slot that only a move keeps busy


@dataclass(frozen=True, slots=True)
class Location:
    """Where a place's bytes are: a segment, and a range in it."""

    segment_id: int
    offset: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """One object being copied out of a segment that is to be emptied."""

    row: int
    source: SlabSegment
    source_slot: int
    target: SlabSegment
    target_slot: int
    length_bytes: int  # padded


class Places:
    """Every place of the tier, over `slabs`. Raises PlaceError for a place used against its life.

    `charged_bytes`, `objects` (published ones, until their place is free) and `leased_bytes`
    (padded, each leased place once) are exact.
    """

    def __init__(self, slabs: Slabs) -> None:
        self.charged_bytes = 0
        self.objects = 0
        self.leased_bytes = 0
        self._slabs = slabs
        self._table = PlaceTable()
        self._moving: set[int] = set()

    def reserve(self, namespace: str, length_bytes: int) -> int | None:
        """A place in a free slot, charged; None when its class has no free slot."""
        slabs = self._slabs
        taken = slabs.take(namespace, slabs.slot_bytes(namespace, length_bytes), MOVER)
        if taken is None:
            return None
        segment, slot = taken
        row = self._table.add(segment.segment_id, slot, length_bytes)
        segment.owners[slot] = row
        segment.pinned += 1
        self._charge(segment.namespace, padded_bytes(length_bytes))
        return self._table.place(row)

    def cancel(self, place: int) -> None:
        """Free a reserved place."""
        row = self._row(place, RESERVED)
        self._segment(row).pinned -= 1
        self._free(row)

    def publish(
        self, place: int, length_bytes: int, tag: int, checksum: bytes, pieces: bytes
    ) -> None:
        """Make a reserved place readable. `tag` is 32 bits of its identity. Raises PlaceError when
        the object is not what the place was reserved for.
        """
        row = self._row(place, RESERVED)
        reserved = self._table.length_bytes[row]
        if length_bytes != reserved:
            raise PlaceError(f"{length_bytes} bytes for a place of {reserved}")
        if (
            len(checksum) != CHECKSUM_BYTES
            or len(pieces) != piece_count(length_bytes) * PIECE_CHECKSUM_BYTES
        ):
            raise PlaceError(f"checksums of {len(checksum)} and {len(pieces)} bytes")
        segment, slot = self._segment(row), self._table.slot[row]
        self._table.set_checksum(row, checksum)
        self._table.tag[row] = tag
        start = slot * segment.piece_stride
        segment.pieces[start : start + len(pieces)] = pieces
        segment.pinned -= 1
        self._table.state[row] = READABLE
        self._count(segment.namespace, 1)

    def lease(self, place: int) -> None:
        """One more reader of a readable place."""
        row = self._row(place, READABLE)
        readers = self._table.readers
        if not readers[row]:
            self._segment(row).pinned += 1
            self.leased_bytes += padded_bytes(self._table.length_bytes[row])
        readers[row] += 1

    def release(self, place: int) -> None:
        """One reader less; the last one frees a deleted place."""
        row = self._table.row(place)
        readers = self._table.readers
        if not readers[row]:
            raise PlaceError(f"place {place:#x} is released more often than leased")
        readers[row] -= 1
        if not readers[row]:
            self._segment(row).pinned -= 1
            self.leased_bytes -= padded_bytes(self._table.length_bytes[row])
            if self._table.state[row] == DOOMED:
                self._free(row)

    def delete(self, place: int) -> None:
        """Make a readable place unreadable at once, and free unless leased."""
        row = self._row(place, READABLE)
        if self._table.readers[row]:
            self._table.state[row] = DOOMED
        else:
            self._free(row)

    def is_readable(self, place: int) -> bool:
        """True from `publish` to `delete`; False also for a place that was freed."""
        try:
            return self._table.state[self._table.row(place)] == READABLE
        except PlaceError:
            return False

    def tag(self, place: int) -> int:
        """What `publish` was told of the object's identity."""
        return self._table.tag[self._table.row(place)]

    def length_bytes(self, place: int) -> int:
        """Length of the object, without padding."""
        return self._table.length_bytes[self._table.row(place)]

    def is_leased(self, place: int) -> bool:
        """True when the place has readers."""
        return self._table.readers[self._table.row(place)] > 0

    def locate(self, place: int) -> Location:
        """Where the bytes are. Raises PlaceError unless the place is reserved or leased, because
        another's bytes may be moved at any time.
        """
        row = self._table.row(place)
        if self._table.state[row] != RESERVED and not self._table.readers[row]:
            raise PlaceError(f"place {place:#x} is looked at without a lease")
        segment = self._segment(row)
        offset = self._table.slot[row] * segment.slot_bytes
        return Location(segment.segment_id, offset, self._table.length_bytes[row])

    def checksums(self, place: int) -> tuple[bytes, bytes]:
        """XXH3-128 of the object and XXH3-64 of its pieces, of a published place."""
        row = self._table.row(place)
        if self._table.state[row] == RESERVED:
            raise PlaceError(f"place {place:#x} is not published")
        segment = self._segment(row)
        start = self._table.slot[row] * segment.piece_stride
        size = piece_count(self._table.length_bytes[row]) * PIECE_CHECKSUM_BYTES
        return self._table.checksum(row), bytes(segment.pieces[start : start + size])

    def begin_moves(self, source: SlabSegment, limit: int, limit_bytes: int) -> list[Move]:
        """Targets for the next objects of a draining segment, at most `limit` and, beyond the
        first, `limit_bytes`. Empty when the segment is, when an object in it is pinned, or when
        its class has no free slot left elsewhere.
        """
        moves: list[Move] = []
        size_bytes = slot = 0
        while not source.pinned and len(moves) < limit and size_bytes < limit_bytes:
            slot = source.busy.find(1, slot)
            taken = (
                self._slabs.take(source.namespace, source.slot_bytes, MOVER) if slot >= 0 else None
            )
            if taken is None:
                break
            row = source.owners[slot]
            length_bytes = padded_bytes(self._table.length_bytes[row])
            moves.append(Move(row, source, slot, taken[0], taken[1], length_bytes))
            taken[0].pinned += 1
            self._moving.add(row)
            size_bytes += length_bytes
            slot += 1
        return moves

    def end_move(self, move: Move, copied: bool = True) -> None:
        """The bytes were copied: the place lies in the target slot from now on, unless somebody
        reads it or it was deleted meanwhile; then the target is free again.
        """
        move.target.pinned -= 1
        if move.source.owners[move.source_slot] == MOVER:  # freed meanwhile
            self._slabs.give(move.source, move.source_slot)
            self._slabs.give(move.target, move.target_slot)
            return
        self._moving.discard(move.row)
        if not copied or self._table.readers[move.row]:
            self._slabs.give(move.target, move.target_slot)
            return
        stride = move.source.piece_stride
        here, there = move.source_slot * stride, move.target_slot * stride
        move.target.pieces[there : there + stride] = move.source.pieces[here : here + stride]
        move.target.owners[move.target_slot] = move.row
        self._table.segment[move.row] = move.target.segment_id
        self._table.slot[move.row] = move.target_slot
        self._slabs.give(move.source, move.source_slot)

    def _row(self, place: int, state: int) -> int:
        row = self._table.row(place)
        if self._table.state[row] != state:
            wanted = "reserved" if state == RESERVED else "readable"
            raise PlaceError(f"place {place:#x} is not {wanted}")
        return row

    def _segment(self, row: int) -> SlabSegment:
        return self._slabs.segments[self._table.segment[row]]

    def _free(self, row: int) -> None:
        segment, slot = self._segment(row), self._table.slot[row]
        self._charge(segment.namespace, -padded_bytes(self._table.length_bytes[row]))
        if self._table.state[row] != RESERVED:
            self._count(segment.namespace, -1)
        if row in self._moving:  # the copy under way reads the slot; `end_move` frees it
            self._moving.discard(row)
            segment.owners[slot] = MOVER
        else:
            self._slabs.give(segment, slot)
        self._table.remove(row)

    def _charge(self, namespace: str, size_bytes: int) -> None:
        self._slabs.spaces[namespace].charged_bytes += size_bytes
        self.charged_bytes += size_bytes

    def _count(self, namespace: str, objects: int) -> None:
        self._slabs.spaces[namespace].objects += objects
        self.objects += objects
