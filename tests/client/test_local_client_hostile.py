"""Whatever a peer on the local socket says: a miss with a reason; nothing is read outside of what
it lent, and no session of the client's, descriptor or mapping is left.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from local_hostile import (
    CHUNKS,
    CONTENTS,
    HELD,
    OFFSETS,
    PREFIX,
    SIZES,
    WHOLE,
    acquired,
    clean_client,
    lent,
    plain_file,
    raw,
    reply,
    segment,
)
from local_peer import ERROR, LAST, REPLY, LocalPeer, Script, laid_out, local_peer, memory
from wire_server import OBJECT_BYTES, Canary

from kvstored_client import KVClient, KVFamily, KVPart
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import Kind, pack


@pytest.fixture
def peer() -> Iterator[LocalPeer]:
    with local_peer() as running:
        yield running


@pytest.fixture
def client(peer: LocalPeer) -> Iterator[KVClient]:
    with clean_client(peer) as made:
        yield made


LIES: dict[str, Script] = {
    "a segment that was never lent": acquired(reply()),
    "an offset beyond the segment": acquired(
        segment(), reply({"offsets_bytes": [*OFFSETS[:3], WHOLE]})
    ),
    "an end beyond the segment": acquired(
        segment(), reply({"offsets_bytes": [*OFFSETS[:3], WHOLE - 4096]})
    ),
    "an offset that wraps": acquired(
        segment(), reply({"offsets_bytes": [*OFFSETS[:3], (1 << 64) - 4096]})
    ),
    "an offset in the middle of a page": acquired(
        segment(), reply({"offsets_bytes": [8, *OFFSETS[1:]]})
    ),
    "a length that wraps": acquired(segment(), reply({"lengths_bytes": [*SIZES[:3], 1 << 63]})),
    "a length of its own": acquired(segment(), reply({"lengths_bytes": [*SIZES[:3], 100]})),
    "no length": acquired(segment(), reply({"lengths_bytes": [*SIZES[:3], 0]})),
    "a column too short": acquired(segment(), reply({"lengths_bytes": SIZES[:3]})),
    "checksums too short": acquired(segment(), reply({"checksums": bytes(16)})),
    "tiers too short": acquired(segment(), reply({"tiers": b"\1"})),
    "objects out of order": acquired(segment(), reply({"indices": [1, 0, 2, 3]})),
    "an object twice": acquired(segment(), reply({"indices": [0, 1, 1, 2]})),
    "an object that was not asked for": acquired(segment(), reply({"indices": [0, 1, 2, 99]})),
    "states too short": acquired(segment(), reply({"states": HELD[:2]})),
    "a body that is no message": acquired(
        segment(), lambda talk, frame: talk.answer(frame, b"\xff" * 50)
    ),
    "an answer of another kind": acquired(
        lambda talk, frame: talk.send(pack(Kind.MATCH, REPLY | LAST, frame.request_id))
    ),
    "an error that is not last": acquired(
        lambda talk, frame: talk.answer(frame, pb.Error(), REPLY | ERROR)
    ),
    "a request of the daemon's": acquired(raw(pack(Kind.ACQUIRE, 0, 9))),
    "garbage": acquired(raw(b"\xa5" * 1000)),
    "a frame of 4 GiB": acquired(raw(b"\xff\xff\xff\xff" + bytes(12))),
    "a segment twice": acquired(segment(), segment()),
    "no descriptor": acquired(lent(1, WHOLE), reply()),
    "descriptors nobody needs": acquired(
        lent(1, WHOLE, lambda: memory(laid_out(CONTENTS)), lambda: memory(b"x")), reply()
    ),
    "a flood of descriptors": acquired(
        *[lent(i, 1, *[lambda: memory(b"x")] * 10) for i in range(10)]
    ),
    "silence then the end": acquired(lambda talk, frame: talk.sock.shutdown(socket.SHUT_RDWR)),
    "the events channel carries garbage": acquired(
        lambda talk, frame: talk.events.send(b"\xa5" * 40), segment()
    ),
    "half an event": acquired(
        lambda talk, frame: talk.events.send(pack(Kind.RETIRE, 0, 0, b"12345")[:-1]), segment()
    ),
}
CUT_SHORT: dict[str, Script] = {
    # What cannot be mapped safely is not mapped; then gRPC is asked, which nobody serves here.
    "a segment that could shrink": acquired(segment(sealed=False), reply()),
    "a segment shorter than announced": acquired(
        lent(1, 10 * WHOLE, lambda: memory(laid_out(CONTENTS))), reply()
    ),
    "a segment of nothing": acquired(lent(1, 0, lambda: memory(b"x")), reply()),
    "a segment of an exabyte": acquired(lent(1, 1 << 60, lambda: memory(b"x")), reply()),
    "a file that is no memory": acquired(lent(1, 4096, plain_file), reply()),
    "a socket that is no memory": acquired(
        lent(1, 4096, lambda: socket.socket(socket.AF_UNIX).detach()), reply()
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_misses(peer: LocalPeer, client: KVClient, lie: str) -> None:
    peer.script = LIES[lie]
    canary = Canary(CHUNKS)
    got = client.get(PREFIX, canary.into)
    if lie == "states too short":
        assert got.chunks == CHUNKS, "bytes decide, not words"
    else:
        assert got.chunks < CHUNKS
        assert got.reason in ("garbage", "unreachable"), got
    # And the client is none the worse for it.
    peer.script = acquired(segment(), reply())
    got = client.get(PREFIX, canary.into)
    assert (got.chunks, got.reason) == (CHUNKS, ""), got
    assert bytes(canary.into) == b"".join(CONTENTS)


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_empty_leases(peer: LocalPeer, client: KVClient, lie: str) -> None:
    peer.script = LIES[lie]
    lease = client.acquire(PREFIX)
    assert lease.chunks < CHUNKS
    assert lease.reason in ("garbage", "unreachable"), lease.detail
    peer.script = acquired(segment(), reply())
    with client.acquire(PREFIX) as lease:
        assert [bytes(view) for view in lease] == CONTENTS


@pytest.mark.parametrize("lie", CUT_SHORT)
def test_what_cannot_be_mapped_safely_is_not(peer: LocalPeer, client: KVClient, lie: str) -> None:
    peer.script = CUT_SHORT[lie]
    got = client.get(PREFIX, Canary(CHUNKS).into)
    assert (got.chunks, got.reason) == (0, "unreachable"), got
    assert client.acquire(PREFIX).chunks == 0


def test_an_object_of_no_length_is_not_leased(peer: LocalPeer, client: KVClient) -> None:
    family = KVFamily("varying", "w", "float32", parts=[KVPart("kv", max_nbytes=OBJECT_BYTES)])
    peer.script = acquired(segment(), reply({"lengths_bytes": [*SIZES[:3], 0]}))
    lease = client.acquire(family.prefix(range(64 * CHUNKS)))
    assert (lease.chunks, lease.reason) == (0, "garbage")
