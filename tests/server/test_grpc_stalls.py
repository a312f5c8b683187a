"""Peers that stand still, late calls, and who else feels it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from asyncio import to_thread
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from server.frozen_peer import FrozenPeer
from server.serving import (
    MIB,
    PART_BYTES,
    TOKEN,
    Refused,
    Served,
    Wire,
    header,
    refused,
    run,
    serving,
)

from kvstored.errors import DeadlineExceeded
from kvstored.server.limits import Limits
from kvstored.server.watch import Waits, Watchdog
from kvstored.store.api import PutOffer, PutTicket
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods

MANY = 512  # of PART_BYTES: 32 MiB, far beyond what sockets and gRPC buffer
LIMITS = Limits(max_running_streams=4, max_running_calls=4, stall_timeout_s=0.4)


@pytest.fixture
async def served(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Served]:
    async with serving(LIMITS) as running:
        yield running
    assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.fixture
async def wire(served: Served) -> AsyncIterator[Wire]:
    client = Wire(served.unix)
    await to_thread(client.hello)
    yield client
    client.close()


@pytest.fixture
async def other(served: Served) -> AsyncIterator[Wire]:
    """Of the namespace "locked"."""
    client = Wire(served.unix, TOKEN)
    await to_thread(client.hello, namespace="locked")
    yield client
    client.close()


class StalledPut:
    """A put that sends its header (unless None) and then nothing."""

    def __init__(self, wire: Wire, head: pb.PutHeader | None, timeout: float | None = None) -> None:
        self._head = head
        self._over = threading.Event()
        self.call = wire.channel.stream_stream(methods.PUT.path)(
            self._messages(), timeout=timeout, metadata=wire.metadata
        )

    def _messages(self) -> Iterator[bytes]:
        if self._head is not None:
            yield self._head.SerializeToString()
        self._over.wait()

    def plan(self) -> pb.PutPlan:
        return pb.PutPlan.FromString(next(self.call))

    def failure(self) -> Refused:
        """How it ended; a plan before that does not matter."""
        with pytest.raises(grpc.RpcError) as failure:
            list(self.call)
        self._over.set()
        return refused(failure.value)

    def end(self) -> None:
        self.call.cancel()
        self._over.set()


async def fill(wire: Wire) -> None:
    await to_thread(wire.put, header(MANY), [bytes(MIB)] * (MANY * PART_BYTES // MIB))


async def test_a_put_that_brings_nothing_is_ended(served: Served, wire: Wire) -> None:
    put = StalledPut(wire, header(4))
    await to_thread(put.plan)
    failure = await to_thread(put.failure)
    assert (failure.status, failure.error.code) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        pb.DEADLINE,
    )
    assert "sent or took nothing" in failure.error.message
    await served.idle()
    assert served.ram.usage().charged_bytes == 0
    assert served.outcomes.ended[-1][:2] == ("put", "DEADLINE")


async def test_a_get_that_is_not_read_is_ended(served: Served, wire: Wire) -> None:
    await fill(wire)
    stream = wire.start_get(pb.GetRequest(run=run(MANY)), timeout=None)
    await to_thread(next, stream)
    await served.idle()
    assert served.nothing_held()
    assert served.outcomes.ended[-1] == ("get", "DEADLINE", "ram")
    with pytest.raises(grpc.RpcError) as failure:
        await to_thread(list, stream)
    assert refused(failure.value).error.code == pb.DEADLINE


async def test_only_what_stands_still_before_its_peer_is_ended() -> None:
    async def looked_at(waits: Waits, draining: bool, moving: bool) -> str:
        watchdog = Watchdog(10.0, lambda: draining)
        with watchdog.watch(waits) as call:
            start = call.since
            for second in range(12):
                call.moves += moving
                watchdog._judge(call, start + second, draining)
            await asyncio.sleep(0)
        return "ended well"

    for waits, draining, moving in [
        (Waits.PEER, False, True),
        (Waits.STORE, False, False),
        (Waits.OUTCOME, False, False),
        (Waits.OUTCOME, True, False),
    ]:
        assert await looked_at(waits, draining, moving) == "ended well"
    with pytest.raises(DeadlineExceeded, match=r"nothing for 10\.0 s"):
        await looked_at(Waits.PEER, False, False)


# ---- one namespace does not starve others --------------------------------------------------------


async def test_a_namespace_has_half_of_the_streams(wire: Wire, other: Wire) -> None:
    nameless = [StalledPut(wire, None) for _ in range(8)]
    puts = [StalledPut(wire, header(1)) for _ in range(2)]
    for put in puts:
        await to_thread(put.plan)
    for verb in (
        lambda: wire.put(header(1), []),
        lambda: wire.get(pb.GetRequest(run=run(1))),
    ):
        with pytest.raises(Refused, match="'default' are running, which is its half") as failure:
            await to_thread(verb)
        assert failure.value.error.code == pb.RESOURCE_EXHAUSTED
        assert failure.value.error.retry_after_ms == LIMITS.retry_after_ms
    _, states = await to_thread(other.put, header(1, namespace="locked"), [bytes(PART_BYTES)])
    assert states == bytes([pb.STORED])
    objects, _, _ = await to_thread(other.get, pb.GetRequest(run=run(1, namespace="locked")))
    assert objects == {0: bytes(PART_BYTES)}
    for put in puts + nameless:
        put.end()


async def test_a_share_is_given_back(served: Served, wire: Wire) -> None:
    for i in range(6):
        await to_thread(wire.put, header(1, salt=bytes([i])), [bytes(PART_BYTES)])
        await served.idle()
    with pytest.raises(Refused, match="does not grant"):
        await to_thread(wire.put, header(1, namespace="locked"), [])
    await served.idle()
    assert not any(served.dispatcher.streams._running.values())
    assert set(served.dispatcher.streams._running) == {"default"}


async def test_a_namespace_has_half_of_the_calls(
    served: Served, wire: Wire, other: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = asyncio.Event()
    begun: asyncio.Queue[None] = asyncio.Queue()

    async def wait(*_: object) -> bytes:
        begun.put_nowait(None)
        await release.wait()
        return b""

    monkeypatch.setattr(served.store, "prefetch", wait)
    raw = pb.PrefetchRequest(run=run(1)).SerializeToString()
    stub = wire.channel.unary_unary(methods.PREFETCH.path)
    futures = [stub.future(raw, timeout=30) for _ in range(2)]
    for _ in futures:
        await begun.get()
    with pytest.raises(Refused, match="2 calls of namespace 'default'"):
        await to_thread(wire.unary, methods.MATCH, pb.MatchRequest(run=run(1)))
    match = pb.MatchRequest(run=run(1, namespace="locked"))
    await to_thread(other.unary, methods.MATCH, match)
    release.set()
    for future in futures:
        await to_thread(future.result)


# ---- late calls ----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["get", "put"])
@pytest.mark.parametrize("thaws", [True, False])
async def test_a_call_that_is_late_with_its_first_message(
    served: Served, wire: Wire, verb: str, thaws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not thaws:
        monkeypatch.setattr("kvstored.server.grpc_peer.LAST_WORD_S", 0.2)
    await to_thread(wire.put, header(1), [bytes(PART_BYTES)])
    served.outcomes.ended.clear()
    context = pb.Context(deadline_ms=50)
    if verb == "get":
        request = pb.GetRequest(run=run(1), ctx=context).SerializeToString()
    else:
        head = header(1, salt=b"new")
        head.ctx.CopyFrom(context)
        request = head.SerializeToString()
    path = methods.GET.path if verb == "get" else methods.PUT.path
    peer = await to_thread(FrozenPeer, str(served.unix_path), path, request, close=verb == "get")
    await served.outcomes.wait_for(verb)
    assert served.outcomes.ended[-1][:2] == (verb, "DEADLINE")
    await served.idle()
    assert served.nothing_held()
    if thaws:
        await to_thread(peer.headers)  # the initial ones
        await to_thread(peer.thaw)
        assert methods.ERROR_METADATA.encode() in await to_thread(peer.headers)
    peer.close()
    await to_thread(wire.hello)


async def test_many_late_calls_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    pause = threading.Event()

    def late(wire: Wire, i: int) -> None:
        timeout = 0.02 * (1 + i % 8)
        request = pb.GetRequest(run=run(MANY))
        head = header(4, salt=bytes([i]))
        if i % 4 < 2:
            head.ctx.deadline_ms = request.ctx.deadline_ms = int(1000 * timeout)
        call_timeout = 30 if i % 4 < 2 else timeout
        if i % 2:
            stream = wire.start_get(request, timeout=call_timeout)
        else:
            stream = StalledPut(wire, head, call_timeout).call
        with contextlib.suppress(grpc.RpcError):
            next(stream)
            pause.wait(timeout)  # a reader too slow for its deadline
            for _ in stream:
                pass

    async with serving(Limits(max_running_streams=128)) as served:
        wire = Wire(served.unix)
        await to_thread(wire.hello)
        await fill(wire)
        await asyncio.gather(*(to_thread(late, wire, i) for i in range(32)))
        await served.idle()
        assert served.nothing_held()
        wire.close()
    assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


# ---- stopping ------------------------------------------------------------------------------------


async def test_a_stop_does_not_wait_for_what_stands_still(
    served: Served, wire: Wire, other: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, waiting = asyncio.Event(), asyncio.Event()
    reserve = served.store.begin_put

    async def begin_put(offer: PutOffer) -> PutTicket:
        if offer.run.namespace == "locked":
            waiting.set()
        return await reserve(offer)

    async def wait_for_ever(*_: object) -> bytes:
        begun.set()
        await asyncio.Event().wait()
        return b""

    monkeypatch.setattr(served.store, "prefetch", wait_for_ever)
    monkeypatch.setattr(served.store, "begin_put", begin_put)
    monkeypatch.setattr("kvstored.server.watch.DRAIN_STALL_S", 0.1)
    # Without a limit on standing still, what ends them is the stop.
    served.server._bounds.watchdog._stall_timeout_s = 1e6
    put = StalledPut(wire, header(1))
    await to_thread(put.plan)
    filling = header(24, salt=b"all", parts=["extra"], lengths=[4 * MIB] * 24)
    filling.when_full = pb.REFUSE
    filler = StalledPut(wire, filling)
    await to_thread(filler.plan)
    raw = pb.PrefetchRequest(run=run(1)).SerializeToString()
    prefetch = wire.channel.unary_unary(methods.PREFETCH.path).future(raw, timeout=30)
    await begun.wait()
    # Waits for room, of which there is none before the others are ended.
    full = StalledPut(other, header(1, namespace="locked", parts=["extra"], lengths=[4 * MIB]))
    await waiting.wait()
    assert await served.server.drain(30)
    for stalled in (put, filler, full):
        assert (await to_thread(stalled.failure)).error.code == pb.DRAINING
    error = await to_thread(prefetch.exception)
    assert isinstance(error, grpc.RpcError)
    assert refused(error).error.code == pb.DRAINING
    assert served.nothing_held()
    assert served.ram.usage().charged_bytes == 0
