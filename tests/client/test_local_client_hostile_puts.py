"""Whatever a peer on the local socket answers to a put: a refusal with a reason, in time."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator

import pytest
from local_hostile import CHUNKS, CONTENTS, OFFSETS, PREFIX, SHORT_S, WHOLE, clean_client
from local_peer import REPLY, Conversation, LocalPeer, Script, local_peer, memory
from wire_server import OBJECT_BYTES

from kvstored_client import KVClient, PutState
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import ABANDONED, POSITION, Kind


@pytest.fixture
def peer() -> Iterator[LocalPeer]:
    with local_peer() as running:
        yield running


@pytest.fixture
def client(peer: LocalPeer) -> Iterator[KVClient]:
    with clean_client(peer) as made:
        yield made


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
