"""Bringing prefixes from a bucket: right bytes in the right memory, or a reason."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tiers.conformance import MIB, Sample, aligned_buffer, make_sample
from tiers.object_servers import REGION, S3Server

from kvstored.tiers.base import ObjectMeta, padded_bytes
from kvstored.tiers.object.api import Fetch, Fetched, ObjectName, Outcome
from kvstored.tiers.object.backend import Bucket, Got, Sink
from kvstored.tiers.object.fetching import Fetcher
from kvstored.tiers.object.format import encode
from kvstored.tiers.object.naming import path_of
from kvstored.tiers.object.obstore_bucket import ObstoreBucket
from kvstored.tiers.object.ranges import first_span, further_spans, pause_s
from kvstored.tiers.object.settings import ObjectSettings

LENGTHS = (4096, 4097, 100_000, MIB - 1, MIB, MIB + 1, 2 * MIB, 3 * MIB + 5, 5 * MIB)


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def name_of(sample: Sample) -> ObjectName:
    meta = sample.meta
    return ObjectName(meta.namespace, meta.family, meta.key, meta.part)


class Trying(ObstoreBucket):
    """A real bucket, whose reads a test may spoil. `spoil(start, sink)`: a sink to use instead, or
    what the read gives at once."""

    def __init__(self, settings: ObjectSettings) -> None:
        super().__init__(settings)
        self.reads: list[tuple[str, int, int]] = []
        self.deadlines: list[float] = []
        self.spoil: Callable[[int, Sink], Awaitable[Sink | Got]] | None = None

    async def get(
        self, path: str, start_bytes: int, length_bytes: int, sink: Sink, deadline: float
    ) -> Got:
        self.reads.append((path, start_bytes, length_bytes))
        self.deadlines.append(deadline)
        if self.spoil is not None:
            instead = await self.spoil(start_bytes, sink)
            if isinstance(instead, Got):
                return instead
            sink = instead
        return await super().get(path, start_bytes, length_bytes, sink, deadline)


@pytest.fixture
async def bucket(tmp_path: Path) -> AsyncIterator[Trying]:
    bucket = Trying(ObjectSettings(f"file://{tmp_path}/bucket"))
    await bucket.open()
    yield bucket
    await bucket.close()


@pytest.fixture
async def s3_bucket(s3_server: S3Server) -> AsyncIterator[Trying]:
    settings = ObjectSettings(
        s3_server.url(), endpoint=s3_server.endpoint, region=REGION, allow_http=True
    )
    bucket = Trying(settings)
    await bucket.open()
    yield bucket
    await bucket.close()


async def store(bucket: Bucket, samples: Sequence[Sample]) -> None:
    for sample in samples:
        pieces = [encode(sample.meta, 1), sample.data]
        assert await bucket.put_if_absent(path_of(name_of(sample)), pieces, soon()) is Outcome.OK


class Wanted:
    """Fetches of samples, with guarded memory, and what came of them."""

    def __init__(self, samples: Sequence[Sample], known: bool = True) -> None:
        self.samples = samples
        self.memory: dict[int, memoryview] = {}
        self.order: list[int] = []
        self.fetched: dict[int, Fetched] = {}
        self.asked: list[int] = []
        self.items = [
            Fetch(name_of(sample), sample.meta.length_bytes if known else 0, self._into(index))
            for index, sample in enumerate(samples)
        ]

    def _into(self, index: int) -> Callable[[ObjectMeta], memoryview | None]:
        def into(meta: ObjectMeta) -> memoryview | None:
            assert index not in self.fetched
            self.asked.append(index)
            padded = padded_bytes(meta.length_bytes)
            self.memory[index] = aligned_buffer(padded + 4096, fill=7)
            return self.memory[index][:padded]

        return into

    def arrived(self, index: int, fetched: Fetched) -> None:
        assert index not in self.fetched, "told twice"
        self.fetched[index] = fetched
        self.order.append(index)

    def outcomes(self) -> list[Outcome]:
        return [self.fetched[index].outcome for index in range(len(self.items))]

    def check(self) -> None:
        """What is OK is the sample, and behind its memory nothing was written."""
        for index, sample in enumerate(self.samples):
            if index in self.memory:
                assert bytes(self.memory[index][-4096:]) == b"\7" * 4096
            if self.fetched[index].outcome is Outcome.OK:
                assert self.fetched[index].meta == sample.meta
                assert self.memory[index][:-4096] == sample.payload
                assert self.asked.count(index) == 1


def fetcher(bucket: Bucket, parallel: int = 4, range_timeout_s: float = 10.0) -> Fetcher:
    return Fetcher(bucket, parallel, 2 * MIB, range_timeout_s)


async def whole_prefix(bucket: Trying, known: bool) -> None:
    samples = [make_sample(length, seed) for seed, length in enumerate(LENGTHS)]
    await store(bucket, samples)
    wanted = Wanted(samples, known)
    await fetcher(bucket).fetch(wanted.items, soon(), wanted.arrived)
    assert wanted.outcomes() == [Outcome.OK] * len(samples)
    wanted.check()
    assert max(length for _, _, length in bucket.reads) <= 2 * MIB + 4096
    assert len(bucket.reads) == sum(max(1, -(-length // (2 * MIB))) for length in LENGTHS)


@pytest.mark.parametrize("known", [True, False])
async def test_a_prefix_comes_byte_for_byte(bucket: Trying, known: bool) -> None:
    await whole_prefix(bucket, known)


@pytest.mark.parametrize("known", [True, False])
async def test_a_prefix_comes_byte_for_byte_from_s3(s3_bucket: Trying, known: bool) -> None:
    await whole_prefix(s3_bucket, known)


async def test_first_objects_come_first(bucket: Trying) -> None:
    samples = [make_sample(4 * MIB, seed) for seed in range(4)]
    await store(bucket, samples)
    wanted = Wanted(samples)
    await fetcher(bucket, parallel=1).fetch(wanted.items, soon(), wanted.arrived)
    assert wanted.order == [0, 1, 2, 3]


async def test_what_is_not_there_is_absent_and_the_rest_comes(bucket: Trying) -> None:
    samples = [make_sample(4096, seed) for seed in range(3)]
    await store(bucket, samples[::2])
    wanted = Wanted(samples)
    await fetcher(bucket).fetch(wanted.items, soon(), wanted.arrived)
    assert wanted.outcomes() == [Outcome.OK, Outcome.ABSENT, Outcome.OK]
    wanted.check()


@pytest.mark.parametrize("at", [100, 2041, 4096, 4096 + MIB, 4096 + 3 * MIB])
async def test_rot_is_told_and_nothing_of_it_is_ok(bucket: Trying, at: int) -> None:
    sample = make_sample(3 * MIB + 5, 1)
    stored = bytearray(encode(sample.meta, 1) + sample.data)
    stored[at] ^= 1
    await bucket.put_if_absent(path_of(name_of(sample)), [bytes(stored)], soon())
    wanted = Wanted([sample])
    await fetcher(bucket).fetch(wanted.items, soon(), wanted.arrived)
    assert wanted.outcomes() == [Outcome.CORRUPT]
    wanted.check()


@pytest.mark.parametrize("change", [-1, -5000, 1, 5000])
@pytest.mark.parametrize("length", [8192, 3 * MIB + 5])
async def test_a_stored_object_of_a_wrong_length_is_corrupt(
    bucket: Trying, length: int, change: int
) -> None:
    sample = make_sample(length, 1)
    stored = encode(sample.meta, 1) + sample.data
    stored = stored[:change] if change < 0 else stored + bytes(change)
    await bucket.put_if_absent(path_of(name_of(sample)), [stored], soon())
    wanted = Wanted([sample], known=False)
    await fetcher(bucket).fetch(wanted.items, soon(), wanted.arrived)
    assert wanted.outcomes() == [Outcome.CORRUPT]


@pytest.mark.parametrize("known", [False, True])
async def test_a_stored_object_without_a_byte_is_corrupt(s3_bucket: Trying, known: bool) -> None:
    sample = make_sample(8192, 1)
    await s3_bucket.put_if_absent(path_of(name_of(sample)), [b""], soon())
    wanted = Wanted([sample], known=known)
    await fetcher(s3_bucket).fetch(wanted.items, soon(), wanted.arrived)
    assert wanted.outcomes() == [Outcome.CORRUPT]


async def test_another_object_under_the_name_is_not_taken_for_it(bucket: Trying) -> None:
    right, other = make_sample(4096, 1), make_sample(4096, 2)
    pieces = [encode(other.meta, 1), other.data]
    await bucket.put_if_absent(path_of(name_of(right)), pieces, soon())
    wanted = Wanted([right])
    await fetcher(bucket).fetch(wanted.items, soon(), wanted.arrived)
    assert wanted.outcomes() == [Outcome.CORRUPT]
    assert not wanted.asked


async def test_an_object_of_another_length_than_expected_is_told(bucket: Trying) -> None:
    sample = make_sample(8192, 1)
    await store(bucket, [sample])
    wanted = Wanted([sample])
    items = [replace(wanted.items[0], length_bytes=4096)]
    await fetcher(bucket).fetch(items, soon(), wanted.arrived)
    assert wanted.outcomes() == [Outcome.LENGTH]


async def test_what_is_not_wanted_any_more_is_cancelled(bucket: Trying) -> None:
    samples = [make_sample(3 * MIB, seed) for seed in range(2)]
    await store(bucket, samples)
    wanted = Wanted(samples)
    items = [replace(wanted.items[0], into=lambda meta: None), wanted.items[1]]
    await fetcher(bucket).fetch(items, soon(), wanted.arrived)
    assert wanted.outcomes() == [Outcome.CANCELLED, Outcome.OK]


@pytest.mark.parametrize("outcome", [Outcome.SHORT, Outcome.SERVER, Outcome.NETWORK])
async def test_a_read_that_failed_is_repeated_whole(bucket: Trying, outcome: Outcome) -> None:
    sample = make_sample(5 * MIB, 1)
    await store(bucket, [sample])
    failed: set[int] = set()

    async def spoil(start: int, sink: Sink) -> Sink | Got:
        if start in failed:
            return sink
        failed.add(start)
        if outcome is Outcome.SHORT:  # some of it, and wrong
            await sink(memoryview(encode(sample.meta, 1) if start == 0 else b"x" * 4096))
            if start == 0:
                await sink(memoryview(b"x" * 4096))
        return Got(outcome)

    bucket.spoil = spoil
    wanted = Wanted([sample])
    await fetcher(bucket).fetch(wanted.items, soon(), wanted.arrived)
    assert wanted.outcomes() == [Outcome.OK]
    wanted.check()
    assert len(failed) == 3


async def test_a_failure_that_lasts_has_its_name(bucket: Trying) -> None:
    samples = [make_sample(5 * MIB, 1), make_sample(4096, 2)]
    await store(bucket, samples)

    async def spoil(start: int, sink: Sink) -> Sink | Got:
        return Got(Outcome.THROTTLED) if start > 0 else sink

    bucket.spoil = spoil
    wanted = Wanted(samples)
    await fetcher(bucket).fetch(wanted.items, soon(0.5), wanted.arrived)
    assert wanted.outcomes() == [Outcome.THROTTLED, Outcome.OK]


async def test_a_body_that_changes_underway_is_read_again_and_then_refused(
    bucket: Trying,
) -> None:
    sample = make_sample(4096, 1)
    await store(bucket, [sample])
    reads = 0

    async def spoil(start: int, sink: Sink) -> Sink | Got:
        nonlocal reads
        reads += 1

        async def wrong(chunk: memoryview) -> bool:
            body = bytearray(chunk)
            body[-1] ^= 1
            return await sink(memoryview(body))

        return wrong

    bucket.spoil = spoil
    wanted = Wanted([sample])
    await fetcher(bucket).fetch(wanted.items, soon(), wanted.arrived)
    assert wanted.outcomes() == [Outcome.CORRUPT]
    assert reads == 2


async def test_a_bucket_that_never_answers_costs_the_deadline(bucket: Trying) -> None:
    samples = [make_sample(4096, seed) for seed in range(9)]
    await store(bucket, samples)

    async def spoil(start: int, sink: Sink) -> Sink | Got:
        await asyncio.sleep(0.2)
        return Got(Outcome.DEADLINE)

    bucket.spoil = spoil
    wanted = Wanted(samples)
    await fetcher(bucket).fetch(wanted.items, soon(0.3), wanted.arrived)
    assert wanted.outcomes() == [Outcome.DEADLINE] * 9


@pytest.mark.parametrize("seed", range(3))
async def test_after_a_cancellation_nothing_is_written(s3_bucket: Trying, seed: int) -> None:
    samples = [make_sample(3 * MIB, number) for number in range(6)]
    await store(s3_bucket, samples)
    wanted = Wanted(samples)
    task = asyncio.ensure_future(fetcher(s3_bucket).fetch(wanted.items, soon(), wanted.arrived))
    for _ in range(random.Random(seed).randrange(1, 12)):
        await asyncio.sleep(0.002)
    task.cancel()
    await asyncio.wait([task])
    assert len(wanted.fetched) == 6
    before = {index: bytes(memory) for index, memory in wanted.memory.items()}
    await s3_bucket.head("v1/anything", soon())
    assert before == {index: bytes(memory) for index, memory in wanted.memory.items()}
    wanted.check()


async def test_no_read_may_outlast_the_fetch_or_its_own_time(bucket: Trying) -> None:
    samples = [make_sample(3 * MIB, 1)]
    await store(bucket, samples)
    before = time.monotonic()
    for patience_s, deadline in ((10.0, before + 7.0), (3.0, before + 100.0)):
        bucket.deadlines.clear()
        wanted = Wanted(samples)
        await fetcher(bucket, 4, patience_s).fetch(wanted.items, deadline, wanted.arrived)
        assert wanted.outcomes() == [Outcome.OK]
        assert max(bucket.deadlines) <= min(deadline, time.monotonic() + patience_s)


async def test_an_object_that_failed_arrives_when_its_other_reads_have_ended(
    bucket: Trying,
) -> None:
    """Or they would still write to memory that has been given back."""
    sample = make_sample(6 * MIB, 1)
    await store(bucket, [sample])
    wanted = Wanted([sample])
    writing = asyncio.Event()  # on the bucket's loop
    told_early: list[bool] = []

    async def spoil(start: int, sink: Sink) -> Sink | Got:
        if start == 2 * MIB + 4096:
            await writing.wait()
            return Got(Outcome.DENIED)
        if start == 0:
            return sink

        async def late(chunk: memoryview) -> bool:
            writing.set()
            await asyncio.sleep(0.05)  # long after the other has failed
            told_early.append(bool(wanted.fetched))
            return await sink(chunk)

        return late

    bucket.spoil = spoil
    await fetcher(bucket).fetch(wanted.items, soon(), wanted.arrived)
    assert wanted.outcomes() == [Outcome.DENIED]
    assert told_early
    assert not any(told_early)


def test_spans_cover_an_object_once() -> None:
    for length in (1, 4096, MIB, 2 * MIB, 2 * MIB + 1, 9 * MIB + 7):
        for known in (length, 0):
            first = first_span(known, 2 * MIB + 5)
            spans = [first, *further_spans(length, first, 2 * MIB + 5)]
            covered = [min(span.stop_bytes, length) - span.start_bytes for span in spans]
            assert sum(covered) == length
            assert all(span.start_bytes % MIB == 0 for span in spans)
            assert spans[0].stored_start_bytes == 0


def test_pauses_grow_and_differ() -> None:
    assert pause_s(1, False, 0.0) < pause_s(1, False, 1.0) < pause_s(3, False, 0.5)
    assert pause_s(1, True, 0.0) > pause_s(1, False, 1.0)
