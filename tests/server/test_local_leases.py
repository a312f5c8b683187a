"""Leases and holds of local sessions: what they keep, for how long, and how much at most."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from server import local_serving as serving
from server import local_wire as w
from server.local_serving import MIB, LocalServed, local_serving
from server.local_wire import LocalWire, Refused

from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault, FaultyFiles
from kvstored.server.limits import Limits, LocalLimits
from kvstored_client.proto import kvstore_pb2 as pb

OBJECT_BYTES = 128 << 10
CAP = 16 * MIB
WHOLE = CAP // OBJECT_BYTES  # chunks that fill RAM
BELOW = 8  # chunks on the disk alone
LIMITS = replace(Limits(), local=LocalLimits(max_leases=8, max_requests=4))


class Gate(threading.Event):
    """Stops reads of the disk, and says when one has begun to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.reached.set()
        return super().wait(timeout)


@pytest.fixture(scope="module")
def disk() -> FaultyFiles:
    return FaultyFiles(RealFiles())


@pytest.fixture(scope="module")
def served(disk: FaultyFiles) -> Iterator[LocalServed]:
    with local_serving(LIMITS, cap_bytes=CAP, files=disk) as running:
        yield running


@pytest.fixture
def wire(served: LocalServed) -> Iterator[LocalWire]:
    with served.session() as opened:
        yield opened
    served.becomes(served.nothing_held)


@pytest.fixture
def gate(served: LocalServed, disk: FaultyFiles) -> Iterator[Gate]:
    """Chunks 0 to BELOW of the salt "below" are on the disk, whose reads wait for the gate."""
    served.push_down(below(), [content(i) for i in range(BELOW)])
    closed = Gate()
    disk.inject(Fault("preadv", "*/data", stuck=closed))
    yield closed
    disk.clear()
    closed.set()


def run(count: int, salt: bytes = b"") -> pb.ChunkRun:
    return serving.run(count, salt=salt, parts=["extra"])


def content(i: int) -> bytes:
    return serving.content(i, OBJECT_BYTES)


def below(count: int = BELOW) -> pb.ChunkRun:
    return run(count, salt=b"below")


def in_ram(served: LocalServed, count: int, salt: bytes = b"") -> pb.ChunkRun:
    """Chunks that are in RAM now."""
    chunks = run(count, salt=salt)
    served.fill(chunks, [content(i) for i in range(count)])
    if set(served.states(chunks)) != {pb.IN_RAM}:  # on the disk alone
        served.delete(chunks)
        served.fill(chunks, [content(i) for i in range(count)])
    assert set(served.states(chunks)) == {pb.IN_RAM}
    return chunks


# ---- release -------------------------------------------------------------------------------------


def test_a_release_overtakes_grants_on_their_way(
    served: LocalServed, wire: LocalWire, gate: Gate
) -> None:
    request_id = wire.start_acquire(below(), 5)
    assert gate.reached.wait(w.GIVE_UP_S)
    wire.send(w.RELEASE, 0, pb.ReleaseRequest(lease_ids=[5]))
    with pytest.raises(Refused) as caught:
        wire.acquired(request_id)
    assert caught.value.code == pb.DEADLINE
    gate.set()
    served.becomes(served.nothing_held)
    assert len(wire.acquire(below(), 5).rows) == BELOW  # the id is free, and the bytes are there
    wire.release(5)


def test_a_release_in_the_same_breath_as_its_acquire(
    served: LocalServed, wire: LocalWire, gate: Gate
) -> None:
    """The task that is to answer has not even begun."""
    acquire = pb.AcquireRequest(run=below(), lease_id=5)
    release = pb.ReleaseRequest(lease_ids=[5])
    wire.send_raw(w.frame(w.ACQUIRE, 700, acquire) + w.frame(w.RELEASE, 0, release))
    with pytest.raises(Refused):
        wire.answer(700)
    served.becomes(served.nothing_held)
    gate.set()


def test_a_release_between_grants(served: LocalServed, wire: LocalWire, gate: Gate) -> None:
    first = in_ram(served, 2)
    mixed = below()
    mixed.keys = first.keys + mixed.keys
    request_id = wire.start_acquire(mixed, 5)
    reply = pb.AcquireReply.FromString(wire.answer(request_id).body)
    assert [*reply.indices] == [0, 1]
    assert gate.reached.wait(w.GIVE_UP_S)
    assert served.look(lambda: served.ram.leased_bytes) >= 2 * OBJECT_BYTES
    wire.send(w.RELEASE, 0, pb.ReleaseRequest(lease_ids=[5]))
    with pytest.raises(Refused):
        wire.answer(request_id)
    gate.set()
    served.becomes(served.nothing_held)


def test_what_comes_from_below_is_told_as_it_comes(wire: LocalWire, gate: Gate) -> None:
    request_id = wire.start_acquire(below(), 5)
    assert gate.reached.wait(w.GIVE_UP_S)
    gate.set()
    granted = wire.acquired(request_id)
    assert granted.states == bytes([pb.IN_NVME]) * BELOW
    assert {row[5] for row in granted.rows} == {pb.TIER_NVME}
    assert [wire.bytes_of(row) for row in granted.rows] == [content(i) for i in range(BELOW)]
    assert [row[0] for row in granted.rows] == [*range(BELOW)]
    wire.release(5)


def test_a_grant_to_a_released_id_ends_at_once(served: LocalServed, wire: LocalWire) -> None:
    chunks = in_ram(served, 2)
    leases = served.look(lambda: [*served.server._sessions][-1].leases)
    assert leases is not None

    def late() -> bool:
        grants = leases.begin(5)
        run_of = served.dispatcher.run_of(chunks, pb.Context())
        found = served.store.acquire_now(run_of, CAP)
        assert found is not None
        assert leases.room(grants, found[0].charged_bytes)
        leases.release([5])
        assert not leases.room(grants, 4096)
        taken = leases.add(grants, found[0])
        leases.end(5, grants, found[0].charged_bytes)
        return taken

    assert not served.look(late)
    served.becomes(served.nothing_held)


def test_a_cancelled_acquire_ends_and_keeps_what_it_gave(
    served: LocalServed, wire: LocalWire, gate: Gate
) -> None:
    first = in_ram(served, 2)
    mixed = below()
    mixed.keys = first.keys + mixed.keys
    request_id = wire.start_acquire(mixed, 5)
    wire.answer(request_id)
    assert gate.reached.wait(w.GIVE_UP_S)
    wire.send(w.CANCEL, request_id)
    with pytest.raises(Refused):
        wire.answer(request_id)
    gate.set()
    served.becomes(lambda: served.ram.leased_bytes == 2 * OBJECT_BYTES)
    assert served.figures.leased_bytes == 2 * OBJECT_BYTES
    wire.release(5)


def test_release_is_idempotent(served: LocalServed, wire: LocalWire) -> None:
    chunks = in_ram(served, 3)
    wire.release(1, 2, 99)  # never used
    wire.acquire(chunks, 1)
    wire.acquire(chunks, 2)
    assert served.figures.leased_bytes == 6 * OBJECT_BYTES
    wire.release(1, 1)
    wire.release(1)
    assert served.figures.leased_bytes == 3 * OBJECT_BYTES
    served.becomes(lambda: served.ram.leased_bytes == 3 * OBJECT_BYTES)  # the writer leases too
    wire.release(2, 1, 2)
    served.becomes(served.nothing_held)


# ---- ids -----------------------------------------------------------------------------------------


def test_an_id_in_use_is_refused_for_every_use(
    served: LocalServed, wire: LocalWire, gate: Gate
) -> None:
    chunks = in_ram(served, 1)
    wire.acquire(chunks, 1)
    wire.call(w.MATCH, pb.MatchRequest(run=chunks, hold=True, hold_id=2))
    under_way = wire.start_acquire(below(), 3)
    assert gate.reached.wait(w.GIVE_UP_S)
    for lease_id in (1, 2, 3):
        hold = pb.MatchRequest(run=chunks, hold=True, hold_id=lease_id)
        reserve = pb.ReserveRequest(
            run=run(1, salt=b"new"), lease_id=lease_id, lengths_bytes=[OBJECT_BYTES]
        )
        acquire = pb.AcquireRequest(run=chunks, lease_id=lease_id)
        for kind, request in ((w.MATCH, hold), (w.RESERVE, reserve), (w.ACQUIRE, acquire)):
            with pytest.raises(Refused) as caught:
                wire.call(kind, request)
            assert caught.value.code == pb.BAD_REQUEST
    gate.set()
    assert len(wire.acquired(under_way).rows) == BELOW


def test_ids_are_bounded(served: LocalServed, wire: LocalWire) -> None:
    chunks = in_ram(served, 1)
    for lease_id in range(1, 9):
        wire.acquire(chunks, lease_id)
    with pytest.raises(Refused) as caught:
        wire.acquire(chunks, 9)
    assert caught.value.code == pb.RESOURCE_EXHAUSTED
    wire.release(4)
    assert len(wire.acquire(chunks, 9).rows) == 1


def test_requests_under_way_are_bounded(wire: LocalWire, gate: Gate) -> None:
    ids = [wire.start_acquire(below(), lease_id) for lease_id in range(1, 5)]
    with pytest.raises(Refused) as caught:
        wire.acquire(below(), 5)
    assert caught.value.code == pb.RESOURCE_EXHAUSTED
    assert caught.value.error.retry_after_ms
    for request_id in ids:
        wire.send(w.CANCEL, request_id)
        with pytest.raises(Refused):
            wire.answer(request_id)
    gate.set()
    assert len(wire.acquire(below(), 5).rows) == BELOW


# ---- bounds --------------------------------------------------------------------------------------


def test_a_session_keeps_half_of_the_cap_and_no_more(served: LocalServed, wire: LocalWire) -> None:
    half = in_ram(served, WHOLE // 2, b"h")
    more = in_ram(served, 4, b"m")
    wide = pb.ChunkRun()
    wide.CopyFrom(half)
    wide.keys += more.keys
    granted = wire.acquire(wide, 1)
    assert [row[0] for row in granted.rows] == [*range(WHOLE // 2)]
    assert granted.states[WHOLE // 2 :] == bytes([pb.MISS_DECLINED] * 4)
    assert served.figures.leased_bytes == wire.opened.max_leased_bytes == CAP // 2
    assert wire.acquire(more, 2).states == bytes([pb.MISS_DECLINED] * 4)
    wire.release(1)
    assert len(wire.acquire(more, 2).rows) == 4


def test_a_namespace_keeps_three_quarters_over_all_sessions(
    served: LocalServed, wire: LocalWire
) -> None:
    half = in_ram(served, WHOLE // 2, b"h")
    wire.acquire(half, 1)
    with served.session() as other:
        granted = other.acquire(half, 1)
        assert len(granted.rows) == WHOLE // 4
        assert served.figures.leased_bytes == CAP * 3 // 4
    served.becomes(lambda: served.server.figures().leased_bytes == CAP // 2)


# ---- holds ---------------------------------------------------------------------------------------


def hold(wire: LocalWire, chunks: pb.ChunkRun, hold_id: int) -> pb.MatchReply:
    reply = wire.call(w.MATCH, pb.MatchRequest(run=chunks, hold=True, hold_id=hold_id))
    assert isinstance(reply, pb.MatchReply)
    return reply


def held_keys(served: LocalServed) -> int:
    return served.look(lambda: len(served.store.namespaces["default"].holds._counts))


def test_a_hold_keeps_its_chunks_until_released(served: LocalServed, wire: LocalWire) -> None:
    chunks = in_ram(served, 8, b"held")
    assert hold(wire, chunks, 1).chunks == 8
    assert served.figures.leased_bytes == 8 * OBJECT_BYTES
    assert held_keys(served) == 8
    wire.release(1)
    assert held_keys(served) == 0
    assert served.figures.leased_bytes == 0


def test_an_acquire_takes_a_hold_over_chunk_by_chunk(served: LocalServed, wire: LocalWire) -> None:
    # More than half of what the session may keep: both at once it could not.
    count = WHOLE * 3 // 8
    chunks = in_ram(served, count, b"held")
    hold(wire, chunks, 1)
    part = run(8, salt=b"held")
    assert len(wire.acquire(part, 2).rows) == 8
    assert held_keys(served) == count - 8
    assert served.figures.leased_bytes == count * OBJECT_BYTES
    wire.release(2)
    assert len(wire.acquire(chunks, 3).rows) == count
    assert held_keys(served) == 0
    assert served.figures.leased_bytes == count * OBJECT_BYTES
    wire.release(1)
    with pytest.raises(Refused):
        hold(wire, chunks, 3)
    wire.release(3)
    assert served.figures.leased_bytes == 0


def test_each_acquire_takes_over_one_hold(served: LocalServed, wire: LocalWire) -> None:
    chunks = in_ram(served, 4, b"held")
    hold(wire, chunks, 1)
    hold(wire, chunks, 2)
    wire.acquire(chunks, 3)
    assert held_keys(served) == 4
    wire.release(1, 2)
    assert held_keys(served) == 0
    assert served.figures.leased_bytes == 4 * OBJECT_BYTES


def test_what_an_acquire_does_not_get_stays_held(
    served: LocalServed, wire: LocalWire, gate: Gate
) -> None:
    assert hold(wire, below(), 1).states == bytes([pb.IN_NVME]) * BELOW
    request_id = wire.start_acquire(below(), 2)
    assert gate.reached.wait(w.GIVE_UP_S)
    wire.send(w.CANCEL, request_id)
    with pytest.raises(Refused):
        wire.answer(request_id)
    assert held_keys(served) == BELOW
    gate.set()
    assert len(wire.acquire(below(), 2).rows) == BELOW
    assert held_keys(served) == 0


def test_a_hold_released_while_an_acquire_uses_it(
    served: LocalServed, wire: LocalWire, gate: Gate
) -> None:
    hold(wire, below(), 1)
    request_id = wire.start_acquire(below(), 2)
    assert gate.reached.wait(w.GIVE_UP_S)
    wire.release_quietly(1)
    gate.set()
    assert len(wire.acquired(request_id).rows) == BELOW
    assert held_keys(served) == 0


def test_a_hold_released_meanwhile_does_not_come_back(
    served: LocalServed, wire: LocalWire, gate: Gate
) -> None:
    hold(wire, below(), 1)
    request_id = wire.start_acquire(below(), 2)
    assert gate.reached.wait(w.GIVE_UP_S)
    wire.release_quietly(1)
    wire.send(w.CANCEL, request_id)
    with pytest.raises(Refused):
        wire.answer(request_id)
    assert held_keys(served) == 0
    gate.set()


def test_a_hold_beyond_the_bound_is_refused_and_keeps_nothing(
    served: LocalServed, wire: LocalWire
) -> None:
    half = in_ram(served, WHOLE // 2, b"h")
    wire.acquire(half, 1)
    more = in_ram(served, 2, b"m")
    with pytest.raises(Refused) as caught:
        hold(wire, more, 2)
    assert caught.value.code == pb.RESOURCE_EXHAUSTED
    assert held_keys(served) == 0


def test_a_run_that_names_a_key_twice_holds_it_once(served: LocalServed, wire: LocalWire) -> None:
    chunks = in_ram(served, 2, b"held")
    chunks.keys += chunks.keys
    hold(wire, chunks, 1)
    assert held_keys(served) == 2
    wire.release(1)
    assert held_keys(served) == 0


def test_the_end_of_a_session_ends_its_holds(served: LocalServed) -> None:
    chunks = in_ram(served, 2, b"held")
    with served.session() as wire:
        hold(wire, chunks, 1)
        wire.acquire(chunks, 2)
        hold(wire, chunks, 3)
        wire.shut_down()
        served.becomes(served.nothing_held)
