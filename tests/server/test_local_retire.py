"""Segments that are given back: told, unmapped, acknowledged, or waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from server import local_wire as w
from server.local_serving import MIB, PART_BYTES, TOKEN, LocalServed, content, local_serving, run
from server.local_wire import LocalWire

from kvstored_client.proto import kvstore_pb2 as pb

CHUNKS = 4


@pytest.fixture
def served() -> Iterator[LocalServed]:
    with local_serving() as running:
        running.fill(run(CHUNKS), [content(i) for i in range(CHUNKS)])
        yield running


class Asked:
    """One retirement, asked for on the server's loop."""

    def __init__(self, served: LocalServed, segment_id: int) -> None:
        self._served = served
        self.future = served.look(lambda: served.server.retire(segment_id))

    @property
    def done(self) -> bool:
        assert self.future is not None
        return self._served.look(self.future.done)

    def becomes_done(self) -> None:
        assert self.future is not None
        self._served.becomes(self.future.done)


def told(wire: LocalWire) -> int:
    """Acquire, be told of a segment, release."""
    wire.acquire(run(CHUNKS), 1)
    wire.release(1)
    (segment_id,) = wire.segments
    return segment_id


def test_nobody_was_told(served: LocalServed) -> None:
    with served.session() as wire:
        assert Asked(served, 0).future is None
        segment_id = told(wire)
        assert Asked(served, segment_id + 1).future is None
        wire.shut_down()
        served.becomes(lambda: not served.server._sessions)
        assert Asked(served, segment_id).future is None


def test_everyone_who_was_told_must_have_unmapped_it(served: LocalServed) -> None:
    with served.session() as first, served.session() as second, served.session() as third:
        segment_id = told(first)
        assert told(second) == segment_id
        asked = Asked(served, segment_id)
        for wire in (first, second):
            assert wire.event() == (w.RETIRE, pb.LocalRetire(segment_ids=[segment_id]))
        third.send(w.RETIRED, 0, pb.LocalRetire(segment_ids=[segment_id]))  # was not asked
        first.send(w.RETIRED, 0, pb.LocalRetire(segment_ids=[segment_id, 77]))
        first.send(w.RETIRED, 0, pb.LocalRetire(segment_ids=[segment_id]))
        first.release(9)
        third.release(9)
        assert not asked.done
        second.send(w.RETIRED, 0, pb.LocalRetire(segment_ids=[segment_id]))
        asked.becomes_done()


@pytest.mark.parametrize("end", ["client", "quarantined"])
def test_the_end_of_a_session_unmaps_too(served: LocalServed, end: str) -> None:
    with served.session() as wire:
        segment_id = told(wire)
        asked = Asked(served, segment_id)
        if end == "quarantined":
            wire.send_raw(b"\xff" * 64)
            wire.until_ended()
            # It may look at what it had until it says otherwise.
            assert served.figures.quarantined_sessions == 1
            assert not asked.done
        wire.shut_down()
        asked.becomes_done()


def test_a_quarantined_session_is_waited_for(served: LocalServed) -> None:
    with served.session() as wire:
        segment_id = told(wire)
        wire.send_raw(b"\xff" * 64)
        wire.until_ended()
        asked = Asked(served, segment_id)
        assert not asked.done
        wire.shut_down()
        asked.becomes_done()


def test_a_cancelled_wait_does_no_harm(served: LocalServed) -> None:
    with served.session() as wire:
        segment_id = told(wire)
        asked = Asked(served, segment_id)
        future = asked.future
        assert isinstance(future, asyncio.Future)
        served.look(future.cancel)
        wire.send(w.RETIRED, 0, pb.LocalRetire(segment_ids=[segment_id]))
        assert wire.acquire(run(1, salt=b"none"), 1).rows == []


def test_the_tier_gives_segments_back_once_its_clients_have() -> None:
    """For real: another namespace needs the memory."""
    count = 128  # all of the cap
    with local_serving(cap_bytes=8 * MIB) as served:
        served.fill(run(count), [content(i) for i in range(count)])
        with served.session() as wire:
            for first in (0, 64):
                half = run(count)
                half.keys = half.keys[first * 32 : (first + 64) * 32]
                assert len(wire.acquire(half, 1).rows) == 64
                wire.release(1)
            mine = {*wire.segments}
            served.delete(run(count))
            other = run(1, namespace="locked", parts=["extra"])
            filling = asyncio.run_coroutine_threadsafe(
                served._fill(other, [content(1, 4 * MIB)], durable=False), served.loop
            )
            while not filling.done() and wire.segments:
                kind, notice = wire.event()
                assert isinstance(notice, pb.LocalRetire)
                assert kind == w.RETIRE
                assert {*notice.segment_ids} <= mine
                for segment_id in notice.segment_ids:
                    wire.segments.pop(segment_id).close()
                wire.send(w.RETIRED, 0, notice)
                if len(mine) - len(wire.segments) >= 4 * MIB // PART_BYTES:
                    break
            filling.result(w.GIVE_UP_S)
            assert served.look(served.ram.usage).footprint_bytes <= 8 * MIB
        with served.session("locked", token=TOKEN) as wire:
            granted = wire.acquire(other, 1)
            assert wire.bytes_of(granted.rows[0]) == content(1, 4 * MIB)
