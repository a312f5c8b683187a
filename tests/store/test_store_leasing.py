"""Acquire, release and hold: leases that outlive the call, over RAM and NVMe."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path

import numpy as np
import xxhash
from store.support_store import MIB, Client, client, open_store, payload, settle, tokens

from kvstored.store.api import Leased, Run
from kvstored.store.store import Store
from kvstored_client.identity import GroupRule, KVPart
from kvstored_client.proto import kvstore_pb2 as pb

SIZE = 64 * 1024 + 4096
NO_BOUND = 1 << 60


def bytes_of(store: Store, leased: Leased) -> dict[int, bytes]:
    """What a client would see in its mappings."""
    rows = zip(
        leased.indices,
        leased.segment_ids,
        leased.offsets_bytes,
        leased.lengths_bytes,
        strict=True,
    )
    return {
        index: os.pread(store.ram.segment_fd(segment), length, offset)
        for index, segment, offset, length in rows
    }


async def drain(store: Store, run: Run, room: int = NO_BOUND) -> tuple[list[Leased], bytes]:
    """All that an acquire gives, with room for so many bytes."""
    left = [room]

    def take(nbytes: int) -> bool:
        left[0] -= nbytes
        return left[0] >= 0

    stream = store.open_acquire(run, time.monotonic() + 20, take)
    found: list[Leased] = []
    while (leased := await stream.next()) is not None:
        found.append(leased)
    states = stream.states
    await stream.close()
    return found, states


async def put_some(store: Store, chunks: int, size: int = SIZE) -> tuple[Client, Run, list[bytes]]:
    c = await client(store, size=size)
    run = c.run(tokens(chunks))
    data = [payload(i, size) for i in range(chunks)]
    assert set(await c.put(run, data, durable=store.nvme is not None)) == {pb.STORED}
    return c, run, data


async def evict_from_ram(store: Store, c: Client, size: int) -> None:
    """Put so much else that what was there leaves RAM."""
    count = store.ram.usage().cap_bytes // size + 4
    for seed in range(100, 100 + count):
        await c.put(c.run(tokens(1, seed)), [payload(seed, size)], durable=True)


async def test_a_run_in_ram_is_leased_in_one_step_and_its_bytes_stay() -> None:
    async with open_store(ram_bytes=4 * MIB) as store:
        c, run, data = await put_some(store, 5)
        answer = store.acquire_now(run, NO_BOUND)
        assert answer is not None
        leased, states = answer
        assert list(states) == [pb.IN_RAM] * 5
        assert bytes_of(store, leased) == dict(enumerate(data))
        assert leased.checksums == b"".join(map(xxhash.xxh3_128_digest, data))
        assert leased.charged_bytes == store.ram.leased_bytes == 5 * SIZE
        hits = store.accounts.hits["default", "default", "test-model", "ram"]
        assert (hits.chunks, hits.tokens, hits.nbytes) == (5, 320, 5 * SIZE)
        await store.delete(run)
        for seed in range(1, 100):
            await c.put(c.run(tokens(1, seed)), [payload(seed, SIZE)])
        assert bytes_of(store, leased) == dict(enumerate(data))
        store.release(leased.places)
        assert store.ram.leased_bytes == 0


async def test_nothing_is_leased_where_one_step_does_not_do(tmp_path: Path) -> None:
    async with open_store(tmp_path, ram_bytes=4 * MIB) as store:
        c, run, _ = await put_some(store, 4)
        assert store.acquire_now(run, 4 * SIZE - 1) is None
        assert store.acquire_now(c.run(tokens(4) + [1] * 64), NO_BOUND) is None
        await evict_from_ram(store, c, SIZE)
        assert c.states(run) == [pb.IN_NVME] * 4
        assert store.acquire_now(run, NO_BOUND) is None
        assert store.acquire_now(c.run([]), NO_BOUND) is None
        await settle(store)
        assert store.ram.leased_bytes == 0


async def test_what_is_below_follows_in_order(tmp_path: Path) -> None:
    async with open_store(tmp_path, ram_bytes=4 * MIB) as store:
        c, run, data = await put_some(store, 6)
        await evict_from_ram(store, c, SIZE)
        assert c.states(run) == [pb.IN_NVME] * 6
        found, states = await drain(store, run)
        assert [i for leased in found for i in leased.indices] == list(range(6))
        got = {k: v for leased in found for k, v in bytes_of(store, leased).items()}
        assert got == dict(enumerate(data))
        assert {t for leased in found for t in leased.tiers} == {pb.TIER_NVME}
        assert list(states) == [pb.IN_NVME] * 6
        await settle(store)
        assert store.ram.leased_bytes == 6 * SIZE == sum(leased.charged_bytes for leased in found)
        for leased in found:
            store.release(leased.places)
        assert store.ram.leased_bytes == 0


async def test_beyond_the_holder_s_room_everything_is_declined(tmp_path: Path) -> None:
    async with open_store(tmp_path, ram_bytes=4 * MIB) as store:
        c, run, data = await put_some(store, 6)
        for cold in (False, True):
            if cold:
                await evict_from_ram(store, c, SIZE)
            found, states = await drain(store, run, room=2 * SIZE)
            got = {k: v for leased in found for k, v in bytes_of(store, leased).items()}
            assert got == dict(enumerate(data[:2]))
            assert list(states[2:]) == [pb.MISS_DECLINED] * 4
            for leased in found:
                store.release(leased.places)
            await settle(store)
        assert store._loader is not None
        await store._loader.close()  # loads under way
        assert store.ram.leased_bytes == 0


async def test_a_stream_that_is_closed_early_keeps_nothing(tmp_path: Path) -> None:
    async with open_store(tmp_path, ram_bytes=4 * MIB) as store:
        c, run, _ = await put_some(store, 6)
        await evict_from_ram(store, c, SIZE)
        stream = store.open_acquire(run, time.monotonic() + 20, lambda nbytes: True)
        waiting = asyncio.ensure_future(stream.next())
        await asyncio.sleep(0)  # it has begun
        waiting.cancel()
        await asyncio.wait([waiting])
        await stream.close()
        await stream.close()
        found, _ = await drain(store, run)
        for leased in found:
            store.release(leased.places)
        await settle(store)
        assert store.ram.leased_bytes == 0


async def test_several_parts_come_in_the_order_asked_for() -> None:
    async with open_store() as store:
        parts = [KVPart("a", nbytes=4096), KVPart("b", nbytes=8192)]
        c = await client(store, parts=parts)
        run = c.run(tokens(3))
        data = [payload(i, (4096, 8192)[i % 2]) for i in range(6)]
        await c.put(run, data)
        answer = store.acquire_now(c.run(tokens(3), parts=["b", "a"]), NO_BOUND)
        assert answer is not None
        swapped = {i: data[i ^ 1] for i in range(6)}
        assert bytes_of(store, answer[0]) == swapped
        only = store.acquire_now(c.run(tokens(3), parts=["b"]), NO_BOUND)
        assert only is not None
        assert bytes_of(store, only[0]) == {i: data[2 * i + 1] for i in range(3)}
        for leased, _ in (answer, only):
            store.release(leased.places)
        assert store.ram.leased_bytes == 0


async def test_one_key_twice_in_a_run_is_leased_twice() -> None:
    async with open_store() as store:
        _, run, data = await put_some(store, 1)
        twice = dataclasses.replace(run, packed=run.packed * 2, end_token=0)
        answer = store.acquire_now(twice, NO_BOUND)
        assert answer is not None
        assert bytes_of(store, answer[0]) == {0: data[0], 1: data[0]}
        store.release(answer[0].places[:1])
        assert store.ram.leased_bytes == SIZE
        store.release(answer[0].places[1:])
        assert store.ram.leased_bytes == 0


async def test_what_has_expired_is_not_leased() -> None:
    async with open_store() as store:
        c = await client(store)
        run = c.run(tokens(2))
        await c.put(run, [payload(i, SIZE) for i in range(2)], ttl_ms=3_600_000)
        answer = store.acquire_now(run, NO_BOUND)
        assert answer is not None
        store.release(answer[0].places)
        store.touch(run, 1)
        await asyncio.sleep(0.005)  # until its time is over
        assert store.acquire_now(run, NO_BOUND) is None
        found, states = await drain(store, run)
        assert found == []
        assert list(states) == [pb.MISS_EXPIRED] * 2


async def test_a_rule_that_needs_few_chunks_leases_few() -> None:
    async with open_store() as store:
        c = await client(
            store,
            parts=[KVPart("w", nbytes=4096, group="window")],
            groups={"window": GroupRule.trailing(64)},
        )
        run = c.run(tokens(3))
        data = [payload(i, 4096) for i in range(3)]
        await c.put(run, data)
        assert store.acquire_now(run, NO_BOUND) is None
        found, states = await drain(store, run)
        assert [i for leased in found for i in leased.indices] == [2]
        assert list(states) == [pb.NOT_NEEDED] * 2 + [pb.IN_RAM]
        store.release(np.concatenate([leased.places for leased in found]))


async def test_the_lease_of_a_last_chunk_keeps_no_other_in_ram(tmp_path: Path) -> None:
    for folder in (tmp_path, None):
        async with open_store(folder, ram_bytes=2 * MIB) as store:
            c, run, data = await put_some(store, 20)
            last = c.run(tokens(20), start=19)
            answer = store.acquire_now(last, NO_BOUND)
            assert answer is not None
            other = c.run(tokens(27, 1))
            more = [payload(100 + i, SIZE) for i in range(27)]
            assert set(await c.put(other, more, timeout_s=5)) == {pb.STORED}
            assert bytes_of(store, answer[0]) == {0: data[19]}
            await settle(store)  # a write under way leases what it reads
            assert store.ram.leased_bytes == SIZE
            states = c.states(run)
            assert states[:19].count(pb.IN_RAM) <= 2
            if folder is not None:
                assert set(states[:19]) <= {pb.IN_RAM, pb.IN_NVME}
                assert (await c.get(run))[0] == dict(enumerate(data))
            store.release(answer[0].places)
            assert store.ram.leased_bytes == 0


async def test_what_is_pinned_or_held_is_not_lost_for_room() -> None:
    async with open_store(ram_bytes=2 * MIB) as store:
        c, run, _ = await put_some(store, 20)
        keys, _ = store.hold(c.run(tokens(20), start=19), bytes([pb.IN_RAM]))
        for seed in range(100, 160):
            await c.put(c.run(tokens(1, seed)), [payload(seed, SIZE)], wait=False)
        assert c.states(run) == [pb.IN_RAM] * 20
        store.unhold("default", keys)


async def test_a_hold_of_what_is_below_keeps_no_ram(tmp_path: Path) -> None:
    async with open_store(tmp_path, ram_bytes=4 * MIB, nvme_bytes=64 * MIB) as store:
        c, run, data = await put_some(store, 3)
        await evict_from_ram(store, c, SIZE)
        keys, charged = store.hold(run, store.match(run, pb.EACH, pb.DEPTH_NODE).states)
        assert (keys, charged) == (run.keys, 0)
        await c.get(run)
        assert c.states(run) == [pb.IN_RAM] * 3
        for seed in range(500, 600):
            await c.put(c.run(tokens(1, seed)), [payload(seed, SIZE)], durable=True)
        assert c.states(run) == [pb.IN_NVME] * 3
        assert (await c.get(run))[0] == dict(enumerate(data))
        store.unhold("default", keys)


async def test_a_held_chunk_outlives_eviction_in_ram_and_on_nvme(tmp_path: Path) -> None:
    async with open_store(tmp_path, ram_bytes=4 * MIB, nvme_bytes=16 * MIB) as store:
        c, run, data = await put_some(store, 3)
        states = store.match(run, pb.EACH, pb.DEPTH_NODE).states
        keys, charged = store.hold(run, states)
        assert keys == run.keys
        assert charged == 3 * SIZE
        for seed in range(100, 500):
            await c.put(c.run(tokens(1, seed)), [payload(seed, SIZE)], durable=True)
        assert c.states(run) == [pb.IN_RAM] * 3
        answer = store.acquire_now(run, NO_BOUND)
        assert answer is not None
        assert bytes_of(store, answer[0]) == dict(enumerate(data))
        store.release(answer[0].places)
        store.unhold("default", keys)
        for seed in range(500, 900):
            await c.put(c.run(tokens(1, seed)), [payload(seed, SIZE)], durable=True)
        assert c.states(run)[0] == pb.MISS_EVICTED


async def test_holds_count_by_key_also_over_a_delete() -> None:
    async with open_store(ram_bytes=MIB) as store:
        c, run, data = await put_some(store, 1)
        first = store.hold(run, bytes([pb.IN_RAM]))[0]
        await store.delete(run)
        second = store.hold(run, store.match(run, pb.EACH, pb.DEPTH_NODE).states)[0]
        assert second == []
        await c.put(run, data)
        store.hold(run, bytes([pb.IN_RAM]))
        store.unhold("default", first)
        for seed in range(1, 40):
            await c.put(c.run(tokens(1, seed)), [payload(seed, SIZE)], wait=False)
        assert c.states(run) == [pb.IN_RAM]
        store.unhold("default", first)
        store.unhold("default", first)  # once too often is nothing
        for seed in range(40, 80):
            await c.put(c.run(tokens(1, seed)), [payload(seed, SIZE)], wait=False)
        assert c.states(run) == [pb.MISS_EVICTED]
