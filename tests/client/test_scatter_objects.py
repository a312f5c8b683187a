"""Whole objects out of mapped memory, and payload into a ring: the two ends of the local session,
with the caller's memory in thousands of fragments.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstored_client import Iov, KVFamily, KVPart
from kvstored_client.buffers import destinations, sources
from kvstored_client.failures import GarbageError
from kvstored_client.objects import Cut, checked_parts, get_table
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.receiving import GetReceiver, Receipt
from kvstored_client.sending import PutSender

GUARD = 0xA5
OBJECT_BYTES = 12_000
FAMILY = KVFamily(
    "m", "w", "float32", parts=[KVPart("kv", OBJECT_BYTES), KVPart("tail", max_nbytes=5000)]
)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


class Scattered:
    """Memory for objects of these sizes, each in fragments of its own length, all shuffled."""

    def __init__(self, sizes: Sequence[int], fragment: Sequence[int], seed: int) -> None:
        lengths: list[int] = []
        counts = []
        for size, most in zip(sizes, fragment, strict=True):
            cuts = [*range(0, size, most), size]
            lengths += np.diff(cuts).tolist()
            counts.append(len(cuts) - 1)
        self.all: NDArray[np.uint8] = np.full(sum(lengths) + 32 * len(lengths) + 64, GUARD, "u1")
        offsets, at = np.zeros(len(lengths), np.int64), 32
        for i in rng(seed).permutation(len(lengths)).tolist():
            offsets[i] = at
            at += lengths[i] + 32
        self._offsets, self._lengths = offsets.tolist(), lengths
        self._first = np.cumsum([0, *counts]).tolist()
        self.iov = Iov(offsets + self.all.ctypes.data, lengths, counts)

    def places(self, number: int) -> list[slice]:
        here = range(self._first[number], self._first[number + 1])
        return [slice(self._offsets[i], self._offsets[i] + self._lengths[i]) for i in here]

    def read(self, number: int) -> bytes:
        return b"".join(self.all[place].tobytes() for place in self.places(number))

    def fill(self, number: int, data: bytes) -> None:
        at = 0
        for place in self.places(number):
            count = place.stop - place.start
            self.all[place] = np.frombuffer(data[at : at + count], np.uint8)
            at += count


class Mapped:
    """What a daemon's segment is to the client: objects somewhere in read-only memory."""

    def __init__(self, objects: Sequence[bytes], gap: int) -> None:
        self._memory = np.frombuffer(b"".join(o + bytes(gap) for o in objects) or b"-", np.uint8)
        lengths = [len(o) + gap for o in objects]
        starts = np.cumsum([0, *lengths])[:-1] if objects else np.zeros(0, np.int64)
        self.addresses = (starts + self._memory.ctypes.data).astype(np.int64)
        self.checksums = b"".join(xxhash.xxh3_128_digest(o) for o in objects)


def receiver(chunks: int, memory: Scattered) -> tuple[GetReceiver, Receipt]:
    prefix = FAMILY.prefix(range(64 * chunks))
    table = get_table(prefix, 0, chunks, checked_parts(FAMILY, None))
    receipt = Receipt.empty(table, destinations(memory.iov, table.want))
    return GetReceiver(receipt, Cut(0, chunks, (0, 1))), receipt


def room(chunks: int) -> list[int]:
    return [OBJECT_BYTES, 5000] * chunks


@settings(max_examples=100, deadline=None)
@given(
    chunks=st.integers(1, 8),
    fragment=st.sampled_from([100, 512, 1000, 4096, 20_000]),
    gap=st.sampled_from([0, 4096]),
    data=st.data(),
)
def test_rows_land_in_their_fragments_and_nowhere_else(
    chunks: int, fragment: int, gap: int, data: st.DataObject
) -> None:
    memory = Scattered(room(chunks), [fragment] * (2 * chunks), seed=chunks)
    indices = sorted(data.draw(st.sets(st.integers(0, 2 * chunks - 1))))
    lengths = [
        OBJECT_BYTES if i % 2 == 0 else data.draw(st.sampled_from([1, 99, 100, 4999, 5000]))
        for i in indices
    ]
    objects = [
        rng(i).integers(0, 160, n, dtype=np.uint8).tobytes()
        for i, n in zip(indices, lengths, strict=True)
    ]
    mapped = Mapped(objects, gap)
    taker, receipt = receiver(chunks, memory)
    expected = memory.all.copy()
    for i, content in zip(indices, objects, strict=True):
        at = 0
        for place in memory.places(i):
            part = content[at : at + place.stop - place.start]
            expected[place.start : place.start + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
    cut = data.draw(st.integers(0, len(indices)))
    for rows in (slice(0, cut), slice(cut, None)):
        assert taker.take_rows(
            indices[rows],
            mapped.addresses[rows],
            lengths[rows],
            mapped.checksums[rows.start * 16 : rows.stop and rows.stop * 16],
            bytes([pb.TIER_RAM]) * len(indices[rows]),
            lambda: False,
        )
    assert np.array_equal(memory.all, expected)
    taker.finish(bytes([pb.IN_RAM]) * chunks)
    assert taker.done
    got = receipt.result()
    assert {i: n for i, n in enumerate(got.lengths.tolist()) if n} == dict(
        zip(indices, lengths, strict=True)
    )
    assert got.ok.tolist() == [{2 * c, 2 * c + 1} <= set(indices) for c in range(chunks)]
    assert got.bytes_by_tier == ({"ram": sum(lengths)} if lengths else {})


def rows_of(indices: list[int], lengths: list[int] | None = None) -> dict[str, object]:
    lengths = (
        [OBJECT_BYTES if i % 2 == 0 else 5000 for i in indices] if lengths is None else lengths
    )
    mapped = Mapped([bytes(20_000) for _ in indices], 0)
    return {
        "indices": indices,
        "addresses": mapped.addresses,
        "lengths": lengths,
        "checksums": mapped.checksums,
        "tiers": bytes([pb.TIER_RAM]) * len(indices),
        "stop": lambda: False,
        "_keep": mapped,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        rows_of([1, 0]),
        rows_of([2, 2]),
        rows_of([4]),
        rows_of([-1]),
        rows_of([1 << 40]),
        rows_of([0], [OBJECT_BYTES - 1]),
        rows_of([0], [0]),
        rows_of([1], [5001]),
        rows_of([1], [0]),
        rows_of([1], [-1]),
        rows_of([0, 1], [OBJECT_BYTES]),
        {**rows_of([0]), "checksums": b""},
        {**rows_of([0]), "checksums": bytes(15)},
        {**rows_of([0]), "tiers": b""},
    ],
)
def test_rows_that_break_the_protocol_touch_nothing(wrong: dict[str, object]) -> None:
    memory = Scattered(room(2), [1000] * 4, seed=1)
    taker, _ = receiver(2, memory)
    arguments = {name: value for name, value in wrong.items() if name != "_keep"}
    with pytest.raises(GarbageError):
        taker.take_rows(**arguments)  # type: ignore[arg-type]  # as parametrised
    assert (memory.all == GUARD).all()


def test_rows_of_a_later_answer_must_go_on_from_the_first() -> None:
    memory = Scattered(room(2), [1000] * 4, seed=1)
    taker, _ = receiver(2, memory)

    def take(indices: list[int]) -> bool:
        rows = rows_of(indices)
        mapped = rows.pop("_keep")
        assert mapped is not None  # it lives until the end of this
        return taker.take_rows(**rows)  # type: ignore[arg-type]  # as made above

    assert take([0, 2])
    for again in ([1], [2]):
        with pytest.raises(GarbageError):
            take(again)
    assert take([3])
    with pytest.raises(GarbageError):
        taker.finish(bytes(3))
    taker.finish(bytes([pb.IN_RAM] * 2))
    with pytest.raises(GarbageError):
        take([3])


def test_a_stop_between_objects_keeps_those_that_are_whole() -> None:
    big = KVFamily("m", "w", "float32", parts=[KVPart("kv", 6 << 20)])
    chunks = 4
    table = get_table(big.prefix(range(64 * chunks)), 0, chunks, checked_parts(big, None))
    into = np.full((chunks, 6 << 20), GUARD, np.uint8)
    receipt = Receipt.empty(table, destinations(into, table.want))
    taker = GetReceiver(receipt, Cut(0, chunks, (0,)))
    mapped = Mapped([bytes([i]) * (6 << 20) for i in range(chunks)], 0)
    looks = iter([False, False, True])
    assert not taker.take_rows(
        list(range(chunks)),
        mapped.addresses,
        [6 << 20] * chunks,
        mapped.checksums,
        bytes([pb.TIER_NVME]) * chunks,
        lambda: next(looks),
    )
    assert (receipt.lengths > 0).tolist() == [True, True, False, False]
    assert (into[2, 4 << 20 :] == GUARD).all()  # copies are cut every 8 MiB, not by object
    assert (into[3] == GUARD).all()
    assert [into[i, -1] for i in range(2)] == [0, 1]
    got = receipt.result()
    assert got.chunks == 2
    assert got.bytes_by_tier == {"nvme": 2 * (6 << 20)}


# ---- put -----------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(1, 6),
    fragment=st.sampled_from([100, 512, 1000, 4096, 20_000]),
    data=st.data(),
)
def test_the_payload_is_the_wanted_objects_wherever_blocks_end(
    count: int, fragment: int, data: st.DataObject
) -> None:
    sender, memory, objects = put_of(count, [fragment] * count)
    wanted = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    payload = b"".join(o for o, w in zip(objects, wanted, strict=True) if w)
    states = bytes([pb.WANTED if w else pb.EXISTED for w in wanted])
    before = memory.all.copy()
    for _ in range(2):  # a step may be run again
        sender.header(announce=False)
        sender.plan(
            pb.PutPlan(
                states=states, payload_bytes=len(payload), max_frame_bytes=7001
            ).SerializeToString()
        )
        assert sender.wanted_bytes == len(payload)
        cuts = sorted(data.draw(st.sets(st.integers(0, len(payload)), max_size=5)))
        out = np.full(len(payload) + 2, GUARD, np.uint8)
        edges = [0, *cuts, len(payload)]
        for a, b in pairwise(edges):
            assert sender.copy_to(out.ctypes.data + 1 + a, b - a)
        assert out[1:-1].tobytes() == payload
        assert out[0] == out[-1] == GUARD
    sender.header()
    sender.plan(
        pb.PutPlan(
            states=states, payload_bytes=len(payload), max_frame_bytes=7001
        ).SerializeToString()
    )
    assert b"".join(sender.frames()) == payload
    assert np.array_equal(memory.all, before)


def put_of(count: int, fragment: list[int]) -> tuple[PutSender, Scattered, list[bytes]]:
    family = KVFamily("m", "w", "float32", parts=[KVPart("kv", OBJECT_BYTES)])
    table = get_table(family.prefix(range(64 * count)), 0, count, checked_parts(family, None))
    memory = Scattered([OBJECT_BYTES] * count, fragment, seed=count)
    objects = [
        rng(i).integers(0, 160, OBJECT_BYTES, dtype=np.uint8).tobytes() for i in range(count)
    ]
    for i, content in enumerate(objects):
        memory.fill(i, content)
    regions = sources(memory.iov, table.want)
    return (
        PutSender(regions, 0, regions.sizes, lambda announce: pb.PutHeader(ttl_ms=int(announce))),
        memory,
        objects,
    )


def test_a_stopped_sender_copies_nothing() -> None:
    sender, _, objects = put_of(2, [1000, 1000])
    assert pb.PutHeader.FromString(sender.header(announce=False)).ttl_ms == 0
    assert pb.PutHeader.FromString(sender.header()).ttl_ms == 1
    sender.plan(
        pb.PutPlan(
            states=bytes([pb.WANTED] * 2), payload_bytes=2 * OBJECT_BYTES, max_frame_bytes=1000
        ).SerializeToString()
    )
    out = np.full(200, GUARD, np.uint8)
    assert sender.copy_to(out.ctypes.data, 100)
    sender.stop()
    assert not sender.copy_to(out.ctypes.data + 100, 100)
    assert out[:100].tobytes() == objects[0][:100]
    assert (out[100:] == GUARD).all()
