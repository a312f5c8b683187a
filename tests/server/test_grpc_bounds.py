"""Floods, stalls, deadlines, cancellation and death: everything held comes back."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import socket
import stat
import sys
import threading
from asyncio import to_thread
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from server.serving import MIB, PART_BYTES, Refused, Served, Wire, header, refused, run, serving

from kvstored.server.grpc_server import GrpcServer
from kvstored.server.limits import Limits
from kvstored.server.sockets import ListenError
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods

MANY = 1024  # of PART_BYTES: 64 MiB, far beyond what sockets and gRPC buffer


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(Limits(max_running_streams=4, max_running_calls=6)) as running:
        yield running


@pytest.fixture
async def wire(served: Served) -> AsyncIterator[Wire]:
    client = Wire(served.unix)
    await to_thread(client.hello)
    yield client
    client.close()


class OpenPut:
    """A put that is fed message by message."""

    def __init__(self, wire: Wire, count: int, deadline_ms: int = 0) -> None:
        self.feed: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        head = header(count)
        head.ctx.deadline_ms = deadline_ms
        self.feed.put(head.SerializeToString())
        self.call = wire.channel.stream_stream(methods.PUT.path)(self._messages())

    def _messages(self) -> Iterator[bytes]:
        while (message := self.feed.get()) is not None:
            yield message

    def plan(self) -> pb.PutPlan:
        return pb.PutPlan.FromString(next(self.call))

    def end(self) -> None:
        self.feed.put(None)


async def fill(wire: Wire, count: int = MANY) -> None:
    data = os.urandom(MIB)
    await to_thread(wire.put, header(count), [data] * (count * PART_BYTES // MIB))


async def test_streams_beyond_the_bound_are_refused_with_a_hint(served: Served, wire: Wire) -> None:
    puts = [OpenPut(wire, 1) for _ in range(2)]
    for put in puts:
        await to_thread(put.plan)
    with pytest.raises(Refused) as failure:
        await to_thread(wire.put, header(1), [])
    assert failure.value.status == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failure.value.error.code == pb.RESOURCE_EXHAUSTED
    assert failure.value.error.retry_after_ms == 50
    # Small verbs have a bound of their own.
    await to_thread(wire.unary, methods.MATCH, pb.MatchRequest(run=run(1)))
    for put in puts:
        put.call.cancel()
        put.end()
    await served.idle()
    assert served.ram.usage().charged_bytes == 0


async def test_calls_beyond_the_bound_are_refused(
    served: Served, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = asyncio.Event()

    async def wait(*_: object) -> bytes:
        await release.wait()
        return b""

    monkeypatch.setattr(served.store, "prefetch", wait)
    request = pb.PrefetchRequest(run=run(1))
    stub = wire.channel.unary_unary(methods.PREFETCH.path)
    futures = [stub.future(request.SerializeToString(), timeout=30) for _ in range(30)]
    outcomes: asyncio.Queue[grpc.Future] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for future in futures:
        future.add_done_callback(lambda f: loop.call_soon_threadsafe(outcomes.put_nowait, f))
    for _ in range(27):
        error = (await outcomes.get()).exception()
        assert isinstance(error, grpc.RpcError)
        assert refused(error).status == grpc.StatusCode.RESOURCE_EXHAUSTED
    release.set()
    for _ in range(3):
        assert (await outcomes.get()).exception() is None


@pytest.mark.parametrize("verb", ["get", "put"])
async def test_a_killed_client_holds_nothing(
    served: Served, wire: Wire, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    if verb == "get":
        await fill(wire)
    before = served.ram.usage().charged_bytes
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("hold_call.py")),
        verb,
        served.unix,
        str(MANY),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert client.stdout is not None
    assert await client.stdout.readline() == b"begun\n"
    assert served.dispatcher.open_payload_calls == 1
    if verb == "get":
        assert served.ram.leased_bytes > 0
    else:
        assert served.ram.usage().charged_bytes == before + MANY * PART_BYTES
    client.kill()
    await client.wait()
    await served.idle()
    assert served.nothing_held()
    assert served.ram.usage().charged_bytes == before
    # gRPC tells the end of a broken stream like that of a closed one.
    assert served.outcomes.ended[-1][1] in ("CANCELLED", "TRUNCATED")
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_a_cancelled_get_holds_nothing(served: Served, wire: Wire) -> None:
    await fill(wire)
    stream = wire.start_get(pb.GetRequest(run=run(MANY)))
    await to_thread(next, stream)
    assert served.ram.leased_bytes > 0
    stream.cancel()  # type: ignore[attr-defined]
    await served.idle()
    assert served.nothing_held()


async def test_what_was_delivered_before_a_cancellation_counts(served: Served, wire: Wire) -> None:
    await fill(wire)
    stream = wire.start_get(pb.GetRequest(run=run(MANY)))

    def read_one_block_and_the_next_head() -> int:
        block = pb.GetBlock.FromString(next(stream))
        left = block.payload_bytes
        while left:
            left -= len(next(stream))
        next(stream)
        return int(block.payload_bytes)

    nbytes = await to_thread(read_one_block_and_the_next_head)
    stream.cancel()  # type: ignore[attr-defined]
    await served.idle()
    assert sum(amount.nbytes for amount in served.store.accounts.hits.values()) >= nbytes
    assert served.nothing_held()


async def test_a_reader_too_slow_for_its_deadline_is_cut_off(served: Served, wire: Wire) -> None:
    await fill(wire)
    request = pb.GetRequest(run=run(MANY), ctx=pb.Context(deadline_ms=300))
    stream = wire.start_get(request, timeout=None)
    await to_thread(next, stream)  # and reads no more
    await served.idle()
    assert served.nothing_held()
    assert served.outcomes.ended[-1] == ("get", "DEADLINE", "ram")
    with pytest.raises(grpc.RpcError) as failure:
        await to_thread(list, stream)
    assert refused(failure.value).error.code == pb.DEADLINE


async def test_a_writer_too_slow_for_its_deadline_is_cut_off(served: Served, wire: Wire) -> None:
    put = OpenPut(wire, 2, deadline_ms=200)
    await to_thread(put.plan)
    put.feed.put(bytes(PART_BYTES))
    with pytest.raises(grpc.RpcError) as failure:
        await to_thread(next, put.call)
    assert refused(failure.value).error.code == pb.DEADLINE
    put.end()
    await served.idle()
    assert served.ram.usage().charged_bytes == 0
    assert served.outcomes.ended[-1][:2] == ("put", "DEADLINE")


async def test_a_header_that_never_comes_is_not_waited_for() -> None:
    async with serving(Limits(max_call_s=0.2)) as served:
        wire = Wire(served.unix)
        never = threading.Event()

        def silence() -> Iterator[bytes]:
            never.wait()
            yield from ()

        call = wire.channel.stream_stream(methods.PUT.path)(silence())
        with pytest.raises(grpc.RpcError) as failure:
            await to_thread(next, call)
        assert refused(failure.value).error.code == pb.DEADLINE
        never.set()
        wire.close()


async def test_the_transports_deadline_counts_too(served: Served, wire: Wire) -> None:
    await fill(wire)
    stream = wire.start_get(pb.GetRequest(run=run(MANY)), timeout=0.3)
    await to_thread(next, stream)
    await served.idle()
    assert served.nothing_held()


async def test_a_delete_begun_is_finished_without_its_caller(
    served: Served, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow_delete(*_: object) -> int:
        begun.set()
        await release.wait()
        ended.set()
        return 1

    monkeypatch.setattr(served.store, "delete", slow_delete)
    future = wire.channel.unary_unary(methods.DELETE.path).future(
        pb.DeleteRequest(run=run(1)).SerializeToString()
    )
    await begun.wait()
    future.cancel()
    await served.outcomes.wait_for("delete")
    release.set()
    async with asyncio.timeout(10):
        await ended.wait()
    await served.idle()


async def test_a_running_put_may_finish_while_draining(served: Served, wire: Wire) -> None:
    put = OpenPut(wire, 1)
    await to_thread(put.plan)
    drained = asyncio.ensure_future(served.server.drain(10))
    await asyncio.sleep(0)  # the drain begins
    assert served.dispatcher.draining
    put.feed.put(bytes(PART_BYTES))
    put.end()
    reply = pb.PutReply.FromString(await to_thread(next, put.call))
    assert reply.states == bytes([pb.STORED])
    assert await drained


async def test_stop_ends_calls_that_outlive_the_grace(served: Served, wire: Wire) -> None:
    put = OpenPut(wire, 4)
    await to_thread(put.plan)
    assert not await served.server.drain(0.05)
    await served.server.stop()
    assert served.nothing_held()
    assert served.ram.usage().charged_bytes == 0
    put.end()


# ---- sockets -------------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def another(served: Served, path: Path | None, tcp: str | None = None) -> GrpcServer:
    loop = asyncio.get_running_loop()
    return GrpcServer(served.dispatcher, loop, unix_path=path, tcp_address=tcp)


async def test_sockets_have_their_modes(served: Served) -> None:
    assert mode(served.unix_path) == 0o660
    assert mode(served.unix_path.with_name("k-admin.sock")) == 0o600
    assert sorted(os.listdir(served.unix_path.parent)) == ["k-admin.sock", "k.sock"]


async def test_a_live_socket_and_a_taken_port_are_refused(served: Served) -> None:
    with pytest.raises(ListenError, match="another process listens"):
        await another(served, served.unix_path).start()
    with pytest.raises(ListenError, match="cannot listen on 127"):
        await another(served, None, served.tcp).start()
    wire = Wire(served.unix)
    await to_thread(wire.hello)  # still served
    wire.close()


async def test_a_stale_socket_is_replaced_and_a_file_is_not(served: Served, tmp_path: Path) -> None:
    stale, file = tmp_path / "s.sock", tmp_path / "f.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(stale))
    file.write_text("precious")
    server = another(served, stale)
    await server.start()
    wire = Wire(f"unix:{stale}")
    await to_thread(wire.hello)
    wire.close()
    await server.stop()
    assert not stale.exists()
    with pytest.raises(ListenError, match="not a socket"):
        await another(served, file).start()
    assert file.read_text() == "precious"
    assert os.listdir(tmp_path) == ["f.sock"]


async def test_a_path_too_long_is_refused(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ListenError, match="longer than 107 bytes"):
        await another(served, tmp_path / ("x" * 110)).start()
