"""What a client can do wrong on the wire: each has its typed error, and leaves nothing behind."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import AsyncIterator
from functools import partial

import grpc
import pytest
from google.protobuf.message import Message
from server.serving import MIB, PART_BYTES, Refused, Served, Wire, header, run, serving

from kvstored.server.limits import Limits
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(Limits(max_put_bytes=4 * MIB)) as running:
        yield running
        await running.idle()
        assert running.nothing_held()
        assert running.ram.usage().objects == 0
        assert running.ram.usage().charged_bytes == 0


@pytest.fixture
async def wire(served: Served) -> AsyncIterator[Wire]:
    client = Wire(served.unix)
    await to_thread(client.hello)
    yield client
    client.close()


PUTS = [
    # id, header, payload, code, what the message says
    ("truncated", header(2), [bytes(PART_BYTES), b"x"], pb.TRUNCATED, "byte 65537 of 131072"),
    ("no payload", header(2), [], pb.TRUNCATED, "byte 0 of 131072"),
    ("nothing at all", None, [], pb.TRUNCATED, "before its PutHeader"),
    ("overlong", header(1), [bytes(PART_BYTES), b"x"], pb.OVERLONG, "byte 65537 of 65536"),
    ("one frame too long", header(1), [bytes(PART_BYTES + 1)], pb.OVERLONG, "65537 of 65536"),
    ("unasked payload", header(0), [b"x"], pb.OVERLONG, "byte 1 of 0"),
    ("empty frame", header(1), [b""], pb.BAD_REQUEST, "empty frame"),
    ("frame over limit", header(40), [bytes(2 * MIB + 1)], pb.TOO_LARGE, "frame of 2097153"),
    ("other length", header(lengths=[4096]), [], pb.WRONG_LENGTH, "exactly 65536"),
    ("payload over limit", header(65), [], pb.TOO_LARGE, "at most 4194304 bytes"),
    ("unknown part", header(1, parts=["v"]), [], pb.UNKNOWN_PART, "'v' is not declared"),
    ("unknown family", header(1, family=b"f" * 32), [], pb.UNKNOWN_FAMILY, "66666666"),
    ("short key", header(1, keys=b"k" * 31), [], pb.BAD_KEYS, "31 bytes"),
    ("not a message", b"\xff\xff", [], pb.BAD_REQUEST, "not a PutHeader"),
]


@pytest.mark.parametrize(
    ("head", "payload", "code", "says"), [p[1:] for p in PUTS], ids=[p[0] for p in PUTS]
)
async def test_bad_puts(
    wire: Wire, head: pb.PutHeader | bytes | None, payload: list[bytes], code: int, says: str
) -> None:
    with pytest.raises(Refused, match=says) as failure:
        await to_thread(wire.put, head, payload)
    assert failure.value.error.code == code
    assert failure.value.error.message in failure.value.details


async def test_a_message_beyond_the_transports_bound(wire: Wire) -> None:
    with pytest.raises(Refused) as failure:
        await to_thread(wire.put, header(64), [bytes(6 * MIB)])
    assert failure.value.status == grpc.StatusCode.RESOURCE_EXHAUSTED


GETS = [
    (run(1, keys=b"k" * 31), pb.BAD_KEYS, "run.keys has 31 bytes"),
    (run(1, parts=["nope"]), pb.UNKNOWN_PART, "'nope'"),
    (run(1, family=b"f" * 32), pb.UNKNOWN_FAMILY, "66666666"),
    (run(1, family=b"f"), pb.BAD_KEYS, "run.family has 1 bytes"),
    (run(1, namespace="locked"), pb.UNAUTHENTICATED, "does not grant"),
]


@pytest.mark.parametrize(("bad", "code", "says"), GETS)
async def test_bad_runs_on_every_verb(wire: Wire, bad: pb.ChunkRun, code: int, says: str) -> None:
    for method, request in [
        (methods.MATCH, pb.MatchRequest(run=bad)),
        (methods.TOUCH, pb.TouchRequest(run=bad)),
        (methods.DELETE, pb.DeleteRequest(run=bad)),
        (methods.PREFETCH, pb.PrefetchRequest(run=bad)),
        (methods.PIN, pb.PinRequest(run=bad)),
        (methods.UNPIN, pb.UnpinRequest(run=bad)),
    ]:
        with pytest.raises(Refused, match=says) as failure:
            await to_thread(wire.unary, method, request)
        assert failure.value.error.code == code
    with pytest.raises(Refused, match=says) as failure:
        await to_thread(wire.get, pb.GetRequest(run=bad))
    assert failure.value.error.code == code


@pytest.mark.parametrize(
    "method",
    [m for m in methods.METHODS if m.kind is methods.Kind.UNARY_UNARY],
    ids=lambda m: m.name,
)
async def test_bytes_that_are_no_message(wire: Wire, method: methods.Method) -> None:
    with pytest.raises(Refused) as failure:
        await to_thread(wire.unary, method, b"\xff\xff\xff")
    assert failure.value.error.code in (pb.BAD_REQUEST, pb.UNIMPLEMENTED)


async def test_family_conflicts(wire: Wire) -> None:
    from server.serving import SPEC

    changed = pb.FamilySpec()
    changed.CopyFrom(SPEC)
    changed.model = "another"
    request = pb.HelloRequest(protocol_version=1, namespace="default", families=[changed])
    with pytest.raises(Refused) as failure:
        await to_thread(wire.unary, methods.HELLO, request)
    assert failure.value.error.code == pb.FAMILY_CONFLICT


async def test_a_bug_says_nothing_of_the_inside(
    served: Served, wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a secret of the inside")

    monkeypatch.setattr(served.store, "match", broken)
    with pytest.raises(Refused) as failure:
        await to_thread(wire.unary, methods.MATCH, pb.MatchRequest(run=run(1)))
    assert failure.value.error.code == pb.INTERNAL
    assert "secret" not in failure.value.details
    assert "a secret of the inside" in caplog.text


@pytest.mark.parametrize(
    ("method", "request_", "says"),
    [
        (methods.DELETE, pb.DeleteRequest(run=run(1), reason=77), "reason: 77"),
        (methods.MATCH, pb.MatchRequest(run=run(1), mode=77), "mode: 77"),
        (methods.MATCH, pb.MatchRequest(run=run(1), depth=77), "depth: 77"),
        (methods.PUT, pb.PutHeader(run=run(1), lengths_bytes=[0], durability=77), "durability: 77"),
        (methods.PUT, pb.PutHeader(run=run(1), lengths_bytes=[0], when_full=77), "when_full: 77"),
    ],
)
async def test_an_enum_value_that_is_not_known_is_refused(
    wire: Wire, method: methods.Method, request_: Message, says: str
) -> None:
    put = isinstance(request_, pb.PutHeader)
    call = partial(wire.put, request_, []) if put else partial(wire.unary, method, request_)
    with pytest.raises(Refused, match=says) as failure:
        await to_thread(call)
    assert failure.value.error.code == pb.BAD_REQUEST
