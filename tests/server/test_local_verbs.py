"""The local session's verbs, over its real socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import xxhash
from server import local_wire as w
from server.local_serving import (
    PART_BYTES,
    SPEC,
    TOKEN,
    LocalServed,
    content,
    local_serving,
    run,
)
from server.local_wire import LocalWire, Refused

from kvstored_client.proto import kvstore_pb2 as pb

CHUNKS = 16
HELD = bytes([pb.IN_RAM]) * CHUNKS


@pytest.fixture(scope="module")
def served() -> Iterator[LocalServed]:
    with local_serving() as running:
        running.fill(run(CHUNKS), [content(i) for i in range(CHUNKS)])
        yield running


@pytest.fixture
def wire(served: LocalServed) -> Iterator[LocalWire]:
    with served.session() as opened:
        yield opened


def test_open_says_what_the_session_may(served: LocalServed, wire: LocalWire) -> None:
    opened = wire.opened
    assert opened.protocol_version == 1
    assert opened.boot_epoch == served.store.boot_epoch
    assert opened.max_leased_bytes == 16 << 20
    assert opened.max_requests == 64
    assert opened.max_staging_bytes == 256 << 20


def test_acquire_gives_the_bytes_and_release_ends_it(served: LocalServed, wire: LocalWire) -> None:
    granted = wire.acquire(run(CHUNKS), 7)
    assert granted.states == HELD
    assert [row[0] for row in granted.rows] == [*range(CHUNKS)]
    for row in granted.rows:
        assert wire.bytes_of(row) == content(row[0])
        assert row[4] == xxhash.xxh3_128_digest(content(row[0]))
        assert row[5] == pb.TIER_RAM
    assert served.figures.leased_bytes == CHUNKS * PART_BYTES
    assert served.look(lambda: served.ram.leased_bytes) == CHUNKS * PART_BYTES
    wire.release(7)
    served.becomes(served.nothing_held)


def test_what_is_not_all_in_ram_is_granted_in_order(served: LocalServed, wire: LocalWire) -> None:
    granted = wire.acquire(run(CHUNKS + 3), 8)
    assert granted.states == HELD + bytes([pb.MISS_NEVER_STORED] * 3)
    assert [wire.bytes_of(row) for row in granted.rows] == [content(i) for i in range(CHUNKS)]
    wire.release(8)
    served.becomes(served.nothing_held)


def test_an_acquire_that_finds_nothing_leaves_its_id_free(wire: LocalWire) -> None:
    for _ in range(2):
        granted = wire.acquire(run(2, salt=b"never"), 9)
        assert granted.rows == []
        assert granted.states == bytes([pb.MISS_NEVER_STORED] * 2)
    assert wire.acquire(run(1), 9).states == HELD[:1]


def test_every_other_verb_answers(served: LocalServed, wire: LocalWire) -> None:
    hello = wire.call(w.HELLO, pb.HelloRequest(protocol_version=1, namespace="default"))
    assert isinstance(hello, pb.HelloReply)
    assert pb.FEATURE_LOCAL in hello.features
    matched = wire.call(w.MATCH, pb.MatchRequest(run=run(CHUNKS)))
    assert isinstance(matched, pb.MatchReply)
    assert (matched.chunks, matched.states) == (CHUNKS, HELD)
    prefetched = wire.call(w.PREFETCH, pb.PrefetchRequest(run=run(2)))
    pinned = wire.call(w.PIN, pb.PinRequest(run=run(2)))
    unpinned = wire.call(w.UNPIN, pb.UnpinRequest(run=run(2)))
    touched = wire.call(w.TOUCH, pb.TouchRequest(run=run(2)))
    assert prefetched == pb.PrefetchReply(states=HELD[:2])
    assert pinned == pb.PinReply(states=HELD[:2], pinned=2)
    assert unpinned == pb.UnpinReply(unpinned=2)
    assert touched == pb.TouchReply(states=HELD[:2])
    listed = wire.call(w.LIST, pb.ListRequest(namespace="default", limit=3))
    assert isinstance(listed, pb.ListReply)
    assert len(listed.entries) == 3
    used = wire.call(w.USAGE, pb.UsageRequest(namespace="default"))
    assert isinstance(used, pb.UsageReply)
    assert used.tiers[0].objects >= CHUNKS
    served.fill(run(1, salt=b"gone"), [content(0)])
    deleted = wire.call(w.DELETE, pb.DeleteRequest(run=run(1, salt=b"gone")))
    assert deleted == pb.DeleteReply(deleted=1)


def test_reserve_and_commit_store_what_was_written_in_place(
    served: LocalServed, wire: LocalWire
) -> None:
    chunks = run(2, salt=b"in place")
    reserved = wire.call(
        w.RESERVE, pb.ReserveRequest(run=chunks, lease_id=3, lengths_bytes=[PART_BYTES] * 2)
    )
    assert isinstance(reserved, pb.ReserveReply)
    assert reserved.states == bytes([pb.WANTED] * 2)
    assert served.figures.leased_bytes == 2 * PART_BYTES
    with pytest.raises(Refused, match="in use"):
        wire.acquire(run(1), 3)
    assert wire.call(w.COMMIT, pb.CommitRequest(lease_id=3)) == pb.PutReply(
        states=bytes([pb.STORED] * 2)
    )
    assert len(wire.acquire(chunks, 3).rows) == 2
    wire.release(3)
    assert served.figures.leased_bytes == 0


def test_put_goes_through_the_ring(served: LocalServed, wire: LocalWire) -> None:
    request_id = wire.new_id()
    chunks = run(1, salt=b"ring")
    wire.send(w.PUT, request_id, pb.PutHeader(run=chunks, lengths_bytes=[PART_BYTES]))
    plan = pb.PutPlan.FromString(wire.answer(request_id).body)
    assert plan.states == bytes([pb.WANTED])
    wire.send(w.CANCEL, request_id)
    with pytest.raises(Refused):
        wire.answer(request_id)
    assert wire.notices[0].kind == w.RING
    assert wire.acquire(chunks, 1).rows == []


@pytest.mark.parametrize("kind", sorted({*w.REPLIES} - {w.RELEASE, w.COMMIT}))
def test_another_namespace_is_refused_whether_or_not_it_exists(wire: LocalWire, kind: int) -> None:
    answers = []
    for namespace in ("locked", "no such", ""):
        if kind in (w.HELLO, w.LIST, w.USAGE):
            request: object = {w.HELLO: pb.HelloRequest, w.LIST: pb.ListRequest}.get(
                kind, pb.UsageRequest
            )(namespace=namespace)
        else:
            # Each of these has its run at field 2.
            request = pb.MatchRequest(run=run(1, namespace=namespace)).SerializeToString()
            if kind == w.RESERVE:
                request = pb.ReserveRequest(run=run(1, namespace=namespace), lease_id=1)
        with pytest.raises(Refused) as caught:
            wire.call(kind, request)  # type: ignore[arg-type]
        answers.append(caught.value.error)
    assert answers[0].code == pb.BAD_REQUEST
    assert answers[0] == answers[1] == answers[2]


def test_errors_of_the_dispatcher_are_answers(wire: LocalWire) -> None:
    for request, code in (
        (pb.MatchRequest(run=run(1, family=b"short")), pb.BAD_KEYS),
        (pb.MatchRequest(run=run(1, family=b"f" * 32)), pb.UNKNOWN_FAMILY),
        (pb.MatchRequest(run=run(1), hold=True), pb.BAD_REQUEST),
    ):
        with pytest.raises(Refused) as caught:
            wire.call(w.MATCH, request)
        assert caught.value.code == code
    with pytest.raises(Refused, match="0"):
        wire.acquire(run(1), 0)
    with pytest.raises(Refused) as caught:
        wire.call(w.RELEASE, pb.ReleaseRequest(lease_ids=range(1, 5000)))
    assert caught.value.code == pb.TOO_LARGE
    assert wire.acquire(run(1), 1).states == HELD[:1]  # and goes on


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"namespace": "locked"}, pb.UNAUTHENTICATED),
        ({"namespace": "locked", "token": "wrong"}, pb.UNAUTHENTICATED),
        ({"namespace": "no such"}, pb.UNAUTHENTICATED),
        ({"namespace": "default", "protocol_version": 0}, pb.VERSION),
        ({"namespace": "default", "client": "x" * 300}, pb.TOO_LARGE),
    ],
)
def test_open_refuses(served: LocalServed, fields: dict[str, object], code: int) -> None:
    wire = LocalWire(served.path)
    with pytest.raises(Refused) as caught:
        wire.open(**fields)  # type: ignore[arg-type]
    assert caught.value.code == code
    with pytest.raises(w.Ended):
        wire.receive()
    wire.close()


def test_a_token_opens_its_namespace(served: LocalServed) -> None:
    with served.session("locked", token=TOKEN) as wire:
        matched = wire.call(w.MATCH, pb.MatchRequest(run=run(2, namespace="locked")))
        assert isinstance(matched, pb.MatchReply)
        assert matched.chunks == 0  # the other namespace's chunks are not its own
    assert SPEC.fingerprint


def test_many_requests_answered_by_their_ids(wire: LocalWire) -> None:
    """A thousand in one write: all are answered, each by its id."""
    match = pb.MatchRequest(run=run(1))
    wire.send_raw(b"".join(w.frame(w.MATCH, 10_000 + i, match) for i in range(1000)))
    for i in range(1000):
        got = wire.receive()
        assert (got.request_id, got.flags) == (10_000 + i, w.REPLY | w.LAST)


def test_request_zero_is_not_answered(served: LocalServed, wire: LocalWire) -> None:
    wire.acquire(run(1), 5)
    wire.send(w.RELEASE, 0, pb.ReleaseRequest(lease_ids=[5]))
    wire.send(w.MATCH, 0, pb.MatchRequest(run=run(1, family=b"short")))
    matched = wire.call(w.MATCH, pb.MatchRequest(run=run(1)))
    assert isinstance(matched, pb.MatchReply)
    assert matched.chunks == 1
    served.becomes(served.nothing_held)
