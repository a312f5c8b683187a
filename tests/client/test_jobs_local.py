"""Jobs and tasks on the daemon's own node: bytes move through shared memory, on threads."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from support_daemon import Daemon, daemon

from kvstored_client import AsyncKVClient, Iov, KVClient, KVFamily, KVPart, Prefix
from kvstored_client.failures import FailureKind
from kvstored_client.steps import Answer, Step
from kvstored_client.stopping import StopFlag
from kvstored_client.transports.auto_async import THREADS

__all__ = ["daemon"]
CHUNKS = 12
OBJECT_BYTES = 1 << 20
FRAGMENT = 16 << 10
GUARD = 0xA5
WAIT_S = 30.0
_families = iter(range(1000))


def new_prefix() -> Prefix:
    family = KVFamily("m", f"jobs{next(_families)}", "float32", parts=[KVPart("kv", OBJECT_BYTES)])
    return family.prefix(range(64 * CHUNKS))


def contents(seed: int) -> NDArray[np.uint8]:
    """Never the guard's value."""
    return np.random.default_rng(seed).integers(0, 160, (CHUNKS, OBJECT_BYTES), dtype=np.uint8)


class Pool:
    """Memory of an engine's: the objects in shuffled fragments, with guards between them."""

    def __init__(self) -> None:
        count = CHUNKS * OBJECT_BYTES // FRAGMENT
        self.all: NDArray[np.uint8] = np.full((count, FRAGMENT + 64), GUARD, np.uint8)
        self._order = np.random.default_rng(5).permutation(count)
        self.iov = Iov(
            self._order * (FRAGMENT + 64) + self.all.ctypes.data,
            np.full(count, FRAGMENT),
            np.full(CHUNKS, OBJECT_BYTES // FRAGMENT),
        )

    def objects(self) -> NDArray[np.uint8]:
        return self.all[self._order, :FRAGMENT].reshape(CHUNKS, OBJECT_BYTES)

    def guards_stand(self) -> bool:
        return bool((self.all[:, FRAGMENT:] == GUARD).all())

    def untouched(self) -> bool:
        return bool((self.all == GUARD).all())


@pytest.fixture
def client(daemon: Daemon) -> Iterator[KVClient]:
    with KVClient(daemon.target) as made:
        yield made
        assert made._transport._wire is None, "all of it went by the local session"


def test_jobs_scatter_and_gather_through_shared_memory(client: KVClient) -> None:
    prefix, data = new_prefix(), contents(1)
    source = Pool()
    source.objects()  # shuffled view of nothing yet
    source.all[source._order, :FRAGMENT] = data.reshape(-1, FRAGMENT)
    put = client.submit_put(prefix, source.iov)
    assert put.result().stored == CHUNKS
    into = Pool()
    got = client.submit_get(prefix, into.iov).result()
    assert got.chunks == CHUNKS
    assert np.array_equal(into.objects(), data)
    assert into.guards_stand()
    assert client.get(prefix, flat := np.zeros_like(data)).chunks == CHUNKS
    assert np.array_equal(flat, data)


def test_jobs_cancelled_at_any_moment_write_nothing_more(client: KVClient) -> None:
    prefix, data = new_prefix(), contents(2)
    assert client.put(prefix, data).stored == CHUNKS
    into, chance = Pool(), random.Random(3)
    reasons = set()
    for _ in range(60):
        into.all[:] = GUARD
        job = client.submit_get(prefix, into.iov)
        pause = threading.Event()
        pause.wait(chance.uniform(0, 0.004))
        cancelled = job.cancel()
        result = job.result()
        reasons.add(result.reason)
        assert cancelled == (result.reason == "cancelled")
        assert np.array_equal(into.objects()[result.ok], data[result.ok])
        into.all[:] = GUARD
        assert client.drain(WAIT_S)
        assert into.untouched()
    assert "cancelled" in reasons


def test_puts_cancelled_at_any_moment_store_what_was_meant_or_nothing(client: KVClient) -> None:
    chance = random.Random(4)
    for turn in range(25):
        prefix, data = new_prefix(), contents(turn)
        memory = data.copy()
        job = client.submit_put(prefix, memory)
        threading.Event().wait(chance.uniform(0, 0.006))
        job.cancel()
        memory[:] = GUARD
        into = np.zeros_like(data)
        got = client.get(prefix, into)
        assert np.array_equal(into[got.ok], data[got.ok])


# ---- asyncio -------------------------------------------------------------------------------------


async def test_tasks_go_by_the_local_session(daemon: Daemon) -> None:
    prefix, data = new_prefix(), contents(6)
    async with AsyncKVClient(daemon.target) as client:
        slots = await client.reserve(prefix, 0, CHUNKS)
        for i in range(CHUNKS):
            slots[i][:] = data[i].tobytes()
        assert (await slots.commit()).stored == CHUNKS
        match = await client.match(prefix, hold=True)
        assert match.chunks == CHUNKS
        assert match.hold is not None
        match.hold.release()
        lease = await client.acquire(prefix)
        assert [bytes(lease[i]) for i in range(CHUNKS)] == [row.tobytes() for row in data]
        lease.release()
        pools = [Pool() for _ in range(2 * THREADS)]
        results = await asyncio.gather(*(client.get(prefix, pool.iov) for pool in pools))
        assert [r.chunks for r in results] == [CHUNKS] * len(pools)
        assert all(np.array_equal(pool.objects(), data) for pool in pools)
        assert client._transport._wire is None, "all of it went by the local session"


async def test_cancelled_tasks_write_nothing_more(daemon: Daemon) -> None:
    prefix, data = new_prefix(), contents(7)
    chance = random.Random(8)
    async with AsyncKVClient(daemon.target) as client:
        assert (await client.put(prefix, data)).stored == CHUNKS
        into = Pool()
        cancelled = 0
        for _ in range(60):
            task = asyncio.create_task(client.get(prefix, into.iov))
            await asyncio.sleep(chance.uniform(0, 0.004))
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                cancelled += 1
            into.all[:] = GUARD
            await asyncio.sleep(0.001)
            assert into.untouched()
        assert cancelled
        assert await client.drain(WAIT_S)
        assert (await client.get(prefix, into.iov)).chunks == CHUNKS
        assert np.array_equal(into.objects(), data)


async def test_a_step_that_no_thread_has_come_to_ends_by_its_deadline(daemon: Daemon) -> None:
    prefix = new_prefix()
    busy, go_on = threading.Semaphore(0), threading.Event()
    async with AsyncKVClient(daemon.target) as client:
        assert (await client.match(prefix)).chunks == 0
        inner = client._transport._local.run

        def held(step: Step, stop: StopFlag | None = None) -> Answer:
            busy.release()
            assert go_on.wait(WAIT_S)
            return inner(step, stop)

        client._transport._local.run = held  # type: ignore[method-assign]  # a busy thread each
        running = [asyncio.create_task(client.match(prefix)) for _ in range(THREADS)]
        for _ in running:
            assert await asyncio.to_thread(busy.acquire, timeout=WAIT_S)
        late = await client.match(prefix, timeout_s=0.05)
        assert late.reason == FailureKind.DEADLINE.value
        waiting = asyncio.create_task(client.match(prefix))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()
        assert [m.reason for m in await asyncio.gather(*running)] == ["never_stored"] * THREADS


async def test_without_a_local_session_tasks_go_by_grpc(daemon: Daemon) -> None:
    prefix, data = new_prefix(), contents(9)
    async with AsyncKVClient(daemon.target) as client:
        client._transport._local._local = None
        assert (await client.put(prefix, data)).stored == CHUNKS
        assert (await client.acquire(prefix)).reason == "not_local"
        assert client._transport._wire is not None
