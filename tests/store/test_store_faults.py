"""A failing device costs durability and misses, said as such, and nothing else."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path

import pytest
from store.support_store import MIB, client, open_store, payload, settle, tokens

from kvstored.errors import KvstoredError
from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault, FaultyFiles
from kvstored.tiers.base import ReadOutcome
from kvstored_client.proto import kvstore_pb2 as pb


class Gate(threading.Event):
    """An event that says when somebody began to wait for it. Made on the loop."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self.reached = asyncio.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self._loop.call_soon_threadsafe(self.reached.set)
        return super().wait(timeout)


async def test_a_device_that_takes_no_writes_leaves_objects_in_ram(tmp_path: Path) -> None:
    files = FaultyFiles(RealFiles())
    async with open_store(tmp_path, files=files) as store:
        c = await client(store, size=MIB)
        files.inject(Fault("pwritev", "*/data", error=errno.EIO))
        run = c.run(tokens(2))
        data = [payload(i, MIB) for i in range(2)]
        states = await c.put(run, data, durable=True)
        assert list(states) == [pb.STORED_NOT_DURABLE] * 2
        assert (await c.get(run))[0] == dict(enumerate(data))
        assert store.writer is not None
        assert sum(store.writer.not_written.values()) == 2
        files.clear()
        later = c.run(tokens(2, seed=5))
        while list(await c.put(later, data, durable=True)) != [pb.STORED] * 2:
            await store.delete(later)  # the tier probes a device that failed by itself
        await settle(store)
        assert c.states(run) == [pb.IN_RAM] * 2


async def test_a_device_that_gives_no_reads_is_a_miss_until_it_does(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        await c.put(c.run(tokens(2)), [payload(i, MIB) for i in range(2)], durable=True)
    files = FaultyFiles(RealFiles())
    async with open_store(tmp_path, files=files) as store:
        c = await client(store, size=MIB)
        run = c.run(tokens(2))
        files.inject(Fault("preadv", "*/data", error=errno.EIO, times=2))
        got, states = await c.get(run)
        assert pb.MISS_TIER_DOWN in states
        assert store.ram.leased_bytes == 0
        while len(got) < 2:
            got, states = await c.get(run)
        assert got == {i: payload(i, MIB) for i in range(2)}


async def test_a_delete_that_the_device_refuses_is_not_answered_as_done(tmp_path: Path) -> None:
    files = FaultyFiles(RealFiles())
    async with open_store(tmp_path, files=files) as store:
        c = await client(store, size=MIB)
        run = c.run(tokens(2))
        await c.put(run, [payload(i, MIB) for i in range(2)], durable=True)
        for operation in ("pwritev", "fdatasync", "commit"):
            files.inject(Fault(operation, "*", error=errno.EIO))
        with pytest.raises(KvstoredError, match="durable"):
            await store.delete(run)
        assert c.states(run) == [pb.MISS_DELETED] * 2
        files.clear()


async def test_a_second_delete_waits_for_the_write_that_the_first_waits_for(
    tmp_path: Path,
) -> None:
    files = FaultyFiles(RealFiles())
    async with open_store(tmp_path, files=files) as store:
        c = await client(store, size=MIB)
        run = c.run(tokens(4))
        gate = Gate()
        files.inject(Fault("fdatasync", "*/data", stuck=gate))
        await c.put(run, [payload(i, MIB) for i in range(4)])
        await gate.reached.wait()
        first = asyncio.ensure_future(store.delete(run))
        await asyncio.wait([first], timeout=0.1)
        first.cancel()  # its client gave up
        second = asyncio.ensure_future(store.delete(run))
        await asyncio.wait([second], timeout=0.3)
        assert not second.done(), "answered while the bytes may still come to the disk"
        files.clear()
        gate.set()
        assert await second == 0
        assert store.tiers[2].usage().objects == 0


async def test_a_read_that_breaks_keeps_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        await c.put(c.run(tokens(3)), [payload(i, MIB) for i in range(3)], durable=True)
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        run = c.run(tokens(3))
        files_read = store.tiers[2].read

        async def broken(items: object, arrived: object = None) -> list[ReadOutcome]:
            raise RuntimeError("a bug in the tier")

        monkeypatch.setattr(store.tiers[2], "read", broken)
        got, states = await c.get(run)
        assert got == {}
        assert list(states) == [pb.MISS_TIER_DOWN] * 3
        assert store.ram.usage().charged_bytes == 0
        monkeypatch.setattr(store.tiers[2], "read", files_read)
        got, _ = await c.get(run)
        assert len(got) == 3


async def test_a_delete_without_its_commit_is_no_damage_after_a_restart(tmp_path: Path) -> None:
    """As a kill between the header and the index leaves it."""
    files = FaultyFiles(RealFiles())
    async with open_store(tmp_path, files=files) as store:
        c = await client(store, size=MIB)
        await c.put(c.run(tokens(3)), [payload(i, MIB) for i in range(3)], durable=True)
        files.inject(Fault("commit", "*/index", error=errno.EIO))
        await store.delete(c.run(tokens(3), 2, 3))
    async with open_store(tmp_path) as store:
        c = await client(store, size=MIB)
        run = c.run(tokens(3))
        assert store.tiers[2].usage().objects == 3, "the index still has it"
        got, states = await c.get(run)
        assert got == {i: payload(i, MIB) for i in range(2)}
        assert list(states) == [pb.IN_NVME, pb.IN_NVME, pb.MISS_EVICTED]
        assert store.accounts.checksum_failures["nvme"] == 0
        await settle(store)
        assert store.tiers[2].usage().objects == 2, "nor does it any more"
    async with open_store(tmp_path) as store:
        assert store.tiers[2].usage().objects == 2
