"""Deletes and purges of a store with a bucket reach the bucket, and hold."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from store.pool_fill import bytes_of, fill, names, soon
from store.pool_memory import MemoryPool, Shelf, node
from store.support_store import client, tokens

from kvstored.errors import BadRequest, BucketSilent
from kvstored_client.proto import kvstore_pb2 as pb


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


async def test_what_lies_below_a_deleted_chunk_leaves_the_bucket_with_it() -> None:
    shelf = Shelf()
    pool = MemoryPool(shelf)
    async with node(pool) as store:
        c = await client(store)
        await c.put(c.run(tokens(4)), bytes_of(4))
        await pool.drained()
        assert await store.delete(c.run(tokens(4), 0, 1)) == 1
        assert not shelf.objects
