"""What is particular to AsyncKVClient: cancellation, loops, many tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import grpc
import numpy as np
import pytest
from support_daemon import Daemon, daemon
from wire_server import FAMILY, Canary, WireServer, honest_get, payload, wire_server

from kvstored_client import AsyncKVClient, KVFamily, KVPart
from kvstored_client.proto import kvstore_pb2 as pb

__all__ = ["daemon"]
CHUNKS = 4
PREFIX = FAMILY.prefix(range(64 * CHUNKS))


@pytest.fixture
async def server() -> AsyncIterator[WireServer]:
    with wire_server() as running:
        yield running


@pytest.mark.parametrize("messages", [0, 1, 2, 4])
async def test_a_cancelled_get_writes_nothing_more(server: WireServer, messages: int) -> None:
    loop = asyncio.get_running_loop()
    begun, returned = asyncio.Event(), threading.Event()

    def script(request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        answer = honest_get(request)
        for _ in range(messages):
            yield next(answer)
        loop.call_soon_threadsafe(begun.set)
        server.hold(returned)
        yield from answer

    server.on_get = script
    canary = Canary(CHUNKS)
    async with AsyncKVClient(server.target) as client:
        task = asyncio.create_task(client.get(PREFIX, canary.into))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        before = canary.all.copy()
        returned.set()
        await asyncio.to_thread(server.wait_ended)
        assert np.array_equal(canary.all, before)
        assert canary.guards_stand()
        assert await client.drain(1)
        # The client is as good as before.
        server.on_get = honest_get
        assert (await client.get(PREFIX, canary.into)).chunks == CHUNKS


async def test_a_cancelled_put_reads_nothing_more(server: WireServer) -> None:
    loop = asyncio.get_running_loop()
    begun, returned = asyncio.Event(), threading.Event()
    came: list[bytes] = []

    def script(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        next(requests)
        yield pb.PutPlan(
            states=bytes([pb.WANTED] * CHUNKS),
            payload_bytes=CHUNKS * len(payload(0)),
            max_frame_bytes=20_000,
        ).SerializeToString()
        came.append(next(requests))
        loop.call_soon_threadsafe(begun.set)
        server.hold(returned)
        came.extend(requests)

    server.on_put = script
    data = b"".join(payload(i) for i in range(CHUNKS))
    memory = np.frombuffer(data, np.uint8).copy()
    async with AsyncKVClient(server.target) as client:
        task = asyncio.create_task(client.put(PREFIX, memory))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        memory[:] = 0
        returned.set()
        await asyncio.to_thread(server.wait_ended)
    sent = b"".join(came)
    assert sent == data[: len(sent)]


async def test_a_timeout_around_a_verb_is_a_cancellation(server: WireServer) -> None:
    held = threading.Event()

    def script(request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        server.hold(held)
        yield from honest_get(request)

    server.on_get = script
    canary = Canary(CHUNKS)
    async with AsyncKVClient(server.target) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.get(PREFIX, canary.into)
        held.set()
        await asyncio.to_thread(server.wait_ended)
        assert canary.untouched()


async def test_many_tasks_share_one_client(daemon: Daemon) -> None:
    async with AsyncKVClient(daemon.target) as client:

        async def one(seed: int) -> bool:
            family = KVFamily("m", f"tasks{seed % 3}", "float32", parts=[KVPart("kv", 64 << 10)])
            prefix = family.prefix([seed] * 64 * 5)
            data = np.random.default_rng(seed).integers(0, 256, (5, 64 << 10), dtype=np.uint8)
            into = np.zeros_like(data)
            put = await client.put(prefix, data)
            got = await client.get(prefix, into)
            return put.refused == 0 and got.chunks == 5 and np.array_equal(into, data)

        assert all(await asyncio.gather(*(one(i) for i in range(20))))
        assert await client.drain(1)


def test_one_client_on_one_loop_after_another(daemon: Daemon) -> None:
    client = AsyncKVClient(daemon.target)
    for _ in range(2):
        assert asyncio.run(client.hello()).protocol_version == 1
