"""Enters very many chunks and objects in an index at once: a step per column, not per chunk.

What it leaves is what `ChunkIndex.add_chunk`, `add_object` and `set_place` would leave, one by one
(tests/store/test_bulk_load.py); only rows and the order of lists differ. No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.store.index import (
    NONE,
    OBJECT_BITS,
    ONE_OBJECT,
    PART_SHIFT,
    TIER_BIT,
    TIERS_SHIFT,
    ChunkIndex,
)
from kvstored.store.walk import column, objects_of
from kvstored.tiers.base import TierKind
from kvstored_client.identity import KEY_BYTES

_AT_ONCE = 1 << 16  # keys that are looked up together; bounds the memory that it takes
_KEY = np.dtype(f"V{KEY_BYTES}")


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks to enter: row i of each is one. No key occurs twice.

    `keys`, `parents` (zeros: none): shape [n, 32].
    """

    keys: NDArray[np.uint8]
    parents: NDArray[np.uint8]
    family: NDArray[np.uint32]
    tenant: NDArray[np.uint32]
    depth: NDArray[np.uint32]
    end_token: NDArray[np.uint64]
    expires_ms: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects to enter, of chunks (rows) that are held; none may be held already, or occur twice.

    `checksums`: shape [n, 16].
    """

    chunk: NDArray[np.int32]
    part: NDArray[np.uint16]
    length: NDArray[np.uint32]
    checksums: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Groups:
    """Which objects are of one key. `of`: the group of each, shape [n]. `first`: the first object
    of each group, shape [groups]; groups are numbered by it. `order`: groups by hash of their key.
    """

    of: NDArray[np.int64]
    first: NDArray[np.int64]
    order: NDArray[np.int64]


def group(keys: NDArray[np.uint8], hashes: NDArray[np.uint64]) -> Groups:
    """Objects by key; shapes [n, 32] and [n]."""
    order = np.argsort(hashes)
    ordered = hashes[order]
    alike = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
    if not len(alike):  # the usual case
        everyone = np.arange(len(keys))
        return Groups(everyone, everyone, order)
    if not _alike(keys[order[alike]], keys[order[alike - 1]]).all():
        # Two keys of one hash, which random keys never have: sort by the keys as well.
        words = np.ascontiguousarray(keys).view(np.uint64)
        order = np.lexsort((*words.T, hashes))
        ordered = hashes[order]
        alike = np.flatnonzero(_alike(keys[order[1:]], keys[order[:-1]])) + 1
    begins = np.ones(len(keys), np.bool_)
    begins[alike] = False
    first = np.minimum.reduceat(order, np.flatnonzero(begins))
    leads = np.zeros(len(keys), np.bool_)
    leads[first] = True
    number = (np.cumsum(leads) - 1)[first]
    of = np.empty(len(keys), np.int64)
    of[order] = number[np.cumsum(begins) - 1]
    return Groups(of, np.flatnonzero(leads), number)


class BulkIndex(ChunkIndex):
    """An index that takes very many at once as well."""

    def hashes(self, keys: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """A hash of each key that nobody can foresee; shapes [n, 32] and [n]."""
        return self._keys.hashes(keys.reshape(-1).data)

    def find_all(self, keys: NDArray[np.uint8]) -> NDArray[np.int32]:
        """`find_many` of very many keys; shapes [n, 32] and [n]."""
        rows = np.empty(len(keys), np.int32)
        for first in range(0, len(keys), _AT_ONCE):
            packed = keys[first : first + _AT_ONCE].tobytes()
            rows[first : first + _AT_ONCE] = self.find_many(packed)
        return rows

    # -- chunks --------------------------------------------------------------------------------

    def add_chunks(
        self, chunks: Chunks, order: NDArray[np.int64] | None = None
    ) -> NDArray[np.int32]:
        """Add chunks that are not held yet; they have no objects and are in no tier. Their rows.

        `order`: how their keys are sorted by `hashes`, where it is known and the index is empty.
        """
        rows = self._new_chunks(chunks.keys, order)
        column(self.family, np.uint32)[rows] = chunks.family
        column(self.tenant, np.uint32)[rows] = chunks.tenant
        column(self.depth, np.uint32)[rows] = chunks.depth
        column(self.end_token, np.uint64)[rows] = chunks.end_token
        mortal = np.flatnonzero(chunks.expires_ms)
        if len(mortal):
            self.set_expiries(rows[mortal], chunks.expires_ms[mortal])
        self._attach_all(chunks, rows)
        return rows

    def _new_chunks(
        self, keys: NDArray[np.uint8], order: NDArray[np.int64] | None
    ) -> NDArray[np.int32]:
        count = len(keys)
        if not self._chunks.has_room(count):
            try:
                self._chunks.grow(count)
            finally:
                self._bind_chunks()
        rows = self._chunks.new_many(count)
        if order is not None and not len(self._keys):
            self._keys.add_sorted(keys, rows, order)
        else:
            self._keys.add_many(keys.tobytes(), rows)
        return rows

    def _attach_all(self, chunks: Chunks, rows: NDArray[np.int32]) -> None:
        """Make new chunks children of their parents, and those that waited for them theirs."""
        keys, parents = chunks.keys, chunks.parents
        known = ~_alike(parents, np.zeros((1, KEY_BYTES), np.uint8))
        above = np.full(len(rows), NONE, np.int32)
        # Written one behind the other, most of them: no need to look those parents up.
        follows = np.flatnonzero(_alike(parents[1:], keys[:-1])) + 1
        above[follows] = rows[follows - 1]
        left = np.flatnonzero(known & (above == NONE))
        above[left] = self.find_all(parents[left])
        linked = np.flatnonzero(above != NONE)
        # Links to a parent of greater depth could close a circle: those are made one by one.
        depths = column(self.depth, np.uint32)
        sound = linked[depths[above[linked]] < chunks.depth[linked]]
        del depths
        self._link_all(above[sound], rows[sound])
        if self._orphans:
            self._adopt_all(keys, rows)
        known[sound] = False
        for i in np.flatnonzero(known).tolist():
            self._attach_late(int(rows[i]), parents[i].tobytes(), int(above[i]))

    def _link_all(self, parents: NDArray[np.int32], children: NDArray[np.int32]) -> None:
        """`_link` of many chunks that are in no tier yet."""
        column(self.parent, np.int32)[children] = parents
        following = column(self.next_sibling, np.int32)
        first = column(self.first_child, np.int32)
        _prepend(first, following, parents, children)
        before = column(self.previous_sibling, np.int32)
        there = following[children] != NONE
        before[following[children[there]]] = children[there]

    def _adopt_all(self, keys: NDArray[np.uint8], rows: NDArray[np.int32]) -> None:
        if len(rows) < len(self._orphans):
            packed = np.ascontiguousarray(keys).view(_KEY).reshape(-1).tolist()
            for row, key in zip(rows.tolist(), packed, strict=True):
                if key in self._orphans:
                    self._adopt(row, key)
            return
        for key in list(self._orphans):
            row = self.find(key)
            if row != NONE:
                self._adopt(row, key)

    def _attach_late(self, chunk: int, parent_key: bytes, parent: int) -> None:
        """`_attach` of a chunk that may have children."""
        if parent == NONE or self._is_ancestor(chunk, parent):
            self._orphan(chunk, parent_key)
        else:
            self._link(parent, chunk)

    # -- objects -------------------------------------------------------------------------------

    def add_objects(self, objects: Objects) -> NDArray[np.int32]:
        """Add objects that are not held yet; they are in no tier. Their rows."""
        count = len(objects.chunk)
        if not self._objects.has_room(count):
            try:
                self._objects.grow(count)
            finally:
                self._bind_objects()
        rows = self._objects.new_many(count)
        column(self.object_chunk, np.int32)[rows] = objects.chunk
        column(self.object_part, np.uint16)[rows] = objects.part
        column(self.object_length, np.uint32)[rows] = objects.length
        halves = np.ascontiguousarray(objects.checksums).view(">u8")
        column(self._high, np.uint64)[rows] = halves[:, 0]
        column(self._low, np.uint64)[rows] = halves[:, 1]
        first, following = column(self.first_object, np.int32), column(self.object_next, np.int32)
        _prepend(first, following, objects.chunk, rows)
        self._note_all(objects.chunk)
        return rows

    def _note_all(self, chunks: NDArray[np.int32]) -> None:
        """`_note_objects` of many."""
        first = column(self.first_object, np.int32)[chunks]
        single = (column(self.object_next, np.int32)[first] == NONE) & (first != NONE)
        brief = column(self.brief, np.uint64)
        brief[chunks] &= ~np.uint64(OBJECT_BITS)
        chunks, first = chunks[single], first[single]
        parts = column(self.object_part, np.uint16)[first].astype(np.uint64)
        lengths = column(self.object_length, np.uint32)[first].astype(np.uint64)
        brief[chunks] |= parts << np.uint64(PART_SHIFT) | lengths | np.uint64(ONE_OBJECT)

    def find_objects(
        self, chunks: NDArray[np.int32], parts: NDArray[np.uint16]
    ) -> NDArray[np.int32]:
        """`find_object` of many; shapes [n]."""
        found = np.full(len(chunks), NONE, np.int32)
        following, part_of = column(self.object_next, np.int32), column(self.object_part, np.uint16)
        at = np.arange(len(chunks))
        rows = column(self.first_object, np.int32)[chunks]
        while len(at := at[more := rows != NONE]):
            rows = rows[more]
            here = part_of[rows] == parts[at]
            found[at[here]] = rows[here]
            at, rows = at[~here], following[rows[~here]]
        return found

    def same(
        self,
        rows: NDArray[np.int32],
        lengths: NDArray[np.uint32],
        checksums: NDArray[np.uint8],
    ) -> NDArray[np.bool_]:
        """Which of these objects are that long and have that checksum; shapes [n] and [n, 16]."""
        halves = np.ascontiguousarray(checksums).view(">u8")
        alike: NDArray[np.bool_] = column(self.object_length, np.uint32)[rows] == lengths
        alike &= column(self._high, np.uint64)[rows] == halves[:, 0]
        alike &= column(self._low, np.uint64)[rows] == halves[:, 1]
        return alike

    def place_many(
        self, rows: NDArray[np.int32], tier: TierKind, places: NDArray[np.int64]
    ) -> None:
        """`set_place` of many objects that have no place in the tier; shapes [n] and [n]."""
        column(self.place[tier], np.int64)[rows] = places
        bit = TIER_BIT[tier]
        tiers, chunks = column(self.tiers, np.uint8), column(self.object_chunk, np.int32)[rows]
        chunks = _distinct(chunks[tiers[chunks] & bit == 0])
        tiers[chunks] |= np.uint8(bit)
        column(self.brief, np.uint64)[chunks] |= np.uint64(bit << TIERS_SHIFT)
        parents = column(self.parent, np.int32)[chunks]
        children = column(self.children[tier], np.uint32)
        np.add.at(children, parents[parents != NONE], np.uint32(1))
        self.on_leaves[tier](chunks[children[chunks] == 0])

    # -- leaving ------------------------------------------------------------------------------

    def unplace_many(self, rows: NDArray[np.int32], tier: TierKind) -> None:
        """`set_place` to NONE of many objects that have a place in the tier; shape [n]."""
        places = column(self.place[tier], np.int64)
        places[rows] = NONE
        chunks = _distinct(column(self.object_chunk, np.int32)[rows])
        at, objects = objects_of(self, chunks)
        leaving = np.ones(len(chunks), np.bool_)
        leaving[at[places[objects] != NONE]] = False
        self._leave(chunks[leaving], tier)

    def _leave(self, chunks: NDArray[np.int32], tier: TierKind) -> None:
        """Chunks have no object in a tier any more; shape [n], ascending. See `_child_left`."""
        bit = TIER_BIT[tier]
        tiers, tick = column(self.tiers, np.uint8), column(self.tick, np.uint64)
        tiers[chunks] &= np.uint8(~bit & 0xFF)
        column(self.brief, np.uint64)[chunks] &= ~np.uint64(bit << TIERS_SHIFT)
        parents = column(self.parent, np.int32)[chunks]
        number = np.full(self.chunk_rows, NONE, np.int32)
        number[chunks] = np.arange(len(chunks), dtype=np.int32)
        above = np.where(parents == NONE, NONE, number[parents])
        depth = column(self.depth, np.uint32)[chunks]
        tick[chunks] = used = hand_up(tick[chunks], above, depth)
        known = parents != NONE
        parents, used = parents[known], used[known]
        np.maximum.at(tick, parents, used)
        children = column(self.children[tier], np.uint32)
        np.subtract.at(children, parents, np.uint32(1))
        bare = _distinct(parents[(children[parents] == 0) & (tiers[parents] & bit > 0)])
        self.on_leaves[tier](bare)

    def remove_objects(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """`remove_object` of many that are in no tier any more. Gives the chunks that have none
        now: they stay, without objects, as long as something lies below them; see `husks`.
        """
        gone = np.zeros(self._objects.rows, np.bool_)
        gone[rows] = True
        chunks = _distinct(column(self.object_chunk, np.int32)[rows])
        at, objects = objects_of(self, chunks)
        kept = ~gone[objects]
        at, objects = at[kept], objects[kept]
        first, following = column(self.first_object, np.int32), column(self.object_next, np.int32)
        first[chunks] = NONE
        following[objects] = NONE
        _prepend(first, following, chunks[at], objects)
        column(self.generation, np.uint32)[rows] += np.uint32(1)
        column(self.object_chunk, np.int32)[rows] = NONE
        self._objects.free_many(rows)
        self._note_all(chunks)
        bare: NDArray[np.int32] = chunks[first[chunks] == NONE]
        return bare

    def keys(self, chunks: NDArray[np.int32]) -> list[bytes]:
        """The keys of many chunks."""
        return [self.key(chunk) for chunk in chunks.tolist()]

    def husks(self, first: int, stop: int) -> list[int]:
        """Chunks among these rows that have no object and nothing below them."""
        bare = column(self.first_object, np.int32)[first:stop] == NONE
        bare &= column(self.first_child, np.int32)[first:stop] == NONE
        return [row + first for row in np.flatnonzero(bare).tolist() if self.held(row + first)]


def _distinct(rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Each of them once, ascending."""
    rows = np.sort(rows)
    return rows[np.flatnonzero(np.diff(rows, prepend=NONE))]


def _alike(some: NDArray[np.uint8], others: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which keys are the same; shapes [n, 32] and [n] (or 1 for n)."""
    ours = np.ascontiguousarray(some).view(np.uint64)
    theirs = np.ascontiguousarray(others).view(np.uint64)
    same: NDArray[np.bool_] = ours[:, 0] == theirs[:, 0]
    for word in range(1, KEY_BYTES // 8):
        same &= ours[:, word] == theirs[:, word]
    return same


def _prepend(
    first: NDArray[np.int32],
    following: NDArray[np.int32],
    owners: NDArray[np.int32],
    items: NDArray[np.int32],
) -> None:
    """Put items (rows) in front of their owners' lists, each of which begins at ``first[owner]``
    and goes on at ``following[item]``; shapes of the last two [n].
    """
    if not len(items):
        return
    if (owners[1:] > owners[:-1]).all():  # one of each
        following[items] = first[owners]
        first[owners] = items
        return
    order = np.argsort(owners, kind="stable")
    owners, items = owners[order], items[order]
    ends = np.flatnonzero(np.diff(owners, append=owners[-1] + 1))
    following[items[:-1]] = items[1:]
    following[items[ends]] = first[owners[ends]]
    first[owners[ends]] = items[np.concatenate([[0], ends[:-1] + 1])]


def depths_first(depth: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Chunks by falling depth, and where each depth begins in that order. What is deeper than
    65,535 counts as of that depth.
    """
    clipped = np.uint16(0xFFFF) - np.minimum(depth, 0xFFFF).astype(np.uint16)
    order = np.argsort(clipped, kind="stable")  # of 16 bits: by counting
    begins = np.flatnonzero(np.diff(clipped[order])) + 1
    return order, np.concatenate([[0], begins, [len(order)]]).astype(np.int64)


def hand_up(
    used: NDArray[np.uint64], above: NDArray[np.int64], depth: NDArray[np.uint32]
) -> NDArray[np.uint64]:
    """When each chunk was last used, by itself or as part of what lies below it.

    `used`: when it was written itself. `above`: number of its parent among them, or NONE, which is
    less deep. Shapes [n].
    """
    found = used.copy()
    order, begins = depths_first(depth)
    for begin, stop in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        some = order[begin:stop]
        some = some[above[some] != NONE]
        np.maximum.at(found, above[some], found[some])
    return found


def by_recency(used: NDArray[np.uint64], depth: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Chunks from the least recent to the most recent; of those used at once, the deepest first."""
    if not len(used):
        return np.zeros(0, np.int64)
    if int(used.max()) >> 48:
        order: NDArray[np.int64] = np.lexsort((-depth.astype(np.int64), used))
        return order
    rising = np.uint64(0xFFFF) - np.minimum(depth, 0xFFFF).astype(np.uint64)
    return np.argsort(used << np.uint64(16) | rising)
