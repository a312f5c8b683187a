"""Turns requests into validated values, or raises errors that name the field. Pure; no I/O.

Numbers come from `Limits`; meanings from proto/kvstored/v1/kvstore.proto.
"""

from __future__ import annotations

import unicodedata

import numpy as np

from kvstored.errors import (
    BadKeys,
    BadRequest,
    TooLarge,
    Unimplemented,
    UnknownPart,
    VersionUnsupported,
    WrongLength,
)
from kvstored.server.limits import KEY_BYTES, Limits
from kvstored.store.api import Family, PutOffer, Run
from kvstored_client.proto import kvstore_pb2 as pb

MIN_PROTOCOL_VERSION = 1
_CHECKSUM_BYTES = 16
_MAX_CHUNK_INDEX = 1 << 31


def check_label(field: str, value: str, max_bytes: int) -> None:
    """Raise BadRequest or TooLarge unless `value` is short and free of control characters."""
    size = len(value.encode("utf-8"))
    if size > max_bytes:
        raise TooLarge(f"{field} has {size} bytes", f"send at most {max_bytes} bytes of UTF-8")
    if any(unicodedata.category(c) == "Cc" for c in value):
        raise BadRequest(f"{field} holds control characters", "send printable UTF-8")


def check_context(context: pb.Context, limits: Limits) -> None:
    """Check the part that every request carries."""
    check_label("ctx.request_id", context.request_id, limits.max_label_bytes)
    check_label("ctx.tenant", context.tenant, limits.max_label_bytes)
    check_label("ctx.hints.session_id", context.hints.session_id, limits.max_hint_bytes)


def check_hello(request: pb.HelloRequest, limits: Limits) -> None:
    """Check a HelloRequest but for the families' meaning, which the store knows."""
    check_context(request.ctx, limits)
    check_label("client", request.client, limits.max_hint_bytes)
    if request.protocol_version < MIN_PROTOCOL_VERSION:
        raise VersionUnsupported(
            f"protocol_version {request.protocol_version} is not served",
            f"speak version {MIN_PROTOCOL_VERSION} or later: upgrade kvstored-client",
        )
    if len(request.families) > limits.max_families_per_hello:
        raise TooLarge(
            f"families: {len(request.families)} in one Hello",
            f"declare at most {limits.max_families_per_hello} per call",
        )
    for i, spec in enumerate(request.families):
        _check_spec(f"families[{i}]", spec, limits)


def _check_spec(field: str, spec: pb.FamilySpec, limits: Limits) -> None:
    if len(spec.fingerprint) != KEY_BYTES:
        raise BadKeys(
            f"{field}.fingerprint has {len(spec.fingerprint)} bytes", "a fingerprint has 32"
        )
    if len(spec.parts) > limits.max_parts_per_family:
        raise TooLarge(
            f"{field}.parts: {len(spec.parts)} parts",
            f"declare at most {limits.max_parts_per_family}",
        )
    size = spec.ByteSize()
    if size > limits.max_family_spec_bytes:
        raise TooLarge(
            f"{field} has {size} bytes", f"at most {limits.max_family_spec_bytes} are taken"
        )


def check_run(run: pb.ChunkRun, limits: Limits) -> int:
    """Check all of a ChunkRun that needs no family; the number of keys."""
    if len(run.family) != KEY_BYTES:
        raise BadKeys(f"run.family has {len(run.family)} bytes", "a family fingerprint has 32")
    count, rest = divmod(len(run.keys), KEY_BYTES)
    if rest:
        raise BadKeys(
            f"run.keys has {len(run.keys)} bytes, {rest} more than {count} whole keys",
            "send 32 bytes per key, packed",
        )
    if count > limits.max_keys_per_call:
        raise TooLarge(
            f"run.keys: {count} keys", f"send at most {limits.max_keys_per_call} per call"
        )
    if run.start + count > _MAX_CHUNK_INDEX:
        raise BadRequest(f"run.start {run.start} is out of range", "chunk indices end at 2**31")
    if len(run.parent) not in (0, KEY_BYTES):
        raise BadKeys(f"run.parent has {len(run.parent)} bytes", "send 32, or none")
    if run.parent and not run.start:
        raise BadKeys("run.parent is given although run.start is 0", "the first chunk has none")
    return count


def _part_indices(names: list[str], family: Family) -> tuple[int, ...]:
    # A part without a group is known from recovered objects alone; nobody has declared it yet.
    declared = {p.name: i for i, p in enumerate(family.parts) if p.group}
    if not names:
        if not declared:
            raise UnknownPart("run.parts: the family declares no part", "declare parts with Hello")
        return tuple(declared.values())
    for name in names:
        if name not in declared:
            raise UnknownPart(
                f"run.parts: {name[:64]!r} is not declared for family {family.fingerprint.hex()}",
                "declare it with Hello, or use one of " + ", ".join(map(repr, [*declared][:8])),
            )
    if len(set(names)) != len(names):
        raise BadRequest("run.parts names a part twice", "name each part once")
    return tuple(declared[name] for name in names)


def _check_end_token(run: pb.ChunkRun, count: int, chunk_tokens: int) -> None:
    if not run.end_token:
        return
    full = (run.start + count) * chunk_tokens
    if not count or not full - chunk_tokens < run.end_token <= full:
        raise BadRequest(
            f"run.end_token {run.end_token} is not in the last chunk",
            f"with start {run.start}, {count} keys and {chunk_tokens} tokens per chunk it lies in "
            f"({full - chunk_tokens}, {full}]",
        )


def build_run(run: pb.ChunkRun, context: pb.Context, family: Family, limits: Limits) -> Run:
    """The validated run. Call `check_run` and `check_context` first."""
    count = len(run.keys) // KEY_BYTES
    parts = _part_indices(list(run.parts), family)
    if count * len(parts) > limits.max_objects_per_call:
        raise TooLarge(
            f"run: {count} keys of {len(parts)} parts are {count * len(parts)} objects",
            f"send at most {limits.max_objects_per_call} per call",
        )
    _check_end_token(run, count, family.chunk_tokens)
    return Run(
        namespace=run.namespace,
        tenant=context.tenant or "default",
        family=family,
        packed=run.keys,
        start=run.start,
        parent=run.parent,
        end_token=run.end_token,
        parts=parts,
        probe=context.hints.probe,
        request_id=context.request_id,
    )


def check_match(request: pb.MatchRequest, *, holdable: bool) -> None:
    """Check the fields of Match beside its run. `holdable`: the transport serves holds."""
    _check_enum("mode", request.mode, pb.MatchMode.values())
    _check_enum("depth", request.depth, pb.Depth.values())
    if request.hold and not holdable:
        raise Unimplemented("hold is not served on this transport", "match without hold")
    if request.hold and not request.hold_id:
        raise BadRequest("hold_id is 0", "choose an id that the session does not use yet")


def check_commit(request: pb.CommitRequest, limits: Limits) -> None:
    """Check the fields of Commit beside its indices."""
    check_context(request.ctx, limits)
    _check_enum("durability", request.durability, pb.Durability.values())


def check_delete(request: pb.DeleteRequest) -> None:
    """Check the fields of Delete beside its run."""
    _check_enum("reason", request.reason, pb.DeleteRequest.Reason.values())


def _check_enum(field: str, value: int, known: list[int]) -> None:
    if value not in known:
        raise BadRequest(f"{field}: {value} is unknown to this daemon", f"use one of {known}")


def check_ttl(field: str, ttl_ms: int, limits: Limits) -> int:
    """`ttl_ms` if it is in range, else BadRequest."""
    if ttl_ms > limits.max_ttl_ms:
        raise BadRequest(f"{field} {ttl_ms} is out of range", f"at most {limits.max_ttl_ms}")
    return ttl_ms


def check_list(request: pb.ListRequest, limits: Limits) -> int:
    """Check a ListRequest; the number of entries to answer with."""
    if len(request.family) not in (0, KEY_BYTES):
        raise BadKeys(f"family has {len(request.family)} bytes", "send 32, or none")
    if len(request.cursor) > limits.max_cursor_bytes:
        raise BadRequest("cursor is not one of this daemon's", "send the last reply's, or none")
    if request.limit > limits.max_list_entries:
        raise TooLarge(f"limit {request.limit}", f"ask for at most {limits.max_list_entries}")
    return request.limit or limits.default_list_entries


def build_offer(header: pb.PutHeader, run: Run, deadline: float, limits: Limits) -> PutOffer:
    """The validated offer of a put. Lengths are checked against what the parts declare."""
    _check_enum("durability", header.durability, pb.Durability.values())
    _check_enum("when_full", header.when_full, pb.WhenFull.values())
    objects = len(run.keys) * len(run.parts)
    if len(header.lengths_bytes) != objects:
        raise BadRequest(
            f"lengths_bytes has {len(header.lengths_bytes)} entries",
            f"send one per object: {len(run.keys)} keys of {len(run.parts)} parts are {objects}",
        )
    if len(header.checksums) not in (0, _CHECKSUM_BYTES * objects):
        raise BadRequest(
            f"checksums has {len(header.checksums)} bytes",
            f"send 16 per object, {_CHECKSUM_BYTES * objects}, or none",
        )
    lengths = list(header.lengths_bytes)
    _check_lengths(lengths, run, limits)
    return PutOffer(
        run=run,
        lengths_bytes=lengths,
        checksums=header.checksums,
        durable=header.durability == pb.DURABLE,
        wait=header.when_full == pb.WAIT,
        ttl_ms=check_ttl("ttl_ms", header.ttl_ms, limits),
        deadline=deadline,
    )


def _check_lengths(lengths: list[int], run: Run, limits: Limits) -> None:
    parts = [run.family.parts[p] for p in run.parts]
    table = np.array(lengths, dtype=np.uint64).reshape(len(run.keys), len(parts))
    exact = np.array([p.bytes for p in parts], dtype=np.uint64)
    most = np.array([p.bytes or p.max_bytes for p in parts], dtype=np.uint64)
    offered = table != 0
    low, high = np.uint64(limits.min_object_bytes), np.uint64(limits.max_object_bytes)
    wrong = offered & ((table > most) | ((exact != 0) & (table != exact)))
    outside = offered & ((table < low) | (table > high))
    for bad, large in ((outside, True), (wrong, False)):
        if bad.any():
            index = int(np.argmax(bad))
            raise _length_error(lengths[index], index, run, limits, large)
    total = sum(lengths)
    if total > limits.max_put_bytes:
        raise TooLarge(
            f"lengths_bytes: {total} bytes in one put",
            f"put at most {limits.max_put_bytes} bytes per call",
        )


def _length_error(
    length: int, index: int, run: Run, limits: Limits, outside: bool
) -> TooLarge | WrongLength:
    chunk, column = divmod(index, len(run.parts))
    part = run.family.parts[run.parts[column]]
    where = f"lengths_bytes[{index}] (chunk {run.start + chunk}, part {part.name!r}): {length}"
    if outside and length > limits.max_object_bytes:
        return TooLarge(where, f"an object has at most {limits.max_object_bytes} bytes")
    if outside:
        return WrongLength(where, f"an object has at least {limits.min_object_bytes} bytes")
    if part.bytes:
        return WrongLength(where, f"the part declares exactly {part.bytes} bytes")
    return WrongLength(where, f"the part declares at most {part.max_bytes} bytes")
