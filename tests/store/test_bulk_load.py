"""Loading very many objects at once leaves what loading them one by one leaves."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store.slow_load import slow_load

from kvstored.store import bulk, recovery
from kvstored.store import keys as key_tables
from kvstored.store.accounting import Accounts
from kvstored.store.index import NONE
from kvstored.store.keys import KeyTable
from kvstored.store.namespace import Namespace
from kvstored.store.residency import Residency, now_ms
from kvstored.tiers.base import Recovered, TierKind
from kvstored.tiers.nvme import layout
from kvstored.tiers.nvme.format import SMALL_BIT

FAMILIES = [bytes([n]) * 32 for n in (1, 2)]
PARTS = ["kv", "state", "window"]
NAMES = ["default", "gone", "other"]
NVME, RAM = TierKind.NVME, TierKind.RAM


class Device:
    """As much of a tier as accounts ask for."""

    charge_mask = SMALL_BIT

    def charge_bytes(self, length_bytes: int) -> int:
        return layout.charge_bytes(length_bytes)

    def charge_at(self, place: int, length_bytes: int) -> int:
        return layout.charge_at(place, length_bytes)


@dataclass
class World:
    """What a store has to load into."""

    discarded: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.namespaces = {n: Namespace(n, i) for i, n in enumerate(("other", "default"))}
        device = Device()
        self.residency = Residency(
            Accounts(2, clock=lambda: 0.0),
            {RAM: device, NVME: device},  # type: ignore[dict-item]
            lambda tier, places: self.discarded.extend(places),
        )

    def load(self, found: Recovered) -> list[int]:
        return recovery.load(found, NVME, self.namespaces.get, self.residency)

    def slow_load(self, found: Recovered) -> list[int]:
        return slow_load(found, NVME, self.namespaces, self.residency)

    def put_in_ram(self, keys: Iterable[tuple[str, bytes]]) -> None:
        """Of these chunks, the first part of each is in RAM and in no other tier."""
        for place, (name, key) in enumerate(keys):
            ns = self.namespaces[name]
            family = ns.families.recovered(FAMILIES[0])
            part = ns.families.add_part_name(family, PARTS[0])
            tenant = ns.tenant_number("default")
            fields = {"family": 0, "tenant": tenant, "depth": 0, "end_token": 1, "expires_ms": 0}
            chunk = ns.index.add_chunk(key, b"", **fields)
            row = ns.index.add_object(chunk, part, 70_000, checksum_of(key, 0))
            self.residency.place_object(ns, row, RAM, place)

    def picture(self) -> object:
        """All that is known, without row numbers."""
        accounts = self.residency.accounts
        return [
            {name: self._chunks(ns) for name, ns in self.namespaces.items()},
            {k: (h.charged_bytes, h.objects) for k, h in accounts.held.items()},
            {k: (a.chunks, a.nbytes) for k, a in accounts.stored.items()},
            self._recency(),
        ]

    def _chunks(self, ns: Namespace) -> dict[bytes, object]:
        index = ns.index
        rows = [row for row in range(index.chunk_rows) if index.held(row)]
        assert len(rows) == index.chunk_count == len(index._keys)
        found: dict[bytes, object] = {}
        for row in rows:
            key = index.key(row)
            assert index.find(key) == row
            assert all(index.parent[child] == row for child in index.child_rows(row))
            family = ns.families.by_number[index.family[row]]
            found[key] = (
                index.parent_key(row),
                index.parent[row] != NONE,
                sorted(map(index.key, index.child_rows(row))),
                [index.children[tier][row] for tier in (RAM, NVME)],
                (index.depth[row], index.end_token[row], index.expires_ms[row]),
                (family.fingerprint, ns.tenants[index.tenant[row]]),
                (index.tiers[row], index.brief[row] >> 48),
                self._objects(ns, row),
            )
            one = list(index.object_rows(row))
            if len(one) == 1:
                only = index.object_part[one[0]] << 32 | index.object_length[one[0]]
                assert index.brief[row] & (1 << 48) - 1 == only
        return found

    def _objects(self, ns: Namespace, chunk: int) -> dict[str, object]:
        index = ns.index
        parts = ns.families.by_number[index.family[chunk]].parts
        return {
            parts[index.object_part[row]].name: (
                index.object_length[row],
                index.checksum(row),
                index.place[RAM][row],
                index.place[NVME][row],
            )
            for row in index.object_rows(chunk)
        }

    def _recency(self) -> list[tuple[str, bytes]]:
        return [
            (name, ns.index.key(row))
            for tick, name, ns, row in sorted(
                ((ns.index.tick[row], name, ns, row) for name, ns, row in self._rows()),
                key=lambda entry: entry[0],
            )
        ]

    def _rows(self) -> Iterable[tuple[str, Namespace, int]]:
        for name, ns in self.namespaces.items():
            for row in range(ns.index.chunk_rows):
                if ns.index.held(row):
                    yield name, ns, row

    def evict_all(self) -> list[bytes]:
        """Every chunk, in the order in which it leaves the device for room."""
        gone = []
        for ns in self.namespaces.values():
            while (row := ns.lru[NVME].victim(lambda row: False)) != NONE:
                gone.append(ns.index.key(row))
                self.residency.evict_chunk(ns, row, NVME)
            assert self.residency.accounts.namespace_bytes(ns.name, "nvme") == 0
        return gone


def checksum_of(key: bytes, part: int) -> bytes:
    return random.Random(key + bytes([part])).randbytes(16)


@dataclass
class Forest:
    """Objects of chunks that form trees; how many, and how, is a matter of dice."""

    dice: random.Random
    rows: list[dict[str, object]] = field(default_factory=list)

    def grow(self, chunks: int) -> Forest:
        dice = self.dice
        known: dict[int, list[tuple[bytes, int]]] = defaultdict(list)
        for _ in range(chunks):
            name, family = dice.choice((0, 0, 0, 1, 2)), dice.randrange(2)
            above = dice.choice(known[name]) if known[name] and dice.random() < 0.9 else None
            if known[name] and dice.random() < 0.6:
                above = known[name][-1]  # most follow the one before
            key = dice.randbytes(32)
            parent, depth = above if above else (bytes(32), -1)
            if above is None and dice.random() < 0.3:
                parent, depth = dice.randbytes(32), 4  # one that is nowhere
            known[name].append((key, depth + 1))
            tenant = dice.randrange(4)
            for part in dice.choice(((0,), (0,), (0, 1), (0, 1, 2), (1, 2))):
                self._add(name, family, part, tenant, key, parent, depth + 1)
        return self

    def _add(
        self, name: int, family: int, part: int, tenant: int, key: bytes, parent: bytes, depth: int
    ) -> None:
        dice = self.dice
        if dice.random() < 0.05:
            return  # lost: those below it wait for it
        expires_ms = dice.choice((0, 0, 0, 0, 1, now_ms() + 10**9))
        for _ in range(dice.choice((1,) * 9 + (2,))):
            self.rows.append(
                {
                    "namespace_id": name,
                    "family_id": family,
                    "part_id": part,
                    "tenant_id": tenant,
                    "keys": key,
                    "parents": parent,
                    "depth": depth,
                    "end_token": 64 * (depth + 1),
                    "expires_ms": expires_ms,
                    "length_bytes": dice.choice((70_000, 80_000)),
                    "checksums": checksum_of(key, part),
                }
            )

    def found(self, rows: list[dict[str, object]], first: int = 1) -> Recovered:
        return recovered(rows, self.dice.sample(range(first, first + len(rows)), len(rows)))


def recovered(rows: list[dict[str, object]], sequence: list[int]) -> Recovered:
    it = Recovered(
        namespaces=list(NAMES),
        families=list(FAMILIES),
        parts=list(PARTS),
        tenants=["a", "b", "c", ""],
    )
    for name in rows[0] if rows else []:
        like = getattr(it, name)
        if like.ndim == 2:
            packed = b"".join(row[name] for row in rows)  # type: ignore[misc]
            setattr(it, name, np.frombuffer(packed, np.uint8).reshape(len(rows), -1))
        else:
            setattr(it, name, np.array([row[name] for row in rows], like.dtype))
    it.sequence = np.array(sequence, np.uint64)
    it.place = np.array(sequence, np.uint64) * np.uint64(3) + np.uint64(5)
    return it


@pytest.mark.parametrize("seed", range(12))
def test_all_at_once_is_as_one_by_one(seed: int) -> None:
    dice = random.Random(seed)
    forest = Forest(dice).grow(dice.choice((0, 1, 30, 400)))
    found = forest.found(forest.rows)
    fast, slow = World(), World()
    assert sorted(fast.load(found)) == sorted(slow.slow_load(found))
    assert fast.picture() == slow.picture()
    assert fast.evict_all() == slow.evict_all()


@pytest.mark.parametrize("seed", range(12))
def test_into_an_index_that_holds_some_of_it(seed: int) -> None:
    dice = random.Random(100 + seed)
    forest = Forest(dice).grow(120)
    rows = dice.sample(forest.rows, len(forest.rows))
    half = len(rows) // 2
    in_ram = {
        (NAMES[int(str(row["namespace_id"]))], row["keys"])
        for row in forest.rows[::7]
        if row["namespace_id"] in (0, 2) and row["family_id"] == 0
    }
    fast, slow = World(), World()
    parts = [forest.found(rows[:half]), forest.found(rows[half:], first=5000)]
    for world in (fast, slow):
        world.put_in_ram(sorted(in_ram))  # type: ignore[arg-type]
    for found in parts:
        assert sorted(fast.load(found)) == sorted(slow.slow_load(found))
        assert fast.picture() == slow.picture()
    assert fast.discarded == slow.discarded == []


def test_an_index_goes_on_as_usual_after_it() -> None:
    """Rows are used again, keys come and go, and the table of keys moves to a larger one."""
    dice = random.Random(7)
    forest = Forest(dice).grow(3000)
    world = World()
    world.load(forest.found(forest.rows))
    ns = world.namespaces["default"]
    for _ in range(4):
        held = [row for row in range(ns.index.chunk_rows) if ns.index.held(row)]
        for row in dice.sample(held, len(held) // 2):
            if ns.index.held(row):
                world.residency.drop_subtree(ns, row, 0, "deleted")  # type: ignore[arg-type]
        fresh = Forest(dice).grow(1500)
        world.load(fresh.found(fresh.rows))
        world.picture()


def test_what_names_itself_or_each_other_as_parents_is_no_circle() -> None:
    keys = [bytes([n]) * 32 for n in range(1, 9)]
    parents = [keys[0], keys[2], keys[1], keys[4], keys[5], keys[3], keys[0], keys[6]]
    for depths in ([0] * 8, list(range(8)), list(range(8, 0, -1)), [3, 1, 2, 1, 2, 3, 4, 5]):
        rows = [
            {
                "namespace_id": 0,
                "family_id": 0,
                "part_id": 0,
                "tenant_id": 0,
                "keys": key,
                "parents": parent,
                "depth": depth,
                "end_token": 1,
                "expires_ms": 0,
                "length_bytes": 70_000,
                "checksums": bytes(16),
            }
            for key, parent, depth in zip(keys, parents, depths, strict=True)
        ]
        world = World()
        world.load(recovered(rows, list(range(1, 9))))
        index = world.namespaces["default"].index
        for key, parent in zip(keys, parents, strict=True):
            row = index.find(key)
            assert index.parent_key(row) == parent
            assert len(list(index.ancestors(row))) < len(keys)
        assert index.parent[index.find(keys[7])] == index.find(keys[6])
        assert len(world.evict_all()) == len(keys)


@pytest.mark.parametrize("hashes", [0, 1, 3])
def test_keys_of_one_hash_are_told_apart(hashes: int) -> None:
    dice = random.Random(1)
    distinct = [dice.randbytes(32) for _ in range(40)]
    chosen = [dice.choice(distinct) for _ in range(200)]
    keys = np.frombuffer(b"".join(chosen), np.uint8).reshape(-1, 32)
    groups = bulk.group(keys, (keys[:, 0] % (hashes + 1)).astype(np.uint64))
    assert groups.first.tolist() == sorted({key: chosen.index(key) for key in chosen}.values())
    assert [chosen[groups.first[g]] for g in groups.of] == chosen
    assert sorted(groups.order.tolist()) == list(range(len(groups.first)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2000), st.sampled_from([1, 3, 1 << 32]), st.sampled_from([7, 100, 1 << 15]))
def test_a_table_that_is_filled_at_once_finds_every_key(
    count: int, tags: int, at_once: int
) -> None:
    dice = random.Random(count)
    table = KeyTable()
    table._coefficients = np.array([1 << 32, 0, 0, 0, 0, 0, 0, 0], np.uint64)
    table._constant = np.uint64(0)
    table._factors, table._offset = table._coefficients.tolist(), 0
    count = count if tags > 3 else min(count, 150)
    held = {
        dice.randrange(tags).to_bytes(4, "little") + n.to_bytes(28, "little"): n
        for n in range(count)
    }
    keys = np.frombuffer(b"".join(held), np.uint8).reshape(-1, 32)
    order = np.argsort(table.hashes(keys.reshape(-1).data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_tables, "_FILL", at_once)
        table.add_sorted(keys, np.arange(count, dtype=np.int32), order)
    others = [dice.randrange(tags).to_bytes(4, "little") + dice.randbytes(28) for _ in range(20)]
    for key in (*held, *others):
        assert table.find(key) == held.get(key, NONE)
    assert len(table) == count
    for key in dice.sample(list(held), count // 2):
        table.remove(held.pop(key))
    for key in (*held, *others):
        assert table.find(key) == held.get(key, NONE)


def test_depths_are_handed_up_from_the_deepest() -> None:
    above = np.array([NONE, 0, 1, 2, 0, NONE])
    depth = np.array([0, 1, 2, 70_000, 1, 9], np.uint32)
    written = np.array([1, 5, 2, 9, 7, 3], np.uint64)
    used = bulk.hand_up(written, above, depth)
    assert used.tolist() == [9, 9, 9, 9, 7, 3]
    order = [5, 4, 3, 2, 1, 0]
    assert bulk.by_recency(used, depth).tolist() == order
    large = used << np.uint64(44)
    assert bulk.by_recency(large, depth).tolist() == order


def slow_lose(world: World, lost: set[int]) -> None:
    """The same as `lose_many` of the objects with these places, one by one."""
    for ns in world.namespaces.values():
        index = ns.index
        rows = [r for r in range(index._objects.rows) if index.object_chunk[r] != NONE]
        mine = [row for row in rows if index.place[NVME][row] in lost]
        # From the deepest up, so that what was used late has handed that on when its turn comes.
        for row in sorted(mine, key=lambda row: -index.depth[index.object_chunk[row]]):
            world.residency.unplace_object(ns, row, NVME, "volume_lost")
            if index.place[RAM][row] == NONE:
                index.remove_object(row)


@pytest.mark.parametrize("seed", range(12))
def test_losing_many_is_as_losing_one_by_one(seed: int) -> None:
    dice = random.Random(300 + seed)
    forest = Forest(dice).grow(200)
    found = forest.found(forest.rows)
    in_ram = {
        (NAMES[int(str(row["namespace_id"]))], row["keys"])
        for row in forest.rows[::5]
        if row["namespace_id"] in (0, 2) and row["family_id"] == 0
    }
    fast, slow = World(), World()
    for world in (fast, slow):
        world.put_in_ram(sorted(in_ram))  # type: ignore[arg-type]
        world.load(found)
        for ns in world.namespaces.values():
            ns.lru[NVME].victim(lambda row: True)  # all leaves there are have had their turn
            ns.lru[NVME].put_back()
    share = dice.choice((0.1, 0.5, 1.0))
    lost = {place for place in found.place.tolist() if dice.random() < share}
    for ns in fast.namespaces.values():
        places = np.frombuffer(ns.index.place[NVME], np.int64)[: ns.index._objects.rows]
        rows = np.flatnonzero(np.isin(places, list(lost))).astype(np.int32)
        del places
        husks = fast.residency.lose_many(ns, rows, NVME, "volume_lost")
        assert all(ns.index.first_object[row] == NONE for row in husks)
    slow_lose(slow, lost)
    assert fast.picture() == slow.picture()
    assert fast.residency.accounts.evicted == slow.residency.accounts.evicted
    if seed % 2:
        assert fast.evict_all() == slow.evict_all()
        return
    again = recovered(forest.rows, found.sequence.tolist())
    assert sorted(fast.load(again)) == sorted(slow.slow_load(again))
    assert fast.picture() == slow.picture()
    assert fast.evict_all() == slow.evict_all()
