"""The index of one namespace: which chunks and objects it holds and where. RAM only, no I/O.

Each namespace has an index of its own, so that no look-up, row number or listing of one can depend
on another's keys. Rows of parallel arrays, not Python objects: a million of them must cost little
and be walked by nobody's garbage collector. A *chunk row* is one chunk, an *object row* is one of
its parts. Rows are reused, so whoever keeps an object row across an ``await`` keeps its generation
too and asks `alive`.

Chunks form trees by parent; a chunk whose parent is not held waits under the parent's key and is
adopted when the parent comes. All methods belong to the verbs' loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kvstored.tiers.base import TierKind

NONE = -1
TIERS = (TierKind.RAM, TierKind.NVME)
TIER_BIT = {tier: 1 << tier.value for tier in TierKind}


class Table:
    """Columns of equal length with a free list. Scalars are read and written by ``column[row]``."""

    def __init__(self, columns: dict[str, tuple[str, int]]) -> None:
        self._defaults = columns
        self._columns = {name: array(code) for name, (code, _) in columns.items()}
        self._free: list[int] = []
        self.rows = 0

    def column(self, name: str) -> array[int]:
        """The array behind a column; it stays the same object when rows are added."""
        return self._columns[name]

    def new(self) -> int:
        """A row with every column at its default."""
        if self._free:
            row = self._free.pop()
            for name, (_, default) in self._defaults.items():
                self._columns[name][row] = default
            return row
        row = self.rows
        self.rows += 1
        for name, (_, default) in self._defaults.items():
            self._columns[name].append(default)
        return row

    def free(self, row: int) -> None:
        """Give a row back for reuse."""
        self._free.append(row)

    @property
    def used(self) -> int:
        """Rows in use."""
        return self.rows - len(self._free)


class ChunkIndex:
    """The chunks of one namespace by key, their objects, and the trees they form."""

    def __init__(self) -> None:
        self.rows: dict[bytes, int] = {}  # key -> chunk row
        self._orphans: dict[bytes, set[int]] = {}  # parent key -> rows that wait for it
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
            }
        )
        self.keys: list[bytes] = []  # by chunk row; the same object as in `rows`
        self.parent_keys: list[bytes] = []
        c = self._chunks.column
        self.family, self.tenant = c("family"), c("tenant")
        self.parent, self.first_child = c("parent"), c("first_child")
        self.next_sibling, self.previous_sibling = c("next_sibling"), c("previous_sibling")
        self.children = {TierKind.RAM: c("children_ram"), TierKind.NVME: c("children_nvme")}
        self.depth, self.end_token, self.expires_ms = c("depth"), c("end_token"), c("expires_ms")
        self.first_object, self.tiers, self.tick = c("first_object"), c("tiers"), c("tick")

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
            }
        )
        self.generation = array("I")  # never reset: it outlives the row's uses
        o = self._objects.column
        self.object_chunk, self.object_part, self.object_next = o("chunk"), o("part"), o("next")
        self.object_length = o("length")
        self._high, self._low = o("checksum_high"), o("checksum_low")
        self.place = {TierKind.RAM: o("place_ram"), TierKind.NVME: o("place_nvme")}

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
        """Rows ever used: the bound for walks over all of them (a free row has an empty key)."""
        return self._chunks.rows

    # -- chunks --------------------------------------------------------------------------------

    def find(self, key: bytes) -> int:
        """The chunk's row, or NONE."""
        return self.rows.get(key, NONE)

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
    ) -> int:
        """Add a chunk that is not held yet; it has no objects and is in no tier."""
        chunk = self._chunks.new()
        if chunk == len(self.keys):
            self.keys.append(key)
            self.parent_keys.append(parent_key)
        else:
            self.keys[chunk] = key
            self.parent_keys[chunk] = parent_key
        self.family[chunk], self.tenant[chunk] = family, tenant
        self.depth[chunk], self.end_token[chunk] = depth, end_token
        self.expires_ms[chunk] = expires_ms
        self.rows[key] = chunk
        self._attach(chunk)
        return chunk

    def _attach(self, chunk: int) -> None:
        parent_key = self.parent_keys[chunk]
        parent = self.rows.get(parent_key, NONE) if parent_key else NONE
        if parent not in (NONE, chunk):
            self._link(parent, chunk)
        elif parent_key:
            self._orphans.setdefault(parent_key, set()).add(chunk)
        key = self.keys[chunk]
        for orphan in self._orphans.pop(key, ()):
            if orphan == chunk or self._is_ancestor(orphan, chunk):
                # Keys that a client made up can name each other in a circle: it stays an orphan.
                self._orphans.setdefault(key, set()).add(orphan)
            else:
                self._link(chunk, orphan)

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
                self.children[tier][parent] -= 1
        self.parent[chunk] = NONE

    def remove_chunk(self, chunk: int) -> None:
        """Forget a chunk that has no objects any more. Its children become orphans."""
        key = self.keys[chunk]
        for child in list(self.child_rows(chunk)):
            self._unlink(child)
            self._orphans.setdefault(key, set()).add(child)
        self._unlink(chunk)
        parent_key = self.parent_keys[chunk]
        waiting = self._orphans.get(parent_key)
        if waiting is not None:
            waiting.discard(chunk)
            if not waiting:
                del self._orphans[parent_key]
        del self.rows[key]
        self.keys[chunk] = self.parent_keys[chunk] = b""
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
        row = self._objects.new()
        if row == len(self.generation):
            self.generation.append(0)
        self.object_chunk[row], self.object_part[row] = chunk, part
        self.object_length[row] = length_bytes
        self._high[row] = int.from_bytes(checksum[:8], "big")
        self._low[row] = int.from_bytes(checksum[8:], "big")
        self.object_next[row] = self.first_object[chunk]
        self.first_object[chunk] = row
        return row

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
        self.generation[row] = (self.generation[row] + 1) & 0xFFFFFFFF
        self.object_chunk[row] = NONE
        self._objects.free(row)

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
        parent = self.parent[chunk]
        if parent != NONE:
            self.children[tier][parent] += 1 if now else -1
        return True
