"""What a store owes its bucket: when it goes up, and what does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

from store.pool_fill import SIZE, bytes_of, names
from store.pool_memory import MemoryPool, Shelf, node
from store.support_store import MIB, client, payload, tokens

from kvstored.tiers.object.api import ObjectName
from kvstored_client.proto import kvstore_pb2 as pb


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


async def test_a_long_put_is_offered_in_turn_with_others_and_whole() -> None:
    shelf = Shelf()
    pool = MemoryPool(shelf)
    async with node(pool, ram_bytes=32 * MIB) as store:
        c = await client(store, size=4096)
        run = c.run(tokens(300))
        await c.put(run, bytes_of(300, 4096))
        assert pool.offered <= 64
    assert set(shelf.objects) == set(names(run)), "a stop brings up the rest"
