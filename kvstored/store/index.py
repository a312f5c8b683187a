"""The index of one namespace: which chunks and objects it holds and where. RAM only, no I/O.

Each namespace has an index of its own, so that no look-up, row number or listing of one can depend
on another's keys. Rows of columns, not Python objects: a million of them must cost little and be
walked by nobody's garbage collector. A *chunk row* is one chunk, an *object row* is one of its
parts. Rows are reused, so whoever keeps an object row across an ``await`` keeps its generation too
and asks `alive`. Columns are other objects after rows were added: nobody keeps one, or an array
over one, across an ``await``.

Chunks form trees by parent; a chunk whose parent is not held waits under the parent's key and is
adopted when the parent comes. All methods belong to the verbs' loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.store.columns import Table
from kvstored.store.keys import KeyTable
from kvstored.tiers.base import TierKind

NONE = -1
TIERS = (TierKind.RAM, TierKind.NVME)
_LATELY = 64
_LATELY_BYTES = 512 * 32
TIER_BIT = {tier: 1 << tier.value for tier in TierKind}

PART_SHIFT = 32
TIERS_SHIFT = 48
ONE_OBJECT = 1 << 56
EXPIRES = 1 << 57
OBJECT_BITS = ONE_OBJECT | (1 << TIERS_SHIFT) - 1
_FREE = 0xFFFF_FFFF  # family of a row that is no chunk


def _ignore(chunk: int) -> None:
    """Nobody asks."""


def _ignore_all(chunks: NDArray[np.int32]) -> None:
    """Nobody asks."""


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """New chunks of one prefix that follow each other, each with one object of the same part.

    `packed`: their keys, back to back. `parent_key`: of the first one's parent, `parent_row` its
    row, if known. `depth`: of the first. `end_tokens`, `lengths`: shape [chunks]. `checksums`: 16
    bytes each.
    """

    packed: bytes
    parent_key: bytes
    parent_row: int
    family: int
    tenant: int
    depth: int
    end_tokens: NDArray[np.uint64]
    expires_ms: int
    part: int
    lengths: NDArray[np.uint32]
    checksums: bytes


class ChunkIndex:
    """The chunks of one namespace by key, their objects, and the trees they form.

    `brief` says of a chunk what most look-ups need, in 64 bits: 0 to 31 length of its only object
    in bytes, 32 to 47 that object's part, 48 to 55 the chunk's tiers (TIER_BIT), 56 whether it has
    exactly one object (else 0 to 47 are 0), 57 whether it has an expiry. `tick` says how late it
    was used; a chunk that leaves a tier hands its tick up, see `lru`.
    """

    def __init__(self) -> None:
        self._keys = KeyTable()
        self._lately: dict[bytes, NDArray[np.int32]] = {}  # packed keys -> their rows
        self._lately_at = 0
        # Of chunks whose parent is not held; the others know it by its row.
        self._orphans: dict[bytes, set[int]] = {}  # parent key -> rows that wait for it
        self._orphan_parents: dict[int, bytes] = {}  # row -> parent key
        self._chunks = Table(
            {
                "family": ("I", 0),
                "tenant": ("I", 0),
                "parent": ("i", NONE),
                "first_child": ("i", NONE),
                "next_sibling": ("i", NONE),
                "previous_sibling": ("i", NONE),
                "children_ram": ("I", 0),
                "children_nvme": ("I", 0),
                "depth": ("I", 0),
                "end_token": ("Q", 0),
                "expires_ms": ("Q", 0),
                "first_object": ("i", NONE),
                "tiers": ("B", 0),
                "tick": ("Q", 0),
                "brief": ("Q", 0),
            },
            link="first_child",
        )
        self._objects = Table(
            {
                "chunk": ("i", NONE),
                "part": ("H", 0),
                "next": ("i", NONE),
                "length": ("I", 0),
                "checksum_high": ("Q", 0),
                "checksum_low": ("Q", 0),
                "place_ram": ("q", NONE),
                "place_nvme": ("q", NONE),
                "generation": ("I", None),  # outlives the row's uses
            },
            link="next",
        )
        self.children: dict[TierKind, memoryview[int]] = {}
        self.place: dict[TierKind, memoryview[int]] = {}
        # Told of a resident chunk that has no resident child (any more): by tier, set by its LRU.
        self.on_leaf: dict[TierKind, Callable[[int], None]] = dict.fromkeys(TIERS, _ignore)
        # The same of many, for `bulk`.
        self.on_leaves: dict[TierKind, Callable[[NDArray[np.int32]], None]]
        self.on_leaves = dict.fromkeys(TIERS, _ignore_all)
        self._bind_chunks()
        self._bind_objects()

    def _bind_chunks(self) -> None:
        c = self._chunks.column
        self.family, self.tenant = c("family"), c("tenant")
        self.parent, self.first_child = c("parent"), c("first_child")
        self.next_sibling, self.previous_sibling = c("next_sibling"), c("previous_sibling")
        self.children.update({TierKind.RAM: c("children_ram"), TierKind.NVME: c("children_nvme")})
        self.depth, self.end_token, self.expires_ms = c("depth"), c("end_token"), c("expires_ms")
        self.first_object, self.tiers = c("first_object"), c("tiers")
        self.tick, self.brief = c("tick"), c("brief")

    def _bind_objects(self) -> None:
        o = self._objects.column
        self.object_chunk, self.object_part, self.object_next = o("chunk"), o("part"), o("next")
        self.object_length = o("length")
        self._high, self._low = o("checksum_high"), o("checksum_low")
        self.place.update({TierKind.RAM: o("place_ram"), TierKind.NVME: o("place_nvme")})
        self.generation = o("generation")

    # -- counts --------------------------------------------------------------------------------

    @property
    def chunk_count(self) -> int:
        """Chunks held."""
        return self._chunks.used

    @property
    def object_count(self) -> int:
        """Objects held."""
        return self._objects.used

    @property
    def chunk_rows(self) -> int:
        """Rows ever used: the bound for walks over all of them. A row may be free; see `held`."""
        return self._chunks.rows

    def held(self, chunk: int) -> bool:
        """Whether a row below `chunk_rows` is a chunk."""
        return self.family[chunk] != _FREE

    # -- chunks --------------------------------------------------------------------------------

    def find(self, key: bytes) -> int:
        """The chunk's row, or NONE."""
        return self._keys.find(key)

    def find_many(self, packed: bytes) -> NDArray[np.int32]:
        """Each key's row, or NONE; shape [keys]. `packed`: whole keys back to back.

        An engine asks for the same keys several times in a row (match, acquire): as long as no key
        has come or gone, what was found lately is found again.
        """
        if self._lately_at != self._keys.changes or len(self._lately) >= _LATELY:
            self._lately.clear()
            self._lately_at = self._keys.changes
        rows = self._lately.get(packed)
        if rows is None:
            rows = self._keys.find_many(packed)
            if len(packed) <= _LATELY_BYTES:
                self._lately[packed] = rows
        return rows.copy()  # callers write into theirs

    def key(self, chunk: int) -> bytes:
        """A chunk's key."""
        return self._keys.key(chunk)

    def parent_key(self, chunk: int) -> bytes:
        """The key of a chunk's parent, held or not; empty if it has none."""
        parent = self.parent[chunk]
        return self._orphan_parents.get(chunk, b"") if parent == NONE else self._keys.key(parent)

    def add_chunk(
        self,
        key: bytes,
        parent_key: bytes,
        *,
        family: int,
        tenant: int,
        depth: int,
        end_token: int,
        expires_ms: int,
        parent_row: int = NONE,
    ) -> int:
        """Add a chunk that is not held yet; it has no objects and is in no tier.

        `parent_row`: the row of `parent_key`, where the caller knows it.
        """
        if self._chunks.full:
            try:
                self._chunks.grow()
            finally:
                self._bind_chunks()
        chunk = self._chunks.new()
        self.family[chunk], self.tenant[chunk] = family, tenant
        self.depth[chunk], self.end_token[chunk] = depth, end_token
        self.set_expiry(chunk, expires_ms)
        self._keys.add(key, chunk)
        self._attach(chunk, key, parent_key, parent_row)
        return chunk

    def add_chain(self, chain: Chain) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Add chunks that follow each other, with one object each; they are in no tier. Chunk rows
        and object rows, in order; shapes [n] and [n].

        No key of it may be held, and none occur twice.
        """
        count = len(chain.lengths)
        if not self._chunks.has_room(count):
            try:
                self._chunks.grow(count)
            finally:
                self._bind_chunks()
        if not self._objects.has_room(count):
            try:
                self._objects.grow(count)
            finally:
                self._bind_objects()
        chunks, objects = self._chunks.new_many(count), self._objects.new_many(count)
        self._keys.add_many(chain.packed, chunks)
        self._fill_chunks(chain, chunks, objects)
        self._fill_objects(chain, chunks, objects)
        first = int(chunks[0])
        self._attach(first, self.key(first), chain.parent_key, chain.parent_row)
        if self._orphans:
            for chunk in chunks[1:].tolist():
                self._adopt(chunk, self.key(chunk))
        return chunks, objects

    def _fill_chunks(
        self, chain: Chain, chunks: NDArray[np.int32], objects: NDArray[np.int32]
    ) -> None:
        count = len(chunks)
        brief = chain.lengths.astype(np.uint64)
        brief |= np.uint64(ONE_OBJECT | chain.part << PART_SHIFT)
        if chain.expires_ms:
            brief |= np.uint64(EXPIRES)
        np.asarray(self.brief)[chunks] = brief
        np.asarray(self.expires_ms)[chunks] = chain.expires_ms
        np.asarray(self.family)[chunks] = chain.family
        np.asarray(self.tenant)[chunks] = chain.tenant
        np.asarray(self.depth)[chunks] = np.arange(chain.depth, chain.depth + count)
        np.asarray(self.end_token)[chunks] = chain.end_tokens
        np.asarray(self.first_object)[chunks] = objects
        np.asarray(self.parent)[chunks[1:]] = chunks[:-1]
        np.asarray(self.first_child)[chunks[:-1]] = chunks[1:]

    def _fill_objects(
        self, chain: Chain, chunks: NDArray[np.int32], objects: NDArray[np.int32]
    ) -> None:
        np.asarray(self.object_chunk)[objects] = chunks
        np.asarray(self.object_part)[objects] = chain.part
        np.asarray(self.object_length)[objects] = chain.lengths
        halves = np.frombuffer(chain.checksums, ">u8").reshape(-1, 2)
        np.asarray(self._high)[objects] = halves[:, 0]
        np.asarray(self._low)[objects] = halves[:, 1]

    def set_places(
        self,
        chunks: NDArray[np.int32],
        objects: NDArray[np.int32],
        tier: TierKind,
        places: list[int],
    ) -> None:
        """`set_place` for the only objects of chunks that are in no tier yet, parents first."""
        np.asarray(self.place[tier])[objects] = places
        bit = TIER_BIT[tier]
        np.asarray(self.tiers)[chunks] |= bit
        np.asarray(self.brief)[chunks] |= np.uint64(bit << TIERS_SHIFT)
        children = np.asarray(self.children[tier])
        parents = np.asarray(self.parent)[chunks]
        np.add.at(children, parents[parents != NONE], 1)
        leaves = chunks[children[chunks] == 0].tolist()
        for leaf in leaves:
            self.on_leaf[tier](leaf)

    def set_expiry(self, chunk: int, expires_ms: int) -> None:
        """Set when a chunk's time is over, in Unix ms; 0: never."""
        self.expires_ms[chunk] = expires_ms
        brief = self.brief[chunk]
        self.brief[chunk] = brief | EXPIRES if expires_ms else brief & ~EXPIRES

    def set_expiries(self, chunks: NDArray[np.int32], expires_ms: int | NDArray[np.uint64]) -> None:
        """`set_expiry` for many, to one time or each to its own; not 0. Shape [chunks]."""
        np.asarray(self.expires_ms)[chunks] = expires_ms
        np.asarray(self.brief)[chunks] |= np.uint64(EXPIRES)

    def _attach(self, chunk: int, key: bytes, parent_key: bytes, parent: int) -> None:
        if parent == NONE and parent_key:
            parent = self._keys.find(parent_key)
        if parent not in (NONE, chunk):
            self._link(parent, chunk)
        elif parent_key:
            self._orphan(chunk, parent_key)
        self._adopt(chunk, key)

    def _adopt(self, chunk: int, key: bytes) -> None:
        """Take in the chunks that waited for this one."""
        for orphan in self._orphans.pop(key, ()):
            if orphan == chunk or self._is_ancestor(orphan, chunk):
                # Keys that a client made up can name each other in a circle: it stays an orphan.
                self._orphans.setdefault(key, set()).add(orphan)
            else:
                del self._orphan_parents[orphan]
                self._link(chunk, orphan)

    def _orphan(self, chunk: int, parent_key: bytes) -> None:
        self._orphan_parents[chunk] = parent_key
        self._orphans.setdefault(parent_key, set()).add(chunk)

    def _is_ancestor(self, candidate: int, chunk: int) -> bool:
        while chunk != NONE:
            if chunk == candidate:
                return True
            chunk = self.parent[chunk]
        return False

    def _link(self, parent: int, chunk: int) -> None:
        first = self.first_child[parent]
        self.parent[chunk] = parent
        self.next_sibling[chunk] = first
        self.previous_sibling[chunk] = NONE
        if first != NONE:
            self.previous_sibling[first] = chunk
        self.first_child[parent] = chunk
        for tier in TIERS:
            if self.tiers[chunk] & TIER_BIT[tier]:
                self.children[tier][parent] += 1

    def _unlink(self, chunk: int) -> None:
        parent = self.parent[chunk]
        if parent == NONE:
            return
        after, before = self.next_sibling[chunk], self.previous_sibling[chunk]
        if after != NONE:
            self.previous_sibling[after] = before
        if before != NONE:
            self.next_sibling[before] = after
        else:
            self.first_child[parent] = after
        for tier in TIERS:
            if self.tiers[chunk] & TIER_BIT[tier]:
                self._child_left(parent, chunk, tier)
        self.parent[chunk] = NONE

    def _child_left(self, parent: int, chunk: int, tier: TierKind) -> None:
        """A resident child has left a tier: what was used as late as it was its parent, too."""
        self.children[tier][parent] -= 1
        if self.tick[parent] < self.tick[chunk]:
            self.tick[parent] = self.tick[chunk]
        if not self.children[tier][parent] and self.tiers[parent] & TIER_BIT[tier]:
            self.on_leaf[tier](parent)

    def remove_chunk(self, chunk: int) -> None:
        """Forget a chunk that has no objects any more. Its children become orphans."""
        key = self._keys.key(chunk)
        for child in list(self.child_rows(chunk)):
            self._unlink(child)
            self._orphan(child, key)
        self._unlink(chunk)
        parent_key = self._orphan_parents.pop(chunk, None)
        if parent_key is not None:
            waiting = self._orphans[parent_key]
            waiting.discard(chunk)
            if not waiting:
                del self._orphans[parent_key]
        self._keys.remove(chunk)
        self.family[chunk] = _FREE
        self.brief[chunk] = self.tick[chunk] = 0
        self._chunks.free(chunk)

    def child_rows(self, chunk: int) -> Iterator[int]:
        """Rows of the chunks whose parent this is."""
        child = self.first_child[chunk]
        while child != NONE:
            yield child
            child = self.next_sibling[child]

    def subtree(self, chunk: int) -> list[int]:
        """The chunk and all below it, parents before children."""
        found = [chunk]
        for row in found:
            found.extend(self.child_rows(row))
        return found

    def ancestors(self, chunk: int) -> Iterator[int]:
        """The chunk's parent, its parent, and so on to the root."""
        row = self.parent[chunk]
        while row != NONE:
            yield row
            row = self.parent[row]

    # -- objects -------------------------------------------------------------------------------

    def find_object(self, chunk: int, part: int) -> int:
        """The object's row, or NONE."""
        row = self.first_object[chunk]
        while row != NONE and self.object_part[row] != part:
            row = self.object_next[row]
        return row

    def object_rows(self, chunk: int) -> Iterator[int]:
        """Rows of the chunk's objects."""
        row = self.first_object[chunk]
        while row != NONE:
            yield row
            row = self.object_next[row]

    def add_object(self, chunk: int, part: int, length_bytes: int, checksum: bytes) -> int:
        """Add an object that is not held yet; it is in no tier."""
        if self._objects.full:
            try:
                self._objects.grow()
            finally:
                self._bind_objects()
        row = self._objects.new()
        self.object_chunk[row], self.object_part[row] = chunk, part
        self.object_length[row] = length_bytes
        self._high[row] = int.from_bytes(checksum[:8], "big")
        self._low[row] = int.from_bytes(checksum[8:], "big")
        self.object_next[row] = self.first_object[chunk]
        self.first_object[chunk] = row
        self._note_objects(chunk)
        return row

    def _note_objects(self, chunk: int) -> None:
        """Bring `brief` up to date after an object came or went."""
        brief = self.brief[chunk] & ~OBJECT_BITS
        row = self.first_object[chunk]
        if row != NONE and self.object_next[row] == NONE:
            brief |= ONE_OBJECT | self.object_part[row] << PART_SHIFT | self.object_length[row]
        self.brief[chunk] = brief

    def remove_object(self, row: int) -> None:
        """Forget an object that is in no tier any more."""
        chunk = self.object_chunk[row]
        if self.first_object[chunk] == row:
            self.first_object[chunk] = self.object_next[row]
        else:
            before = self.first_object[chunk]
            while self.object_next[before] != row:
                before = self.object_next[before]
            self.object_next[before] = self.object_next[row]
        self._note_objects(chunk)
        self.generation[row] = (self.generation[row] + 1) & 0xFFFFFFFF
        self.object_chunk[row] = NONE
        self._objects.free(row)

    def placed_within(self, tier: TierKind, first: int, stop: int) -> NDArray[np.int32]:
        """Rows of the objects whose place in a tier is at least `first` and below `stop`."""
        places = np.frombuffer(self.place[tier], np.int64)[: self._objects.rows]
        return np.flatnonzero((places >= first) & (places < stop)).astype(np.int32)

    def alive(self, row: int, generation: int) -> bool:
        """Whether the row still is the object it was when `generation` was noted."""
        return self.generation[row] == generation and self.object_chunk[row] != NONE

    def checksum(self, row: int) -> bytes:
        """XXH3-128 of an object, canonical 16 bytes."""
        return self._high[row].to_bytes(8, "big") + self._low[row].to_bytes(8, "big")

    def set_place(self, row: int, tier: TierKind, place: int) -> bool:
        """Record where an object is in a tier (NONE: no longer). True: the chunk as a whole came
        to that tier, or left it.
        """
        self.place[tier][row] = place
        chunk = self.object_chunk[row]
        bit = TIER_BIT[tier]
        was = bool(self.tiers[chunk] & bit)
        places = self.place[tier]
        now = place != NONE or any(places[o] != NONE for o in self.object_rows(chunk))
        if was == now:
            return False
        self.tiers[chunk] ^= bit
        self.brief[chunk] ^= bit << TIERS_SHIFT
        parent = self.parent[chunk]
        if now:
            if parent != NONE:
                self.children[tier][parent] += 1
            if not self.children[tier][chunk]:
                self.on_leaf[tier](chunk)
        elif parent != NONE:
            self._child_left(parent, chunk, tier)
        return True
