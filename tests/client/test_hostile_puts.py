"""Whatever the peer answers to a put: a refusal with a reason, in time, and no later read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from client_kinds import MakeClient, OnLoop, make_client
from wire_server import FAMILY, OBJECT_BYTES, WireServer, payload, refuse, wire_server

from kvstored_client import PutState
from kvstored_client.buffers import Want, sources
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.sending import PutSender

__all__ = ["make_client"]
CHUNKS = 4
PREFIX = FAMILY.prefix(range(64 * CHUNKS))
DATA = [payload(i) for i in range(CHUNKS)]
WANT_ALL = pb.PutPlan(
    states=bytes([pb.WANTED] * CHUNKS),
    payload_bytes=CHUNKS * OBJECT_BYTES,
    max_frame_bytes=30_000,
).SerializeToString()
Context = grpc.ServicerContext
Script = Callable[[Iterator[bytes], Context], Iterator[bytes]]


@pytest.fixture
def server() -> Iterator[WireServer]:
    with wire_server() as running:
        yield running


def answers(*messages: bytes) -> Script:
    """Read the header, give the first answer, read all there is, give the others."""

    def script(requests: Iterator[bytes], _context: Context) -> Iterator[bytes]:
        next(requests)
        yield from messages[:1]
        for _ in requests:
            pass
        yield from messages[1:]

    return script


def plan(**changes: object) -> bytes:
    message = pb.PutPlan.FromString(WANT_ALL)
    for name, value in changes.items():
        setattr(message, name, value)
    return message.SerializeToString()


def reply(*states: int) -> bytes:
    return pb.PutReply(states=bytes(states)).SerializeToString()


LIES = {
    "plan is not a message": answers(b"\xff" * 50),
    "no plan": lambda requests, context: iter(()),
    "plan of other objects": answers(plan(states=bytes([pb.WANTED]))),
    "plan wants other bytes": answers(plan(payload_bytes=1)),
    "plan without frames": answers(plan(max_frame_bytes=0)),
    "no reply": answers(WANT_ALL),
    "reply is not a message": answers(WANT_ALL, b"\xff" * 50),
    "reply of other objects": answers(WANT_ALL, reply(pb.STORED)),
    "reply still wants": answers(WANT_ALL, reply(*[pb.WANTED] * CHUNKS)),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refusals_and_nothing_else(
    server: WireServer, make_client: MakeClient, lie: str
) -> None:
    server.on_put = LIES[lie]
    result = make_client(server.target).put(PREFIX, DATA)
    assert (result.stored, result.existed, result.refused) == (0, 0, CHUNKS)
    assert set(result.outcomes) == {PutState.REFUSED_UNREACHABLE}
    assert result.reason == "garbage"


@pytest.mark.parametrize(
    ("code", "reason", "state"),
    [
        (pb.DRAINING, "draining", PutState.REFUSED_DRAINING),
        (pb.RESOURCE_EXHAUSTED, "overloaded", PutState.REFUSED_NO_ROOM),
        (pb.TOO_LARGE, "refused", PutState.REFUSED_TOO_LARGE),
        (pb.DEADLINE, "deadline", PutState.REFUSED_DEADLINE),
        (pb.UNAUTHENTICATED, "unauthenticated", PutState.REFUSED_UNREACHABLE),
    ],
)
@pytest.mark.parametrize("frames", [0, 2])
def test_a_call_that_is_refused(
    server: WireServer,
    make_client: MakeClient,
    code: int,
    reason: str,
    state: PutState,
    frames: int,
) -> None:
    def script(requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        next(requests)
        if frames:
            yield WANT_ALL
            for _ in range(frames):
                next(requests)
        refuse(context, code)

    server.on_put = script
    client = make_client(server.target)
    result = client.put(PREFIX, DATA)
    if result.reason == "unreachable":
        # grpc.aio hides the status of a call that ends while it sends.
        assert frames
        assert isinstance(client, OnLoop)
    else:
        assert set(result.outcomes) == {state}
        assert result.reason == reason
    assert result.refused == CHUNKS


def test_each_chunk_has_the_worst_outcome_of_its_objects(
    server: WireServer, make_client: MakeClient
) -> None:
    def script(requests: Iterator[bytes], _context: Context) -> Iterator[bytes]:
        next(requests)
        states = [pb.WANTED, pb.EXISTED, pb.REFUSED_LENGTH, pb.WANTED]
        yield plan(states=bytes(states), payload_bytes=2 * OBJECT_BYTES)
        assert b"".join(requests) == DATA[0] + DATA[3]
        yield reply(pb.STORED, pb.EXISTED, pb.REFUSED_LENGTH, pb.STORED_NOT_DURABLE)

    server.on_put = script
    result = make_client(server.target).put(PREFIX, DATA, durability="durable", ttl_ms=5)
    assert (result.stored, result.existed, result.refused) == (2, 1, 1)
    assert [state.outcome for state in result.outcomes] == [
        "stored",
        "existed",
        "refused",
        "stored",
    ]
    assert [state.reason for state in result.outcomes] == ["", "", "length", "not_durable"]
    assert result.reason == "length"


def test_what_a_plan_settled_counts_although_the_call_died(
    server: WireServer, make_client: MakeClient
) -> None:
    settled = [pb.EXISTED, pb.WANTED, pb.EXISTED, pb.REFUSED_CAP]
    server.on_put = answers(plan(states=bytes(settled), payload_bytes=OBJECT_BYTES))
    result = make_client(server.target).put(PREFIX, DATA)
    assert result.outcomes == (
        PutState.EXISTED,
        PutState.REFUSED_UNREACHABLE,
        PutState.EXISTED,
        PutState.REFUSED_CAP,
    )


def test_what_a_plan_found_is_not_known_to_be_durable_when_the_call_died(
    server: WireServer, make_client: MakeClient
) -> None:
    server.on_put = answers(plan(states=bytes([pb.EXISTED] * CHUNKS), payload_bytes=0))
    result = make_client(server.target).put(PREFIX, DATA, durability="durable")
    assert set(result.outcomes) == {PutState.STORED_NOT_DURABLE}
    assert result.reason == "not_durable"


def test_objects_that_are_not_offered(server: WireServer, make_client: MakeClient) -> None:
    seen: list[pb.PutHeader] = []

    def script(requests: Iterator[bytes], _context: Context) -> Iterator[bytes]:
        seen.append(pb.PutHeader.FromString(next(requests)))
        states = [pb.WANTED if n else pb.NOT_OFFERED for n in seen[0].lengths_bytes]
        yield plan(states=bytes(states), payload_bytes=2 * OBJECT_BYTES)
        assert b"".join(requests) == DATA[1] + DATA[2]
        yield reply(*[pb.STORED if n else pb.NOT_OFFERED for n in seen[0].lengths_bytes])

    server.on_put = script
    client = make_client(server.target)
    result = client.put(PREFIX, [None, DATA[1], DATA[2], None])
    assert [state.outcome for state in result.outcomes] == [
        "not_offered",
        "stored",
        "stored",
        "not_offered",
    ]
    assert list(seen[0].lengths_bytes) == [0, OBJECT_BYTES, OBJECT_BYTES, 0]
    assert client.put(PREFIX, [None] * 4).outcomes == (PutState.NOT_OFFERED,) * 4
    assert len(seen) == 1, "nothing offered, nothing asked"


def test_a_daemon_that_stops_reading_costs_the_deadline_and_no_later_read(
    server: WireServer, make_client: MakeClient
) -> None:
    returned = threading.Event()
    came: list[bytes] = []

    def script(requests: Iterator[bytes], _context: Context) -> Iterator[bytes]:
        next(requests)
        yield WANT_ALL
        came.append(next(requests))
        server.hold(returned)
        came.extend(requests)

    server.on_put = script
    memory = np.frombuffer(b"".join(DATA), np.uint8).copy()
    result = make_client(server.target).put(PREFIX, memory, timeout_s=0.4)
    # The memory is the caller's again; whatever were read of it from now on would be zeros.
    memory[:] = 0
    returned.set()
    server.wait_ended()
    assert set(result.outcomes) == {PutState.REFUSED_DEADLINE}
    assert result.reason == "deadline"
    sent = b"".join(came)
    assert sent == b"".join(DATA)[: len(sent)]


def sender_of(memory: np.ndarray) -> PutSender:
    want = Want(np.full(CHUNKS, OBJECT_BYTES), np.ones(CHUNKS, np.bool_), ["it"] * CHUNKS)
    sender = PutSender(
        sources(memory, want),
        0,
        np.full(CHUNKS, OBJECT_BYTES),
        lambda announce: pb.PutHeader(ttl_ms=1),
    )
    sender.header()
    sender.plan(WANT_ALL)
    return sender


def test_frames_are_cut_from_objects_back_to_back() -> None:
    frames = list(sender_of(np.frombuffer(b"".join(DATA), np.uint8)).frames())
    assert b"".join(frames) == b"".join(DATA)
    assert {len(frame) for frame in frames[:-1]} == {30_000}


def test_a_stopped_sender_reads_no_memory_of_the_caller() -> None:
    # grpc's thread may ask for a frame at the very moment at which the call returns.
    memory = np.frombuffer(b"".join(DATA), np.uint8).copy()
    sender = sender_of(memory)
    frames = sender.frames()
    assert next(frames) == b"".join(DATA)[:30_000]
    sender.stop()
    assert next(frames, None) is None


def test_stop_waits_for_the_frame_that_is_being_made() -> None:
    sender = sender_of(np.frombuffer(b"".join(DATA), np.uint8))
    stopped = threading.Thread(target=sender.stop)
    with sender._lock:  # as `frames` holds it while it copies
        stopped.start()
        stopped.join(0.1)
        assert stopped.is_alive()
    stopped.join(30)
    assert not stopped.is_alive()
