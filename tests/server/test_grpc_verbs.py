"""Every verb over real gRPC, by Unix socket and TCP."""

from __future__ import annotations

import os
from asyncio import to_thread
from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf.wrappers_pb2 import Int32Value, StringValue
from server.serving import (
    ADMIN_TOKEN,
    MIB,
    PART_BYTES,
    SALTS,
    SPEC,
    TOKEN,
    Refused,
    Served,
    Wire,
    header,
    keys,
    run,
    serving,
)

from kvstored_client.proto import admin_pb2 as admin
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as running:
        yield running


@pytest.fixture(params=["unix", "tcp"])
async def wire(served: Served, request: pytest.FixtureRequest) -> AsyncIterator[Wire]:
    client = Wire(served.unix if request.param == "unix" else served.tcp)
    await to_thread(client.hello)
    yield client
    client.close()


async def test_hello_tells_what_a_client_must_know(served: Served, wire: Wire) -> None:
    reply = await to_thread(wire.hello)
    assert reply.namespace_salt == SALTS["default"]
    assert (reply.protocol_version, reply.min_protocol_version) == (1, 1)
    assert reply.boot_epoch == served.store.boot_epoch
    assert pb.FEATURE_LOCAL not in reply.features
    assert pb.FEATURE_DURABLE not in reply.features
    assert reply.limits.max_keys_per_call == 16_384


async def test_bytes_come_back_as_they_went(served: Served, wire: Wire) -> None:
    data = [os.urandom(PART_BYTES) for _ in range(40)]
    blob = b"".join(data)
    cut = [blob[at : at + 1_000_003] for at in range(0, len(blob), 1_000_003)]
    plan, states = await to_thread(wire.put, header(40), cut)
    assert plan.payload_bytes == len(blob)
    assert plan.states == bytes([pb.WANTED]) * 40
    assert states == bytes([pb.STORED]) * 40
    objects, states, sizes = await to_thread(wire.get, pb.GetRequest(run=run(41)))
    assert objects == dict(enumerate(data))
    assert states == bytes([pb.IN_RAM]) * 40 + bytes([pb.MISS_NEVER_STORED])
    assert sizes == [MIB, MIB, len(blob) - 2 * MIB]
    await served.idle()
    assert served.nothing_held()
    assert served.outcomes.ended[-2:] == [("put", "ok", ""), ("get", "ok", "ram")]


async def test_objects_of_several_frames_and_parts(wire: Wire) -> None:
    large = os.urandom(3 * MIB + 8)
    small = os.urandom(PART_BYTES)
    both = {"parts": ["extra", "kv"]}
    head = header(1, lengths=[len(large), len(small)], **both)
    await to_thread(wire.put, head, [large[:MIB], large[MIB : 3 * MIB], large[3 * MIB :] + small])
    objects, _, _ = await to_thread(wire.get, pb.GetRequest(run=run(1, **both)))
    assert objects == {0: large, 1: small}


async def test_a_second_put_is_asked_for_nothing(wire: Wire) -> None:
    data = os.urandom(PART_BYTES)
    await to_thread(wire.put, header(1), [data])
    plan, states = await to_thread(wire.put, header(2), [data])
    assert plan.states == bytes([pb.EXISTED, pb.WANTED])
    assert plan.payload_bytes == PART_BYTES
    assert states == bytes([pb.EXISTED, pb.STORED])
    plan, states = await to_thread(wire.put, header(2), [])
    assert (plan.payload_bytes, states) == (0, bytes([pb.EXISTED] * 2))


async def test_a_wrong_checksum_is_refused(wire: Wire) -> None:
    head = header(1)
    head.checksums = bytes(16)
    _, states = await to_thread(wire.put, head, [os.urandom(PART_BYTES)])
    assert states == bytes([pb.REFUSED_CHECKSUM])
    objects, _, _ = await to_thread(wire.get, pb.GetRequest(run=run(1)))
    assert objects == {}


async def test_the_small_verbs(wire: Wire) -> None:
    await to_thread(wire.put, header(2), [os.urandom(2 * PART_BYTES)])

    async def call(method: methods.Method, request: object) -> object:
        return await to_thread(wire.unary, method, request)  # type: ignore[arg-type]

    held = bytes([pb.IN_RAM] * 2)
    match = await call(methods.MATCH, pb.MatchRequest(run=run(3)))
    assert isinstance(match, pb.MatchReply)
    assert (match.chunks, match.tokens, match.payload_bytes) == (2, 128, 2 * PART_BYTES)
    assert match.states == held + bytes([pb.MISS_NEVER_STORED])
    assert await call(methods.TOUCH, pb.TouchRequest(run=run(2))) == pb.TouchReply(states=held)
    pinned = pb.PinReply(states=held, pinned=2)
    assert await call(methods.PIN, pb.PinRequest(run=run(2))) == pinned
    assert await call(methods.UNPIN, pb.UnpinRequest(run=run(2))) == pb.UnpinReply(unpinned=2)
    assert await call(methods.PREFETCH, pb.PrefetchRequest(run=run(2))) == pb.PrefetchReply(
        states=held
    )
    listed = await call(methods.LIST, pb.ListRequest(namespace="default"))
    assert isinstance(listed, pb.ListReply)
    assert {e.key for e in listed.entries} == {keys(2)[:32], keys(2)[32:]}
    assert listed.entries[0].family == SPEC.fingerprint
    usage = await call(methods.USAGE, pb.UsageRequest(namespace="default"))
    assert isinstance(usage, pb.UsageReply)
    assert usage.tiers[0].charged_bytes == 2 * PART_BYTES
    deleted = await call(methods.DELETE, pb.DeleteRequest(run=run(2)))
    assert deleted == pb.DeleteReply(deleted=2)
    match = await call(methods.MATCH, pb.MatchRequest(run=run(2), mode=pb.EACH))
    assert isinstance(match, pb.MatchReply)
    assert match.states == bytes([pb.MISS_DELETED] * 2)


async def test_an_empty_run_is_answered_by_every_verb(wire: Wire) -> None:
    empty = run(0)
    for method, request in [
        (methods.MATCH, pb.MatchRequest(run=empty)),
        (methods.TOUCH, pb.TouchRequest(run=empty)),
        (methods.PIN, pb.PinRequest(run=empty)),
        (methods.UNPIN, pb.UnpinRequest(run=empty)),
        (methods.PREFETCH, pb.PrefetchRequest(run=empty)),
        (methods.DELETE, pb.DeleteRequest(run=empty)),
    ]:
        assert (await to_thread(wire.unary, method, request)).ByteSize() == 0
    assert await to_thread(wire.get, pb.GetRequest(run=empty)) == ({}, b"", [])
    assert (await to_thread(wire.put, header(0), []))[1] == b""


async def test_same_node_verbs_are_said_to_be_absent(wire: Wire) -> None:
    for method in (methods.RESERVE, methods.COMMIT, methods.RELEASE):
        with pytest.raises(Refused) as failure:
            await to_thread(wire.unary, method, b"")
        assert failure.value.error.code == pb.UNIMPLEMENTED


async def test_namespaces_and_tokens(served: Served) -> None:
    for address in (served.unix, served.tcp):
        right = Wire(address, TOKEN)
        reply = await to_thread(right.hello, namespace="locked")
        assert reply.namespace_salt == SALTS["locked"]
        answers = set()
        for token, namespace in [
            (None, "locked"),
            ("wrong", "locked"),
            (TOKEN, "default"),
            (TOKEN, "missing"),
            (None, "missing"),
        ]:
            other = Wire(address, token)
            with pytest.raises(Refused) as failure:
                await to_thread(other.hello, namespace=namespace)
            assert failure.value.status == grpc.StatusCode.UNAUTHENTICATED
            assert failure.value.error.code == pb.UNAUTHENTICATED
            answers.add(failure.value.details)
            other.close()
        assert len(answers) == 1
        right.close()


async def test_tcp_without_insecure_needs_a_token() -> None:
    async with serving(insecure=False) as served:
        wire = Wire(served.tcp)
        with pytest.raises(Refused, match="UNAUTHENTICATED"):
            await to_thread(wire.hello)
        wire.close()


async def test_status_is_for_operators(served: Served, wire: Wire) -> None:
    await to_thread(wire.put, header(1), [os.urandom(PART_BYTES)])
    with pytest.raises(Refused, match="admin token"):
        await to_thread(wire.unary, methods.STATUS, admin.StatusRequest())
    for operator in (Wire(served.admin), Wire(served.tcp, ADMIN_TOKEN)):
        status = await to_thread(operator.unary, methods.STATUS, admin.StatusRequest())
        assert isinstance(status, admin.StatusReply)
        assert (status.phase, status.objects, status.chunks) == ("ready", 1, 1)
        assert status.boot_epoch == served.store.boot_epoch
        operator.close()


def health(client: Wire, service: str) -> int:
    check = client.channel.unary_unary("/grpc.health.v1.Health/Check")
    raw = check(StringValue(value=service).SerializeToString(), timeout=10)
    return Int32Value.FromString(raw).value


async def test_health_follows_draining(served: Served, wire: Wire) -> None:
    for service in ("", methods.KVSTORE_SERVICE, methods.ADMIN_SERVICE):
        assert await to_thread(health, wire, service) == 1
    with pytest.raises(grpc.RpcError) as failure:
        await to_thread(health, wire, "no.such.Service")
    assert failure.value.code() == grpc.StatusCode.NOT_FOUND
    watch = wire.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=20)
    assert Int32Value.FromString(await to_thread(next, watch)).value == 1
    assert await served.server.drain(5)
    assert Int32Value.FromString(await to_thread(next, watch)).value == 2
    watch.cancel()


async def test_draining_refuses_new_calls(served: Served, wire: Wire) -> None:
    assert await served.server.drain(5)
    for call in (
        lambda: wire.unary(methods.MATCH, pb.MatchRequest(run=run(1))),
        lambda: wire.get(pb.GetRequest(run=run(1))),
        lambda: wire.put(header(1), []),
        wire.hello,
    ):
        with pytest.raises(Refused) as failure:
            await to_thread(call)
        assert failure.value.status == grpc.StatusCode.UNAVAILABLE
        assert failure.value.error.code == pb.DRAINING
    operator = Wire(served.admin)
    status = await to_thread(operator.unary, methods.STATUS, admin.StatusRequest())
    assert isinstance(status, admin.StatusReply)
    assert status.phase == "draining"
    operator.close()
