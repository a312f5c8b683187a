"""Whatever the peer answers to a get: a miss with a reason, in time, and no byte out of place."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from client_kinds import MakeClient, make_client
from wire_server import (
    FAMILY,
    OBJECT_BYTES,
    Canary,
    WireServer,
    block,
    honest_get,
    payload,
    refuse,
    wire_server,
)

from kvstored_client import AuthError, ChunkState, ProtocolError, VersionError
from kvstored_client.proto import kvstore_pb2 as pb

__all__ = ["make_client"]
CHUNKS = 4
PREFIX = FAMILY.prefix(range(64 * CHUNKS))
HELD = bytes([pb.IN_RAM])
Messages = Callable[[], Iterator[bytes]]


@pytest.fixture
def server() -> Iterator[WireServer]:
    with wire_server() as running:
        yield running


def first_chunk_then(*messages: bytes) -> Messages:
    """Chunk 0 as it should be, then something else."""

    def script() -> Iterator[bytes]:
        yield block({0: payload(0)})
        yield payload(0)
        yield from messages

    return script


def changed(**fields: object) -> bytes:
    """Head of chunk 1 with some field of its object wrong."""
    head = pb.GetBlock.FromString(block({1: payload(1)}))
    for name, value in fields.items():
        setattr(head.objects[0], name, value)
    return head.SerializeToString()


ALL_HELD = block({}, last=True, states=HELD * CHUNKS)
LIES = {
    "not a message": first_chunk_then(b"\xff" * 100),
    "stream ends early": first_chunk_then(),
    "truncated payload": first_chunk_then(block({1: payload(1)}), payload(1)[:1000]),
    "frame too long": first_chunk_then(block({1: payload(1)}), payload(1) + b"x"),
    "empty frame": first_chunk_then(block({1: payload(1)}), b""),
    "more than announced": first_chunk_then(
        block({1: payload(1)}), payload(1)[:65_000], payload(1)[:1000]
    ),
    "object longer than its part": first_chunk_then(block({1: payload(1, OBJECT_BYTES + 1)})),
    "object shorter than its part": first_chunk_then(block({1: payload(1, OBJECT_BYTES - 1)})),
    "huge object": first_chunk_then(changed(length_bytes=1 << 62)),
    "no checksum": first_chunk_then(changed(checksum=b"")),
    "object sent twice": first_chunk_then(block({0: payload(0)}), payload(0)),
    "object not asked for": first_chunk_then(block({CHUNKS: payload(9)}), payload(9)),
    "sum of lengths wrong": first_chunk_then(
        pb.GetBlock(payload_bytes=1, last=False).SerializeToString(), b"x"
    ),
    "held but never sent": first_chunk_then(ALL_HELD),
    "states missing": first_chunk_then(block({}, last=True, states=HELD)),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_cost_misses_and_nothing_else(
    server: WireServer, make_client: MakeClient, lie: str
) -> None:
    server.on_get = lambda request, context: LIES[lie]()
    canary = Canary(CHUNKS)
    result = make_client(server.target).get(PREFIX, canary.into)
    assert canary.guards_stand()
    assert result.chunks == 1
    assert result.ok.tolist() == [True, False, False, False]
    assert canary.chunk(0) == payload(0)
    assert result.states[0] is ChunkState.IN_RAM
    assert result.states[1] is ChunkState.MISS_UNREACHABLE
    assert result.reason in ("garbage", "unreachable")
    assert result.bytes_by_tier == {"ram": OBJECT_BYTES}


def test_a_call_that_the_daemon_cancels_is_not_one_that_the_client_closed(
    server: WireServer, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    def script(request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from first_chunk_then()()
        context.abort(grpc.StatusCode.CANCELLED, "stopping")

    server.on_get = script
    with caplog.at_level(logging.INFO, "kvstored_client"):
        result = make_client(server.target).get(PREFIX, Canary(CHUNKS).into)
    assert (result.chunks, result.reason) == (1, "unreachable")
    assert "stopping" in result.detail
    assert ": unreachable: CANCELLED: stopping" in caplog.text


def test_wrong_bytes_are_a_corrupt_miss(server: WireServer, make_client: MakeClient) -> None:
    def script(request: pb.GetRequest, context: object) -> Iterator[bytes]:
        for i in range(CHUNKS):
            data = bytearray(payload(i))
            yield block({i: bytes(data)})
            data[-1] ^= i == 2
            yield bytes(data)
        yield ALL_HELD

    server.on_get = script
    canary = Canary(CHUNKS)
    result = make_client(server.target).get(PREFIX, canary.into)
    assert result.chunks == 2
    assert result.ok.tolist() == [True, True, False, True]
    assert result.states[2] is ChunkState.MISS_CORRUPT
    assert result.reason == "corrupt"
    assert result.lengths.tolist() == [OBJECT_BYTES, OBJECT_BYTES, 0, OBJECT_BYTES]
    assert canary.guards_stand()


@pytest.mark.parametrize("when", ["before anything", "within an object", "after the last block"])
def test_late_answers_write_nothing_after_the_return(
    server: WireServer, make_client: MakeClient, when: str
) -> None:
    returned = threading.Event()

    def script(request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        if when == "before anything":
            server.hold(returned)
        for number, message in enumerate(honest_get(request)):
            yield message
            if when == "within an object" and number == 1:
                server.hold(returned)
        if when == "after the last block":
            server.hold(returned)

    server.on_get = script
    canary = Canary(CHUNKS)
    result = make_client(server.target).get(PREFIX, canary.into, timeout_s=0.4)
    before = canary.all.copy()
    returned.set()
    server.wait_ended()
    assert np.array_equal(canary.all, before)
    assert canary.guards_stand()
    if when == "after the last block":
        assert result.chunks == CHUNKS
        assert result.reason == ""
    else:
        assert result.chunks == 0
        assert result.reason == "deadline"
        assert set(result.states) == {ChunkState.MISS_DEADLINE}
    if when == "before anything":
        assert canary.untouched()


def test_an_endless_stream_ends_at_the_deadline(
    server: WireServer, make_client: MakeClient
) -> None:
    def script(request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in server.forever(context):
            yield block({})

    server.on_get = script
    canary = Canary(CHUNKS)
    result = make_client(server.target).get(PREFIX, canary.into, timeout_s=0.4)
    assert (result.chunks, result.reason) == (0, "deadline")
    server.wait_ended()
    assert canary.untouched()


def test_a_peer_that_dies_in_the_middle(server: WireServer, make_client: MakeClient) -> None:
    def script(request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from first_chunk_then(block({1: payload(1)}), payload(1)[:1000])()
        threading.Thread(target=server.stop).start()
        for _ in server.forever(context):
            yield from ()

    server.on_get = script
    canary = Canary(CHUNKS)
    result = make_client(server.target).get(PREFIX, canary.into)
    assert result.chunks == 1
    assert result.reason in ("unreachable", "closed")
    assert canary.guards_stand()
    assert canary.chunk(2) == canary.chunk(3) == bytes([0xA5]) * OBJECT_BYTES


@pytest.mark.parametrize(
    ("code", "reason", "state"),
    [
        (pb.RESOURCE_EXHAUSTED, "overloaded", ChunkState.MISS_DECLINED),
        (pb.DRAINING, "draining", ChunkState.MISS_DECLINED),
        (pb.DEADLINE, "deadline", ChunkState.MISS_DEADLINE),
        (pb.UNAUTHENTICATED, "unauthenticated", ChunkState.MISS_UNREACHABLE),
        (pb.VERSION, "version", ChunkState.MISS_UNREACHABLE),
        (pb.INTERNAL, "refused", ChunkState.MISS_UNREACHABLE),
    ],
)
def test_refusals_are_misses_with_the_daemons_reason(
    server: WireServer, make_client: MakeClient, code: int, reason: str, state: ChunkState
) -> None:
    def script(request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        refuse(context, code)
        yield b""

    server.on_get = script
    canary = Canary(CHUNKS)
    result = make_client(server.target).get(PREFIX, canary.into)
    assert (result.chunks, result.reason) == (0, reason)
    assert set(result.states) == {state}
    assert "told to refuse" in result.detail
    assert canary.untouched()


def test_a_forgotten_family_is_declared_again_once(
    server: WireServer, make_client: MakeClient
) -> None:
    def script(request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        if len(server.gets) % 2:
            refuse(context, pb.UNKNOWN_FAMILY)
        yield from honest_get(request)

    server.on_get = script
    client = make_client(server.target)
    canary = Canary(CHUNKS)
    assert client.get(PREFIX, canary.into).chunks == CHUNKS
    assert [len(hello.families) for hello in server.hellos] == [1, 1]
    server.on_get = lambda request, context: refuse(context, pb.UNKNOWN_FAMILY) or iter(())
    asked = len(server.gets)
    assert client.get(PREFIX, canary.into).reason == "refused"
    assert len(server.gets) == asked + 2, "it is tried once more, and not for ever"


def test_hello_is_said_once_per_family_and_brings_salt_and_token(
    server: WireServer, make_client: MakeClient
) -> None:
    client = make_client(server.target, token="t0ken", tenant="acme")
    canary = Canary(CHUNKS)
    for _ in range(3):
        assert client.get(PREFIX, canary.into).chunks == CHUNKS
    assert len(server.hellos) == 1
    assert server.hellos[0].families[0].fingerprint == FAMILY.fingerprint
    request = server.gets[0]
    assert request.run.keys == PREFIX.keys(b"s" * 32)
    assert request.ctx.tenant == "acme"
    assert 0 < request.ctx.deadline_ms <= 30_000
    assert server.metadata[0]["authorization"] == "Bearer t0ken"


def test_a_salt_of_the_clients_own_wins(
    server: WireServer, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(server.target, salt=b"o" * 32)
    client.get(PREFIX, Canary(CHUNKS).into)
    assert server.gets[0].run.keys == PREFIX.keys(b"o" * 32)
    assert "is not the daemon's" in caplog.text


@pytest.mark.parametrize(
    ("changes", "reason", "error"),
    [
        ({"protocol_version": 2}, "version", VersionError),
        ({"protocol_version": 0}, "version", VersionError),
        ({"min_protocol_version": 2}, "version", VersionError),
        ({"namespace_salt": b"short"}, "garbage", ProtocolError),
    ],
)
def test_a_peer_that_is_no_fitting_daemon(
    server: WireServer,
    make_client: MakeClient,
    changes: dict[str, object],
    reason: str,
    error: type[Exception],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in changes.items():
        setattr(server.hello, name, value)
    client = make_client(server.target)
    caplog.set_level(logging.INFO, "kvstored_client")
    for _ in range(3):
        assert client.match(PREFIX).reason == reason
        assert client.get(PREFIX, Canary(CHUNKS).into).reason == reason
    told = [r for r in caplog.records if "no local session" not in r.getMessage()]
    assert len(told) == 1, "said once, not with every call"
    with pytest.raises(error):
        client.check()
    assert server.gets == []


def test_a_wrong_token_is_a_miss_and_an_error_where_one_asks(
    server: WireServer, make_client: MakeClient
) -> None:
    server.unary["Hello"] = lambda request, context: (
        refuse(context, pb.UNAUTHENTICATED) or pb.HelloReply()
    )
    client = make_client(server.target)
    assert client.match(PREFIX).reason == "unauthenticated"
    with pytest.raises(AuthError, match="told to refuse"):
        client.check()


def test_what_is_not_kvstored_at_all(server: WireServer, make_client: MakeClient) -> None:
    server.unary.clear()
    result = make_client(server.target).match(PREFIX)
    assert (result.chunks, result.reason) == (0, "garbage")
    assert "UNIMPLEMENTED" in result.detail


def test_a_match_that_answers_nonsense(server: WireServer, make_client: MakeClient) -> None:
    server.unary["Match"] = lambda request, context: pb.MatchReply(chunks=99, states=HELD)
    assert make_client(server.target).match(PREFIX).reason == "garbage"
