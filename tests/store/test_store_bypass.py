"""Reads past RAM: the same bytes, no copy kept, memory that comes back."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
from store.support_store import MIB, client, open_store, payload, tokens
from store.test_store_cold_reads import SIZE, collect, fill, gated_store, slot_of
from tiers.nvme_gates import Gate, RangeFiles

from kvstored.store import bypass
from kvstored.store.bypass import Arena
from kvstored.store.store import Store
from kvstored.tiers.nvme.volume_tier import VolumeTier
from kvstored_client.proto import kvstore_pb2 as pb


def arena(store: Store) -> Arena:
    assert store._loader is not None
    return store._loader._bypass.arena


def all_is_back(store: Store) -> bool:
    return arena(store).free_bytes == arena(store).size_bytes and store.ram.leased_bytes == 0


async def reads_ended(store: Store) -> None:
    assert store._loader is not None
    await store._loader.close()  # waits for what is under way, and ends nothing


async def test_nothing_of_it_stays_in_ram(tmp_path: Path) -> None:
    await fill(tmp_path, 6)
    async with open_store(tmp_path) as store:
        c = await client(store, size=SIZE)
        run, got = c.run(tokens(6)), dict[int, bytes]()
        await c.get(c.run(tokens(6), 1, 2))  # this one is in RAM, and taken from there
        held = store.ram.usage().charged_bytes
        stream = store.open_get(run, time.monotonic() + 20, bypass_ram=True)
        await collect(stream, got)
        assert got == {i: payload(i, SIZE) for i in range(6)}
        assert list(stream.states) == [pb.IN_NVME, pb.IN_RAM] + [pb.IN_NVME] * 4
        await stream.close()
        assert store.ram.usage().charged_bytes == held
        assert c.states(run) == [pb.IN_NVME, pb.IN_RAM] + [pb.IN_NVME] * 4
        assert all_is_back(store)
        assert store.accounts.hits["default", "default", "test-model", "nvme"].chunks == 6


async def test_readers_at_once_share_one_read_and_one_copy(tmp_path: Path) -> None:
    await fill(tmp_path, 4)
    async with open_store(tmp_path) as store:
        c = await client(store, size=SIZE)
        streams = [
            store.open_get(c.run(tokens(4)), time.monotonic() + 20, bypass_ram=True)
            for _ in range(3)
        ]
        results: list[dict[int, bytes]] = [{} for _ in streams]
        await asyncio.gather(*map(collect, streams, results))
        assert results == [{i: payload(i, SIZE) for i in range(4)}] * 3
        for stream in streams:
            await stream.close()
        assert isinstance(store.nvme, VolumeTier)
        assert store.nvme.verified_bytes == 4 * SIZE
        assert all_is_back(store)


async def test_what_has_no_room_is_read_through_ram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bypass, "SCRATCH_BYTES", 3 * MIB)
    await fill(tmp_path, 5)
    async with open_store(tmp_path) as store:
        c = await client(store, size=SIZE)
        got: dict[int, bytes] = {}
        stream = store.open_get(c.run(tokens(5)), time.monotonic() + 20, bypass_ram=True)
        await collect(stream, got)
        await stream.close()
        assert got == {i: payload(i, SIZE) for i in range(5)}
        assert all_is_back(store)


async def test_memory_serves_again_only_when_the_device_has_let_go_of_it(tmp_path: Path) -> None:
    await fill(tmp_path, 2)
    files = RangeFiles()
    async with gated_store(tmp_path, files) as store:
        c = await client(store, size=SIZE)
        gate = files.gates[slot_of(store, c, 0)] = Gate()
        stream = store.open_get(c.run(tokens(2)), time.monotonic() + 0.05, bypass_ram=True)
        assert await stream.next() is None
        assert list(stream.states) == [pb.MISS_DEADLINE] * 2
        await stream.close()
        await gate.reached.wait()
        assert arena(store).size_bytes - arena(store).free_bytes >= SIZE
        gate.set()
        await reads_ended(store)
        assert all_is_back(store)
        assert c.states(c.run(tokens(2))) == [pb.IN_NVME] * 2


async def test_rotten_bytes_and_a_device_that_fails_are_misses(tmp_path: Path) -> None:
    await fill(tmp_path, 3)
    files = RangeFiles()
    async with gated_store(tmp_path, files) as store:
        c = await client(store, size=SIZE)
        at = slot_of(store, c, 1)
        files.bad = {at}
        stream = store.open_get(c.run(tokens(3)), time.monotonic() + 20, bypass_ram=True)
        await collect(stream, got := {})
        assert list(stream.states) == [pb.IN_NVME, pb.MISS_TIER_DOWN, pb.IN_NVME]
        await stream.close()
        files.bad = set()
        assert isinstance(store.nvme, VolumeTier)
        with (store.nvme._volume.directory / "data").open("r+b") as opened:
            opened.seek(at + 100_000)
            opened.write(bytes(64))
        stream = store.open_get(c.run(tokens(3)), time.monotonic() + 20, bypass_ram=True)
        await collect(stream, got)
        assert stream.states[1] == pb.MISS_CORRUPT
        await stream.close()
        assert 1 not in got
        assert store.accounts.checksum_failures["nvme"] == 1
        assert store.match(c.run(tokens(3)), pb.PREFIX, pb.DEPTH_NODE).chunks == 1
        assert all_is_back(store)


async def test_a_get_that_ends_early_gives_everything_back(tmp_path: Path) -> None:
    await fill(tmp_path, 6)
    async with open_store(tmp_path) as store:
        c = await client(store, size=SIZE)
        for taken in range(3):
            stream = store.open_get(c.run(tokens(6)), time.monotonic() + 20, bypass_ram=True)
            for _ in range(taken):
                grants = await stream.next()
                assert grants
            await stream.close()
        await reads_ended(store)
        assert all_is_back(store)


@pytest.mark.parametrize("seed", range(5))
def test_the_arena_against_a_map(seed: int) -> None:
    rng = random.Random(seed)
    size = 64
    arena, used = Arena(size), dict[int, int]()
    for _ in range(2000):
        if used and rng.random() < 0.5:
            offset = rng.choice(list(used))
            arena.give(offset, used.pop(offset))
        else:
            wanted = rng.randint(1, 20)
            taken = {i for at, n in used.items() for i in range(at, at + n)}
            offset = arena.take(wanted)
            holes = "".join("x" if i in taken else "." for i in range(size)).split("x")
            if offset is None:
                assert max(map(len, holes)) < wanted
            else:
                assert not taken & set(range(offset, offset + wanted))
                assert offset + wanted <= size
                used[offset] = wanted
        assert arena.free_bytes == size - sum(used.values())
