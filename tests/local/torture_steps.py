"""How far a client has come when it is killed. Each step is a function that gets there.

A step that returns waits for its killer; one that goes on and on is killed at any moment of it;
one that must die at one exact place kills itself there. What a step writes are the chunks of its
own number.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from server import local_wire as w
from server.local_wire import LocalWire
from torture_data import FAMILY, OBJECT_BYTES, content, contents, prefix_of, run_of
from torture_pen import Stage

from kvstored_client import KVClient
from kvstored_client.proto import kvstore_pb2 as pb

BASE, COLD = 1, 2  # what everyone reads; what was last used longest ago
BASE_CHUNKS, COLD_CHUNKS = 64, 96
WRITTEN_CHUNKS = 96
"""More than a ring."""

_POSITION = struct.Struct("<QQ")
_KEEP: list[object] = []
"""What must live as long as the process."""

Step = Callable[[Stage], None]
STEPS: dict[str, Step] = {}


def step(function: Step) -> Step:
    """Register one under its name."""
    STEPS[function.__name__] = function
    return function


# ---- with the client itself ----------------------------------------------------------------------


def _client(stage: Stage) -> KVClient:
    client = KVClient(stage.target)
    assert "local" in client.hello().features
    assert client._transport._wire is None, "it must go by the local session"
    _KEEP.append(client)
    return client


def _slots(stage: Stage) -> tuple[KVClient, object]:
    client = _client(stage)
    slots = client.reserve(prefix_of(stage.number, WRITTEN_CHUNKS))
    assert not slots.reason, (slots.reason, slots.detail)
    for chunk in range(WRITTEN_CHUNKS):
        slots[chunk][:] = content(stage.number, chunk).data
    _KEEP.append(slots)
    return client, slots


@step
def connected(stage: Stage) -> None:
    _client(stage)
    stage.arrived()


@step
def leases_with_views(stage: Stage) -> None:
    lease = _client(stage).acquire(prefix_of(BASE, BASE_CHUNKS))
    assert len(lease) == BASE_CHUNKS, lease.reason
    _KEEP.extend([lease, [lease[i] for i in range(0, BASE_CHUNKS, 3)], lease.array(1)])
    stage.arrived()


@step
def views_without_their_lease(stage: Stage) -> None:
    client = _client(stage)
    with client.acquire(prefix_of(BASE, BASE_CHUNKS)) as lease:
        _KEEP.append(lease.array(5))
    client.close()
    stage.arrived()


@step
def holds(stage: Stage) -> None:
    match = _client(stage).match(prefix_of(BASE, BASE_CHUNKS), hold=True)
    assert match.hold is not None
    _KEEP.append(match)
    stage.arrived()


@step
def slots_filled(stage: Stage) -> None:
    _slots(stage)
    stage.arrived()


@step
def commits(stage: Stage) -> None:
    """Killed somewhere in a commit, or just after it."""
    _, slots = _slots(stage)
    stage.arrived()
    slots.commit(durability="durable")  # type: ignore[attr-defined]  # Slots


@step
def puts(stage: Stage) -> None:
    client = _client(stage)
    data = contents(stage.number, WRITTEN_CHUNKS)
    prefix = prefix_of(stage.number, WRITTEN_CHUNKS)
    stage.arrived()
    while True:
        client.put(prefix, data)
        client.delete(prefix)


@step
def copies(stage: Stage) -> None:
    """Gets from whatever tier."""
    client = _client(stage)
    out = np.zeros((COLD_CHUNKS, OBJECT_BYTES), np.uint8)
    stage.arrived()
    while True:
        client.get(prefix_of(COLD, COLD_CHUNKS), out)


@step
def acquires_and_releases(stage: Stage) -> None:
    client = _client(stage)

    def work() -> None:
        while True:
            with client.acquire(prefix_of(BASE, BASE_CHUNKS), stop=32):
                pass

    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    stage.arrived()


@step
def jobs(stage: Stage) -> None:
    client = _client(stage)
    prefix, data = prefix_of(stage.number, WRITTEN_CHUNKS), contents(stage.number, WRITTEN_CHUNKS)
    out: NDArray[np.uint8] = np.zeros((BASE_CHUNKS, OBJECT_BYTES), np.uint8)
    stage.arrived()
    while True:
        work = [
            client.submit_put(prefix, data),
            client.submit_get(prefix_of(BASE, BASE_CHUNKS), out),
        ]
        for job in work:
            job.result()
        client.delete(prefix)


# ---- with a client that stops at one frame -------------------------------------------------------


def _wire(stage: Stage) -> LocalWire:
    path = Path(stage.target.removeprefix("unix://")).with_name("k-local.sock")
    wire = LocalWire(path)
    _KEEP.append(wire)
    return wire


def _opened(stage: Stage) -> tuple[LocalWire, bytes]:
    """A session, and the namespace's salt."""
    wire = _wire(stage)
    wire.open()
    hello = wire.call(
        w.HELLO,
        pb.HelloRequest(protocol_version=1, namespace="default", families=[FAMILY.spec()]),
    )
    assert isinstance(hello, pb.HelloReply)
    return wire, hello.namespace_salt


def _await_answer(wire: LocalWire) -> None:
    """Until there is one to read; it is not."""
    assert select.select([wire.socket], [], [], w.GIVE_UP_S)[0]


def _reserved(stage: Stage, chunks: int = WRITTEN_CHUNKS) -> LocalWire:
    """A reservation, id 9, that is filled."""
    wire, salt = _opened(stage)
    request = pb.ReserveRequest(
        run=run_of(stage.number, chunks, salt), lease_id=9, lengths_bytes=[OBJECT_BYTES] * chunks
    )
    reply = wire.call(w.RESERVE, request)
    assert isinstance(reply, pb.ReserveReply)
    (notice,) = wire.notices
    area = pb.LocalArea.FromString(notice.body)
    memory = mmap.mmap(notice.fds[0], area.size_bytes)
    _KEEP.append(memory)
    for chunk, offset in enumerate(reply.offsets_bytes):
        memory[offset : offset + OBJECT_BYTES] = content(stage.number, chunk).tobytes()
    return wire


@step
def wire_connected(stage: Stage) -> None:
    _wire(stage)
    stage.arrived()


@step
def wire_open_unread(stage: Stage) -> None:
    wire = _wire(stage)
    wire.send(w.OPEN, 1, pb.LocalOpen(protocol_version=1, namespace="default", client="test"))
    _await_answer(wire)
    stage.arrived()


@step
def wire_open_sent(stage: Stage) -> None:
    wire = _wire(stage)
    stage.arrived()
    wire.send(w.OPEN, 1, pb.LocalOpen(protocol_version=1, namespace="default", client="test"))
    stage.die()


@step
def wire_half_a_frame(stage: Stage) -> None:
    wire, salt = _opened(stage)
    request = pb.AcquireRequest(run=run_of(BASE, BASE_CHUNKS, salt), lease_id=1)
    stage.arrived()
    wire.send_raw(w.frame(w.ACQUIRE, 5, request)[:-100])
    stage.die()


@step
def wire_acquire_sent(stage: Stage) -> None:
    wire, salt = _opened(stage)
    stage.arrived()
    for lease_id, number in ((1, BASE), (2, COLD)):
        wire.start_acquire(run_of(number, BASE_CHUNKS, salt), lease_id)
    stage.die()


@step
def wire_acquire_unread(stage: Stage) -> None:
    wire, salt = _opened(stage)
    wire.start_acquire(run_of(BASE, BASE_CHUNKS, salt), 1)
    _await_answer(wire)
    stage.arrived()


@step
def wire_acquire_and_release_sent(stage: Stage) -> None:
    wire, salt = _opened(stage)
    stage.arrived()
    for lease_id in range(1, 20):
        wire.start_acquire(run_of(BASE, BASE_CHUNKS, salt), lease_id)
        if lease_id % 3:
            wire.release_quietly(lease_id)
    stage.die()


@step
def wire_hold_sent(stage: Stage) -> None:
    wire, salt = _opened(stage)
    stage.arrived()
    for hold_id, number in ((1, BASE), (2, COLD)):
        request = pb.MatchRequest(run=run_of(number, BASE_CHUNKS, salt), hold=True, hold_id=hold_id)
        wire.send(w.MATCH, hold_id, request)
    stage.die()


@step
def wire_quarantined(stage: Stage) -> None:
    """The daemon has ended it; what it looks at is held until it dies."""
    wire, salt = _opened(stage)
    wire.acquire(run_of(BASE, BASE_CHUNKS, salt), 1)
    wire.send_raw(b"\xff" * 64)
    wire.until_ended()
    stage.arrived()


@step
def wire_reserve_sent(stage: Stage) -> None:
    wire, salt = _opened(stage)
    request = pb.ReserveRequest(
        run=run_of(stage.number, WRITTEN_CHUNKS, salt),
        lease_id=9,
        lengths_bytes=[OBJECT_BYTES] * WRITTEN_CHUNKS,
    )
    stage.arrived()
    wire.send(w.RESERVE, 7, request)
    stage.die()


@step
def wire_reserve_filled(stage: Stage) -> None:
    _reserved(stage)
    stage.arrived()


@step
def wire_commit_sent(stage: Stage) -> None:
    wire = _reserved(stage)
    stage.arrived()
    wire.send(w.COMMIT, 8, pb.CommitRequest(lease_id=9, durability=pb.DURABLE))
    stage.die()


@step
def wire_commit_unread(stage: Stage) -> None:
    wire = _reserved(stage)
    wire.send(w.COMMIT, 8, pb.CommitRequest(lease_id=9))
    _await_answer(wire)
    stage.arrived()


def _put(stage: Stage, wire: LocalWire, salt: bytes) -> None:
    header = pb.PutHeader(
        run=run_of(stage.number, WRITTEN_CHUNKS, salt),
        lengths_bytes=[OBJECT_BYTES] * WRITTEN_CHUNKS,
    )
    wire.send(w.PUT, 7, header)


@step
def wire_put_sent(stage: Stage) -> None:
    wire, salt = _opened(stage)
    stage.arrived()
    _put(stage, wire, salt)
    stage.die()


@step
def wire_put_planned(stage: Stage) -> None:
    wire, salt = _opened(stage)
    _put(stage, wire, salt)
    wire.answer(7)
    stage.arrived()


class _Payload:
    """A put whose payload goes out as far as one says."""

    def __init__(self, stage: Stage) -> None:
        wire, salt = _opened(stage)
        _put(stage, wire, salt)
        plan = pb.PutPlan.FromString(wire.answer(7).body)
        (notice,) = wire.notices
        self.total = plan.payload_bytes
        self.size = pb.LocalRing.FromString(notice.body).size_bytes
        self.memory = mmap.mmap(notice.fds[0], self.size)
        self._data = notice.fds[1]
        self._bytes = contents(stage.number, WRITTEN_CHUNKS).tobytes()
        self.taken = 0
        self.sent = 0
        _KEEP.append(self)

    def send(self, position: int) -> None:
        """Write up to there, and say so."""
        while self.sent < position:
            step = min(position, self.taken + self.size, self.sent + OBJECT_BYTES)
            at = self.sent % self.size
            self.memory[at : at + step - self.sent] = self._bytes[self.sent : step]
            self.sent = step
            os.write(self._data, _POSITION.pack(7, step))
            if self.sent < position and self.sent == self.taken + self.size:
                self.hear()

    def hear(self) -> None:
        """How far the daemon has taken."""
        request_id, self.taken = _POSITION.unpack(os.read(self._data, 16))
        assert (request_id, self.taken <= self.sent) == (7, True)


@step
def wire_put_half(stage: Stage) -> None:
    """Some of it taken, a piece of an object unfinished."""
    payload = _Payload(stage)
    payload.send(payload.total // 2)
    payload.hear()
    stage.arrived()


@step
def wire_put_more_sent(stage: Stage) -> None:
    """In the middle of what the daemon copies."""
    payload = _Payload(stage)
    payload.send(OBJECT_BYTES)
    stage.arrived()
    payload.send(payload.total - OBJECT_BYTES)
    stage.die()


@step
def wire_put_all_sent(stage: Stage) -> None:
    """Nothing is missing but somebody to hear of it."""
    payload = _Payload(stage)
    payload.send(OBJECT_BYTES)
    stage.arrived()
    payload.send(payload.total)
    stage.die()
