"""Verbs that take many keys at once: some held, some not, some named twice."""

from __future__ import annotations

import os
from dataclasses import replace

from store.support_store import Client, client, open_store, tokens

from kvstored.store.api import Run
from kvstored.store.deleting import DELETE_ROWS
from kvstored.store.index import NONE
from kvstored.store.residency import now_ms
from kvstored.store.store import Store
from kvstored_client.proto import kvstore_pb2 as pb

SIZE = 4096
COUNT = 2 * DELETE_ROWS + 10


async def filled(store: Store) -> tuple[Client, Run, Run]:
    """A chain that is held, and a run of it in which each second key is not, and its first key
    comes again.
    """
    c = await client(store, size=SIZE, chunk_tokens=1)
    held = c.run(tokens(COUNT, chunk_tokens=1))
    states = await c.put(held, [bytes(SIZE)] * COUNT)
    assert set(states) == {pb.STORED}
    mixed = b"".join(key + os.urandom(32) for key in held.keys) + held.keys[0]
    return c, held, replace(held, packed=mixed, start=0, end_token=0)


async def test_pins_count_each_chunk_once() -> None:
    async with open_store() as store:
        _, held, mixed = await filled(store)
        states = store.pin(mixed, 60_000)
        assert states == bytes([pb.IN_RAM, pb.MISS_NEVER_STORED]) * COUNT + bytes([pb.IN_RAM])
        ns = store.namespaces["default"]
        assert sorted(ns.pins) == sorted(ns.index.find(key) for key in held.keys)
        assert all(type(row) is int for row in ns.pins)
        assert store.unpin(mixed) == COUNT
        assert store.unpin(mixed) == 0


async def test_touch_renews_what_is_held_and_nothing_else() -> None:
    async with open_store() as store:
        _, held, mixed = await filled(store)
        ns = store.namespaces["default"]
        store.touch(replace(mixed, packed=mixed.packed[: 64 * 20]), 100_000)
        due = [ns.index.expires_ms[ns.index.find(key)] for key in held.keys]
        assert all(now_ms() < at for at in due[:20])
        assert not any(due[20:])
        assert not any(ns.expired(ns.index.find(key), now_ms()) for key in held.keys)
        assert ns.expired(ns.index.find(held.keys[0]), now_ms() + 200_000)
        assert not ns.expired(ns.index.find(held.keys[20]), now_ms() + 200_000)


async def test_delete_counts_what_it_was_told_and_takes_what_is_below() -> None:
    async with open_store() as store:
        c, held, mixed = await filled(store)
        ns = store.namespaces["default"]
        # The chain's first key comes last, so it goes first, and all of the chain with it.
        assert await store.delete(mixed) == 1
        assert ns.index.chunk_count == 0
        assert c.states(held)[0] == pb.MISS_DELETED
        await c.put(held, [bytes(SIZE)] * COUNT)
        assert await store.delete(held) == COUNT
        assert set(c.states(held)) == {pb.MISS_DELETED}
        assert all(ns.index.find(key) == NONE for key in held.keys)
