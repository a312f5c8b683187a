"""Whatever a peer on the local socket says: a miss with a reason, in time; nothing is read outside
of what it lent, and no session of the client's, descriptor or mapping is left.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from local_clients import join_session_threads
from local_peer import (
    ERROR,
    LAST,
    OPENED,
    REPLY,
    Conversation,
    LocalPeer,
    Script,
    laid_out,
    local_peer,
    memory,
    rows,
)
from wire_server import FAMILY, OBJECT_BYTES, Canary, payload

from kvstored_client import KVClient, KVFamily, KVPart, PutState, Timeouts
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import ABANDONED, POSITION, Kind, pack

CHUNKS = 4
PREFIX = FAMILY.prefix(range(64 * CHUNKS))
CONTENTS = [payload(i) for i in range(CHUNKS)]
HELD = bytes([pb.IN_RAM]) * CHUNKS
SHORT_S = 0.5


@pytest.fixture
def peer() -> Iterator[LocalPeer]:
    with local_peer() as running:
        yield running


@pytest.fixture
def client(peer: LocalPeer) -> Iterator[KVClient]:
    before = descriptors()
    with KVClient(peer.target, timeouts=Timeouts(5, 5, 5, 5)) as made:
        yield made
    join_session_threads()
    peer.settle()
    after = descriptors()
    assert not [target for target in after if "memfd" in target]
    if made._transport._wire is None:  # what grpc leaves open is its own affair
        assert len(after) == len(before) + 5 * len(peer.sessions), after


def descriptors() -> list[str]:
    """What this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def acquired(*steps: Callable[[Conversation, object], None]) -> Script:
    """Answers the first Acquire by these steps."""

    def script(talk: Conversation) -> None:
        frame = talk.request(Kind.ACQUIRE)
        for step in steps:
            step(talk, frame)

    return script


def segment(content: bytes = laid_out(CONTENTS), number: int = 1, **options: bool) -> Callable:  # type: ignore[type-arg]
    return lambda talk, frame: talk.segment(number, content, **options)


def reply(changes: dict[str, object] | None = None, flags: int = REPLY | LAST) -> Callable:  # type: ignore[type-arg]
    """An honest answer with some fields replaced."""
    message = rows(CONTENTS, states=HELD)
    for name, value in (changes or {}).items():
        if isinstance(value, bytes):
            setattr(message, name, value)
        else:
            getattr(message, name)[:] = value
    return lambda talk, frame: talk.answer(frame, message, flags)


def raw(data: bytes, fds: Callable[[], list[int]] = list) -> Callable:  # type: ignore[type-arg]
    def send(talk: Conversation, frame: object) -> None:
        numbers = fds()
        try:
            talk.send(data, numbers)
        finally:
            for fd in numbers:
                os.close(fd)

    return send


def lent(number: int, size: int, *fds: Callable[[], int]) -> Callable:  # type: ignore[type-arg]
    """A SEGMENT notice with whatever descriptors."""
    body = pb.LocalSegment(segment_id=number, size_bytes=size).SerializeToString()
    return raw(pack(Kind.SEGMENT, 0, 0, body), lambda: [make() for make in fds])


WHOLE = len(laid_out(CONTENTS))
SIZES = [OBJECT_BYTES] * CHUNKS
OFFSETS = [i * OBJECT_BYTES for i in range(CHUNKS)]


def plain_file() -> int:
    return os.open("/proc/self/exe", os.O_RDONLY | os.O_CLOEXEC)


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


def ends_in_time(client: KVClient, reason: str, timeout_s: float = SHORT_S) -> None:
    began = time.monotonic()
    got = client.get(PREFIX, Canary(CHUNKS).into, timeout_s=timeout_s)
    assert (got.chunks, got.reason) == (0, reason), got
    assert time.monotonic() - began < 20


def test_silence_ends_at_the_deadline_and_the_lease_is_given_back(
    peer: LocalPeer, client: KVClient
) -> None:
    late = threading.Event()
    asked: list[int] = []

    def script(talk: Conversation) -> None:
        frame = talk.request(Kind.ACQUIRE)
        asked.append(pb.AcquireRequest.FromString(frame.body).lease_id)
        released = talk.request(Kind.RELEASE)
        assert released.request_id == 0
        asked.extend(pb.ReleaseRequest.FromString(released.body).lease_ids)
        # The answer comes after all, and is passed over.
        talk.segment(1, laid_out(CONTENTS))
        talk.answer(frame, rows(CONTENTS, states=HELD))
        late.set()
        frame = talk.request(Kind.ACQUIRE)
        talk.answer(frame, rows(CONTENTS, states=HELD))

    peer.script = script
    ends_in_time(client, "deadline")
    assert late.wait(20)
    assert asked[0] == asked[1]
    into = Canary(CHUNKS).into
    assert client.get(PREFIX, into).chunks == CHUNKS
    assert bytes(into) == b"".join(CONTENTS)
    assert len(peer.sessions) == 1


def test_late_answers_are_read_though_nobody_waits(peer: LocalPeer, client: KVClient) -> None:
    """Else the daemon would take the client for one that does not read, and end the session."""
    taken = threading.Event()

    def script(talk: Conversation) -> None:
        frame = talk.request(Kind.ACQUIRE)
        talk.request(Kind.RELEASE)
        talk.sock.settimeout(20)
        for _ in range(100):
            talk.answer(frame, bytes(100_000), REPLY)
        talk.answer(frame, b"")
        taken.set()

    peer.script = script
    ends_in_time(client, "deadline")
    assert taken.wait(20)
    assert client.match(PREFIX).chunks == CHUNKS


def test_a_session_that_ends_before_it_answers_is_replaced(
    peer: LocalPeer, client: KVClient
) -> None:
    def script(talk: Conversation) -> None:
        if len(peer.sessions) == 1:
            talk.answer_as_usual(talk.request(Kind.MATCH))
            talk.request(Kind.MATCH)
            talk.sock.shutdown(socket.SHUT_RDWR)

    peer.script = script
    assert client.match(PREFIX).chunks == CHUNKS
    match = client.match(PREFIX)
    assert (match.chunks, match.reason) == (CHUNKS, "")
    assert len(peer.sessions) == 2


def test_a_session_that_is_new_is_not_replaced_again_and_again(
    peer: LocalPeer, client: KVClient
) -> None:
    def script(talk: Conversation) -> None:
        talk.request(Kind.MATCH)
        talk.sock.shutdown(socket.SHUT_RDWR)

    peer.script = script
    assert client.match(PREFIX).reason == "unreachable"
    assert len(peer.sessions) <= 2


def test_an_object_of_no_length_is_not_leased(peer: LocalPeer, client: KVClient) -> None:
    family = KVFamily("varying", "w", "float32", parts=[KVPart("kv", max_nbytes=OBJECT_BYTES)])
    peer.script = acquired(segment(), reply({"lengths_bytes": [*SIZES[:3], 0]}))
    lease = client.acquire(family.prefix(range(64 * CHUNKS)))
    assert (lease.chunks, lease.reason) == (0, "garbage")


def test_half_an_answer_ends_at_the_deadline(peer: LocalPeer, client: KVClient) -> None:
    whole = rows(CONTENTS, states=HELD).SerializeToString()

    def script(talk: Conversation) -> None:
        frame = talk.request(Kind.ACQUIRE)
        talk.segment(1, laid_out(CONTENTS))
        talk.answer(frame, rows(CONTENTS[:1]), REPLY)
        talk.send(pack(Kind.ACQUIRE, REPLY | LAST, frame.request_id, whole)[:-5])

    peer.script = script
    got = client.get(PREFIX, Canary(CHUNKS).into, timeout_s=SHORT_S)
    assert (got.chunks, got.reason) == (1, "deadline"), "what came whole is good"


def silent(talk: Conversation) -> None:
    """Reads nothing, says nothing."""
    hold.wait(20)
    raise ConnectionError


hold = threading.Event()


def test_a_daemon_that_does_not_open_is_late(peer: LocalPeer, client: KVClient) -> None:
    hold.clear()
    peer.script = silent
    ends_in_time(client, "deadline")
    hold.set()


OPENINGS = {
    "no descriptor": lambda talk, frame: talk.answer(frame, OPENED),
    "a pipe": lambda talk, frame: talk.answer(frame, OPENED, fds=[*os.pipe()][:1]),
    "garbage": lambda talk, frame: talk.send(b"\xff" * 64),
    "no limits": lambda talk, frame: talk.answer(
        frame, pb.LocalOpened(), fds=[talk._theirs.fileno()]
    ),
    "too large": lambda talk, frame: talk.refuse(frame, pb.RESOURCE_EXHAUSTED),
    "not served": lambda talk, frame: talk.refuse(frame, pb.UNIMPLEMENTED),
}


@pytest.mark.parametrize("opening", [name for name in OPENINGS if name != "a pipe"])
def test_openings_that_fail_leave_it_to_grpc(
    peer: LocalPeer, client: KVClient, opening: str
) -> None:
    def script(talk: Conversation) -> None:
        frame = talk.next()
        assert frame is not None
        OPENINGS[opening](talk, frame)

    peer.script = script
    # Nobody serves gRPC here.
    assert client.match(PREFIX).reason == "unreachable"


def test_a_goodbye_says_why(peer: LocalPeer, client: KVClient) -> None:
    def script(talk: Conversation) -> None:
        talk.request(Kind.ACQUIRE)
        body = pb.Error(code=pb.DRAINING, message="stopping").SerializeToString()
        talk.events.send(pack(Kind.GOODBYE, 0, 0, body))
        talk.sock.shutdown(socket.SHUT_WR)

    peer.script = script
    ends_in_time(client, "draining", 5)


def test_views_outlast_a_goodbye_and_the_socket_stays_open_for_them(
    peer: LocalPeer, client: KVClient
) -> None:
    ended = threading.Event()

    def script(talk: Conversation) -> None:
        frame = talk.request(Kind.ACQUIRE)
        talk.segment(1, laid_out(CONTENTS))
        talk.answer(frame, rows(CONTENTS, states=HELD))
        talk.request(Kind.MATCH)
        body = pb.Error(code=pb.DRAINING, message="stopping").SerializeToString()
        talk.events.send(pack(Kind.GOODBYE, 0, 0, body))
        talk.sock.shutdown(socket.SHUT_WR)
        while talk.next() is not None:
            pass
        ended.set()

    peer.script = script
    with client.acquire(PREFIX) as lease:
        view = np.frombuffer(lease[2], np.uint8)
    assert client.match(PREFIX).reason == "draining"
    assert view.tobytes() == CONTENTS[2]
    assert not ended.is_set()
    del view
    assert ended.wait(20), "with its last view the session is ended"


def test_retired_segments_are_unmapped_and_said_to_be(peer: LocalPeer, client: KVClient) -> None:
    said: list[list[int]] = []

    def script(talk: Conversation) -> None:
        frame = talk.request(Kind.ACQUIRE)
        talk.segment(1, laid_out(CONTENTS))
        talk.answer(frame, rows(CONTENTS, states=HELD))
        talk.request(Kind.RELEASE)
        # 2 is still on its way when it is asked back.
        body = pb.LocalRetire(segment_ids=[1, 2]).SerializeToString()
        talk.events.send(pack(Kind.RETIRE, 0, 0, body))
        told: list[int] = []
        while len(told) < 2:
            told += pb.LocalRetire.FromString(talk.request(Kind.RETIRED).body).segment_ids
        said.append(sorted(told))
        retired.set()
        frame = talk.request(Kind.ACQUIRE)
        talk.segment(2, laid_out(CONTENTS))
        talk.segment(3, laid_out(CONTENTS))
        talk.answer(frame, rows(CONTENTS, 3, states=HELD))
        frame = talk.request(Kind.ACQUIRE)
        talk.answer(frame, rows(CONTENTS, 2, states=HELD))

    retired = threading.Event()
    peer.script = script
    client.acquire(PREFIX).release()
    assert retired.wait(20)
    with client.acquire(PREFIX) as lease:
        assert bytes(lease[1]) == CONTENTS[1]
    assert said == [[1, 2]]
    assert client.acquire(PREFIX).reason == "garbage", "2 was never mapped"


# ---- put -----------------------------------------------------------------------------------------

PLAN = pb.PutPlan(
    states=bytes([pb.WANTED]) * CHUNKS,
    payload_bytes=CHUNKS * OBJECT_BYTES,
    max_frame_bytes=1 << 20,
)
STORED = pb.PutReply(states=bytes([pb.STORED]) * CHUNKS)
RING_BYTES = 64 << 10


def put_by(*steps: Callable[[Conversation, object], None]) -> Script:
    def script(talk: Conversation) -> None:
        frame = talk.request(Kind.PUT)
        for step in steps:
            step(talk, frame)

    return script


def ring(talk: Conversation, frame: object) -> None:
    os.close(talk.ring(RING_BYTES))


def plan(talk: Conversation, frame: object) -> None:
    talk.answer(frame, PLAN, REPLY)


def position(number: int) -> Callable:  # type: ignore[type-arg]
    return lambda talk, frame: talk.data.send(POSITION.pack(frame.request_id, number))


def test_a_put_goes_through_the_ring(peer: LocalPeer, client: KVClient) -> None:
    came = bytearray()

    def script(talk: Conversation) -> None:
        frame = talk.request(Kind.PUT)
        assert not pb.PutHeader.FromString(frame.body).checksums
        fd = talk.ring(RING_BYTES)
        plan(talk, frame)
        while len(came) < PLAN.payload_bytes:
            number, written = POSITION.unpack(talk.data.recv(64))
            assert number == frame.request_id
            assert len(came) < written <= len(came) + RING_BYTES
            while len(came) < written:
                at = len(came) % RING_BYTES
                count = min(written - len(came), RING_BYTES - at)
                came.extend(os.pread(fd, count, at))
            talk.data.send(POSITION.pack(0, 1 << 40))  # of another put: passed over
            talk.data.send(POSITION.pack(number, written))
        os.close(fd)
        talk.answer(frame, STORED)

    peer.script = script
    put = client.put(PREFIX, CONTENTS)
    assert put.stored == CHUNKS, put
    assert bytes(came) == b"".join(CONTENTS)


PUT_LIES: dict[str, tuple[Script, str]] = {
    "no ring": (put_by(plan), "garbage"),
    "more taken than written": (put_by(ring, plan, position(1 << 30)), "garbage"),
    "half a position": (put_by(ring, plan, lambda t, f: t.data.send(b"1234567")), "garbage"),
    "two rings": (put_by(ring, ring, plan), "garbage"),
    "the data channel ends": (put_by(ring, plan, lambda t, f: t.data.shutdown(2)), "unreachable"),
    "the last answer first": (put_by(lambda t, f: t.answer(f, STORED)), "garbage"),
    "two plans": (put_by(ring, plan, plan, position(ABANDONED)), "garbage"),
    "nothing more": (put_by(ring, plan), "deadline"),
    "abandoned": (
        put_by(ring, plan, position(ABANDONED), lambda t, f: t.refuse(f, pb.RESOURCE_EXHAUSTED)),
        "overloaded",
    ),
    "a plan of another length": (
        put_by(ring, lambda t, f: t.answer(f, pb.PutPlan(states=b"\2"), REPLY)),
        "garbage",
    ),
}


@pytest.mark.parametrize("lie", PUT_LIES)
def test_puts_that_are_answered_wrongly_are_refusals(
    peer: LocalPeer, client: KVClient, lie: str
) -> None:
    peer.script, reason = PUT_LIES[lie]
    put = client.put(PREFIX, CONTENTS, timeout_s=SHORT_S if reason == "deadline" else 5)
    assert put.stored == 0
    assert put.reason == reason, put


def test_a_put_that_is_given_up_is_cancelled_and_keeps_its_turn_until_it_is_over(
    peer: LocalPeer, client: KVClient
) -> None:
    order: list[str] = []

    def script(talk: Conversation) -> None:
        first = talk.request(Kind.PUT)
        ring(talk, first)
        plan(talk, first)
        cancel = talk.request(Kind.CANCEL)
        assert cancel.request_id == first.request_id
        order.append("cancelled")
        go_on.wait(20)
        order.append("over")
        while select.select([talk.sock], [], [], 0)[0]:
            came = talk.next()
            if came is None or came.kind != Kind.RELEASE:
                order.append("the next came before")
        talk.refuse(first, pb.DEADLINE)
        second = talk.request(Kind.PUT)
        order.append("second")
        talk.answer(second, pb.PutPlan(states=bytes([pb.EXISTED]) * CHUNKS), REPLY)
        talk.answer(second, pb.PutReply(states=bytes([pb.EXISTED]) * CHUNKS))

    go_on = threading.Event()
    peer.script = script
    assert client.put(PREFIX, CONTENTS, timeout_s=SHORT_S).reason == "deadline"
    waiting = client.submit_put(PREFIX, CONTENTS)
    assert client.put(PREFIX, CONTENTS, timeout_s=SHORT_S).outcomes[0] in (
        PutState.REFUSED_DEADLINE,
    )
    go_on.set()
    assert waiting.result().existed == CHUNKS
    assert order == ["cancelled", "over", "second"]


RESERVED = {
    "no area": pb.ReserveReply(
        area_id=5, offsets_bytes=OFFSETS, states=bytes([pb.WANTED]) * CHUNKS
    ),
    "beyond the area": pb.ReserveReply(
        area_id=1, offsets_bytes=[*OFFSETS[:3], WHOLE], states=bytes([pb.WANTED]) * CHUNKS
    ),
    "overlapping": pb.ReserveReply(
        area_id=1, offsets_bytes=[0, 0, 4096, 8192], states=bytes([pb.WANTED]) * CHUNKS
    ),
    "wrapping": pb.ReserveReply(
        area_id=1, offsets_bytes=[(1 << 64) - 4096] * 4, states=bytes([pb.WANTED]) * CHUNKS
    ),
    "too few": pb.ReserveReply(area_id=1, offsets_bytes=[0], states=bytes([pb.WANTED]) * CHUNKS),
    "no states": pb.ReserveReply(area_id=1, offsets_bytes=OFFSETS),
}


@pytest.mark.parametrize("lie", RESERVED)
def test_slots_outside_their_area_are_none(peer: LocalPeer, client: KVClient, lie: str) -> None:
    def script(talk: Conversation) -> None:
        frame = talk.request(Kind.RESERVE)
        fd = memory(bytes(WHOLE))
        talk.notice(Kind.AREA, pb.LocalArea(area_id=1, size_bytes=WHOLE), [fd])
        os.close(fd)
        talk.answer(frame, RESERVED[lie])

    peer.script = script
    slots = client.reserve(PREFIX)
    assert slots.reason == "garbage", slots.detail
    assert slots.commit().refused == CHUNKS


def test_a_daemon_that_reads_nothing_is_late(peer: LocalPeer, client: KVClient) -> None:
    """A request that does not fit into the socket's buffer ends with its deadline."""
    deaf = threading.Event()

    def script(talk: Conversation) -> None:
        for _ in range(2):
            frame = talk.next()
            assert frame is not None
            talk.answer_as_usual(frame)
        deaf.wait(20)

    peer.script = script
    assert client.match(FAMILY.prefix(range(64))).reason in ("", "deadline")
    long = FAMILY.prefix(range(64 * 16_000))
    match = client.match(long, timeout_s=SHORT_S)
    assert (match.chunks, match.reason) == (0, "deadline")
    deaf.set()
