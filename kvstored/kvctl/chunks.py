"""The commands that name chunks."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvstored.kvctl import text
from kvstored.kvctl.access import Access
from kvstored.kvctl.files import FileReceiver, named_files, read_objects
from kvstored.kvctl.outcome import DONE, FAILED, Outcome
from kvstored.kvctl.selection import Mistake, Selection, prompt, select
from kvstored.kvctl.sinks import STDOUT, check_destination, descriptor
from kvstored.kvctl.text import Json
from kvstored.kvctl.wire import Wire
from kvstored_client import ChunkState, States
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods
from kvstored_client.results import tier_name

_MOST_TTL_S = 3.2e9  # a century


def _greet(wire: Wire, chosen: Selection) -> pb.ChunkRun:
    family = chosen.prefix.family if chosen.prefix is not None else None
    reply = wire.hello(family)
    count = chosen.stop - chosen.start
    if count > reply.limits.max_keys_per_call:
        raise Mistake(
            f"{count} chunks are more than the daemon takes in one call, "
            f"{reply.limits.max_keys_per_call}: choose fewer with --start and --stop"
        )
    return chosen.run(wire.namespace, reply.namespace_salt)


def _chunk_answer(states: bytes) -> dict[str, Json]:
    packed = States(states)
    return {
        "states": [ChunkState(state).name.lower() for state in states],
        "reason": packed.first_reason(),
    }


def match(args: argparse.Namespace, access: Access) -> Outcome:
    """Which chunks are held."""
    chosen = select(args)
    wire = access.wire()
    try:
        request = pb.MatchRequest(
            run=_greet(wire, chosen), mode=pb.EACH if args.each else pb.PREFIX, ctx=wire.context()
        )
        reply = wire.ask(methods.MATCH, request, pb.MatchReply)
    finally:
        wire.close()
    answer: dict[str, Json] = {
        "chunks": reply.chunks,
        "tokens": reply.tokens,
        "bytes": reply.payload_bytes,
        "eta_ms": reply.eta_ms,
        **_chunk_answer(reply.states),
    }
    status = DONE if reply.chunks == chosen.stop - chosen.start else FAILED
    return Outcome(status, answer, text.chunks("held", answer, reply.states))


def get(args: argparse.Namespace, access: Access) -> Outcome:
    """Read and verify chunks."""
    chosen = select(args)
    files = _single_files(args.part)
    wire = access.wire()
    receiver: FileReceiver | None = None
    try:
        run = _greet(wire, chosen)
        parts = chosen.parts or tuple(files)
        if not parts:
            raise Mistake("--keys: name the parts to read, by --parts or --part NAME=FILE")
        if unknown := set(files) - set(parts):
            raise Mistake(f"--part {unknown.pop()}: not among the parts read, {', '.join(parts)}")
        del run.parts[:]
        run.parts.extend(parts)
        receiver = FileReceiver(parts, files)
        wire.get(pb.GetRequest(run=run, ctx=wire.context()), receiver)
        receiver.keep()
    finally:
        if receiver is not None:
            receiver.abandon()
        wire.close()
    states = bytearray(receiver.states)
    for chunk in receiver.corrupt:
        states[chunk] = pb.MISS_CORRUPT
    held = [1 <= state <= pb.NOT_NEEDED for state in states]
    answer: dict[str, Json] = {
        "chunks": next((i for i, ok in enumerate(held) if not ok), len(held)),
        "bytes": sum(receiver.bytes_by_tier.values()),
        "bytes_by_tier": {tier_name(k): v for k, v in sorted(receiver.bytes_by_tier.items())},
        **_chunk_answer(bytes(states)),
    }
    status = DONE if all(held) else FAILED
    aside = any(descriptor(path) == STDOUT for path in files.values())
    return Outcome(status, answer, text.chunks("read", answer, bytes(states)), aside)


def _single_files(options: list[str]) -> dict[str, Path]:
    files = named_files(options)
    for name, paths in files.items():
        if len(paths) > 1:
            raise Mistake(f"--part {name}: given twice")
        check_destination(f"--part {name}={paths[0]}", paths[0])
    return {name: paths[0] for name, paths in files.items()}


def put(args: argparse.Namespace, access: Access) -> Outcome:
    """Store chunks from files."""
    prefix = prompt(args)
    if not 0 <= args.ttl <= _MOST_TTL_S:  # which NaN is not, either
        raise Mistake(f"--ttl {args.ttl:g}: 0 (the namespace's default) to {_MOST_TTL_S:g} seconds")
    names, views = read_objects(prefix.family, named_files(args.part))
    with access.client() as client:
        client.check(timeout_s=access.timeout_s)  # says in words what a refusal would not
        result = client.put(
            prefix,
            views,
            start=args.start,
            parts=names,
            durability="durable" if args.durable else "accepted",
            ttl_ms=int(args.ttl * 1000),
            timeout_s=access.timeout_s,
        )
    answer: dict[str, Json] = {
        "stored": result.stored,
        "existed": result.existed,
        "refused": result.refused,
        "outcomes": [state.name.lower() for state in result.outcomes],
        "reason": result.reason,
        "detail": result.detail,
    }
    return Outcome(FAILED if result.reason else DONE, answer, text.put(answer))


def delete(args: argparse.Namespace, access: Access) -> Outcome:
    """Drop chunks."""
    chosen = select(args)
    reason = pb.DeleteRequest.CORRUPT if args.corrupt else pb.DeleteRequest.REQUESTED
    wire = access.wire()
    try:
        request = pb.DeleteRequest(run=_greet(wire, chosen), reason=reason, ctx=wire.context())
        reply = wire.ask(methods.DELETE, request, pb.DeleteReply)
    finally:
        wire.close()
    return Outcome(DONE, {"deleted": reply.deleted}, f"deleted {reply.deleted} chunks")
