"""The store over RAM and NVMe: durability, promotion, restart, deletes, damage."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path

import pytest
from store.support_store import (
    MIB,
    client,
    open_store,
    payload,
    settle,
    tokens,
    two_namespaces,
)

from kvstored.store.store import NamespaceSettings, StoreSettings
from kvstored_client.identity import KVPart
from kvstored_client.proto import kvstore_pb2 as pb


async def test_durable_objects_survive_a_restart_with_exact_accounts(tmp_path: Path) -> None:
    data = [payload(i, MIB + 4096 * i + 5) for i in range(6)]
    part = [KVPart("kv", max_nbytes=4 * MIB)]
    async with open_store(tmp_path) as store:
        c = await client(store, parts=part, tenant="acme")
        states = await c.put(c.run(tokens(6)), data, durable=True)
        assert list(states) == [pb.STORED] * 6
        before = store.tiers[2].usage()
        charged = store.accounts.namespace_bytes("default", "nvme")
        assert charged == before.charged_bytes > sum(map(len, data))
    async with open_store(tmp_path) as store:
        assert store.tiers[2].usage().charged_bytes == before.charged_bytes
        assert store.accounts.namespace_bytes("default", "nvme") == charged
        assert store.accounts.held["default", "acme", "nvme"].objects == 6
        family = store.namespaces["default"].families.by_number[0]
        assert (family.model, family.chunk_tokens) == ("test-model", 64)
        c = await client(store, parts=part, tenant="acme")
        run = c.run(tokens(6))
        assert c.states(run) == [pb.IN_NVME] * 6
        got, states = await c.get(run)
        assert got == dict(enumerate(data))
        assert list(states) == [pb.IN_NVME] * 6
        assert c.states(run) == [pb.IN_RAM] * 6
        hits = store.accounts.hits["default", "acme", "test-model", "nvme"]
        assert (hits.chunks, hits.nbytes) == (6, sum(map(len, data)))
        got, states = await c.get(run)
        assert list(states) == [pb.IN_RAM] * 6


async def test_a_clean_stop_makes_accepted_objects_durable(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        await c.put(c.run(tokens(8)), [payload(i, MIB) for i in range(8)])
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        got, _ = await c.get(c.run(tokens(8)))
        assert got == {i: payload(i, MIB) for i in range(8)}


async def test_a_prefix_larger_than_ram_is_read_whole_from_below(tmp_path: Path) -> None:
    async with open_store(tmp_path, ram_bytes=6 * MIB) as store:
        c = await client(store, size=MIB)
        run = c.run(tokens(20))
        for i in range(20):
            one = c.run(tokens(20), i, i + 1)
            assert list(await c.put(one, [payload(i, MIB)])) == [pb.STORED]
        await settle(store)
        assert store.match(run, pb.PREFIX, pb.DEPTH_NODE).chunks == 20
        got, states = await c.get(run)
        assert got == {i: payload(i, MIB) for i in range(20)}
        assert set(states) <= {pb.IN_RAM, pb.IN_NVME}
        assert store.ram.leased_bytes == 0


async def test_concurrent_readers_load_an_object_once(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        await c.put(c.run(tokens(4)), [payload(i, MIB) for i in range(4)], durable=True)
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        run = c.run(tokens(4))
        results = await asyncio.gather(*(c.get(run) for _ in range(8)))
        assert all(got == {i: payload(i, MIB) for i in range(4)} for got, _ in results)
        assert store.accounts.stored["default", "default", "ram"].chunks == 4
        assert store.ram.leased_bytes == 0


async def test_the_cap_holds_after_a_restart(tmp_path: Path) -> None:
    cap = 24 * MIB
    async with open_store(tmp_path, nvme_bytes=cap) as store:
        c = await client(store, size=MIB)
        for seed in range(8):
            await c.put(c.run(tokens(4, seed=seed)), [payload(seed, MIB)] * 4, durable=True)
        full = store.tiers[2].usage()
        assert full.footprint_bytes <= cap
        assert store.accounts.evicted["default", "nvme", "capacity"].chunks > 0
    async with open_store(tmp_path, nvme_bytes=cap) as store:
        usage = store.tiers[2].usage()
        assert usage.charged_bytes == full.charged_bytes
        assert (
            usage.objects
            == full.objects
            == store.accounts.held["default", "default", "nvme"].objects
        )
        c = await client(store, size=MIB)
        for seed in range(20, 28):
            await c.put(c.run(tokens(4, seed=seed)), [payload(seed, MIB)] * 4, durable=True)
            usage = store.tiers[2].usage()
            assert usage.footprint_bytes <= cap
            assert usage.charged_bytes <= cap
        newest = c.run(tokens(4, seed=27))
        assert pb.MISS_EVICTED not in c.states(newest)


async def test_deletes_hold_after_a_restart_even_while_being_written(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        kept, gone = c.run(tokens(2, seed=1)), c.run(tokens(2, seed=2))
        await c.put(kept, [payload(i, MIB) for i in range(2)], durable=True)
        await c.put(gone, [payload(i, MIB) for i in range(2)])  # still on its way down
        assert await store.delete(gone) == 2
        old = c.run(tokens(3, seed=3))
        await c.put(old, [payload(i, MIB) for i in range(3)], durable=True)
        assert store.tiers[2].usage().objects == 5
        assert await store.delete(old) == 3
        assert store.tiers[2].usage().objects == 2, "answered before the delete held"
        assert c.states(gone) == [pb.MISS_DELETED] * 2
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        assert c.states(c.run(tokens(2, seed=2))) == [pb.MISS_NEVER_STORED] * 2
        assert c.states(c.run(tokens(2, seed=1))) == [pb.IN_NVME] * 2


async def test_deleted_and_put_again_is_the_new_object(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        run = c.run(tokens(1))
        for seed in range(6):
            deleting = asyncio.ensure_future(store.delete(run))
            await asyncio.sleep(0)
            assert list(await c.put(run, [payload(seed, MIB)])) == [pb.STORED]
            await deleting
            assert (await c.get(run))[0] == {0: payload(seed, MIB)}
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        assert (await c.get(c.run(tokens(1))))[0] == {0: payload(5, MIB)}


def _flip_one_bit_after(directory: Path, needle: bytes) -> int:
    """Damage the file that holds these bytes. Gives how many did."""
    damaged = 0
    for file in directory.rglob("*"):
        if not file.is_file():
            continue
        raw = file.read_bytes()
        at = raw.find(needle)
        if at >= 0:
            with file.open("r+b") as opened:
                opened.seek(at + 100)
                opened.write(bytes([raw[at + 100] ^ 1]))
            damaged += 1
    return damaged


async def test_rotten_bytes_are_a_miss_and_may_be_written_again(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        await c.put(c.run(tokens(3)), [payload(i, MIB) for i in range(3)], durable=True)
    assert _flip_one_bit_after(tmp_path, payload(1, MIB)[:4096]) == 1
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        run = c.run(tokens(3))
        got, states = await c.get(run)
        assert list(states)[:2] == [pb.IN_NVME, pb.MISS_CORRUPT]
        assert 1 not in got
        assert store.accounts.checksum_failures["nvme"] == 1
        assert store.match(run, pb.PREFIX, pb.DEPTH_NODE).chunks == 1
        again = c.run(tokens(3), 1, 3)
        states = await c.put(again, [payload(i, MIB) for i in (1, 2)])
        assert states[0] == pb.STORED
        assert (await c.get(run))[0] == {i: payload(i, MIB) for i in range(3)}


async def test_what_lies_below_rotten_bytes_stays_and_can_be_deleted(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        await c.put(c.run(tokens(3)), [payload(i, MIB) for i in range(3)], durable=True)
    assert _flip_one_bit_after(tmp_path, payload(1, MIB)[:4096]) == 1
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        run = c.run(tokens(3))
        await c.get(run)
        states = store.match(run, pb.EACH, pb.DEPTH_NODE).states
        assert list(states) == [pb.IN_RAM, pb.MISS_CORRUPT, pb.IN_RAM]
        assert set(await c.put(run, [payload(i, MIB) for i in range(3)], durable=True)) == {
            pb.EXISTED,
            pb.STORED,
        }
        assert (await c.get(run))[0] == {i: payload(i, MIB) for i in range(3)}
    assert _flip_one_bit_after(tmp_path, payload(1, MIB)[:4096]) == 1
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        run = c.run(tokens(3))
        await c.get(run)
        assert await store.delete(run) == 3
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        assert (await c.get(c.run(tokens(3))))[0] == {}


async def test_small_objects_go_through_every_step_too(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        c = await client(store, size=5000)
        await c.put(c.run(tokens(40)), [payload(i, 5000) for i in range(40)], durable=True)
        assert await store.delete(c.run(tokens(40), 30, 31)) == 1
    async with open_store(tmp_path) as store:
        c = await client(store, size=5000)
        got, states = await c.get(c.run(tokens(40)))
        assert got == {i: payload(i, 5000) for i in range(30)}
        assert list(states[30:]) == [pb.MISS_NEVER_STORED] * 10


async def test_expired_and_foreign_namespaces_are_not_recovered(tmp_path: Path) -> None:
    async with open_store(tmp_path, settings=two_namespaces()) as store:
        c, other = await client(store), await client(store, namespace="other")
        size = 64 * 1024 + 4096
        run = c.run(tokens(2))
        await c.put(run, [payload(i, size) for i in range(2)], durable=True, ttl_ms=200)
        await other.put(other.run(tokens(2)), [payload(i, size) for i in range(2)], durable=True)
        await asyncio.sleep(0.25)  # time to live is a matter of the clock alone
    only = StoreSettings(namespaces=(NamespaceSettings("default"),))
    async with open_store(tmp_path, settings=only) as store:
        c = await client(store)
        assert c.states(run) == [pb.MISS_NEVER_STORED] * 2
        await store._trash.flush(store.tiers[2].kind)
        assert store.tiers[2].usage().objects == 0


async def test_a_get_gives_up_at_its_deadline_and_the_load_still_lands(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        await c.put(c.run(tokens(4)), [payload(i, MIB) for i in range(4)], durable=True)
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        run = c.run(tokens(4))
        stream = store.open_get(run, time.monotonic() + 0.0)
        assert await stream.next() is None
        assert list(stream.states) == [pb.MISS_DEADLINE] * 4
        await stream.close()
        assert store.accounts.misses["default", "default", "test-model", "deadline"].chunks == 4
        await store.prefetch(run, time.monotonic() + 20)
        assert c.states(run) == [pb.IN_RAM] * 4
        assert store.ram.leased_bytes == 0


async def test_a_prefetch_of_more_than_ram_holds_up_nobody(tmp_path: Path) -> None:
    async with open_store(tmp_path, ram_bytes=8 * MIB) as store:
        c = await client(store, size=MIB)
        many = c.run(tokens(24, seed=1))
        for i in range(24):
            await c.put(c.run(tokens(24, seed=1), i, i + 1), [payload(i, MIB)], durable=True)
        prefetching = asyncio.ensure_future(store.prefetch(many, time.monotonic() + 20))
        await asyncio.sleep(0)
        states = await c.put(c.run(tokens(1, seed=2)), [payload(7, MIB)], timeout_s=5.0)
        assert list(states) == [pb.STORED]
        got, _ = await c.get(c.run(tokens(24, seed=1), 23, 24), timeout_s=5.0)
        assert got == {0: payload(23, MIB)}
        states = await asyncio.wait_for(prefetching, 10.0)
        assert 0 < states.count(pb.IN_RAM) < 24
        await settle(store)
        assert store.ram.leased_bytes == 0


@pytest.mark.parametrize("size", [64 * 1024, 128 * 1024])
async def test_nobody_keeps_a_view_of_what_was_written_behind(tmp_path: Path, size: int) -> None:
    gc.disable()  # memory must come back when a view's time is over, not when cycles are collected
    try:
        async with open_store(tmp_path, ram_bytes=MIB) as store:
            c = await client(store, parts=[KVPart("kv", max_nbytes=MIB)])
            run = c.run(tokens(4, seed=1))
            await c.put(run, [payload(i, size) for i in range(4)], durable=True)
            await c.get(run)
            big = c.run(tokens(1, seed=2))
            assert list(await c.put(big, [payload(9, MIB)], wait=False)) == [pb.STORED]
    finally:
        gc.enable()
