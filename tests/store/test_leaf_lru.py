"""Leaf-first LRU: order, and the hit rates an independent simulator gets on a public trace."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from kvstored.store.index import NONE, ChunkIndex
from kvstored.store.lru import LeafLru
from kvstored.tiers.base import TierKind

TRACES = Path(__file__).parents[3] / "shared" / "traces"


def test_victim_is_the_one_used_longest_ago() -> None:
    lru = LeafLru()
    for row in (3, 1, 2):
        lru.add(row)
    lru.touch(3)
    assert list(lru.from_oldest()) == [1, 2, 3]
    assert lru.victim(lambda row: True) == 1
    assert lru.victim(lambda row: row != 1) == 2
    lru.remove(2)
    assert list(lru.from_oldest()) == [1, 3]
    assert lru.victim(lambda row: False) == NONE


class _Cache:
    """The replay semantics of the trace's page, on the index and LRU that the daemon uses."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.index = ChunkIndex()
        self.lru = LeafLru()

    def _add(self, key: bytes, parent: bytes) -> None:
        chunk = self.index.add_chunk(
            key, parent, family=0, tenant=0, depth=0, end_token=0, expires_ms=0
        )
        row = self.index.add_object(chunk, 0, 4096, bytes(16))
        self.index.set_place(row, TierKind.RAM, 1)
        self.lru.add(chunk)

    def _evict(self, keep: set[int]) -> bool:
        children = self.index.children[TierKind.RAM]
        chunk = self.lru.victim(lambda row: not children[row] and row not in keep)
        if chunk == NONE:
            return False
        self.lru.remove(chunk)
        row = self.index.find_object(chunk, 0)
        self.index.set_place(row, TierKind.RAM, NONE)
        self.index.remove_object(row)
        self.index.remove_chunk(chunk)
        return True

    def request(self, keys: list[bytes]) -> int:
        """Hits (leading cached blocks); touches them and inserts the rest."""
        hits = 0
        while hits < len(keys) and self.index.find(keys[hits]) != NONE:
            hits += 1
        for key in reversed(keys[:hits]):
            self.lru.touch(self.index.find(key))
        held = {self.index.find(key) for key in keys[:hits]}
        done = hits
        for i in range(hits, len(keys)):
            if self.index.chunk_count >= self.capacity and not self._evict(held):
                break
            self._add(keys[i], keys[i - 1] if i else b"")
            held.add(self.index.find(keys[i]))
            done = i + 1
        for key in reversed(keys[:done]):
            self.lru.touch(self.index.find(key))
        return hits


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
        hits = cache.request([i.to_bytes(32, "little") for i in request["hash_ids"]])
        if n >= len(requests) // 2:
            hit_tokens += min(hits * block, request["input_length"])
            input_tokens += request["input_length"]
    percent = 100 * hit_tokens / input_tokens
    assert percent == pytest.approx(expected["percent"]["lru"][str(capacity)], abs=0.1)
