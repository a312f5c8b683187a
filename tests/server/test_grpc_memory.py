"""A put that ends badly gives its memory back at once, and not when garbage is collected."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import threading
from asyncio import to_thread
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from server.serving import MIB, Refused, Served, Wire, header, refused, serving

from kvstored.server.limits import Limits
from kvstored_client.identity import KVFamily, KVPart
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods

OTHER = KVFamily(
    model="other",
    weights="w",
    kv_dtype="float32",
    chunk_tokens=64,
    parts=[KVPart("big", nbytes=3 * MIB)],
).spec()


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    # A second process may take longer to start than the first one's put may stand still.
    killed = getattr(request.node, "callspec", None) and "killed" in request.node.callspec.id
    limits = Limits(stall_timeout_s=20.0 if killed else 0.5)
    async with serving(limits, cap_bytes=16 * MIB) as running:
        yield running


@contextlib.asynccontextmanager
async def killed_put(served: Served) -> AsyncIterator[None]:
    """A put of 8 x 1 MiB by a process that is killed after the block."""
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("hold_call.py")),
        "put",
        served.unix,
        "8",
        str(MIB),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert client.stdout is not None
    assert await client.stdout.readline() == b"begun\n"
    yield
    client.kill()
    await client.wait()


def half_a_put(wire: Wire, how: str) -> None:
    """A put of 8 x 1 MiB that is truncated, cancelled, or brings nothing more until it is ended."""
    head = header(8, parts=["extra"], lengths=[MIB] * 8)
    if how == "truncated":
        with pytest.raises(Refused, match="ended at byte"):
            wire.put(head, [bytes(MIB), bytes(MIB // 2)])
        return
    done = threading.Event()

    def messages() -> Iterator[bytes]:
        yield head.SerializeToString()
        yield bytes(MIB + MIB // 2)
        done.wait()

    call = wire.channel.stream_stream(methods.PUT.path)(messages())
    next(call)
    if how == "cancelled":
        call.cancel()
    with pytest.raises(grpc.RpcError) as failure:
        next(call)
    done.set()
    if how == "stalled":
        assert refused(failure.value).error.code == pb.DEADLINE


@pytest.mark.parametrize("how", ["killed", "truncated", "cancelled", "stalled"])
async def test_memory_of_puts_that_end_badly_is_there_for_others(served: Served, how: str) -> None:
    wire = Wire(served.unix)
    await to_thread(wire.hello)
    if how == "killed":
        async with killed_put(served), killed_put(served):
            assert served.ram.usage().charged_bytes == 16 * MIB
    else:
        for _ in range(2):
            await to_thread(half_a_put, wire, how)
    await served.idle()
    hello = pb.HelloRequest(protocol_version=1, namespace="default", families=[OTHER])
    await to_thread(wire.unary, methods.HELLO, hello)
    head = header(4, family=OTHER.fingerprint, parts=["big"], lengths=[3 * MIB] * 4)
    head.when_full = pb.REFUSE
    _, states = await to_thread(wire.put, head, [bytes(MIB)] * 12)
    assert states == bytes([pb.STORED]) * 4
    wire.close()
