"""A peer on the local socket that is late, stops, or says goodbye: a miss with a reason, in time,
and views that stay.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from local_hostile import CHUNKS, CONTENTS, HELD, PREFIX, SHORT_S, clean_client
from local_peer import LAST, OPENED, REPLY, Conversation, LocalPeer, laid_out, local_peer, rows
from wire_server import FAMILY, Canary

from kvstored_client import KVClient
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
