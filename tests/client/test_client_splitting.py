"""Prefixes longer than one request may be, on a server that notes what it was asked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from client_kinds import MakeClient, make_client
from google.protobuf.message import Message
from wire_server import FAMILY, OBJECT_BYTES, Canary, WireServer, payload, wire_server

from kvstored_client import ChunkState, GroupRule, KVFamily, KVPart, Prefix, PutState
from kvstored_client.objects import checked_parts, get_cuts, get_table, put_cuts, put_table
from kvstored_client.proto import kvstore_pb2 as pb

__all__ = ["make_client"]
SALT = b"s" * 32
CHUNKS = 10
PREFIX = FAMILY.prefix(range(64 * CHUNKS - 3))


@pytest.fixture
def server() -> Iterator[WireServer]:
    with wire_server() as running:
        running.hello.limits.max_keys_per_call = 3
        yield running


def test_a_long_get_goes_in_several_requests_that_fit_together(
    server: WireServer, make_client: MakeClient
) -> None:
    canary = Canary(CHUNKS - 1)
    result = make_client(server.target).get(PREFIX, canary.into, start=1)
    assert result.chunks == CHUNKS - 1
    assert [canary.chunk(i) for i in range(CHUNKS - 1)] == [payload(i) for i in range(1, CHUNKS)]
    assert canary.guards_stand()
    keys = PREFIX.keys(SALT)
    runs = [get.run for get in server.gets]
    assert b"".join(run.keys for run in runs) == keys[32:]
    for run in runs:
        count = len(run.keys) // 32
        assert count <= 3
        assert run.parent == keys[32 * (run.start - 1) : 32 * run.start]
        assert run.end_token == PREFIX.end_token(run.start + count - 1)
        assert list(run.parts) == ["kv"]
    assert runs[-1].end_token == 64 * CHUNKS - 3


def test_foreign_prefixes_name_their_parents_too(
    server: WireServer, make_client: MakeClient
) -> None:
    prefix = FAMILY.foreign([bytes([i]) for i in range(4)], tokens=250)
    make_client(server.target).get(prefix, Canary(4).into)
    keys = prefix.keys(SALT)
    assert [g.run.parent for g in server.gets] == [b"", keys[64:96]]
    assert [g.run.end_token for g in server.gets] == [192, 250]


@pytest.mark.parametrize("held", [0, 2, 3, 7, 10])
def test_a_long_match_stops_at_the_first_request_that_is_not_held_whole(
    server: WireServer, make_client: MakeClient, held: int
) -> None:
    asked: list[int] = []

    def match(request: Message, _context: object) -> Message:
        assert isinstance(request, pb.MatchRequest)
        count = len(request.run.keys) // 32
        asked.append(request.run.start)
        here = min(max(held - request.run.start, 0), count)
        states = bytes([pb.IN_RAM] * here + [pb.MISS_EVICTED] * (count - here))
        return pb.MatchReply(chunks=here, tokens=64 * here, states=states, payload_bytes=here)

    server.unary["Match"] = match
    result = make_client(server.target).match(PREFIX)
    assert (result.chunks, result.tokens, result.nbytes) == (held, 64 * held, held)
    assert len(result.states) == CHUNKS
    assert asked == [0, 3, 6, 9][: min(held // 3 + 1, 4)]
    assert result.reason == ("" if held == CHUNKS else "evicted")


HYBRID = KVFamily(
    "m",
    "w",
    "float32",
    parts=[
        KVPart("kv", 4096),
        KVPart("window", 4096, group="swa"),
        KVPart("state", 4096, group="ssm"),
    ],
    groups={
        "default": GroupRule.all(),
        "swa": GroupRule.trailing(200),
        "ssm": GroupRule.last(),
    },
)


def hybrid_table(prefix: Prefix, start: int, stop: int) -> np.ndarray:
    return get_table(prefix, start, stop, checked_parts(HYBRID, None)).needed.astype(int)


def test_rules_decide_which_objects_a_get_needs() -> None:
    prefix = HYBRID.prefix(range(64 * 6))
    assert hybrid_table(prefix, 0, 6).tolist() == [
        [1, 0, 0],
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 0],
        [1, 1, 0],
        [1, 1, 1],
    ]
    assert hybrid_table(prefix, 4, 5).tolist() == [[1, 1, 1]]
    assert hybrid_table(prefix, 0, 0).shape == (0, 3)
    # 200 tokens before token 330 begin in chunk 2; before token 384 (all full) also in chunk 2.
    short = HYBRID.prefix(range(330))
    assert hybrid_table(short, 0, 6)[:, 1].tolist() == [0, 0, 1, 1, 1, 1]
    # 200 tokens before token 325 begin at 125: chunk 1.
    assert hybrid_table(HYBRID.prefix(range(325)), 0, 6)[:, 1].tolist() == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("max_keys", [1, 2, 3, 4, 5, 100])
@pytest.mark.parametrize(("start", "stop"), [(0, 12), (3, 12), (0, 1), (10, 11), (0, 7)])
def test_requests_of_a_get_ask_for_each_needed_object_once(
    max_keys: int, start: int, stop: int
) -> None:
    prefix = HYBRID.prefix(range(64 * 12))
    table = get_table(prefix, start, stop, checked_parts(HYBRID, None))
    seen = np.zeros(table.needed.shape, int)
    for cut in get_cuts(table, max_keys):
        assert cut.stop - cut.start <= max_keys
        # What the daemon will read: the rules at the end of this request.
        theirs = get_table(
            prefix, cut.start, cut.stop, tuple(table.parts[p] for p in cut.parts)
        ).needed
        seen[cut.start - start : cut.stop - start, list(cut.parts)] += theirs
    assert np.array_equal(seen, table.needed.astype(int))


def test_a_long_hybrid_match_applies_the_rules_over_all_requests(
    server: WireServer, make_client: MakeClient
) -> None:
    # kv up to chunk 8, the window everywhere, states after chunks 1 and 5 alone.
    there = {"kv": set(range(8)), "window": set(range(12)), "state": {1, 5}}

    def match(request: Message, _context: object) -> Message:
        assert isinstance(request, pb.MatchRequest)
        run = request.run
        states = bytes(
            pb.IN_NVME if all(run.start + i in there[p] for p in run.parts) else pb.MISS_EVICTED
            for i in range(len(run.keys) // 32)
        )
        return pb.MatchReply(chunks=states.count(pb.IN_NVME), states=states)

    server.unary["Match"] = match
    result = make_client(server.target).match(HYBRID.prefix(range(64 * 12)))
    assert (result.chunks, result.tokens) == (6, 384)
    assert result.states[0] is ChunkState.IN_NVME
    assert result.states[6] is ChunkState.MISS_EVICTED
    assert result.states[7] is ChunkState.MISS_AFTER_GAP
    # 6 of kv; the 200 tokens before token 384 are in chunks 2 to 5; one state.
    assert result.nbytes == 4096 * (6 + 4 + 1)


def test_a_long_put_goes_in_several_requests_within_every_limit(
    server: WireServer, make_client: MakeClient
) -> None:
    headers: list[pb.PutHeader] = []
    came: list[bytes] = []

    def put(requests: Iterator[bytes], _context: object) -> Iterator[bytes]:
        header = pb.PutHeader.FromString(next(requests))
        headers.append(header)
        wanted = [n for i, n in enumerate(header.lengths_bytes) if n and i != 0]
        states = bytes([pb.EXISTED] + [pb.WANTED] * (len(header.lengths_bytes) - 1))
        yield pb.PutPlan(
            states=states, payload_bytes=sum(wanted), max_frame_bytes=50_000
        ).SerializeToString()
        frames = list(requests)
        assert max(map(len, frames), default=0) <= 50_000
        came.append(b"".join(frames))
        final = bytes([pb.EXISTED] + [pb.STORED] * (len(states) - 1))
        yield pb.PutReply(states=final).SerializeToString()

    server.on_put = put
    server.hello.limits.max_put_bytes = 2 * OBJECT_BYTES
    data = [payload(i) for i in range(CHUNKS)]
    result = make_client(server.target).put(PREFIX, data)
    keys = PREFIX.keys(SALT)
    assert [h.run.start for h in headers] == [0, 2, 3, 5, 6, 8, 9]
    assert b"".join(h.run.keys for h in headers) == keys
    assert b"".join(h.checksums for h in headers) == b"".join(map(xxhash.xxh3_128_digest, data))
    assert all(sum(h.lengths_bytes) <= 2 * OBJECT_BYTES for h in headers)
    # The first of each request was said to exist, and was not sent.
    assert came == [data[1], b"", data[4], b"", data[7], b"", b""]
    assert (result.stored, result.existed, result.refused) == (3, 7, 0)
    assert result.outcomes[1] is PutState.STORED


def test_a_chunk_over_the_limit_on_bytes_makes_a_request_of_its_own() -> None:
    table = put_table(PREFIX, 0, 4, checked_parts(FAMILY, None))
    cuts = put_cuts(table, np.full(4, 100), 1000, 50)
    assert [(c.start, c.stop) for c in cuts] == [(0, 1), (1, 2), (2, 3), (3, 4)]
