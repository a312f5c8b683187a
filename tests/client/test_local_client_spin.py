"""How long a client looks for an answer without sleeping."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kvstored_client.local import stream as streams
from kvstored_client.local.stream import Stream
from kvstored_client.proto.local import Kind, pack


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stream, socket.socket]]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    ours, theirs = socket.socketpair()
    stream = Stream(ours)
    yield stream, theirs
    stream.close()
    theirs.close()


def looks(stream: Stream) -> int:
    """Waits in vain until one that looks without sleeping; how many slept at once before it."""
    slept = stream._sit_out
    for _ in range(slept + 1):
        assert not stream.wait(0.0)
    return slept


def test_looking_in_vain_is_tried_ever_more_rarely(ends: tuple[Stream, socket.socket]) -> None:
    stream, theirs = ends
    assert [looks(stream) for _ in range(8)] == [0, 2, 4, 8, 16, 32, 64, 64]
    theirs.send(pack(Kind.MATCH, 3, 1, b"x"))
    while stream._sit_out:
        assert stream.wait(1.0)
    assert stream.wait(1.0)  # found by looking
    assert [frame.body for frame in stream.receive()] == [b"x"]
    assert looks(stream) == 0


def test_a_late_answer_and_a_wake_end_the_wait(
    ends: tuple[Stream, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, theirs = ends
    monkeypatch.setattr(streams, "SPIN_S", 0.0)
    assert not stream.wait(0.001)
    theirs.send(b"1")
    assert stream.wait(5.0)
    stream.wake.set()
    stream.receive()
    assert not stream.wait(5.0)  # woken, and nothing there


def test_one_processor_sleeps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    ours, theirs = socket.socketpair()
    stream = Stream(ours)
    assert stream._sit_out > 1 << 40
    theirs.send(b"1")
    assert stream.wait(5.0)
    stream.close()
    theirs.close()
