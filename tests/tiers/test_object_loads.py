"""Loads from the bucket while a tenant's objects are dropped from it."""

from __future__ import annotations

import asyncio
import time

import pytest
from store.pool_memory import MemoryPool, Shelf, node
from store.support_store import client, payload, tokens

from kvstored.tiers.object.api import Swept
from kvstored_client.proto import kvstore_pb2 as pb

SIZE = 64 * 1024 + 4096
CHUNKS = 3


class Slow(MemoryPool):
    """One whose sweeps take a while."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.sweeping = asyncio.Event()
        self.sweep = asyncio.Event()

    async def delete_all(self, namespace: str, tenant: str, deadline: float) -> Swept:
        self.sweeping.set()
        await self.sweep.wait()
        return await super().delete_all(namespace, tenant, deadline)


async def filled() -> Slow:
    """Two prefixes: of tenant "gone" (0) and of tenant "stays" (1)."""
    pool = MemoryPool(Shelf())
    async with node(pool) as store:
        for seed, tenant in enumerate(("gone", "stays")):
            c = await client(store, tenant=tenant)
            await c.put(c.run(tokens(CHUNKS, seed=seed)), [payload(seed, SIZE)] * CHUNKS)
        await pool.drained()
    return Slow(pool.shelf)


@pytest.mark.parametrize("when", ["asked", "landing", "during"])
async def test_a_purge_of_one_tenant_leaves_the_loads_of_others_alone(when: str) -> None:
    pool = await filled()
    async with node(pool) as store:
        c = await client(store, tenant="stays")
        gone, stays = (c.run(tokens(CHUNKS, seed=seed)) for seed in range(2))
        gate, begun = (pool.body, pool.landing) if when == "landing" else (pool.gate, pool.fetching)
        if when != "during":
            gate.clear()
            readers = [asyncio.ensure_future(c.get(run)) for run in (gone, stays)]
            await begun.wait()
        purge = asyncio.ensure_future(store.purge("default", "gone", time.monotonic() + 20))
        await pool.sweeping.wait()
        if when == "during":
            readers = [asyncio.ensure_future(c.get(run)) for run in (gone, stays)]
        gate.set()
        (none, states), (got, there) = await asyncio.gather(*readers)
        assert not none
        assert states[0] == pb.MISS_DELETED
        assert list(there) == [pb.IN_OBJECT] * CHUNKS
        assert len(got) == CHUNKS
        pool.sweep.set()
        assert await purge == (0, CHUNKS)
        assert store.namespaces["default"].index.chunk_count == CHUNKS
