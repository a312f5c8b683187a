"""Every rule of validation, by the message that breaks it alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from server.serving import PART_BYTES, SPEC, header, keys, run

from kvstored import errors
from kvstored.server import validation as check
from kvstored.server.limits import PIECE_BYTES, Limits
from kvstored.store.api import Family, PartInfo, Run
from kvstored.tiers import base
from kvstored_client.identity import GroupRule
from kvstored_client.proto import kvstore_pb2 as pb

LIMITS = Limits(max_keys_per_call=100, max_objects_per_call=150, max_put_bytes=8 << 20)
PARTS = [
    PartInfo("kv", "default", PART_BYTES, PART_BYTES, pb.PartSpec(name="kv")),
    PartInfo("extra", "default", 0, 1 << 20, pb.PartSpec(name="extra")),
    PartInfo("recovered", "", 0, 256 << 20, pb.PartSpec(name="recovered")),
]
FAMILY = Family(
    "default",
    SPEC.fingerprint,
    "m",
    64,
    {"default": GroupRule.all()},
    PARTS,
    {p.name: i for i, p in enumerate(PARTS)},
)


def validated(message: pb.ChunkRun, context: pb.Context | None = None) -> Run:
    context = context or pb.Context()
    check.check_context(context, LIMITS)
    check.check_run(message, LIMITS)
    return check.build_run(message, context, FAMILY, LIMITS)


def test_a_valid_run_is_taken_over_in_full() -> None:
    message = run(3, start=5, parent=b"p" * 32, end_token=8 * 64 - 1, parts=["extra", "kv"])
    hints = pb.Hints(probe=True)
    made = validated(message, pb.Context(tenant="t", request_id="r", hints=hints))
    packed = keys(3)
    assert made.keys == [packed[:32], packed[32:64], packed[64:]]
    assert (made.start, made.parent, made.end_token) == (5, b"p" * 32, 511)
    assert (made.parts, made.tenant, made.request_id, made.probe) == ((1, 0), "t", "r", True)


def test_keys_keep_their_trailing_zeros() -> None:
    packed = b"k" * 31 + b"\0" + bytes(32)
    assert validated(run(keys=packed)).keys == [packed[:32], packed[32:]]


def test_what_is_absent_has_its_default() -> None:
    made = validated(run(1, parts=[]))
    assert made.tenant == "default"
    # Parts known from recovered objects alone are not declared.
    assert made.parts == (0, 1)


def test_an_empty_run_is_valid() -> None:
    assert validated(run(keys=b"")).keys == []


@pytest.mark.parametrize(
    ("message", "error", "says"),
    [
        (run(family=b"f" * 31), errors.BadKeys, "run.family has 31 bytes"),
        (run(keys=b"k" * 31), errors.BadKeys, "run.keys has 31 bytes"),
        (run(keys=b"k" * 65), errors.BadKeys, "1 more than 2 whole keys"),
        (run(101), errors.TooLarge, "run.keys: 101 keys"),
        (run(start=2**31), errors.BadRequest, "run.start"),
        (run(start=1, parent=b"p" * 31), errors.BadKeys, "run.parent has 31 bytes"),
        (run(start=0, parent=b"p" * 32), errors.BadKeys, "run.parent is given"),
        (run(parts=["nope"]), errors.UnknownPart, "'nope' is not declared"),
        (run(parts=["recovered"]), errors.UnknownPart, "'recovered' is not declared"),
        (run(parts=["kv", "kv"]), errors.BadRequest, "twice"),
        (run(76, parts=["kv", "extra"]), errors.TooLarge, "152 objects"),
        (run(2, start=1, end_token=128), errors.BadRequest, "run.end_token 128"),
        (run(2, start=1, end_token=193), errors.BadRequest, "run.end_token 193"),
        (run(keys=b"", end_token=1), errors.BadRequest, "run.end_token 1"),
    ],
)
def test_a_bad_run_names_its_field(
    message: pb.ChunkRun, error: type[errors.KvstoredError], says: str
) -> None:
    with pytest.raises(error, match=says):
        validated(message)


def test_end_token_at_both_ends_of_the_last_chunk() -> None:
    assert validated(run(2, start=1, end_token=129)).chunk_tokens(1) == 1
    assert validated(run(2, start=1, end_token=192)).chunk_tokens(1) == 64


@pytest.mark.parametrize(
    ("context", "error", "says"),
    [
        (pb.Context(tenant="t" * 65), errors.TooLarge, "ctx.tenant has 65 bytes"),
        (pb.Context(tenant="é" * 33), errors.TooLarge, "ctx.tenant has 66 bytes"),
        (pb.Context(request_id="r" * 65), errors.TooLarge, "ctx.request_id"),
        (pb.Context(tenant="a\nb"), errors.BadRequest, "ctx.tenant holds control"),
        (
            pb.Context(hints=pb.Hints(session_id="s" * 257)),
            errors.TooLarge,
            "ctx.hints.session_id",
        ),
    ],
)
def test_a_bad_context_names_its_field(
    context: pb.Context, error: type[errors.KvstoredError], says: str
) -> None:
    with pytest.raises(error, match=says):
        validated(run(), context)


def offered(message: pb.PutHeader) -> list[int]:
    return check.build_offer(message, validated(message.run), 1.0, LIMITS).lengths_bytes


def changed(message: pb.PutHeader, **fields: object) -> pb.PutHeader:
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def test_an_offer_may_leave_objects_out() -> None:
    message = header(2, parts=["kv", "extra"], lengths=[PART_BYTES, 4096, 0, 1 << 20])
    assert offered(message) == [PART_BYTES, 4096, 0, 1 << 20]


@pytest.mark.parametrize(
    ("message", "error", "says"),
    [
        (header(2, lengths=[PART_BYTES]), errors.BadRequest, "lengths_bytes has 1 entries"),
        (
            header(2, lengths=[PART_BYTES, PART_BYTES - 1]),
            errors.WrongLength,
            r"lengths_bytes\[1\] \(chunk 1, part 'kv'\): 65535.*exactly 65536",
        ),
        (header(lengths=[PART_BYTES + 1]), errors.WrongLength, "exactly 65536"),
        (
            header(parts=["extra"], lengths=[(1 << 20) + 1]),
            errors.WrongLength,
            "at most 1048576",
        ),
        (header(parts=["extra"], lengths=[4095]), errors.WrongLength, "at least 4096"),
        (header(parts=["extra"], lengths=[(256 << 20) + 1]), errors.TooLarge, "at most 268435456"),
        (header(parts=["extra"], lengths=[2**64 - 1]), errors.TooLarge, "18446744073709551615"),
        (
            header(9, parts=["extra"], lengths=[1 << 20] * 9),
            errors.TooLarge,
            "9437184 bytes in one put",
        ),
        (changed(header(2), checksums=b"c" * 16), errors.BadRequest, "checksums has 16 bytes"),
        (changed(header(), ttl_ms=2**60), errors.BadRequest, "ttl_ms"),
        (changed(header(), durability=7), errors.BadRequest, "durability: 7"),
        (changed(header(), when_full=7), errors.BadRequest, "when_full: 7"),
    ],
)
def test_a_bad_offer_names_its_field(
    message: pb.PutHeader, error: type[errors.KvstoredError], says: str
) -> None:
    with pytest.raises(error, match=says):
        offered(message)


def hello(**fields: object) -> pb.HelloRequest:
    message = pb.HelloRequest(protocol_version=1, families=[SPEC])
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def _spec(change: Callable[[pb.FamilySpec], object]) -> pb.HelloRequest:
    message = hello()
    change(message.families[0])
    return message


@pytest.mark.parametrize(
    ("message", "error", "says"),
    [
        (hello(protocol_version=0), errors.VersionUnsupported, "protocol_version 0"),
        (hello(client="c" * 257), errors.TooLarge, "client has 257"),
        (
            pb.HelloRequest(protocol_version=1, families=[SPEC] * 65),
            errors.TooLarge,
            "families: 65",
        ),
        (
            _spec(lambda s: setattr(s, "fingerprint", b"f")),
            errors.BadKeys,
            r"families\[0\].fingerprint has 1 bytes",
        ),
        (
            _spec(lambda s: s.parts.extend([pb.PartSpec()] * 257)),
            errors.TooLarge,
            r"families\[0\].parts",
        ),
        (
            _spec(lambda s: setattr(s, "quantisation_scales", bytes(70_000))),
            errors.TooLarge,
            r"families\[0\] has 7\d{4} bytes",
        ),
    ],
)
def test_a_bad_hello_names_its_field(
    message: pb.HelloRequest, error: type[errors.KvstoredError], says: str
) -> None:
    with pytest.raises(error, match=says):
        check.check_hello(message, LIMITS)


def test_a_later_client_is_welcome() -> None:
    check.check_hello(hello(protocol_version=9), LIMITS)


@pytest.mark.parametrize(
    ("message", "error", "says"),
    [
        (pb.ListRequest(family=b"f"), errors.BadKeys, "family has 1 bytes"),
        (pb.ListRequest(limit=10_001), errors.TooLarge, "limit 10001"),
        (pb.ListRequest(cursor=bytes(1025)), errors.BadRequest, "cursor"),
    ],
)
def test_a_bad_list_names_its_field(
    message: pb.ListRequest, error: type[errors.KvstoredError], says: str
) -> None:
    with pytest.raises(error, match=says):
        check.check_list(message, LIMITS)


def test_list_defaults_to_a_page() -> None:
    assert check.check_list(pb.ListRequest(), LIMITS) == 1000


def test_match_refuses_what_it_does_not_serve() -> None:
    with pytest.raises(errors.Unimplemented, match="hold"):
        check.check_match(pb.MatchRequest(hold=True), holdable=False)
    unknown = pb.MatchRequest()
    unknown.mode = 9
    with pytest.raises(errors.BadRequest, match="mode: 9"):
        check.check_match(unknown, holdable=False)


def test_limits_agree_with_the_tiers() -> None:
    limits = Limits()
    assert (limits.min_object_bytes, limits.max_object_bytes, PIECE_BYTES) == (
        base.MIN_OBJECT_BYTES,
        base.MAX_OBJECT_BYTES,
        base.PIECE_BYTES,
    )


def test_a_million_tokens_fit_one_call() -> None:
    message = run(keys=bytes(32) * 15_625)
    check.check_run(message, Limits())
    made = check.build_run(message, pb.Context(), FAMILY, Limits())
    assert len(made.keys) == 15_625
    told = Limits().to_proto()
    for field in dataclasses.fields(Limits):
        if field.name in pb.Limits.DESCRIPTOR.fields_by_name:
            assert getattr(told, field.name) == getattr(Limits(), field.name)
