"""Cutting and joining frames, against plain concatenation."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored.errors import BadRequest, Overlong, TooLarge, Truncated
from kvstored.server import frames
from kvstored.server.limits import PIECE_BYTES
from kvstored.store.api import Grant, Received, WantedObject

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
LENGTHS = st.lists(st.integers(1, 5000), max_size=30)


def content(length: int, seed: int = 0) -> bytes:
    return random.Random(seed * 1_000_003 + length).randbytes(length)


def grants(lengths: list[int]) -> list[Grant]:
    return [
        Grant(i, n, b"c" * 16, 1, memoryview(content(n, i)).toreadonly(), b"")
        for i, n in enumerate(lengths)
    ]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 3000))
def test_frames_are_the_objects_back_to_back(lengths: list[int], frame_bytes: int) -> None:
    cut = list(frames.frames(grants(lengths), frame_bytes))
    assert b"".join(cut) == b"".join(content(n, i) for i, n in enumerate(lengths))
    assert all(len(frame) == frame_bytes for frame in cut[:-1])
    assert all(cut)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 20_000))
def test_blocks_keep_order_and_bound(lengths: list[int], block_bytes: int) -> None:
    given_grants = grants(lengths)
    made = list(frames.blocks(given_grants, block_bytes))
    assert [g for block in made for g in block] == given_grants
    for block in made:
        assert len(block) == 1 or sum(g.length_bytes for g in block) <= block_bytes
    for block, after in itertools.pairwise(made):
        assert sum(g.length_bytes for g in block) + after[0].length_bytes > block_bytes


def wanted(lengths: list[int]) -> tuple[list[WantedObject], list[bytearray]]:
    memory = [bytearray(n) for n in lengths]
    return [WantedObject(3 * i, len(m), memoryview(m)) for i, m in enumerate(memory)], memory


def expected(data: bytes, index: int) -> Received:
    pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
    return Received(
        index,
        xxhash.xxh3_128(data).digest(),
        b"".join(xxhash.xxh3_64(p).intdigest().to_bytes(8, "little") for p in pieces),
    )


@settings(deadline=None)
@given(LENGTHS, st.lists(st.integers(1, 4000), min_size=1, max_size=5))
def test_joining_gives_back_what_was_cut(lengths: list[int], sizes: list[int]) -> None:
    objects, memory = wanted(lengths)
    joiner = frames.FrameJoiner(objects, 4000)
    payload = b"".join(content(n, i) for i, n in enumerate(lengths))
    at = 0
    for size in itertools.cycle([*sizes, 4000]):
        if at >= len(payload):
            break
        joiner.add(payload[at : at + size])
        at += size
    assert joiner.finish() == [expected(content(n, i), 3 * i) for i, n in enumerate(lengths)]
    assert b"".join(memory) == payload


def test_pieces_of_a_large_object() -> None:
    length = 2 * PIECE_BYTES + 5
    objects, _ = wanted([4096, length])
    joiner = frames.FrameJoiner(objects, PIECE_BYTES)
    payload = content(4096, 0) + content(length, 1)
    for at in range(0, len(payload), 700_001):
        joiner.add(payload[at : at + 700_001])
    received = joiner.finish()
    assert received == [expected(content(4096, 0), 0), expected(content(length, 1), 3)]
    assert len(received[1].piece_checksums) == 24


def test_the_daemons_own_copy_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty_memory(target: Bytes, source: Bytes) -> None:
        target[:] = source
        target[0] ^= 1

    monkeypatch.setattr(frames.np, "copyto", faulty_memory)
    objects, memory = wanted([5000])
    joiner = frames.FrameJoiner(objects, 5000)
    joiner.add(content(5000))
    # What is hashed is what will be read, so that a client's checksum shows the fault.
    assert joiner.finish() == [expected(bytes(memory[0]), 0)]
    assert bytes(memory[0]) != content(5000)


@pytest.mark.parametrize(
    ("sent", "error", "says"),
    [
        ([b"x" * 101], TooLarge, "a frame of 101 bytes at payload byte 0"),
        ([b"x" * 60, b"x" * 60], Overlong, "payload byte 120 of 100"),
        ([b"x" * 60, b""], BadRequest, "empty frame at payload byte 60"),
        ([b"x" * 60], Truncated, "ended at byte 60 of 100"),
        ([], Truncated, "ended at byte 0 of 100"),
    ],
)
def test_bad_payloads(sent: list[bytes], error: type[Exception], says: str) -> None:
    objects, _ = wanted([50, 50])
    joiner = frames.FrameJoiner(objects, 100)
    with pytest.raises(error, match=says):  # noqa: PT012 - any of the frames, or the end
        for frame in sent:
            joiner.add(frame)
        joiner.finish()


def test_an_overlong_frame_writes_nothing() -> None:
    objects, memory = wanted([10])
    joiner = frames.FrameJoiner(objects, 100)
    with pytest.raises(Overlong):
        joiner.add(b"x" * 11)
    assert memory[0] == bytes(10)


def test_letting_go_frees_the_memory() -> None:
    objects, memory = wanted([10])
    joiner = frames.FrameJoiner(objects, 100)
    joiner.add(b"12345")
    joiner.let_go()
    objects[0].view.release()
    memory[0].append(1)  # fails while anything exports the buffer
