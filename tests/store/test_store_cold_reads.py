"""Objects come up from a device in order as they complete, and a sick one costs only time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from store.support_store import MIB, Client, client, open_store, payload, tokens
from tiers.nvme_gates import Gate, RangeFiles

from kvstored.store.api import Grant
from kvstored.store.index import NONE
from kvstored.store.loader import piece_checksums
from kvstored.store.reading import GetStream
from kvstored.store.store import Store
from kvstored.tiers.base import TierKind
from kvstored.tiers.nvme.volume_tier import VolumeTier
from kvstored_client.proto import kvstore_pb2 as pb

SIZE = MIB + 4096
"""Two of them are more than one transfer brings."""


async def fill(directory: Path, chunks: int, size: int = SIZE) -> None:
    """A volume with one prefix, put and closed."""
    async with open_store(directory) as store:
        c = await client(store, size=size)
        await c.put(c.run(tokens(chunks)), [payload(i, size) for i in range(chunks)], durable=True)


@contextlib.asynccontextmanager
async def gated_store(
    directory: Path, files: RangeFiles, ram_bytes: int = 16 * MIB
) -> AsyncIterator[Store]:
    """An open store whose gates are opened before it closes, however the test ends."""
    async with open_store(directory, files=files, ram_bytes=ram_bytes) as store:
        with files.all_opened():
            yield store


def slot_of(store: Store, c: Client, chunk: int) -> int:
    """Where the chunk's object begins in the data file."""
    tier = store.nvme
    assert isinstance(tier, VolumeTier)
    index = store.namespaces["default"].index
    (row,) = index.find_many(c.run(tokens(chunk + 1), chunk, chunk + 1).packed)
    place = index.place[TierKind.NVME][index.first_object[int(row)]]
    entry = tier._space.entry(place)
    assert entry is not None
    return tier._volume.data.offset(entry, place)


def in_ram(store: Store, c: Client, chunks: int) -> list[int]:
    return [i for i, s in enumerate(c.states(c.run(tokens(chunks)))) if s == pb.IN_RAM]


async def until_in_ram(store: Store, c: Client, chunks: int, wanted: list[int]) -> None:
    """Join the loads of these chunks; nothing else may be in RAM then."""
    for i in wanted:
        await store.prefetch(c.run(tokens(chunks), i, i + 1), time.monotonic() + 20)
    assert in_ram(store, c, chunks) == wanted


async def collect(stream: GetStream, got: dict[int, bytes]) -> None:
    while (grants := await stream.next()) is not None:
        got |= {g.index: bytes(g.view) for g in grants}
        stream.delivered(grants)


async def test_what_comes_before_a_stuck_object_is_handed_out_and_the_rest_lands(
    tmp_path: Path,
) -> None:
    await fill(tmp_path, 5)
    files = RangeFiles()
    async with gated_store(tmp_path, files) as store:
        c = await client(store, size=SIZE)
        gate = files.gates[slot_of(store, c, 2)] = Gate()
        run, got = c.run(tokens(5)), dict[int, bytes]()
        stream = store.open_get(run, time.monotonic() + 60)
        getting = asyncio.ensure_future(collect(stream, got))
        await gate.reached.wait()
        await until_in_ram(store, c, 5, [0, 1, 3, 4])
        assert sorted(got) == [0, 1], "in order, and no later than they are there"
        stream._deadline = time.monotonic()  # the time is over now
        getting.cancel()
        await asyncio.wait([getting])
        await collect(stream, got)
        assert got == {i: payload(i, SIZE) for i in (0, 1)}
        assert list(stream.states) == [pb.IN_NVME] * 2 + [pb.MISS_DEADLINE] * 3
        await stream.close()
        assert store.ram.leased_bytes == 0
        gate.set()
        await until_in_ram(store, c, 5, [0, 1, 2, 3, 4])
        assert (await c.get(run))[0] == {i: payload(i, SIZE) for i in range(5)}


async def test_an_extent_is_not_used_again_before_its_read_has_returned(tmp_path: Path) -> None:
    await fill(tmp_path, 1)
    files = RangeFiles()
    async with gated_store(tmp_path, files, ram_bytes=4 * MIB) as store:
        c = await client(store, size=SIZE)
        run = c.run(tokens(1))
        gate = files.gates[slot_of(store, c, 0)] = Gate()
        stream = store.open_get(run, time.monotonic() + 0.05)
        assert await stream.next() is None
        await stream.close()
        await gate.reached.wait()
        deleting = asyncio.ensure_future(store.delete(run))
        await asyncio.sleep(0)
        charged = store.ram.charge_bytes(SIZE)
        assert store.ram.usage().charged_bytes == charged, "the kernel may still write there"
        others = c.run(tokens(4, seed=9))
        states = await c.put(others, [payload(i, SIZE) for i in range(4)], wait=False)
        stored = states.count(pb.STORED)
        assert 0 < stored < 4
        assert set(states[stored:]) <= {pb.REFUSED_NO_ROOM, pb.REFUSED_CAP}
        gate.set()
        await deleting
        assert (await c.get(others))[0] == {i: payload(i, SIZE) for i in range(stored)}


async def test_a_row_that_is_another_object_by_now_is_not_taken_for_the_old_one(
    tmp_path: Path,
) -> None:
    await fill(tmp_path, 1)
    files = RangeFiles()
    async with gated_store(tmp_path, files) as store:
        c = await client(store, size=SIZE)
        old = c.run(tokens(1))
        index = store.namespaces["default"].index
        gate = files.gates[slot_of(store, c, 0)] = Gate()
        stream = store.open_get(old, time.monotonic() + 0.05)
        assert await stream.next() is None
        await stream.close()
        await gate.reached.wait()
        deleting = asyncio.ensure_future(store.delete(old))
        await asyncio.sleep(0)
        new = c.run(tokens(1, seed=5))
        await c.put(new, [payload(5, SIZE)], durable=True)
        (chunk,) = index.find_many(new.packed)
        store.residency.evict_chunk(store.namespaces["default"], int(chunk), TierKind.RAM)
        assert index.place[TierKind.RAM][index.first_object[int(chunk)]] == NONE
        got, _ = await c.get(new, timeout_s=20)
        assert got == {0: payload(5, SIZE)}
        gate.set()
        await deleting
        assert (await c.get(new))[0] == {0: payload(5, SIZE)}
        assert store.accounts.checksum_failures["nvme"] == 0


async def test_a_batch_that_ends_forgets_no_newer_load(tmp_path: Path) -> None:
    await fill(tmp_path, 4)
    files = RangeFiles()
    async with gated_store(tmp_path, files, ram_bytes=32 * MIB) as store:
        c = await client(store, size=SIZE)
        run = c.run(tokens(4))
        gate = files.gates[slot_of(store, c, 3)] = Gate()
        first = asyncio.ensure_future(c.get(run))
        await gate.reached.wait()
        await until_in_ram(store, c, 4, [0, 1, 2])
        assert store._loader is not None
        batch = set(store._loader._tasks)
        ns = store.namespaces["default"]
        rows = ns.index.find_many(run.packed)
        store.residency.evict_chunk(ns, int(rows[2]), TierKind.RAM)  # its batch goes on
        again = files.gates[slot_of(store, c, 2)] = Gate()
        second = asyncio.ensure_future(c.get(run))
        await again.reached.wait()
        gate.set()
        assert (await first)[0] == {i: payload(i, SIZE) for i in range(4)}
        await asyncio.wait(batch)
        third = asyncio.ensure_future(c.get(run))
        await asyncio.sleep(0)
        again.set()
        assert (await second)[0] == (await third)[0] == {i: payload(i, SIZE) for i in range(4)}
        assert isinstance(store.nvme, VolumeTier)
        assert store.nvme.verified_bytes == 5 * SIZE, "no object is read for each who asks"
        assert store.ram.leased_bytes == 0


async def test_the_checksums_that_the_tier_found_are_published(tmp_path: Path) -> None:
    await fill(tmp_path, 2, size=3 * MIB + 5)
    async with open_store(tmp_path) as store:
        c = await client(store, size=3 * MIB + 5)
        stream = store.open_get(c.run(tokens(2)), time.monotonic() + 20)
        grants: list[Grant] = []
        while (more := await stream.next()) is not None:
            grants += more
        for grant in grants:
            assert grant.piece_checksums == piece_checksums(grant.view)
        stream.delivered(grants)
        await stream.close()
