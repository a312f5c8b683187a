"""Writing behind: bounded, without pauses, and at a stop nothing is lost that is not reported."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from store.support_store import MIB, Client, client, fail_on_death, payload, settle, tokens
from store.test_store_faults import Gate

from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault, FaultyFiles
from kvstored.store import writer as writer_module
from kvstored.store.api import PutOffer, PutTicket, StoppedReport
from kvstored.store.store import Store, StoreSettings
from kvstored.supervise import Supervisor
from kvstored.tiers.nvme.volume_tier import VolumeTier
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.proto import kvstore_pb2 as pb

BOUND = 4 * MIB


class World:
    """A store that a test closes by itself, over files that fail on demand."""

    def __init__(self, directory: Path) -> None:
        self.files = FaultyFiles(RealFiles())
        self._directory = directory
        self._supervisor = Supervisor(fail_on_death)
        self.closed = True

    async def open(self, bound_bytes: int = BOUND) -> Client:
        self._supervisor = Supervisor(fail_on_death)
        tier = VolumeTier(self._directory, 64 * MIB, files=self.files, ahead_bytes=0)
        settings = StoreSettings(max_dirty_bytes=bound_bytes)
        self.store = Store(RamTier(16 * MIB), tier, settings, self._supervisor)
        await self.store.open()
        self.closed = False
        return await client(self.store, size=MIB)

    async def close(self, deadline_s: float = 20.0) -> StoppedReport:
        self.closed = True
        report = await self.store.close(deadline_s)
        await self._supervisor.stop()
        return report


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    made.files.clear()
    if not made.closed:
        await made.close()


def offer(to: Client, chunks: int, seed: int, *, wait: bool = False) -> PutOffer:
    run = to.run(tokens(chunks, seed))
    return PutOffer(run, [MIB] * chunks, b"", False, wait, 0, time.monotonic() + 20)


def wanted(ticket: PutTicket) -> list[int]:
    return [w.index for w in ticket.wanted]


# ---- the bound on dirty bytes -------------------------------------------------------------------


async def test_puts_under_way_count_against_the_bound(world: World) -> None:
    to = await world.open()
    store, writer = world.store, world.store.writer
    assert writer is not None
    first = await store.begin_put(offer(to, 3, 1))
    assert wanted(first) == [0, 1, 2]
    assert writer.claimed_bytes == 3 * MIB
    second = await store.begin_put(offer(to, 2, 2))
    assert list(second.states) == [pb.REFUSED_NO_ROOM] * 2
    waiting = asyncio.ensure_future(store.begin_put(offer(to, 2, 3, wait=True)))
    await asyncio.sleep(0)
    assert not waiting.done()
    await store.abort_put(first)
    third = await waiting
    assert wanted(third) == [0, 1]
    for ticket in (second, third):
        await store.abort_put(ticket)
    assert writer.claimed_bytes == 0


async def test_a_put_waits_for_a_slow_device_or_is_refused(world: World) -> None:
    to = await world.open()
    store, writer = world.store, world.store.writer
    assert writer is not None
    gate = Gate()
    world.files.inject(Fault("fdatasync", "*/data", stuck=gate, skip=2))  # but for the new region
    assert set(await to.put(to.run(tokens(4)), [payload(i, MIB) for i in range(4)]))
    await gate.reached.wait()
    assert (writer.dirty_bytes, writer.claimed_bytes) == (BOUND, 0)
    refused = await to.put(to.run(tokens(1, 2)), [payload(9, MIB)], wait=False)
    assert list(refused) == [pb.REFUSED_NO_ROOM]
    late = await to.put(to.run(tokens(1, 2)), [payload(9, MIB)], timeout_s=0.05)
    assert list(late) == [pb.REFUSED_DEADLINE]
    waits = asyncio.ensure_future(to.put(to.run(tokens(1, 2)), [payload(9, MIB)]))
    await asyncio.sleep(0)
    assert not waits.done()
    gate.set()
    assert list(await waits) == [pb.STORED]
    await settle(store)
    assert (writer.dirty_bytes, writer.claimed_bytes) == (0, 0)


@pytest.mark.parametrize("bound", [12 * MIB, 64 * MIB])
async def test_a_put_that_is_cancelled_claims_nothing(world: World, bound: int) -> None:
    """While it waits for the backlog, or for room in RAM."""
    to = await world.open(bound)
    writer = world.store.writer
    assert writer is not None
    kept = await world.store.begin_put(offer(to, 10, 1))
    assert len(wanted(kept)) == 10
    waiting = asyncio.ensure_future(world.store.begin_put(offer(to, 8, 3, wait=True)))
    for _ in range(5):
        await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert writer.claimed_bytes == 10 * MIB
    await world.store.abort_put(kept)
    assert writer.claimed_bytes == 0


# ---- no pauses ----------------------------------------------------------------------------------


async def test_a_batch_is_written_while_another_is_committed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "BATCH_BYTES", MIB)
    to = await world.open()
    await to.put(to.run(tokens(1, 5)), [payload(5, MIB)], durable=True)
    committing, writing = Gate(), Gate()
    writing.set()
    world.files.inject(Fault("commit", "*/index", stuck=committing, times=1))
    world.files.inject(Fault("pwritev", "*/data", stuck=writing, skip=1, times=1))
    run = to.run(tokens(2))
    put = asyncio.ensure_future(to.put(run, [payload(i, MIB) for i in range(2)], durable=True))
    try:
        async with asyncio.timeout(10):
            await committing.reached.wait()
            await writing.reached.wait()
    finally:
        committing.set()
    assert set(await put) == {pb.STORED}


# ---- a clean stop -------------------------------------------------------------------------------


async def test_what_had_failed_is_tried_again_at_a_stop(world: World) -> None:
    to = await world.open()
    world.files.inject(Fault("pwritev", "*/data", error=errno.EIO, skip=2, times=1))
    run = to.run(tokens(3))
    data = [payload(i, MIB) for i in range(3)]
    states = list(await to.put(run, data, durable=True))
    assert pb.STORED_NOT_DURABLE in states
    assert await world.close() == StoppedReport(0, 0)
    to = await world.open()
    assert (await to.get(run))[0] == dict(enumerate(data))


async def test_a_stop_says_what_is_not_durable(world: World) -> None:
    to = await world.open()
    safe = to.run(tokens(2, 1))
    await to.put(safe, [payload(i, MIB) for i in range(2)], durable=True)
    world.files.inject(Fault("pwritev", "*/data", error=errno.EIO))
    failed = to.run(tokens(3, 2))
    await to.put(failed, [payload(i, MIB) for i in range(3)], durable=True)
    dropped = to.run(tokens(1, 3))
    await to.put(dropped, [payload(7, MIB)], durable=True)
    await world.store.delete(dropped)
    assert await world.close() == StoppedReport(3, 3 * MIB), "not what was deleted"
    world.files.clear()
    to = await world.open()
    assert len((await to.get(safe))[0]) == 2
    assert not (await to.get(failed))[0]


async def test_a_stop_keeps_its_deadline_and_says_what_was_left(world: World) -> None:
    to = await world.open()
    gate = Gate()
    world.files.inject(Fault("fdatasync", "*/data", stuck=gate, skip=2))
    run = to.run(tokens(3))
    await to.put(run, [payload(i, MIB) for i in range(3)])
    await gate.reached.wait()
    assert await world.close(0.2) == StoppedReport(3, 3 * MIB)
    gate.set()
