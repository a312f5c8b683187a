"""A store with a bucket: what no local tier has comes from there, and what is stored goes there."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from store.pool_memory import MemoryPool, Shelf, node
from store.support_store import MIB, Client, client, payload, settle, tokens

from kvstored.errors import BadRequest, BucketSilent
from kvstored.store.api import Run
from kvstored.tiers.base import TierKind
from kvstored.tiers.object.api import ObjectName, Outcome
from kvstored_client.identity import GroupRule, KVPart
from kvstored_client.proto import kvstore_pb2 as pb

SIZE = 64 * 1024 + 4096
MISSES = "default", "default", "test-model"


def names(run: Run) -> list[ObjectName]:
    family = run.family
    return [
        ObjectName(run.namespace, family.fingerprint, key, family.parts[part].name)
        for key in run.keys
        for part in run.parts
    ]


def bytes_of(chunks: int, size: int = SIZE) -> list[bytes]:
    return [payload(i, size) for i in range(chunks)]


async def fill(shelf: Shelf, chunks: int, **more: object) -> list[bytes]:
    """What another node has stored."""
    pool = MemoryPool(shelf)
    async with node(pool) as store:
        c = await client(store)
        data = bytes_of(chunks)
        await c.put(c.run(tokens(chunks)), data, **more)  # type: ignore[arg-type]
        await pool.drained()
    return data


def soon() -> float:
    return time.monotonic() + 20


async def matched(c: Client, run: Run, mode: int = pb.PREFIX) -> tuple[int, list[int]]:
    answer = await c.store.match_pool(run, mode, soon())
    return answer.chunks, list(answer.states)


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


async def test_a_delete_reaches_the_bucket_before_it_is_acknowledged(tmp_path: Path) -> None:
    shelf = Shelf()
    await fill(shelf, 6)
    pool = MemoryPool(shelf)
    async with node(pool, tmp_path) as store:
        c = await client(store)
        run = c.run(tokens(6))
        await c.get(run)
        assert await store.delete(c.run(tokens(6), 3, 6)) == 3
        assert len(shelf.objects) == 3
        pool.refuses_deletes = True
        with pytest.raises(BucketSilent, match="delete them again"):
            await store.delete(run)
        assert c.states(run)[:3] == [pb.MISS_DELETED] * 3
        pool.refuses_deletes = False
        await store.delete(run)
        assert not shelf.objects


@pytest.mark.parametrize("purge", [False, True])
@pytest.mark.parametrize("landing", [False, True])
async def test_a_load_that_began_before_a_delete_brings_nothing_back(
    landing: bool, purge: bool
) -> None:
    shelf = Shelf()
    await fill(shelf, 3)
    pool = MemoryPool(shelf)
    async with node(pool) as store:
        c = await client(store)
        run = c.run(tokens(3))
        gate, begun = (pool.body, pool.landing) if landing else (pool.gate, pool.fetching)
        gate.clear()
        reader = asyncio.ensure_future(c.get(run))
        await begun.wait()
        if purge:
            await store.purge("default", "", soon())
        else:
            await store.delete(run)
        gate.set()
        got, states = await reader
        assert not got
        assert states[0] == pb.MISS_DELETED
        await store.pooling.loads.close()  # type: ignore[union-attr]
        assert not store.namespaces["default"].index.chunk_count
        assert not store.ram.usage().charged_bytes


async def test_what_was_deleted_goes_up_again_when_it_is_put_again() -> None:
    shelf, pool = Shelf(), MemoryPool(Shelf())
    pool.shelf = shelf
    async with node(pool) as store:
        c = await client(store)
        run = c.run(tokens(3))
        await c.put(run, bytes_of(3))
        await pool.drained()
        await store.delete(run)
        assert not shelf.objects
        await c.put(run, bytes_of(3))
        await pool.drained()
        assert len(shelf.objects) == 3


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


async def test_objects_leave_ram_before_their_turn_and_go_up_from_nvme(tmp_path: Path) -> None:
    shelf = Shelf()
    pool = MemoryPool(shelf)
    pool.lift.clear()
    async with node(pool, tmp_path, ram_bytes=8 * MIB) as store:
        c = await client(store)
        run = c.run(tokens(4))
        await c.put(run, bytes_of(4), durable=True)
        for seed in range(3):
            await c.put(c.run(tokens(50, seed=20 + seed)), bytes_of(50), durable=True)
        assert pb.IN_NVME in c.states(run)
        pool.lift.set()
        await pool.drained()
        assert [shelf.objects[name][1] for name in names(run)] == bytes_of(4)


async def test_what_is_gone_by_then_does_not_go_up() -> None:
    shelf = Shelf()
    pool = MemoryPool(shelf)
    pool.lift.clear()
    async with node(pool) as store:
        c = await client(store)
        run = c.run(tokens(2))
        await c.put(run, bytes_of(2))
        task = asyncio.ensure_future(store.delete(run))
        await asyncio.sleep(0)  # from here on it waits for the uploads to end
        assert not store.namespaces["default"].index.chunk_count
        pool.lift.set()
        await task
        assert not shelf.objects


async def test_second_hit_goes_up_when_it_is_used() -> None:
    shelf = Shelf()
    pool = MemoryPool(shelf)
    async with node(pool, write_back="second_hit") as store:
        c = await client(store)
        run = c.run(tokens(3))
        await c.put(run, bytes_of(3))
        await pool.drained()
        assert not shelf.objects
        await c.get(c.run(tokens(2)))
        await pool.drained()
        assert list(shelf.objects) == names(run)[:2]
        leased = store.acquire_now(run, 8 * MIB)
        assert leased is not None
        store.release(leased[0].places)
        await pool.drained()
        assert list(shelf.objects) == names(run)


async def test_shared_goes_up_when_a_second_prefix_goes_on_from_it() -> None:
    shelf = Shelf()
    pool = MemoryPool(shelf)
    async with node(pool, write_back="shared") as store:
        c = await client(store)
        for seed in (1, 2):
            run = c.run(tokens(3) + tokens(2, seed=seed))
            await c.put(run, bytes_of(5))
            await pool.drained()
        assert set(shelf.objects) == set(names(c.run(tokens(3))))


async def test_what_the_pool_refuses_is_offered_at_the_next_put() -> None:
    shelf = Shelf()
    pool = MemoryPool(shelf)
    pool.most_offers = 1
    async with node(pool) as store:
        c = await client(store)
        run = c.run(tokens(3))
        await c.put(run, bytes_of(3))
        await pool.drained()
        assert len(shelf.objects) == 1
        pool.most_offers = 10
        await c.put(run, bytes_of(3))
        await pool.drained()
        assert len(shelf.objects) == 3


async def test_what_the_last_life_owed_goes_up(tmp_path: Path) -> None:
    shelf = Shelf()
    first = MemoryPool(shelf)
    first.most_offers = 0
    async with node(first, tmp_path) as store:
        c = await client(store)
        run = c.run(tokens(2))
        await c.put(run, bytes_of(2), durable=True)
    second = MemoryPool(shelf)
    elsewhere = ObjectName("default", bytes(32), bytes(32), "kv")
    second.left = [*names(run), elsewhere]
    async with node(second, tmp_path):
        await second.drained()
        assert set(shelf.objects) == set(names(run))
        assert second.disowned == [elsewhere]


async def test_a_purge_reaches_what_others_stored(tmp_path: Path) -> None:
    shelf = Shelf()
    await fill(shelf, 3)
    pool = MemoryPool(shelf)
    async with node(pool, tmp_path) as store:
        mine = await client(store, tenant="acme")
        run = mine.run(tokens(4, seed=3))
        await mine.put(run, bytes_of(4), durable=True)
        await pool.drained()
        assert len(shelf.objects) == 7
        await mine.get(mine.run(tokens(3)))
        assert await store.purge("default", "acme", soon()) == (4, 4)
        assert store.namespaces["default"].index.chunk_count == 3
        assert set(shelf.objects) == set(names(mine.run(tokens(3))))
        pool.refuses_deletes = True
        with pytest.raises(BucketSilent, match="call it again"):
            await store.purge("default", "", soon())
        pool.refuses_deletes = False
        assert await store.purge("default", "", soon()) == (0, 3)
        assert not store.namespaces["default"].index.chunk_count
        await mine.put(run, bytes_of(4), durable=True)
        await pool.drained()
        assert len(shelf.objects) == 4
        with pytest.raises(BadRequest):
            await store.purge("", "", soon())


async def test_what_the_pool_refuses_is_due_again_at_the_next_use() -> None:
    shelf = Shelf()
    pool = MemoryPool(shelf)
    pool.most_offers = 0
    async with node(pool, write_back="second_hit") as store:
        c = await client(store)
        run = c.run(tokens(2))
        await c.put(run, bytes_of(2))
        await c.get(run)
        pool.most_offers = 10
        await c.get(run)
        await pool.drained()
        assert set(shelf.objects) == set(names(run))


async def test_behind_a_gap_no_further_window_is_asked_for() -> None:
    pool = MemoryPool(Shelf())
    async with node(pool, ram_bytes=8 * MIB) as store:
        c = await client(store)
        _, states = await c.get(c.run(tokens(120)))
        assert set(states) == {pb.MISS_NEVER_STORED, pb.MISS_AFTER_GAP}
        assert len(pool.fetched) <= 8, "one small batch"


async def test_what_is_up_is_not_offered_again() -> None:
    pool = MemoryPool(Shelf())
    async with node(pool) as store:
        c = await client(store)
        for _ in range(2):
            await c.put(c.run(tokens(3)), bytes_of(3))
            await pool.drained()
        assert pool.offered == 3


async def test_what_ram_has_evicted_does_not_go_up_and_nothing_else_does_by_its_name() -> None:
    shelf = Shelf()
    pool = MemoryPool(shelf)
    pool.lift.clear()
    async with node(pool, ram_bytes=8 * MIB) as store:
        c = await client(store)
        first = c.run(tokens(4))
        await c.put(first, bytes_of(4))
        data = {}
        for seed in range(3):
            run = c.run(tokens(100, seed=30 + seed))
            fresh = [payload(1000 * seed + i, SIZE) for i in range(100)]
            data |= dict(zip(names(run), fresh, strict=True))
            await c.put(run, fresh)
        assert min(c.states(first)) >= pb.MISS_NEVER_STORED
        pool.lift.set()
        await pool.drained()
        assert not set(shelf.objects).intersection(names(first))
        assert shelf.objects
        assert all(stored == data[name] for name, (_, stored) in shelf.objects.items())


async def test_what_lies_below_a_deleted_chunk_leaves_the_bucket_with_it() -> None:
    shelf = Shelf()
    pool = MemoryPool(shelf)
    async with node(pool) as store:
        c = await client(store)
        await c.put(c.run(tokens(4)), bytes_of(4))
        await pool.drained()
        assert await store.delete(c.run(tokens(4), 0, 1)) == 1
        assert not shelf.objects


async def test_a_long_put_is_offered_in_turn_with_others_and_whole() -> None:
    shelf = Shelf()
    pool = MemoryPool(shelf)
    async with node(pool, ram_bytes=32 * MIB) as store:
        c = await client(store, size=4096)
        run = c.run(tokens(300))
        await c.put(run, bytes_of(300, 4096))
        assert pool.offered <= 64
    assert set(shelf.objects) == set(names(run)), "a stop brings up the rest"
