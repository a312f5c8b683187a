"""A store with a bucket: what no local tier has comes from there, and what is stored goes there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from store.pool_fill import MISSES, SIZE, bytes_of, fill, matched, names, soon
from store.pool_memory import MemoryPool, Shelf, node
from store.support_store import MIB, client, payload, settle, tokens

from kvstored.tiers.base import TierKind
from kvstored.tiers.object.api import Outcome
from kvstored_client.identity import GroupRule, KVPart
from kvstored_client.proto import kvstore_pb2 as pb


async def test_a_fresh_node_serves_what_another_has_stored(tmp_path: Path) -> None:
    shelf = Shelf()
    data = await fill(shelf, 12)
    pool = MemoryPool(shelf)
    async with node(pool, tmp_path) as store:
        c = await client(store)
        run = c.run(tokens(12))
        assert c.states(run) == [pb.MISS_NEVER_STORED] * 12
        got, states = await c.get(run)
        assert [got[i] for i in range(12)] == data
        assert list(states) == [pb.IN_OBJECT] * 12
        hits = store.accounts.hits[*MISSES, "object"]
        assert (hits.chunks, hits.nbytes) == (12, 12 * SIZE)
        assert pool.fetched == names(run)
        got, states = await c.get(run)
        assert list(states) == [pb.IN_RAM] * 12
        assert pool.fetched == names(run)
        await settle(store)
        row = store.namespaces["default"].index.first_object[0]
        assert store.namespaces["default"].index.place[TierKind.NVME][row] >= 0
        assert store.namespaces["default"].index.depth[0] == 0


async def test_without_promotion_it_stays_in_ram(tmp_path: Path) -> None:
    shelf = Shelf()
    await fill(shelf, 3)
    async with node(MemoryPool(shelf), tmp_path, promote=False) as store:
        c = await client(store)
        await c.get(c.run(tokens(3)))
        await settle(store)
        assert not store.tiers[TierKind.NVME].usage().objects


async def test_readers_join_a_load_that_is_under_way() -> None:
    shelf = Shelf()
    data = await fill(shelf, 6)
    pool = MemoryPool(shelf)
    async with node(pool) as store:
        c = await client(store)
        run = c.run(tokens(6))
        pool.gate.clear()
        readers = [asyncio.ensure_future(c.get(run)) for _ in range(3)]
        await pool.fetching.wait()
        pool.gate.set()
        for got, states in await asyncio.gather(*readers):
            assert [got[i] for i in range(6)] == data
            assert pb.IN_OBJECT in states
        assert len(pool.fetched) == 6


async def test_who_joins_with_more_time_is_served_all_the_same() -> None:
    shelf = Shelf()
    data = await fill(shelf, 2)
    pool = MemoryPool(shelf)
    async with node(pool) as store:
        c = await client(store)
        run = c.run(tokens(2))
        pool.gate.clear()
        hasty = asyncio.ensure_future(c.get(run, timeout_s=0.1))
        await pool.fetching.wait()
        patient = asyncio.ensure_future(c.get(run))
        assert (await hasty)[1][0] == pb.MISS_DEADLINE
        pool.gate.set()
        got, _ = await patient
        assert got[0] == data[0]


async def test_the_deadline_ends_a_get_and_nothing_is_written_after() -> None:
    shelf = Shelf()
    await fill(shelf, 4)
    pool = MemoryPool(shelf)
    async with node(pool) as store:
        c = await client(store)
        pool.gate.clear()
        got, states = await c.get(c.run(tokens(4)), timeout_s=0.05)
        assert not got
        assert states[0] == pb.MISS_DEADLINE
        assert store.accounts.misses[*MISSES, "deadline"].chunks
        assert not store.accounts.hits[*MISSES, "object"].chunks


async def test_a_gap_ends_it_and_makes_no_room_for_what_is_behind() -> None:
    shelf = Shelf()
    await fill(shelf, 4)
    pool = MemoryPool(shelf)
    async with node(pool, ram_bytes=8 * MIB) as store:
        c = await client(store)
        long = c.run(tokens(4) + tokens(60, seed=9))
        got, states = await c.get(long)
        assert len(got) == 4
        assert list(states[:5]) == [pb.IN_OBJECT] * 4 + [pb.MISS_NEVER_STORED]
        assert set(states[5:]) <= {pb.MISS_NEVER_STORED, pb.MISS_AFTER_GAP}
        never = c.run(tokens(60, seed=8))
        await c.put(c.run(tokens(100, seed=7)), bytes_of(100))
        evicted = sum(amount.nbytes for amount in store.accounts.evicted.values())
        got, states = await c.get(never)
        assert not got
        gone = sum(amount.nbytes for amount in store.accounts.evicted.values()) - evicted
        assert gone <= 8 * MIB // 16 + SIZE + 4096
        assert len(set(pool.fetched).intersection(names(never))) <= 8


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome.NETWORK, pb.MISS_TIER_DOWN),
        (Outcome.OPEN, pb.MISS_TIER_DOWN),
        (Outcome.DENIED, pb.MISS_TIER_DOWN),
        (Outcome.CORRUPT, pb.MISS_CORRUPT),
        (Outcome.LENGTH, pb.MISS_DECLINED),
    ],
)
async def test_each_failure_is_a_miss_with_its_reason(outcome: Outcome, state: int) -> None:
    shelf = Shelf()
    await fill(shelf, 3)
    pool = MemoryPool(shelf)
    async with node(pool) as store:
        c = await client(store)
        run = c.run(tokens(3))
        pool.fails[names(run)[1]] = outcome
        got, states = await c.get(run)
        assert got.keys() >= {0}
        assert states[:2] == bytes([pb.IN_OBJECT, state])


async def test_rot_is_counted_and_may_be_put_again() -> None:
    shelf = Shelf()
    data = await fill(shelf, 2)
    pool = MemoryPool(shelf)
    async with node(pool) as store:
        c = await client(store)
        run = c.run(tokens(2))
        pool.spoil(names(run)[0])
        _, states = await c.get(run)
        assert states[0] == pb.MISS_CORRUPT
        assert store.accounts.checksum_failures["object"] == 1
        assert set(await c.put(run, data)) <= {pb.STORED, pb.EXISTED}
        await pool.drained()
        assert shelf.objects[names(run)[0]][1] == data[0]


async def test_an_expired_object_is_a_miss() -> None:
    shelf = Shelf()
    await fill(shelf, 2)
    pool = MemoryPool(shelf)
    async with node(pool) as store:
        c = await client(store)
        run = c.run(tokens(2))
        pool.alter(names(run)[0], expires_ms=1)
        _, states = await c.get(run)
        assert states[0] == pb.MISS_EXPIRED


async def test_what_nvme_has_lost_comes_from_the_bucket(tmp_path: Path) -> None:
    shelf = Shelf()
    pool = MemoryPool(shelf)
    data = bytes_of(3)
    async with node(pool, tmp_path / "a") as store:
        c = await client(store)
        run = c.run(tokens(3))
        await c.put(run, data, durable=True)
        await pool.drained()
        index = store.namespaces["default"].index
        rows = [index.first_object[chunk] for chunk in index.find_many(run.packed).tolist()]
        ns = store.namespaces["default"]
        places = [store.residency.unplace_object(ns, row, TierKind.RAM, "capacity") for row in rows]
        await store.ram.delete(places)
        _flip(tmp_path / "a", data[1])
        got, states = await c.get(run)
        assert [got[i] for i in range(3)] == data
        assert list(states) == [pb.IN_NVME, pb.IN_OBJECT, pb.IN_NVME]
        assert store.accounts.checksum_failures["nvme"] == 1


def _flip(directory: Path, needle: bytes) -> None:
    """Spoil the payload where it lies on the volume."""
    for file in directory.rglob("*"):
        if file.is_file() and (at := file.read_bytes().find(needle[:4096])) >= 0:
            with file.open("r+b") as opened:
                opened.seek(at + 100)
                opened.write(bytes([needle[100] ^ 1]))
            return
    raise AssertionError("not on the volume")


async def test_match_goes_as_far_as_asked() -> None:
    shelf = Shelf()
    await fill(shelf, 8)
    pool = MemoryPool(shelf)
    async with node(pool) as store:
        c = await client(store)
        run = c.run(tokens(8) + tokens(4, seed=5))
        assert store.match(run, pb.PREFIX, pb.DEPTH_NODE).chunks == 0
        await c.get(c.run(tokens(2)))
        answer = await store.match_pool(run, pb.PREFIX, soon())
        assert answer.chunks == 8
        assert answer.tokens == 8 * 64
        assert answer.payload_bytes == 8 * SIZE
        assert list(answer.states) == (
            [pb.IN_RAM] * 2 + [pb.IN_OBJECT] * 6 + [pb.MISS_NEVER_STORED] + [pb.MISS_AFTER_GAP] * 3
        )
        nvme_ms = store.rates.eta_ms({TierKind.NVME: 6 * SIZE})
        assert answer.eta_ms > nvme_ms
        each = await store.match_pool(run, pb.EACH, soon())
        assert (each.chunks, each.payload_bytes) == (8, 8 * SIZE)


async def test_a_bucket_that_is_away_is_said_to_be() -> None:
    shelf = Shelf()
    await fill(shelf, 3)
    pool = MemoryPool(shelf)
    async with node(pool) as store:
        c = await client(store)
        pool.health = "open: 8 requests in a row failed"
        chunks, states = await matched(c, c.run(tokens(3)))
        assert (chunks, states[0]) == (0, pb.MISS_TIER_DOWN)


async def test_groups_with_other_rules_match_across_tiers() -> None:
    shelf = Shelf()
    parts = [KVPart("full", nbytes=SIZE), KVPart("slide", nbytes=SIZE, group="slide")]
    groups = {"default": GroupRule.all(), "slide": GroupRule.trailing(64)}
    first = MemoryPool(shelf)
    async with node(first) as store:
        c = await client(store, parts=parts, groups=groups)
        await c.put(c.run(tokens(4)), bytes_of(8))
        await first.drained()
    pool = MemoryPool(shelf)
    async with node(pool) as store:
        c = await client(store, parts=parts, groups=groups)
        run = c.run(tokens(4))
        for name in names(run)[1:5:2]:  # what the rule does not need
            del shelf.objects[name]
        assert await matched(c, run) == (4, [pb.IN_OBJECT] * 4)
        got, states = await c.get(run)
        assert set(states) == {pb.IN_OBJECT}
        assert set(got) == {0, 2, 4, 6, 7}


async def test_parts_whose_sizes_vary() -> None:
    shelf = Shelf()
    parts = [KVPart("kv", max_nbytes=2 * MIB)]
    data = [payload(i, 8192 + 4096 * i) for i in range(5)]
    first = MemoryPool(shelf)
    async with node(first) as store:
        c = await client(store, parts=parts)
        await c.put(c.run(tokens(5)), data)
        await first.drained()
    for look_first in (False, True):
        pool = MemoryPool(shelf)
        async with node(pool) as store:
            c = await client(store, parts=parts)
            run = c.run(tokens(5) + tokens(3, seed=4))
            if look_first:
                assert (await matched(c, run))[0] == 5
            got, states = await c.get(run)
            assert [got[i] for i in range(5)] == data
            assert len(got) == 5
            assert list(states[:6]) == [pb.IN_OBJECT] * 5 + [pb.MISS_NEVER_STORED]


async def test_prefetch_brings_it_to_ram() -> None:
    shelf = Shelf()
    await fill(shelf, 5)
    async with node(MemoryPool(shelf)) as store:
        c = await client(store)
        states = await store.prefetch(c.run(tokens(5)), soon())
        assert list(states) == [pb.IN_RAM] * 5


async def test_both_store_the_same_with_other_bytes_and_the_first_stands() -> None:
    shelf = Shelf()
    data = await fill(shelf, 3)
    pool = MemoryPool(shelf)
    async with node(pool) as store:
        c = await client(store)
        run = c.run(tokens(3))
        mine = [payload(100 + i, SIZE) for i in range(3)]
        await c.put(run, mine)
        await pool.drained()
        assert store.accounts.conflicts["default"] == 3
        assert [shelf.objects[name][1] for name in names(run)] == data
        got, _ = await c.get(run)
        assert [got[i] for i in range(3)] == mine, "its own node keeps what it acknowledged"


async def test_behind_a_gap_no_further_window_is_asked_for() -> None:
    pool = MemoryPool(Shelf())
    async with node(pool, ram_bytes=8 * MIB) as store:
        c = await client(store)
        _, states = await c.get(c.run(tokens(120)))
        assert set(states) == {pb.MISS_NEVER_STORED, pb.MISS_AFTER_GAP}
        assert len(pool.fetched) <= 8, "one small batch"
