"""Which row a key has: a hash table in memory maps, without a Python object per key. No I/O.

Keys lie in a column, 32 bytes per row. The table has buckets of eight slots, one cache line each:
eight tags, then eight rows. A key's tag is 32 bits of a strongly universal hash with random
coefficients (multilinear: sum of coefficient times word, modulo 2**64, upper half), so that a
client that makes keys up cannot make them collide. The tag scaled to the number of buckets is the
bucket; a bucket that is full passes on to the next. Tags are odd, and so differ from the marks of a
slot that was never used and of one whose key has gone.

When a table is five eighths used up, a second one is filled from it, some hundred buckets with
every change; meanwhile a search looks into the new one, then into the old one.
"""

from __future__ import annotations

import os
import struct
from operator import mul

import numpy as np
from numpy.typing import NDArray

from kvstored.store.columns import Column, next_capacity, private_memory
from kvstored_client.identity import KEY_BYTES

NONE = -1

_SLOTS = 8
_EMPTY = 0
_GONE = 2
_MAX_LOAD = 0.62  # of slots used when the next table is begun: one key in a hundred is passed on
_NEW_LOAD = 0.48  # of its slots, by what there is to move
_MIN_LOAD = 0.20  # of slots live, below which memory is given back
_MIN_BUCKETS = 64  # one page
_MOVE_BUCKETS = 128  # of the old table per change: 0.1 ms
_BATCH = 64  # keys that are added together
_FILL = 1 << 15  # keys that are entered together where there are very many
_FEW = 8  # keys that are searched faster one by one

Packed = bytes | memoryview
"""Whole keys, back to back."""

_KEY = np.dtype(f"V{KEY_BYTES}")
_unpack_words = struct.Struct("<8I").unpack
_unpack_tags = struct.Struct("=8I").unpack_from
_MASK = 0xFFFF_FFFF_FFFF_FFFF


class Buckets:
    """One hash table: tags to rows. It knows no keys: one tag may stand in it several times."""

    def __init__(self, count: int) -> None:
        """`count`: of buckets."""
        self.count = count
        self.memory = private_memory(64 * count)
        self.words = np.frombuffer(self.memory, np.uint32)
        self.grid = self.words.reshape(count, 2 * _SLOTS)
        self.items: memoryview[int] = memoryview(self.memory).cast("I")
        self.used = 0  # slots that are not empty
        self.max_used = int(count * _SLOTS * _MAX_LOAD)
        self.min_live = int(count * _SLOTS * _MIN_LOAD) if count > _MIN_BUCKETS else 0

    def insert(self, tag: int, row: int) -> None:
        """Add a row under a tag."""
        bucket = tag * self.count >> 32
        while True:
            tags = _unpack_tags(self.memory, bucket << 6)
            for slot, there in enumerate(tags):
                if not there & 1:
                    self.used += there == _EMPTY
                    at = 2 * _SLOTS * bucket + slot
                    self.items[at] = tag
                    self.items[at + _SLOTS] = row
                    return
            bucket = (bucket + 1) % self.count

    def remove(self, tag: int, row: int) -> bool:
        """Take a row out. False: it is not there."""
        bucket = tag * self.count >> 32
        while True:
            tags = _unpack_tags(self.memory, bucket << 6)
            passed_on = _EMPTY not in tags
            for slot, there in enumerate(tags):
                at = 2 * _SLOTS * bucket + slot
                if there == tag and self.items[at + _SLOTS] == row:
                    # Nobody was passed on from a bucket that still has a slot never used.
                    self.items[at] = _GONE if passed_on else _EMPTY
                    self.used -= not passed_on
                    return True
            if not passed_on:
                return False
            bucket = (bucket + 1) % self.count

    def search(self, tags: NDArray[np.uint32]) -> NDArray[np.int32]:
        """For each tag a row that stands under it, or NONE; shapes [n] and [n]."""
        return self._search_from(tags, self._bucket_of(tags))

    def _bucket_of(self, tags: NDArray[np.uint32]) -> NDArray[np.int64]:
        return (tags.astype(np.uint64) * np.uint64(self.count) >> np.uint64(32)).view(np.int64)

    def _search_from(
        self, tags: NDArray[np.uint32], bucket: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        near = self.grid.take(bucket, axis=0)
        at = (near[:, :_SLOTS] == tags[:, None]).reshape(-1).nonzero()[0]
        rows = np.full(len(tags), NONE, np.int32)
        # Hit number 8 * key + slot; in a bucket of 16 words the row is 8 behind the tag.
        rows[at >> 3] = near.reshape(-1)[_SLOTS:].take(at + (at & -_SLOTS)).view(np.int32)
        left = (rows == NONE).nonzero()[0]  # the hits do not tell: a tag may stand there twice
        if left.size:
            left = left[near[left, :_SLOTS].all(axis=1)]
            if left.size:
                rows[left] = self._search_on(tags[left], bucket[left])
        return rows

    def _search_on(self, tags: NDArray[np.uint32], bucket: NDArray[np.int64]) -> NDArray[np.int32]:
        """`search`, after these full buckets."""
        if len(tags) > _FEW:
            return self._search_from(tags, (bucket + 1) % self.count)
        one = map(self._search_one, tags.tolist(), bucket.tolist())
        return np.fromiter(one, np.int32, len(tags))

    def _search_one(self, tag: int, bucket: int) -> int:
        while True:
            bucket = (bucket + 1) % self.count
            tags = _unpack_tags(self.memory, bucket << 6)
            if tag in tags:
                return self.items[2 * _SLOTS * bucket + _SLOTS + tags.index(tag)]
            if _EMPTY in tags:
                return NONE

    def insert_many(self, tags: NDArray[np.uint32], rows: NDArray[np.uint32]) -> None:
        """Add rows under tags; shapes [n] and [n]."""
        bucket = self._bucket_of(tags)
        order = np.argsort(bucket, kind="stable")
        bucket, tags, rows = bucket[order], tags[order], rows[order]
        own, first, group, counts = np.unique(
            bucket, return_index=True, return_inverse=True, return_counts=True
        )
        del counts
        rank = np.arange(len(bucket)) - first[group]
        taken = self.grid[own, :_SLOTS] != _EMPTY
        free = _SLOTS - taken.sum(axis=1)
        slots = np.argsort(taken, axis=1, kind="stable")
        fits = rank < free[group]
        at = 2 * _SLOTS * bucket[fits] + slots[group[fits], rank[fits]]
        self.words[at] = tags[fits]
        self.words[at + _SLOTS] = rows[fits]
        self.used += len(at)
        for tag, row in zip(tags[~fits].tolist(), rows[~fits].tolist(), strict=True):
            self.insert(tag, row)

    def fill(self, tags: NDArray[np.uint32], rows: NDArray[np.uint32]) -> None:
        """`insert_many` for very many, by ascending tag, into buckets that are all empty. Nothing
        is sorted, and memory is gone through once.
        """
        passed_on: list[tuple[int, int]] = []
        for first in range(0, len(tags), _FILL):
            some, bucket = tags[first : first + _FILL], self._bucket_of(tags[first : first + _FILL])
            begins = np.flatnonzero(np.diff(bucket, prepend=-1))
            rank = np.arange(len(bucket)) - np.repeat(begins, np.diff(begins, append=len(bucket)))
            if first:  # the first bucket of this slice may have got some of the last
                rank[: len(rank) if len(begins) < 2 else begins[1]] += int(
                    (self.grid[bucket[0], :_SLOTS] != _EMPTY).sum()
                )
            fits = rank < _SLOTS
            at = 2 * _SLOTS * bucket[fits] + rank[fits]
            self.words[at] = some[fits]
            self.words[at + _SLOTS] = rows[first : first + _FILL][fits]
            self.used += len(at)
            late = np.flatnonzero(~fits) + first
            passed_on += zip(tags[late].tolist(), rows[late].tolist(), strict=True)
        for tag, row in passed_on:  # last, so that they take no slot of a bucket's own
            self.insert(tag, row)

    def take(self, begin: int, stop: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Tags and rows in a range of buckets, which are gone from here afterwards; what was passed
        on from these buckets is still found.
        """
        tags = self.grid[begin:stop, :_SLOTS]
        live = (tags & 1).astype(bool)
        taken = tags[live], self.grid[begin:stop, _SLOTS:][live]
        tags[tags != _EMPTY] = _GONE
        return taken


class KeyTable:
    """Rows by key, and keys by row. The rows are the caller's."""

    def __init__(self) -> None:
        self._keys = Column("B", KEY_BYTES)
        random = np.frombuffer(os.urandom(72), np.uint64)
        self._coefficients, self._constant = random[:8], random[8]
        self._factors: list[int] = random[:8].tolist()
        self._offset = int(random[8])
        self._young = Buckets(_MIN_BUCKETS)
        self._old: Buckets | None = None
        self._moved = 0  # leading buckets of the old table that were moved
        self._live = 0
        self.changes = 0
        """Grows with every key that comes or goes: what was found is good until then."""

    def reserve(self, rows: int, keys: int) -> None:
        """Make room for so many rows and, in a table that is empty, for so many keys at once."""
        if rows > self._keys.rows:
            self._keys.grow(rows)
        if not self._live:
            count = max(_MIN_BUCKETS, int((keys + 1) / (_SLOTS * _NEW_LOAD)))
            self._old, self._young = None, Buckets(count)

    def hashes(self, packed: Packed) -> NDArray[np.uint64]:
        """A hash of each key, whole keys back to back; shape [keys]. Its upper half is the tag, so
        that keys by ascending hash are what `add_sorted` takes.
        """
        found = np.empty(len(packed) // KEY_BYTES, np.uint64)
        words = np.frombuffer(packed, np.uint32).reshape(-1, 8)
        for first in range(0, len(found), _FILL):  # bounds the memory that it takes
            some = words[first : first + _FILL].astype(np.uint64)
            np.matmul(some, self._coefficients, out=found[first : first + _FILL])
        found += self._constant
        return found

    def add_sorted(
        self, keys: NDArray[np.uint8], rows: NDArray[np.int32], order: NDArray[np.int64]
    ) -> None:
        """`add_many` to a table that is empty, for very many keys; shapes [n, 32], [n] and [n].

        `order`: how the keys are sorted by `hashes`.
        """
        assert not self._live
        packed = keys.reshape(-1).data
        self.reserve(int(rows.max(initial=-1)) + 1, len(rows))
        np.frombuffer(self._keys.memory, _KEY)[rows] = np.frombuffer(packed, _KEY)
        tags = _tags_of(self.hashes(packed))
        self._young.fill(tags[order], rows[order].view(np.uint32))
        self._live = len(rows)
        self.changes += 1

    def __len__(self) -> int:
        """Keys held."""
        return self._live

    def key(self, row: int) -> bytes:
        """The key of a row that has one."""
        return self._keys.memory[KEY_BYTES * row : KEY_BYTES * (row + 1)]

    def _tag(self, key: bytes) -> int:
        total: int = sum(map(mul, self._factors, _unpack_words(key)), self._offset)
        return (total & _MASK) >> 32 | 1

    def find(self, key: bytes) -> int:
        """The row of a key, or NONE."""
        tag = self._tag(key)
        row = self._find_in(self._young, tag, key)
        if row == NONE and self._old is not None:
            row = self._find_in(self._old, tag, key)
        return row

    def _find_in(self, buckets: Buckets, tag: int, key: bytes) -> int:
        bucket = tag * buckets.count >> 32
        keys = self._keys.memory
        while True:
            tags = _unpack_tags(buckets.memory, bucket << 6)
            if tag in tags:
                for slot, there in enumerate(tags):
                    if there == tag:
                        row = buckets.items[2 * _SLOTS * bucket + _SLOTS + slot]
                        if keys[KEY_BYTES * row : KEY_BYTES * (row + 1)] == key:
                            return row
            if _EMPTY in tags:
                return NONE
            bucket = (bucket + 1) % buckets.count

    def find_many(self, packed: bytes) -> NDArray[np.int32]:
        """The row of each key, or NONE; shape [keys]. `packed`: whole keys back to back."""
        count = len(packed) // KEY_BYTES
        if count <= _FEW:
            one = (packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))
            return np.fromiter(map(self.find, one), np.int32, count)
        tags = self._tags(packed)
        rows = self._young.search(tags)
        if self._old is not None:
            left = (rows == NONE).nonzero()[0]
            rows[left] = self._old.search(tags[left])
        self._check(packed, rows)
        return rows

    def _check(self, packed: bytes, rows: NDArray[np.int32]) -> None:
        """Keep rows only where the whole key is the one asked for; a tag is 32 bits of it."""
        # A void dtype is gathered as whole keys; mode "clip" spares numpy a look at every index.
        held = np.frombuffer(self._keys.memory, _KEY)
        found = (rows >= 0).nonzero()[0]
        if len(found) == len(rows):
            wanted, there = packed, held.take(rows, mode="clip").tobytes()
        else:
            wanted = np.frombuffer(packed, _KEY).take(found, mode="clip").tobytes()
            there = held.take(rows.take(found), mode="clip").tobytes()
        if there == wanted:
            return
        for n, i in enumerate(found.tolist()):
            key = wanted[KEY_BYTES * n : KEY_BYTES * (n + 1)]
            if there[KEY_BYTES * n : KEY_BYTES * (n + 1)] != key:
                rows[i] = self.find(key)

    def add(self, key: bytes, row: int) -> None:
        """Give a row its key. The key must not be held, the row not have one."""
        if row >= self._keys.rows:
            self._keys.grow(max(row + 1, next_capacity(self._keys.rows)))
        self._keys.memory[KEY_BYTES * row : KEY_BYTES * (row + 1)] = key
        if self._old is None and self._young.used >= self._young.max_used:
            self._renew()
        self._young.insert(self._tag(key), row)
        self._live += 1
        self.changes += 1
        if self._old is not None:
            self._move()

    def add_many(self, packed: bytes, rows: NDArray[np.int32]) -> None:
        """`add` for many keys, back to back; they must differ."""
        top = int(rows.max(initial=-1))
        if top >= self._keys.rows:
            self._keys.grow(max(top + 1, next_capacity(self._keys.rows)))
        np.frombuffer(self._keys.memory, _KEY)[rows] = np.frombuffer(packed, _KEY)
        tags, unsigned = self._tags(packed), rows.astype(np.uint32)
        for at in range(0, len(rows), _BATCH):
            stop = min(at + _BATCH, len(rows))
            if self._old is None and self._young.used + stop - at >= self._young.max_used:
                self._renew()
            self._young.insert_many(tags[at:stop], unsigned[at:stop])
            self._live += stop - at
            self.changes += 1
            for _ in range(_BATCH // 8):  # one in eight keys: fast enough to be done in time
                if self._old is not None:
                    self._move()

    def _tags(self, packed: bytes) -> NDArray[np.uint32]:
        return _tags_of(self.hashes(packed))

    def remove(self, row: int) -> None:
        """Forget a row's key."""
        tag = self._tag(self.key(row))
        if not self._young.remove(tag, row) and self._old is not None:
            self._old.remove(tag, row)
        self._live -= 1
        self.changes += 1
        if self._old is not None:
            self._move()
        elif self._live < self._young.min_live:
            self._renew()

    def _renew(self) -> None:
        """Begin a table that fits what is held, without the marks of what has gone."""
        count = max(_MIN_BUCKETS, int((self._live + 1) / (_SLOTS * _NEW_LOAD)))
        self._old, self._young, self._moved = self._young, Buckets(count), 0

    def _move(self) -> None:
        assert self._old is not None
        stop = min(self._moved + _MOVE_BUCKETS, self._old.count)
        tags, rows = self._old.take(self._moved, stop)
        self._young.insert_many(tags, rows)
        self._moved = stop
        if stop == self._old.count:
            self._old = None


def _tags_of(hashes: NDArray[np.uint64]) -> NDArray[np.uint32]:
    tags: NDArray[np.uint32] = (hashes >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    return tags
