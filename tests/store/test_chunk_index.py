"""The index against a plain model: trees, orphans, residency counts, row reuse."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstored.store.index import EXPIRES, NONE, ONE_OBJECT, TIERS, ChunkIndex
from kvstored.tiers.base import TierKind

KEYS = [bytes([n]) * 32 for n in range(10)]


class IndexMachine(RuleBasedStateMachine):
    """`model`: key -> (parent key, {part: set of tiers})."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ChunkIndex()
        self.model: dict[bytes, tuple[bytes, dict[int, set[TierKind]]]] = {}
        self.expiries: dict[bytes, int] = {}
        self.circular: set[bytes] = set()  # keys that were in, or below, a circle of parents

    @rule(key=st.sampled_from(KEYS), parent=st.sampled_from([b"", *KEYS]))
    def add_chunk(self, key: bytes, parent: bytes) -> None:
        if key not in self.model:
            self.index.add_chunk(
                key, parent, family=1, tenant=2, depth=3, end_token=4, expires_ms=5
            )
            self.model[key] = (parent, {})
            self.expiries.pop(key, None)

    @rule(key=st.sampled_from(KEYS), expires_ms=st.sampled_from([0, 7]))
    def set_expiry(self, key: bytes, expires_ms: int) -> None:
        if key in self.model:
            self.index.set_expiry(self.index.find(key), expires_ms)
            self.expiries[key] = expires_ms
            assert self.index.expires_ms[self.index.find(key)] == expires_ms

    @rule(key=st.sampled_from(KEYS), part=st.integers(0, 2))
    def add_object(self, key: bytes, part: int) -> None:
        if key in self.model and part not in self.model[key][1]:
            chunk = self.index.find(key)
            row = self.index.add_object(chunk, part, 4096 + part, bytes([part]) * 16)
            assert self.index.alive(row, self.index.generation[row])
            self.model[key][1][part] = set()

    @rule(key=st.sampled_from(KEYS), part=st.integers(0, 2), tier=st.sampled_from(TIERS))
    def flip_place(self, key: bytes, part: int, tier: TierKind) -> None:
        if key not in self.model or part not in self.model[key][1]:
            return
        tiers = self.model[key][1][part]
        row = self.index.find_object(self.index.find(key), part)
        before = any(tier in t for t in self.model[key][1].values())
        tiers.symmetric_difference_update({tier})
        after = any(tier in t for t in self.model[key][1].values())
        changed = self.index.set_place(row, tier, 7 if tier in tiers else NONE)
        assert changed == (before != after)

    @rule(key=st.sampled_from(KEYS), part=st.integers(0, 2))
    def remove_object(self, key: bytes, part: int) -> None:
        if key in self.model and part in self.model[key][1]:
            row = self.index.find_object(self.index.find(key), part)
            for tier in TIERS:
                self.index.set_place(row, tier, NONE)
            self.index.remove_object(row)
            del self.model[key][1][part]

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: bytes) -> None:
        if key not in self.model:
            return
        chunk = self.index.find(key)
        for row in list(self.index.object_rows(chunk)):
            generation = self.index.generation[row]
            for tier in TIERS:
                if self.index.place[tier][row] != NONE:
                    self.index.set_place(row, tier, NONE)
            self.index.remove_object(row)
            assert not self.index.alive(row, generation)
        self.index.remove_chunk(chunk)
        del self.model[key]

    @invariant()
    def same_as_model(self) -> None:
        index = self.index
        held = [index.key(row) for row in range(index.chunk_rows) if index.held(row)]
        assert sorted(held) == sorted(self.model)
        assert index.chunk_count == len(self.model)
        rows = index.find_many(b"".join(KEYS)).tolist()
        assert rows == [index.find(key) for key in KEYS]
        assert [row != NONE for row in rows] == [key in self.model for key in KEYS]
        assert index.object_count == sum(len(parts) for _, parts in self.model.values())
        for key, (parent_key, parts) in self.model.items():
            chunk = index.find(key)
            assert index.key(chunk) == key
            assert index.parent_key(chunk) == parent_key
            assert index.brief[chunk] == self._brief(key)
            assert {index.object_part[row] for row in index.object_rows(chunk)} == set(parts)
            for part, tiers in parts.items():
                row = index.find_object(chunk, part)
                assert index.checksum(row) == bytes([part]) * 16
                assert {t for t in TIERS if index.place[t][row] != NONE} == tiers

    def _brief(self, key: bytes) -> int:
        parts = self.model[key][1]
        brief = self.expiries.get(key, 5) and EXPIRES
        for tier in TIERS:
            if any(tier in tiers for tiers in parts.values()):
                brief |= 1 << 48 + tier.value
        if len(parts) == 1:
            (part,) = parts
            brief |= ONE_OBJECT | part << 32 | 4096 + part
        return brief

    @invariant()
    def trees_are_consistent(self) -> None:
        index = self.index
        self.circular &= self.model.keys()
        self.circular |= {key for key in self.model if self._circular(key)}
        for key, (parent_key, _) in self.model.items():
            chunk = index.find(key)
            above = list(index.ancestors(chunk))
            assert chunk not in above
            assert len(above) == len(set(above))
            parent = index.parent[chunk]
            if parent != NONE:
                assert index.key(parent) == parent_key
                assert chunk in index.child_rows(parent)
            elif parent_key in self.model:
                # Only a made-up circle leaves a held parent unlinked; it stays so when a third
                # chunk of the circle has gone.
                assert key in self.circular
            for tier in TIERS:
                resident = [
                    c for c in index.child_rows(chunk) if index.tiers[c] & (1 << tier.value)
                ]
                assert index.children[tier][chunk] == len(resident)

    @invariant()
    def only_orphans_have_their_parents_keys_kept(self) -> None:
        index = self.index
        orphans = {
            index.find(key): parent_key
            for key, (parent_key, _) in self.model.items()
            if parent_key and index.parent[index.find(key)] == NONE
        }
        assert index._orphan_parents == orphans
        assert {row for rows in index._orphans.values() for row in rows} == set(orphans)

    def _circular(self, key: bytes) -> bool:
        seen: set[bytes] = set()
        while key in self.model and key not in seen:
            seen.add(key)
            key = self.model[key][0]
        return key in seen


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_subtree_lists_parents_before_children() -> None:
    index = ChunkIndex()
    for key, parent in zip(KEYS[:4], [b"", KEYS[0], KEYS[0], KEYS[1]], strict=True):
        index.add_chunk(key, parent, family=0, tenant=0, depth=0, end_token=0, expires_ms=0)
    rows = index.subtree(index.find(KEYS[0]))
    keys = [index.key(row) for row in rows]
    assert set(keys) == set(KEYS[:4])
    assert keys.index(KEYS[1]) < keys.index(KEYS[3])


def test_orphans_are_adopted_when_their_parent_comes() -> None:
    index = ChunkIndex()
    child = index.add_chunk(
        KEYS[1], KEYS[0], family=0, tenant=0, depth=1, end_token=0, expires_ms=0
    )
    assert index.parent[child] == NONE
    parent = index.add_chunk(KEYS[0], b"", family=0, tenant=0, depth=0, end_token=0, expires_ms=0)
    assert index.parent[child] == parent
