"""What the bucket has: few questions, true answers, and never beyond the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers.conformance import Sample, make_sample
from tiers.object_helpers import Bench, bucket_settings, make_bench, name_of, soon
from tiers.object_servers import S3Server

from kvstored.tiers.object.api import ObjectName, Outcome
from kvstored.tiers.object.existence import Existence
from kvstored.tiers.object.galloping import Gallop


@given(st.integers(1, 5000), st.integers(1, 40), st.data())
def test_the_search_finds_every_end_in_few_rounds(
    count: int, width: int, data: st.DataObject
) -> None:
    stored = data.draw(st.integers(0, count))
    search, asked = Gallop(count, width), []
    while not search.done:
        questions = search.questions()
        assert 1 <= len(questions) <= max(2, width)
        assert questions == sorted(set(questions) - set(asked))
        asked += questions
        search.answers(questions, [at < stored for at in questions])
    assert search.leading == stored
    assert search.rounds <= 3 + count.bit_length()
    if stored in (0, count):
        assert search.rounds <= 1


@given(st.lists(st.booleans(), min_size=1, max_size=300), st.integers(2, 20))
def test_holes_neither_stop_nor_mislead_it(present: list[bool], width: int) -> None:
    search, absent = Gallop(len(present), width), []
    while not search.done:
        questions = search.questions()
        search.answers(questions, [present[at] for at in questions])
        absent += [at for at in questions if not present[at]]
    end = search.leading
    assert all(at >= end for at in absent), "never beyond one that was seen"
    assert end == 0 or present[end - 1]
    assert end == len(present) or not present[end]


@pytest.fixture(params=["s3", "file"])
async def bench(
    request: pytest.FixtureRequest, s3_server: S3Server, tmp_path: Path
) -> AsyncIterator[Bench]:
    async with make_bench(bucket_settings(request.param, s3_server, tmp_path / "b")) as bench:
        yield bench


@pytest.fixture
async def local(s3_server: S3Server, tmp_path: Path) -> AsyncIterator[Bench]:
    async with make_bench(bucket_settings("file", s3_server, tmp_path / "b")) as bench:
        yield bench


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(bench: Bench, clock: Clock | None = None, **more: int) -> Existence:
    return Existence(bench.guarded, 16, 2.0, 5.0, now=clock or Clock(), **more)


async def store(bench: Bench, count: int, length_bytes: int = 4096) -> list[list[ObjectName]]:
    """Names of chunks of two parts, of which the first `count` are stored; twice as many."""
    chunks: list[list[Sample]] = []
    for seed in range(2 * count):
        sample = make_sample(length_bytes, seed)
        other = replace(sample, meta=replace(sample.meta, part="other"))
        chunks.append([sample, other])
    await asyncio.gather(*(bench.put(sample) for chunk in chunks[:count] for sample in chunk))
    return [[name_of(sample.meta) for sample in chunk] for chunk in chunks]


async def test_how_far_a_prefix_is_there(bench: Bench) -> None:
    names = await store(bench, 20)
    existence = make(bench)
    for stop in (1, 3, 20, 21, 40):
        found = await existence.leading(names[:stop], soon())
        assert len(found) == min(stop, 20)
        assert all(set(lengths) <= {0, 4096} for lengths in found)
    assert list(found[0]) == [4096, 4096]
    assert await existence.leading(names[20:], soon()) == []
    assert await existence.leading([], soon()) == []
    each = await existence.each(names[18:22], soon())
    assert each == [[4096, 4096], [4096, 4096], None, None]


async def test_nothing_and_everything_cost_one_round(local: Bench) -> None:
    names = await store(local, 20)
    await make(local).leading(names[20:], soon())
    assert local.bucket.count("head") == 4
    await make(local).leading(names[:20], soon())
    assert local.bucket.count("head") == 8


async def test_a_chunk_is_there_when_all_its_parts_are(local: Bench) -> None:
    names = await store(local, 6)
    missing = names[3][1]
    await local.bucket.inner.delete(
        [p for p in await local.paths() if missing.key.hex() in p], soon()
    )
    await local.put(make_sample(4096, 3))
    assert len(await make(local).leading(names[:4], soon())) == 3
    assert (await make(local).each(names[2:5], soon()))[1] is None


async def test_answers_are_remembered_for_a_while(local: Bench) -> None:
    names, clock = await store(local, 2), Clock()
    existence = make(local, clock)
    for _ in range(3):
        assert await existence.each(names, soon()) == [[4096, 4096]] * 2 + [None] * 2
        assert local.bucket.count("head") == 8
    clock.now += 5.0
    await existence.each(names, soon())
    assert local.bucket.count("head") == 16


async def test_what_is_learned_or_forgotten_counts_at_once(local: Bench) -> None:
    (one, _), *_ = await store(local, 1)
    existence = make(local)
    gone = replace(one, key=bytes(32))
    assert await existence.each([[one], [gone]], soon()) == [[4096], None]
    existence.absent([one])
    existence.learn(gone, 77)
    assert await existence.each([[one], [gone]], soon()) == [None, [77]]
    existence.forget([one, gone])
    assert await existence.each([[one], [gone]], soon()) == [[4096], None]
    assert local.bucket.count("head") == 4


async def test_memory_is_bounded(local: Bench) -> None:
    existence = make(local, most_known=10)
    names = [[replace(name_of(make_sample(4096, 1).meta), key=bytes([n]) * 32)] for n in range(30)]
    await existence.each(names, soon())
    assert len(existence._known) == 10
    assert not existence._asking


async def test_a_name_is_asked_for_once_at_a_time(local: Bench) -> None:
    names = await store(local, 1)
    hold = local.bucket.hold["head"] = asyncio.Event()
    existence = make(local)
    calls = [asyncio.ensure_future(existence.each(names[:1], soon())) for _ in range(10)]
    await local.bucket.until(lambda: local.bucket.count("head") == 2)
    assert await existence.each(names[:1], soon(0.02)) == [None], "its own deadline"
    calls[0].cancel()
    await asyncio.wait([calls[0]])
    await release(local, hold)
    assert await asyncio.gather(*calls[1:]) == [[[4096, 4096]]] * 9
    assert local.bucket.count("head") == 2


async def release(bench: Bench, hold: asyncio.Event) -> None:
    """Set an event that is waited for on the bucket's loop."""

    async def work() -> None:
        hold.set()

    await bench.guarded.run(work)


async def test_what_changes_while_it_is_asked_for_is_not_remembered(local: Bench) -> None:
    names = await store(local, 1)
    hold = local.bucket.hold["head"] = asyncio.Event()
    existence = make(local)
    missing = names[1][:1]
    call = asyncio.ensure_future(existence.each([missing], soon()))
    await local.bucket.until(lambda: local.bucket.count("head") == 1)
    existence.learn(missing[0], 123)
    await release(local, hold)
    await call
    assert await existence.each([missing], soon()) == [[123]]


@pytest.mark.parametrize("outcome", [Outcome.SERVER, Outcome.DEADLINE, Outcome.NETWORK])
async def test_what_is_not_known_is_absent_but_not_remembered(
    local: Bench, outcome: Outcome
) -> None:
    names = await store(local, 1)
    existence = make(local)
    local.bucket.fail["head"] = [outcome] * 2
    assert await existence.leading(names[:1], soon()) == []
    assert await existence.leading(names[:1], soon()) == [[4096, 4096]]


async def test_a_bucket_that_is_not_trusted_is_not_asked(local: Bench) -> None:
    names = await store(local, 1)
    existence = make(local)
    local.bucket.fail |= {"head": [Outcome.SERVER], "list": [Outcome.SERVER]}
    local.bucket.forever |= {"head", "list"}
    for _ in range(3):
        await existence.each(names[:1], soon())
    asked = local.bucket.count("head")
    assert await existence.leading(names[:1], soon()) == []
    assert local.bucket.count("head") == asked


async def test_a_stored_object_too_short_to_be_one_is_absent(local: Bench) -> None:
    names = await store(local, 1)
    await local.bucket.inner.put_if_absent("v1/x", [b""], soon())
    path = next(iter(await local.paths("v1/default")))
    await local.bucket.inner.delete([path], soon())
    await local.bucket.inner.put_if_absent(path, [b"short"], soon())
    assert await make(local).each(names[:1], soon()) == [None]
