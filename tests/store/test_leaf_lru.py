"""Leaf-first LRU: order against a plain list, and the hit rates that an independent simulator gets
on a public trace.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvstored.store import lru
from kvstored.store.index import NONE, ChunkIndex
from kvstored.store.lru import LeafLru
from kvstored.tiers.base import TierKind

TRACES = Path(__file__).parents[3] / "shared" / "traces"


class _Cache:
    """Chunks of one part in one tier, on the index and LRU that the daemon uses."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.index = ChunkIndex()
        self.lru = LeafLru(self.index, TierKind.RAM)
        self.tick = 0

    def touch(self, chunks: list[int]) -> None:
        """A run in prefix order, as `Residency.touch` does it."""
        for chunk in reversed(chunks):
            self.tick += 1
            self.index.tick[chunk] = self.tick

    def add(self, key: bytes, parent: bytes) -> int:
        chunk = self.index.add_chunk(
            key, parent, family=0, tenant=0, depth=0, end_token=0, expires_ms=0
        )
        row = self.index.add_object(chunk, 0, 4096, bytes(16))
        self.touch([chunk])
        self.index.set_place(row, TierKind.RAM, 1)
        return chunk

    def drop(self, chunk: int) -> None:
        row = self.index.find_object(chunk, 0)
        self.index.set_place(row, TierKind.RAM, NONE)
        self.index.remove_object(row)
        self.index.remove_chunk(chunk)

    def evict(self, keep: Collection[int] = ()) -> bytes:
        """The key of the chunk that went; empty if none could."""
        chunk = self.lru.victim(keep.__contains__)
        self.lru.put_back()
        if chunk == NONE:
            return b""
        key = self.index.key(chunk)
        self.drop(chunk)
        return key

    def request(self, keys: list[bytes]) -> int:
        """The replay semantics of the trace's page. Hits (leading cached blocks); touches them and
        inserts the rest.
        """
        rows = self.index.find_many(b"".join(keys)).tolist()
        hits = rows.index(NONE) if NONE in rows else len(rows)
        self.touch(rows[:hits])
        held = rows[:hits]
        keep = set(held)
        for i in range(hits, len(keys)):
            if self.index.chunk_count >= self.capacity and not self.evict(keep):
                break
            held.append(self.add(keys[i], keys[i - 1] if i else b""))
            keep.add(held[-1])
        self.touch(held)
        return hits


def key_of(n: int) -> bytes:
    return n.to_bytes(32, "little")


class _Model:
    """Strict order: a list of keys, oldest first; a touch moves the run, then all above it."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.parent: dict[int, int] = {}

    def touch(self, run: list[int]) -> None:
        above, n = [], self.parent.get(run[0], 0)
        while n in self.order:
            above.append(n)
            n = self.parent[n]
        for n in [*reversed(run), *above]:
            self.order.remove(n)
            self.order.append(n)

    def add(self, n: int, parent: int) -> None:
        self.parent[n] = parent
        self.order.append(n)
        self.touch([n])

    def drop(self, n: int) -> None:
        self.order.remove(n)

    def leaf(self, n: int) -> bool:
        return all(self.parent[m] != n for m in self.order)

    def victim(self, keep: Collection[int]) -> int:
        return next((n for n in self.order if self.leaf(n) and n not in keep), 0)


class LruMachine(RuleBasedStateMachine):
    """Chunks have numbers from 1 on; 0 is no parent."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = _Cache()
        self.model = _Model()
        self.added = 0

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from([0, *self.model.order]))
        self.added += 1
        self.cache.add(key_of(self.added), key_of(parent) if parent else b"")
        self.model.add(self.added, parent)

    @rule(length=st.integers(1, 5))
    def add_run(self, length: int) -> None:
        first = self.added + 1
        for n in range(first, first + length):
            self.cache.add(key_of(n), key_of(n - 1) if n > first else b"")
            self.model.add(n, n - 1 if n > first else 0)
        self.added += length
        self._touch(list(range(first, first + length)))

    def _touch(self, run: list[int]) -> None:
        self.cache.touch([self.cache.index.find(key_of(n)) for n in run])
        self.model.touch(run)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        """A run from a held chunk upwards."""
        if self.model.order:
            run = [data.draw(st.sampled_from(self.model.order))]
            while (parent := self.model.parent[run[0]]) and data.draw(st.booleans()):
                run.insert(0, parent)
            self._touch(run)

    @rule(data=st.data(), count=st.integers(1, 6))
    def evict(self, data: st.DataObject, count: int) -> None:
        busy = data.draw(st.sets(st.sampled_from([0, *self.model.order])))
        rows = {self.cache.index.find(key_of(n)) for n in busy if n}
        for _ in range(count):
            n = self.model.victim(busy)
            assert self.cache.evict(rows) == (key_of(n) if n else b"")
            if not n:
                break
            self.model.drop(n)

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """A leaf goes before its turn."""
        leaves = [n for n in self.model.order if self.model.leaf(n)]
        if leaves:
            n = data.draw(st.sampled_from(leaves))
            self.cache.drop(self.cache.index.find(key_of(n)))
            self.model.drop(n)

    def teardown(self) -> None:
        while n := self.model.victim(()):
            assert self.cache.evict() == key_of(n)
            self.model.drop(n)
        assert not self.cache.evict()


TestLruMachine = LruMachine.TestCase
TestLruMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", [1, 2])
def test_batches_of_a_large_tier_come_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough chunks that a batch is a small part of them, found by sampling and in slices."""
    monkeypatch.setattr(lru, "_SLICE_ROWS", 10_000)
    dice = random.Random(seed)
    cache, runs = _Cache(), []
    for run in range(3000):
        length = dice.choice([1, 1, 60])
        keys = [key_of(run << 32 | i + 1) for i in range(length)]
        parents = [b"", *keys]
        runs.append([cache.add(*pair) for pair in zip(keys, parents, strict=False)])
        cache.touch(runs[-1])
    assert cache.index.chunk_rows > 1 << 15
    for _ in range(2000):
        cache.touch(dice.choice(runs))
    keys_of_rows = {row: cache.index.key(row) for run in runs for row in run}
    by_age = sorted(keys_of_rows, key=cache.index.tick.__getitem__)
    busy = set(dice.sample(by_age, 1000)) - {row for run in runs for row in run[:-1]}
    held_up = {row for run in runs if run[-1] in busy for row in run}
    expected = [keys_of_rows[row] for row in by_age if row not in held_up]
    seen = []
    while (chunk := cache.lru.victim(busy.__contains__)) != NONE:
        seen.append(cache.index.key(chunk))
        cache.drop(chunk)
        if len(seen) % 1000 == 0:
            cache.lru.put_back()
    assert seen == expected


def test_a_chunk_that_another_tier_made_younger_keeps_its_turn() -> None:
    """Its tick is raised behind the batches' back, to one that they have passed already."""
    cache = _Cache()
    parent, child = cache.add(key_of(1), b""), cache.add(key_of(2), key_of(1))
    others = [cache.add(key_of(n), b"") for n in range(3, 6)]
    row = cache.index.find_object(child, 0)
    cache.index.set_place(row, TierKind.NVME, 1)
    cache.touch([child])
    cache.touch(others)
    cache.index.set_place(row, TierKind.RAM, NONE)
    assert cache.lru.victim(lambda row: True) == NONE  # the first batch has all four
    cache.lru.put_back()
    tick = cache.index.tick[parent]
    cache.index.tick[child] = tick + 1
    cache.index.set_place(row, TierKind.NVME, NONE)
    assert cache.index.tick[parent] == tick + 1
    assert cache.evict() == key_of(1)


def test_a_chunk_that_comes_back_with_an_old_tick_takes_its_place() -> None:
    cache = _Cache()
    chunks = [cache.add(key_of(n), b"") for n in range(1, 5)]
    row = cache.index.find_object(chunks[0], 0)
    cache.index.set_place(row, TierKind.RAM, NONE)
    assert cache.evict() == key_of(2)
    cache.index.set_place(row, TierKind.RAM, 1)
    assert [cache.evict() for _ in range(4)] == [key_of(1), key_of(3), key_of(4), b""]


@pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not beside this checkout")
@pytest.mark.parametrize("capacity", [352, 2818, 22550])
def test_hit_rate_on_the_public_trace(capacity: int) -> None:
    expected = json.loads((TRACES / "expected.json").read_text())
    with lzma.open(TRACES / f"{expected['trace']}.jsonl.xz", "rt") as lines:
        requests = [json.loads(line) for line in lines]
    cache = _Cache(capacity)
    block = expected["block_tokens"]
    hit_tokens = input_tokens = 0
    for n, request in enumerate(requests):
        hits = cache.request([key_of(i) for i in request["hash_ids"]])
        if n >= len(requests) // 2:
            hit_tokens += min(hits * block, request["input_length"])
            input_tokens += request["input_length"]
    percent = 100 * hit_tokens / input_tokens
    assert percent == pytest.approx(expected["percent"]["lru"][str(capacity)], abs=0.1)
