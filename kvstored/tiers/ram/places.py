"""Life of places: who holds what, which slot it lies in, who reads it. Bookkeeping only.

Charges are exact at all times: a place is charged from `reserve` until it is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.tiers.base import ALIGNMENT_BYTES, padded_bytes, piece_count
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

_PADDING = ALIGNMENT_BYTES - 1
_ONE = np.uint32(1)  # of the column's own type: a Python 1 makes `add.at` thirty times slower


@dataclass(frozen=True, slots=True)
class Location:
    """Where a place's bytes are: a segment, and a range in it."""

    segment_id: int
    offset: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Locations:
    """Where many places' bytes are: row i of each column is the i-th place."""

    segment_ids: NDArray[np.uint32]
    offsets: NDArray[np.uint64]  # bytes from the segment's start
    lengths: NDArray[np.uint64]  # bytes, without padding
    checksums: bytes  # XXH3-128, 16 bytes per row


@dataclass(frozen=True, slots=True)
class Reserved:
    """Places, and where they lie: per segment, the offsets in bytes, in the same order."""

    places: list[int]
    extents: list[tuple[int, list[int]]]


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

    def reserve_many(self, namespace: str, length_bytes: int, count: int) -> Reserved:
        """Places in free slots, charged: as many as there are, at most `count`."""
        slabs, table = self._slabs, self._table
        slot_bytes = slabs.slot_bytes(namespace, length_bytes)
        places: list[int] = []
        extents: list[tuple[int, list[int]]] = []
        while len(places) < count:
            taken = slabs.take_many(namespace, slot_bytes, count - len(places))
            if taken is None:
                break
            segment, slots = taken
            rows = table.add_many(segment.segment_id, slots, length_bytes)
            np.frombuffer(segment.owners, np.uint32)[slots] = rows
            segment.pinned += len(slots)
            places += table.places(rows)
            extents.append((segment.segment_id, (slots * slot_bytes).tolist()))
        if places:
            self._charge(namespace, len(places) * padded_bytes(length_bytes))
        return Reserved(places, extents)

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
        segment = self._segment(row)
        if stride := segment.piece_stride:
            start = self._table.slot[row] * stride
            segment.pieces[start : start + len(pieces)] = pieces
        elif pieces != _only_piece(checksum):
            raise PlaceError("the checksum of the only piece is not the object's")
        self._table.set_checksum(row, checksum)
        self._table.tag[row] = tag
        segment.pinned -= 1
        self._table.state[row] = READABLE
        self._count(segment.namespace, 1)

    def publish_many(
        self, places: NDArray[np.int64], tags: list[int], checksums: bytes, pieces: list[bytes]
    ) -> None:
        """`publish` for reserved places, each once, with what each was reserved for. Raises
        PlaceError, and nothing is published, when one is not reserved.
        """
        rows, columns = self._table.rows(places), self._table.columns
        reserved = columns.state[rows] == RESERVED
        if not reserved.all():
            raise PlaceError(f"place {int(places[reserved.argmin()]):#x} is not reserved")
        self._keep_pieces(rows.tolist(), checksums, pieces)
        columns.checksum[rows] = np.frombuffer(checksums, np.uint64).reshape(-1, 2)
        for row, tag in zip(rows.tolist(), tags, strict=True):
            self._table.tag[row] = tag
        columns.state[rows] = READABLE
        segments = self._slabs.segments
        for segment_id, count in Counter(columns.segment[rows].tolist()).items():
            segments[segment_id].pinned -= count
            self._count(segments[segment_id].namespace, count)

    def _keep_pieces(self, rows: list[int], checksums: bytes, pieces: list[bytes]) -> None:
        table = self._table
        for i, (row, own) in enumerate(zip(rows, pieces, strict=True)):
            segment = self._slabs.segments[table.segment[row]]
            checksum = checksums[CHECKSUM_BYTES * i : CHECKSUM_BYTES * (i + 1)]
            if stride := segment.piece_stride:
                if len(own) != piece_count(table.length_bytes[row]) * PIECE_CHECKSUM_BYTES:
                    raise PlaceError(f"{len(own)} bytes of piece checksums")
                start = table.slot[row] * stride
                segment.pieces[start : start + len(own)] = own
            elif own != _only_piece(checksum):
                raise PlaceError("the checksum of the only piece is not the object's")

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

    def lease_many(self, places: NDArray[np.int64]) -> None:
        """One more reader of each, of one that occurs twice two more. Raises PlaceError, and
        nothing is leased, when one is not readable.
        """
        self._lease_rows(places)

    def lease_located(self, places: NDArray[np.int64]) -> Locations:
        """`lease_many` and `locate_many` in one."""
        return self._located(self._lease_rows(places))

    def _lease_rows(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        rows, columns = self._table.rows(places), self._table.columns
        readable = columns.state[rows] == READABLE
        if not readable.all():
            raise PlaceError(f"place {int(places[readable.argmin()]):#x} is not readable")
        before = columns.readers[rows]
        np.add.at(columns.readers, rows, _ONE)
        fresh = _distinct(rows, columns.readers[rows] - before, before == 0)
        self._pin(fresh, 1)
        return rows

    def release_many(self, places: NDArray[np.int64]) -> None:
        """One reader less of each, of one that occurs twice two less. Raises PlaceError, and
        nothing is released, when one has no more readers.
        """
        rows, columns = self._table.rows(places), self._table.columns
        before = columns.readers[rows]
        np.subtract.at(columns.readers, rows, _ONE)
        after = columns.readers[rows]
        too_often = after >= before  # wrapped
        if too_often.any():
            np.add.at(columns.readers, rows, _ONE)
            place = int(places[too_often.argmax()])
            raise PlaceError(f"place {place:#x} is released more often than leased")
        ended = _distinct(rows, before - after, after == 0)
        self._pin(ended, -1)
        for row in ended[columns.state[ended] == DOOMED].tolist():
            self._free(row)

    def locate_many(self, places: NDArray[np.int64]) -> Locations:
        """Where the bytes of leased places are, and their checksums. Raises PlaceError when one
        is not leased.
        """
        rows, columns = self._table.rows(places), self._table.columns
        leased = columns.readers[rows] != 0
        if not leased.all():
            place = int(places[leased.argmin()])
            raise PlaceError(f"place {place:#x} is looked at without a lease")
        return self._located(rows)

    def _located(self, rows: NDArray[np.int64]) -> Locations:
        columns = self._table.columns
        segment_ids = columns.segment[rows]
        offsets = columns.slot[rows] * self._slot_bytes(segment_ids.tolist())
        lengths = columns.length_bytes[rows].astype(np.uint64)
        return Locations(segment_ids, offsets, lengths, columns.checksum[rows].tobytes())

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
        segment, checksum = self._segment(row), self._table.checksum(row)
        stride = segment.piece_stride
        if not stride:
            return checksum, _only_piece(checksum)
        start = self._table.slot[row] * stride
        size = piece_count(self._table.length_bytes[row]) * PIECE_CHECKSUM_BYTES
        return checksum, bytes(segment.pieces[start : start + size])

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

    def _pin(self, rows: NDArray[np.int64], count: int) -> None:
        """Rows, each once, became leased (1) or ceased to be (-1)."""
        columns = self._table.columns
        segments = self._slabs.segments
        for segment_id, places in Counter(columns.segment[rows].tolist()).items():
            segments[segment_id].pinned += count * places
        lengths = columns.length_bytes[rows].astype(np.int64)
        self.leased_bytes += count * int((lengths + _PADDING & ~_PADDING).sum())

    def _slot_bytes(self, segment_ids: Sequence[int]) -> NDArray[np.uint64]:
        segments = self._slabs.segments
        sizes = {segment_id: segments[segment_id].slot_bytes for segment_id in set(segment_ids)}
        if len(sizes) == 1:
            return np.full(1, next(iter(sizes.values())), np.uint64)
        return np.fromiter(map(sizes.__getitem__, segment_ids), np.uint64, len(segment_ids))

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


def _distinct(
    rows: NDArray[np.int64], times: NDArray[np.uint32], wanted: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """The wanted rows, each once; `times`: how often each occurs."""
    chosen = rows[wanted]
    return chosen if (times == 1).all() else np.unique(chosen)


def _only_piece(checksum: bytes) -> bytes:
    """XXH3-64, little-endian, of an object of one piece: the low half of its XXH3-128, which is
    big-endian. It is so for every input of more than 240 bytes, hence for every object.
    """
    return checksum[:7:-1]
