"""A put of a run of new chunks is published in columns: nothing tells it from one by one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from store.support_store import MIB, Client, client, open_store, payload, settle, tokens

from kvstored.store import putting
from kvstored.store.api import Run
from kvstored.store.index import NONE, TIERS
from kvstored.store.keys import KeyTable
from kvstored.store.store import Store
from kvstored_client.identity import KVPart
from kvstored_client.proto import kvstore_pb2 as pb

SIZE = 8192


def pictured(store: Store, runs: list[Run]) -> dict[bytes, object]:
    """All that the index knows of every key, with rows told by their keys."""
    ns = store.namespaces["default"]
    index = ns.index
    found: dict[bytes, object] = {}
    for key in {key for run in runs for key in run.keys}:
        chunk = index.find(key)
        if chunk == NONE:
            found[key] = ns.ghosts.reason(key)
            continue
        parent = index.parent[chunk]
        found[key] = (
            index.parent_key(chunk),
            index.key(parent) if parent != NONE else None,
            sorted(index.key(child) for child in index.child_rows(chunk)),
            [index.children[tier][chunk] for tier in TIERS],
            index.depth[chunk],
            index.end_token[chunk],
            bool(index.expires_ms[chunk]),
            index.tiers[chunk],
            index.brief[chunk],
            [
                (index.object_part[row], index.object_length[row], index.checksum(row))
                for row in index.object_rows(chunk)
            ],
        )
    return found


async def storm(c: Client, seed: int) -> list[Run]:
    """Puts of runs of few prefixes, in any order, so that orphans come about; and deletes."""
    chance = random.Random(seed)
    runs = []
    for _ in range(60):
        prefix = tokens(12, chance.randrange(4))
        start = chance.randrange(12)
        stop = chance.randrange(start + 1, 13)
        run = c.run(prefix, start=start, stop=stop)
        runs.append(run)
        if chance.random() < 0.2:
            await c.store.delete(run)
        else:
            data = [payload(start + i, SIZE) for i in range(stop - start)]
            await c.put(run, data, ttl_ms=chance.choice([0, 10**9]), wait=False)
    return runs


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("ram_mib", [4, 1])
async def test_chains_leave_what_single_objects_leave(
    seed: int, ram_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = []
    for least in (2, 10**9):
        monkeypatch.setattr(putting, "_LEAST_CHAIN", least)
        async with open_store(ram_bytes=ram_mib * MIB // 4) as store:
            c = await client(store, size=SIZE)
            runs = await storm(c, seed)
            # What goes first, too, is the same: fill the rest up with something else.
            for other in range(40):
                await c.put(c.run(tokens(3, 1000 + other)), [payload(other, SIZE)] * 3, wait=False)
            usage = store.usage("default")
            pictures.append(
                (pictured(store, runs), usage.tiers[0].objects, usage.tiers[0].charged_bytes)
            )
    assert pictures[0] == pictures[1]


async def test_a_chain_is_written_behind_and_read_back(tmp_path: Path) -> None:
    data = [payload(i, MIB + 4096) for i in range(9)]
    parts = [KVPart("kv", nbytes=MIB + 4096)]
    async with open_store(tmp_path) as store:
        c = await client(store, parts=parts)
        assert set(await c.put(c.run(tokens(9)), data, durable=True)) == {pb.STORED}
        await settle(store)
    async with open_store(tmp_path) as store:
        c = await client(store, parts=parts)
        assert (await c.get(c.run(tokens(9))))[0] == dict(enumerate(data))


def test_many_keys_at_once_are_found_as_one_by_one() -> None:
    chance = np.random.default_rng(1)
    table = KeyTable()
    row = 0
    for count in (1, 3, 64, 200, 5000, 40, 1000):
        packed = chance.integers(0, 256, 32 * count, np.uint8).tobytes()
        rows = np.arange(row, row + count, dtype=np.int32)
        row += count
        table.add_many(packed, rows)
        assert (table.find_many(packed) == rows).all()
        assert [table.find(packed[i : i + 32]) for i in range(0, 32 * count, 32)] == rows.tolist()
        for gone in rows[::3].tolist():
            table.remove(gone)
        left = np.where(np.arange(count) % 3 == 0, NONE, rows)
        assert (table.find_many(packed) == left).all()
    assert len(table) == sum(n - (n + 2) // 3 for n in (1, 3, 64, 200, 5000, 40, 1000))
