"""What goes up once more: objects that this node, and perhaps the bucket, have lost meanwhile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from store.pool_memory import MemoryPool, Shelf, node
from store.support_store import MIB, Client, client, payload, tokens

from kvstored.store.api import Run
from kvstored.store.offered import hash_one, hashes
from kvstored.tiers.object.api import ObjectName, Offer, Outcome
from kvstored_client.proto import kvstore_pb2 as pb

SIZE = 64 * 1024 + 4096
CHUNKS = 3


def names(run: Run) -> list[ObjectName]:
    family = run.family
    return [ObjectName(run.namespace, family.fingerprint, key, "kv") for key in run.keys]


def bytes_of(chunks: int) -> list[bytes]:
    return [payload(i, SIZE) for i in range(chunks)]


async def crowd_out(c: Client, pool: MemoryPool, run: Run) -> None:
    """Store others until nothing of a run is left here."""
    seed = 50
    while min(c.states(run)) < pb.MISS_NEVER_STORED:
        await c.put(c.run(tokens(50, seed=seed)), bytes_of(50))
        seed += 1
    await pool.drained()


@pytest.mark.parametrize("write_back", ["all", "second_hit"])
async def test_what_node_and_bucket_have_lost_goes_up_when_it_is_stored_anew(
    write_back: str,
) -> None:
    pool = MemoryPool(Shelf())
    async with node(pool, ram_bytes=8 * MIB, write_back=write_back) as store:
        c = await client(store)
        run = c.run(tokens(CHUNKS))
        await c.put(run, bytes_of(CHUNKS))
        await c.get(run)
        await pool.drained()
        assert set(names(run)) <= set(pool.shelf.objects)
        await crowd_out(c, pool, run)
        for name in names(run):  # its cap, its age, a lifecycle rule, rot
            del pool.shelf.objects[name]
        await c.put(run, bytes_of(CHUNKS))
        await pool.drained()
        assert set(names(run)) <= set(pool.shelf.objects)


async def test_what_came_from_the_bucket_is_not_sent_back() -> None:
    shelf = Shelf()
    other = MemoryPool(shelf)
    async with node(other) as store:
        c = await client(store)
        await c.put(c.run(tokens(CHUNKS)), bytes_of(CHUNKS))
        await other.drained()
    pool = MemoryPool(shelf)
    async with node(pool) as store:
        c = await client(store)
        _, states = await c.get(c.run(tokens(CHUNKS)))
        assert list(states) == [pb.IN_OBJECT] * CHUNKS
        await c.put(c.run(tokens(CHUNKS)), bytes_of(CHUNKS))
        await pool.drained()
        assert pool.offered == 0


async def test_what_is_stored_anew_before_its_turn_goes_up() -> None:
    pool = MemoryPool(Shelf())
    pool.lift.clear()
    async with node(pool, ram_bytes=8 * MIB) as store:
        c = await client(store)
        run = c.run(tokens(CHUNKS))
        await c.put(run, bytes_of(CHUNKS))
        seed = 50
        while min(c.states(run)) < pb.MISS_NEVER_STORED:
            await c.put(c.run(tokens(50, seed=seed)), bytes_of(50))
            seed += 1
        await c.put(run, bytes_of(CHUNKS))
        pool.lift.set()
        await pool.drained()
        assert set(names(run)) <= set(pool.shelf.objects)


async def test_what_the_last_life_owed_goes_up_once(tmp_path: Path) -> None:
    first = MemoryPool(Shelf())
    first.most_offers = 0
    async with node(first, tmp_path) as store:
        c = await client(store)
        run = c.run(tokens(CHUNKS))
        await c.put(run, bytes_of(CHUNKS), durable=True)
    second = MemoryPool(first.shelf)
    second.left = names(run)
    async with node(second, tmp_path) as store:
        await second.drained()
        c = await client(store)
        await c.put(c.run(tokens(CHUNKS)), bytes_of(CHUNKS))
        await second.drained()
        assert second.offered == CHUNKS


async def test_of_all_what_was_refused_goes_up_when_it_is_used() -> None:
    pool = MemoryPool(Shelf())
    pool.most_offers = 1
    async with node(pool) as store:
        c = await client(store)
        run = c.run(tokens(CHUNKS))
        await c.put(run, bytes_of(CHUNKS))
        await pool.drained()
        assert len(pool.shelf.objects) == 1
        pool.most_offers = 10
        await c.get(run)
        await pool.drained()
        assert set(names(run)) <= set(pool.shelf.objects)


@pytest.mark.parametrize("write_back", ["all", "second_hit"])
async def test_what_was_given_up_is_due_at_its_next_use(
    write_back: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = MemoryPool(Shelf())
    async with node(pool, write_back=write_back) as store:
        c = await client(store)
        run = c.run(tokens(CHUNKS))
        with monkeypatch.context() as away:
            away.setattr(pool, "_upload", give_up)
            await c.put(run, bytes_of(CHUNKS))
            await c.get(run)
            await pool.drained()
        assert pool.offered >= CHUNKS
        await c.get(run)
        await pool.drained()
        assert set(names(run)) == set(pool.shelf.objects)


async def give_up(offer: Offer) -> None:
    offer.done(Outcome.SERVER)


async def test_of_second_hits_what_was_gone_is_due_when_it_is_seen_again() -> None:
    pool = MemoryPool(Shelf())
    pool.lift.clear()
    async with node(pool, ram_bytes=8 * MIB, write_back="second_hit") as store:
        c = await client(store)
        run = c.run(tokens(CHUNKS))
        await c.put(run, bytes_of(CHUNKS))
        await c.get(run)
        await crowd_out(c, MemoryPool(Shelf()), run)
        pool.lift.set()
        await pool.drained()
        assert not pool.shelf.objects
        await c.put(run, bytes_of(CHUNKS))
        await pool.drained()
        assert set(names(run)) == set(pool.shelf.objects)


def test_one_hash_is_that_of_many() -> None:
    packed = np.random.default_rng(3).bytes(32 * 64)
    many = hashes(5 << 16 | 2, packed, np.arange(64, dtype=np.uint64))
    keys = [packed[at : at + 32] for at in range(0, len(packed), 32)]
    assert [hash_one(5 << 16 | 2, key, part) for part, key in enumerate(keys)] == many.tolist()
