"""Clients that want harm: the daemon stays up, and no other session notices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from server import local_intruder
from server import local_wire as w
from server.local_serving import MIB, PART_BYTES, TOKEN, LocalServed, content, local_serving, run
from server.local_wire import LocalWire, Refused

from kvstored.server.limits import Limits, LocalLimits
from kvstored_client.proto import kvstore_pb2 as pb

CHUNKS = 4
OTHER_USER = 65_534
LIMITS = replace(Limits(), local=LocalLimits(max_leases=100))
HELD = bytes([pb.IN_RAM]) * CHUNKS


@pytest.fixture(scope="module")
def served() -> Iterator[LocalServed]:
    with local_serving(LIMITS) as running:
        running.fill(run(CHUNKS), [content(i) for i in range(CHUNKS)])
        running.fill(run(CHUNKS, namespace="locked"), [content(90 + i) for i in range(CHUNKS)])
        yield running


@pytest.fixture
def bystander(served: LocalServed) -> Iterator[LocalWire]:
    """A session that must notice nothing."""
    with served.session() as wire:
        granted = wire.acquire(run(CHUNKS), 1)
        yield wire
        assert [wire.bytes_of(row) for row in granted.rows] == [content(i) for i in range(CHUNKS)]
        assert wire.acquire(run(CHUNKS), 2).states == HELD
    served.becomes(served.nothing_held)


def descriptors() -> int:
    """Open descriptors of this process, the server among its threads."""
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("uid", [os.getuid(), OTHER_USER])
def test_a_received_segment_can_be_read_and_nothing_else(
    served: LocalServed, bystander: LocalWire, uid: int
) -> None:
    if os.getuid() != 0 and uid != os.getuid():
        pytest.skip("only root can become another user")
    (segment_id,) = bystander.segments
    fd = served.look(lambda: served.ram.segment_fd(segment_id))
    intruder = subprocess.run(
        [
            sys.executable,
            local_intruder.__file__,
            str(served.path),
            *map(str, (uid, os.getpid(), fd)),
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
        check=True,
    )
    assert json.loads(intruder.stdout) == {"done": [], "wrong": [], "rows": CHUNKS}


def test_no_segment_of_another_namespace_is_to_be_had(
    served: LocalServed, bystander: LocalWire
) -> None:
    with served.session("locked", token=TOKEN) as owner:
        theirs = owner.acquire(run(CHUNKS, namespace="locked"), 1)
        assert owner.bytes_of(theirs.rows[0]) == content(90)
        assert not {*owner.segments} & {*bystander.segments}
        with pytest.raises(Refused) as caught:
            bystander.acquire(run(CHUNKS, namespace="locked"), 5)
        assert caught.value.code == pb.BAD_REQUEST
        # Nor does saying that it was unmapped, or asking for an id, bring it.
        notice = pb.LocalRetire(segment_ids=[*owner.segments])
        bystander.send(w.RETIRED, 0, notice)
        bystander.release(1 << 60)
        assert {*bystander.segments}.isdisjoint(owner.segments)
        assert owner.bytes_of(theirs.rows[0]) == content(90)


def test_descriptors_that_a_client_sends_are_dropped(
    served: LocalServed, bystander: LocalWire
) -> None:
    with served.session() as wire, open(os.devnull) as null:
        wire.acquire(run(CHUNKS), 1)
        before = descriptors()
        for i in range(200):
            match = w.frame(w.MATCH, 10_000 + i, pb.MatchRequest(run=run(1)))
            wire.send_raw(match, [null.fileno()] * 250)
            assert wire.answer(10_000 + i).flags == w.REPLY | w.LAST
        # In the middle of a frame, too.
        half = w.frame(w.MATCH, 5, pb.MatchRequest(run=run(1)))
        wire.send_raw(half[:20], [null.fileno()] * 250)
        wire.send_raw(half[20:], [null.fileno()] * 250)
        wire.answer(5)
        assert descriptors() == before
        wire.send_raw(b"\xff" * 64, [null.fileno()] * 250)
        wire.until_ended()
        wire.send_raw(b"\xff" * 64, [null.fileno()] * 250)
        served.becomes(lambda: descriptors() == before)


def test_sessions_leave_no_descriptor(served: LocalServed, bystander: LocalWire) -> None:
    before = descriptors()
    for i in range(20):
        with served.session() as wire:
            wire.acquire(run(CHUNKS), 1)
            if i % 2:
                wire.send_raw(b"\xff" * 64)
                wire.until_ended()
    served.becomes(lambda: descriptors() == before)


ACQUIRES = int(os.environ.get("KVSTORED_TEST_ACQUIRES", "100000"))
"""A million in `make local-torture`."""


def test_very_many_acquires(served: LocalServed, bystander: LocalWire) -> None:
    """Ids are never released: bounded, whatever comes; others are answered in between."""
    with served.session() as wire:
        answered = refused = 0
        for start in range(0, ACQUIRES, 2_000):
            batch = [
                w.frame(w.ACQUIRE, i + 1, pb.AcquireRequest(run=run(1), lease_id=i + 1))
                for i in range(start, start + 2_000)
            ]
            writer = threading.Thread(target=wire.send_raw, args=(b"".join(batch),))
            writer.start()
            for i in range(start, start + 2_000):
                code = wire.outcome(i + 1)
                answered += code == 0
                refused += code == pb.RESOURCE_EXHAUSTED
            writer.join()
            assert bystander.acquire(run(CHUNKS), 9).states == HELD
            bystander.release(9)
        assert (answered, refused) == (100, ACQUIRES - 100)
        assert served.figures.leased_bytes == (100 + CHUNKS) * PART_BYTES


def test_a_client_that_pipelines_does_not_hold_the_loop(
    served: LocalServed, bystander: LocalWire
) -> None:
    """What one sends in one go is answered between what others send, not before it."""
    with served.session() as greedy:
        let_go = threading.Event()
        del served.ended[:]
        # Until both have sent, the loop does nothing: then it finds both at once.
        served.loop.call_soon_threadsafe(let_go.wait)
        match = w.frame(w.MATCH, 5, pb.MatchRequest(run=run(1)))
        greedy.send_raw(match * 400)
        bystander.send(w.TOUCH, 6, pb.TouchRequest(run=run(1)))
        let_go.set()
        assert bystander.answer(6).flags == w.REPLY | w.LAST
        for _ in range(400):
            greedy.answer(5)
        verbs = [verb for verb, _ in served.ended]
        assert verbs.count("match") == 400
        assert verbs.index("touch") <= 2 * 64


def test_ids_of_others_are_not_ones_own(served: LocalServed, bystander: LocalWire) -> None:
    """Lease ids, request ids and retirements belong to a session."""
    with served.session() as wire:
        wire.release(1)
        wire.send(w.CANCEL, 1)
        wire.send(w.RETIRED, 0, pb.LocalRetire(segment_ids=[*bystander.segments], area_ids=[1]))
        with pytest.raises(Refused) as caught:
            wire.call(w.COMMIT, pb.CommitRequest(lease_id=1))
        assert caught.value.code == pb.BAD_REQUEST
        assert served.figures.leased_bytes == CHUNKS * PART_BYTES
        # Nobody asked for it to be unmapped: that it was is not believed, nor told again.
        granted = wire.acquire(run(CHUNKS), 1)
        assert len(granted.rows) == CHUNKS
        wire.send(w.RETIRED, 0, pb.LocalRetire(segment_ids=[*wire.segments]))
        assert len(wire.acquire(run(CHUNKS), 2).rows) == CHUNKS


def test_requests_beyond_every_limit_are_answers(served: LocalServed, bystander: LocalWire) -> None:
    with served.session() as wire:
        many = run(1)
        many.keys = bytes(32) * 20_000
        for kind, request in (
            (w.MATCH, pb.MatchRequest(run=many)),
            (w.ACQUIRE, pb.AcquireRequest(run=many, lease_id=5)),
            (w.RESERVE, pb.ReserveRequest(run=run(1), lease_id=6, lengths_bytes=[1 << 40])),
        ):
            with pytest.raises(Refused):
                wire.call(kind, request)
        with pytest.raises(Refused):
            wire.call(
                w.RESERVE,
                pb.ReserveRequest(
                    run=run(64, parts=["extra"], salt=b"big"),
                    lease_id=7,
                    lengths_bytes=[4 * MIB] * 64,
                    when_full=pb.REFUSE,
                ),
            )
        assert served.figures.leased_bytes == CHUNKS * PART_BYTES
