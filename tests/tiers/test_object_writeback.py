"""Write-back against a real server and a directory: each object once, whatever goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiers.conformance import MIB, make_sample
from tiers.object_helpers import (
    QUICK,
    Bench,
    Giving,
    bucket_settings,
    giving,
    make_bench,
    name_of,
    soon,
)
from tiers.object_servers import S3Server

from kvstored.io.base import RealFiles
from kvstored.supervise import Supervisor
from kvstored.tiers.object import format as stored
from kvstored.tiers.object.api import ObjectName, Outcome
from kvstored.tiers.object.creating import Creator
from kvstored.tiers.object.journal import Journal, Owed
from kvstored.tiers.object.naming import path_of
from kvstored.tiers.object.writeback import WriteBack, WriteBackLimits


@pytest.fixture(params=["s3", "file"])
async def bench(
    request: pytest.FixtureRequest, s3_server: S3Server, tmp_path: Path
) -> AsyncIterator[Bench]:
    async with make_bench(bucket_settings(request.param, s3_server, tmp_path / "b")) as bench:
        yield bench


@pytest.fixture
async def local(s3_server: S3Server, tmp_path: Path) -> AsyncIterator[Bench]:
    """For what has nothing to do with the kind of bucket."""
    async with make_bench(bucket_settings("file", s3_server, tmp_path / "b")) as bench:
        yield bench


LEARNED: list[tuple[ObjectName, int]] = []


def make(bench: Bench, owed: Owed | None = None, **limits: int) -> WriteBack:
    LEARNED.clear()
    return WriteBack(
        bench.guarded,
        Creator(bench.guarded, 8 * MIB, 5.0, "node-1", now_ms=lambda: 1234),
        owed if owed is not None else Owed(),
        bench.supervisor,
        WriteBackLimits(**limits),
        learned=lambda name, length: LEARNED.append((name, length)),
    )


async def ended(items: Sequence[Giving]) -> list[Outcome]:
    await asyncio.gather(*(item.ended.wait() for item in items))
    assert all(len(item.outcomes) == 1 for item in items), "once each"
    return [item.outcomes[0] for item in items]


def path(item: Giving) -> str:
    return path_of(name_of(item.sample.meta))


async def test_what_is_offered_goes_up_byte_for_byte(bench: Bench) -> None:
    back = make(bench)
    await back.open()
    items = [giving(seed, length) for seed, length in enumerate((4096, MIB, 3 * MIB + 5, 12_345))]
    assert back.offer([item.offer() for item in items]) == 4
    assert await ended(items) == [Outcome.OK] * 4
    for item in items:
        data = await bench.read(path(item))
        header = stored.decode(data[: stored.HEADER_BYTES])
        assert header == stored.ObjectHeader(item.sample.meta, 1234, "node-1")
        assert data[stored.HEADER_BYTES :] == item.sample.data
    assert back.backlog.objects == back.backlog.bytes == 0
    assert back.backlog.uploaded_bytes == sum(len(item.sample.data) for item in items)
    assert await back.close(5) == 0


async def test_another_nodes_object_stands(bench: Bench) -> None:
    back = make(bench)
    await back.open()
    items = [giving(seed, length) for seed, length in ((1, 5000), (2, 5000), (3, 5000))]
    same, conflict, length = (item.sample for item in items)
    await bench.put(same)
    other = replace(make_sample(5000, 77), meta=replace(conflict.meta, checksum=bytes(16)))
    await bench.put(other)
    longer = make_sample(6000, 78)
    meta = replace(longer.meta, **{n: getattr(length.meta, n) for n in ("family", "key", "part")})
    await bench.put(replace(longer, meta=meta))
    before = {path(item): await bench.read(path(item)) for item in items}
    back.offer([item.offer() for item in items])
    assert await ended(items) == [Outcome.EXISTED, Outcome.CONFLICT, Outcome.LENGTH]
    assert sorted(LEARNED, key=str) == sorted(
        [(name_of(item.sample.meta), 5000) for item in items[:2]], key=str
    )
    assert {path(item): await bench.read(path(item)) for item in items} == before
    counts = bench.guarded.counts()
    assert {o: counts["upload", o] for o in ("existed", "conflict", "length")} == dict.fromkeys(
        ("existed", "conflict", "length"), 1
    )
    await back.close(5)


async def test_many_nodes_of_one_object_and_differing_bytes(bench: Bench) -> None:
    nodes = [make(bench) for _ in range(4)]
    for number, back in enumerate(nodes):
        bench.supervisor.start(f"write-back-{number}", back.run)
    first = giving(1)
    others = [
        Giving(replace(make_sample(10_000, 50 + seed), meta=first.sample.meta)) for seed in range(3)
    ]
    items = [first, *others]
    for item in others:
        checksum = bytes([others.index(item)]) * 16
        item.sample = replace(item.sample, meta=replace(item.sample.meta, checksum=checksum))
    for back, item in zip(nodes, items, strict=True):
        back.offer([item.offer()])
    outcomes = await ended(items)
    assert sorted(o.name for o in outcomes) == ["CONFLICT"] * 3 + ["OK"]
    winner = items[outcomes.index(Outcome.OK)].sample
    assert (await bench.read(path(first)))[stored.HEADER_BYTES :] == winner.data


@pytest.mark.parametrize("what", ["damaged", "cut", "tiny", "empty", "misplaced", "expired"])
async def test_what_is_rotten_is_replaced(bench: Bench, what: str) -> None:
    back = make(bench)
    await back.open()
    item, meta = giving(1), giving(1).sample.meta
    block, body = stored.encode(meta, 1), item.sample.data
    if what == "damaged":
        block = block[:100] + bytes([block[100] ^ 1]) + block[101:]
    elif what == "cut":
        body = body[:-1]
    elif what in ("tiny", "empty"):
        block, body = b"x" if what == "tiny" else b"", b""
    elif what == "misplaced":
        block = stored.encode(replace(meta, key=bytes(32)), 1)
    else:
        block = stored.encode(replace(meta, expires_ms=1234), 1)
    await bench.bucket.inner.put_if_absent(path(item), [block, body], soon())
    back.offer([item.offer()])
    assert await ended([item]) == [Outcome.OK]
    assert (await bench.read(path(item)))[stored.HEADER_BYTES :] == item.sample.data
    await back.close(5)


async def test_an_object_of_a_newer_version_is_left_alone(local: Bench) -> None:
    back = make(local)
    await back.open()
    item = giving(1)
    block = bytearray(stored.encode(item.sample.meta, 1))
    block[8:10] = (2).to_bytes(2, "little")
    block[2040:2048] = bytes(8)
    block[2040:2048] = stored.xxhash.xxh3_64_intdigest(block).to_bytes(8, "little")
    await local.bucket.inner.put_if_absent(path(item), [bytes(block), item.sample.data], soon())
    back.offer([item.offer()])
    assert await ended([item]) == [Outcome.CONFLICT]
    assert (await local.read(path(item)))[:4096] == block
    await back.close(5)


FAILURES = [
    Outcome.SERVER,
    Outcome.THROTTLED,
    Outcome.NETWORK,
    Outcome.NAME,
    Outcome.DEADLINE,
    Outcome.DENIED,
    Outcome.NO_BUCKET,
]


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failure_is_repeated_and_an_outage_waited_for(
    local: Bench, failure: Outcome
) -> None:
    back = make(local, parallel=4, attempts=2)
    await back.open()
    local.bucket.fail |= {"put": [failure], "list": [failure]}
    local.bucket.forever |= {"put", "list"}
    items = [giving(seed) for seed in range(6)]
    back.offer([item.offer() for item in items[:2]])
    await local.bucket.until(lambda: not local.guarded.closed)
    back.offer([item.offer() for item in items[2:]])
    probes = local.bucket.count("list")
    await local.bucket.until(lambda: local.bucket.count("list") >= probes + 3)
    assert sum(item.reads for item in items[2:]) == 0, "nothing is begun meanwhile"
    assert back.backlog.objects == 6
    local.bucket.fail.clear()
    assert await ended(items) == [Outcome.OK] * 6
    assert await back.close(5) == 0


@pytest.mark.parametrize("failure", [Outcome.NO_BUCKET, Outcome.DENIED, Outcome.NETWORK])
async def test_a_single_object_is_not_given_up_for_the_buckets_sake(
    local: Bench, failure: Outcome
) -> None:
    back = make(local, attempts=1)
    await back.open()
    local.bucket.fail |= {"put": [failure], "list": [failure]}
    local.bucket.forever |= {"put", "list"}
    item = giving(1)
    back.offer([item.offer()])
    await local.bucket.until(lambda: not local.guarded.closed)
    assert back.backlog.objects == 1
    local.bucket.fail.clear()
    assert await ended([item]) == [Outcome.OK]
    assert await back.close(5) == 0


async def test_an_outage_may_last(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstored.tiers.object.writeback.LONGEST_PAUSE_S", 0.0)
    never = replace(QUICK, failures=10**6)
    async with make_bench(bucket_settings("file", s3_server, tmp_path / "b"), never) as bench:
        back = make(bench, attempts=1)
        await back.open()
        bench.bucket.fail["put"] = [Outcome.NETWORK] * 1200
        item = giving(1)
        back.offer([item.offer()])
        assert await ended([item]) == [Outcome.OK]
        await back.close(5)


async def test_a_slow_line_is_given_more_time(local: Bench) -> None:
    back = make(local, attempts=9)
    await back.open()
    local.bucket.fail["put"] = [Outcome.DEADLINE, Outcome.OK]
    item, other = giving(1), giving(2, 12 * MIB)
    back.offer([item.offer()])
    await ended([item])
    back.offer([other.offer()])
    await ended([other])
    assert [round(seconds) for seconds in local.bucket.given_s] == [5, 10, 10]
    await back.close(5)


async def test_what_fails_while_others_go_up_is_given_up(local: Bench) -> None:
    back = make(local, attempts=2)
    await back.open()
    item, other = giving(1), giving(2)
    local.bucket.fail["put"] = [Outcome.SERVER, Outcome.SERVER]
    back.offer([item.offer()])
    assert await ended([item]) == [Outcome.SERVER]
    back.offer([other.offer()])
    assert await ended([other]) == [Outcome.OK]
    assert await back.close(5) == 0


async def test_the_queue_is_bounded_in_bytes_and_objects(local: Bench) -> None:
    local.bucket.hold["put"] = asyncio.Event()
    size = stored.stored_bytes(10_000)
    back = make(local, max_backlog_bytes=3 * size, max_backlog_objects=100)
    await back.open()
    items = [giving(seed) for seed in range(5)]
    assert back.offer([item.offer() for item in items]) == 3
    assert (back.refused, back.backlog.bytes) == (2, 3 * size)
    local.bucket.hold.pop("put").set()
    await ended(items[:3])
    assert [item.reads for item in items[3:]] == [0, 0]
    few = make(local, max_backlog_objects=2)
    assert few.offer([giving(seed).offer() for seed in range(5)]) == 2
    await few.close(0)
    await back.close(5)


async def test_memory_in_hand_and_requests_are_bounded(local: Bench) -> None:
    back = make(local, parallel=3, in_hand_bytes=40_000)
    await back.open()
    items = [giving(seed) for seed in range(8)] + [giving(9, 100_000)] + [giving(10)]
    back.offer([item.offer() for item in items])
    assert await ended(items) == [Outcome.OK] * 10
    assert local.bucket.most_under_way == 2, "two of 14 096 B fit into what may be in hand"
    await back.close(5)


async def test_an_object_that_is_gone_is_owed_no_more(local: Bench, tmp_path: Path) -> None:
    back = make(local, Owed(Journal(RealFiles(), tmp_path / "object")))
    await back.open()
    item = giving(1)
    item.gone = True
    back.offer([item.offer()])
    assert await ended([item]) == [Outcome.CANCELLED]
    assert await back.close(5) == 0
    assert await local.paths() == set()


async def test_a_delete_comes_after_the_upload_under_way(bench: Bench) -> None:
    hold = bench.bucket.hold["put"] = asyncio.Event()
    back = make(bench, parallel=1)
    await back.open()
    items = [giving(seed) for seed in range(3)]
    back.offer([item.offer() for item in items])
    await bench.bucket.until(lambda: bool(bench.bucket.asked))
    again = Giving(items[0].sample)
    names = [name_of(item.sample.meta) for item in items[:2]]
    delete = asyncio.ensure_future(back.delete(names, soon()))
    await asyncio.sleep(0)
    back.offer([again.offer()])
    assert items[1].outcomes == [Outcome.CANCELLED], "what only waits ends at once"
    assert not delete.done()
    wait = bench.bucket.hold["delete"] = asyncio.Event()
    hold.set()
    await bench.bucket.until(lambda: bench.bucket.count("delete") > 0)
    await turns()
    assert again.reads == 0
    wait.set()
    assert await delete is True
    assert await ended([items[0], items[2], again]) == [Outcome.OK] * 3
    order = [
        (verb, path) for verb, path in bench.bucket.asked if path.startswith(path_of(names[0]))
    ]
    assert [verb for verb, _ in order] == ["put", "delete", "put"]
    assert await bench.paths() == {path(items[0]), path(items[2])}
    await back.close(5)


async def turns() -> None:
    """Let what can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_two_of_one_name_go_up_one_after_the_other(local: Bench) -> None:
    hold = local.bucket.hold["put"] = asyncio.Event()
    back = make(local)
    await back.open()
    one = giving(1)
    other = Giving(one.sample)
    back.offer([one.offer(), other.offer()])
    await local.bucket.until(lambda: local.bucket.count("put") > 0)
    await turns()
    assert (one.reads, other.reads) == (1, 0)
    hold.set()
    assert await ended([one, other]) == [Outcome.OK, Outcome.EXISTED]
    await back.close(5)


async def test_a_delete_that_cannot_be_is_false_in_time(local: Bench) -> None:
    back = make(local)
    await back.open()
    sample = make_sample(5000, 1)
    await local.put(sample)
    local.bucket.fail["delete"] = [Outcome.SERVER]
    assert await back.delete([name_of(sample.meta)], soon()) is True, "repeated"
    assert await back.delete([name_of(sample.meta)], soon()) is True, "nothing there is well, too"
    local.bucket.fail["delete"] = [Outcome.DENIED]
    local.bucket.forever.add("delete")
    assert await back.delete([name_of(sample.meta)], soon(0.3)) is False
    local.bucket.hold["put"] = asyncio.Event()
    item = giving(2)
    back.offer([item.offer()])
    await local.bucket.until(lambda: local.bucket.count("put") > 0)
    assert await back.delete([name_of(item.sample.meta)], soon(0.05)) is False
    await back.close(0)


async def test_cancelling_a_namespace_or_tenant_leaves_the_others(local: Bench) -> None:
    local.bucket.hold["put"] = asyncio.Event()
    back = make(local)
    items = [giving(1, tenant="a"), giving(2, tenant="b"), giving(3, namespace="other", tenant="a")]
    back.offer([item.offer() for item in items])
    assert await back.cancel("default", "a", soon())
    assert [bool(item.outcomes) for item in items] == [True, False, False]
    assert await back.cancel("default", "", soon())
    assert [bool(item.outcomes) for item in items] == [True, True, False]
    await back.close(0)


async def test_what_is_owed_at_the_end_is_known_to_the_next_life(
    bench: Bench, tmp_path: Path
) -> None:
    hold = bench.bucket.hold["put"] = asyncio.Event()
    owed = Owed(Journal(RealFiles(), tmp_path / "object"))
    back = make(bench, owed, parallel=2)
    await back.open()
    items = [giving(seed) for seed in range(5)]
    back.offer([item.offer() for item in items])
    await bench.bucket.until(lambda: bench.bucket.count("put") >= 2)
    assert await back.close(0.05) == 5
    assert await ended(items) == [Outcome.CANCELLED] * 5
    assert back.offer([giving(9).offer()]) == 0
    hold.set()
    bench.bucket.hold.clear()

    owed = Owed(Journal(RealFiles(), tmp_path / "object"))
    bench.supervisor = supervisor = Supervisor(lambda death: None)
    after = make(bench, owed)
    await after.open()
    left: Sequence[ObjectName] = after.left
    assert list(left) == [name_of(item.sample.meta) for item in items]
    again = [Giving(item.sample) for item in items[:4]]
    after.offer([item.offer() for item in again])
    assert set(await ended(again)) <= {Outcome.OK, Outcome.EXISTED}
    after.disown(left)  # the store has the last one no more
    assert await after.close(5) == 0
    await supervisor.stop()
    assert await Owed(Journal(RealFiles(), tmp_path / "object")).open() == []


async def test_what_is_owed_can_be_deleted_or_disowned(local: Bench, tmp_path: Path) -> None:
    names = [name_of(giving(seed).sample.meta) for seed in range(4)]
    owed = Owed(Journal(RealFiles(), tmp_path / "object"))
    await owed.open()
    for name in names:
        owed.add(name)
    await owed.flush()
    owed = Owed(Journal(RealFiles(), tmp_path / "object"))
    back = make(local, owed)
    local.bucket.hold["put"] = asyncio.Event()
    await back.open()
    assert list(back.left) == names
    back.offer([giving(0).offer()])
    back.disown(names[:2])
    assert [name in owed for name in names] == [True, False, True, True], "one is in the queue"
    assert await back.delete(names[2:3], soon())
    assert [name in owed for name in names] == [True, False, False, True]
    assert await back.close(0.05) == 2


async def test_a_clean_stop_brings_up_what_it_can(bench: Bench) -> None:
    back = make(bench, parallel=1)
    items = [giving(seed) for seed in range(6)]
    back.offer([item.offer() for item in items])  # and its task never ran
    assert await back.close(20) == 0
    assert await ended(items) == [Outcome.OK] * 6
    assert len(await bench.paths()) == 6


async def test_a_stop_does_not_wait_for_a_bucket_that_is_away(local: Bench) -> None:
    local.bucket.fail |= {"put": [Outcome.NETWORK], "list": [Outcome.NETWORK]}
    local.bucket.forever |= {"put", "list"}
    back = make(local)
    await back.open()
    items = [giving(seed) for seed in range(4)]
    back.offer([item.offer() for item in items])
    async with asyncio.timeout(20):
        await back.close(1000)
    assert await ended(items) == [Outcome.CANCELLED] * 4


async def test_an_error_in_the_stores_callback_stops_nothing(local: Bench) -> None:
    back = make(local)
    await back.open()
    item, other = giving(1), giving(2)

    def done(outcome: Outcome) -> None:
        item.outcomes.append(outcome)
        raise RuntimeError("a bug")

    async def read() -> memoryview | None:
        raise RuntimeError("another bug")

    third = giving(3)
    back.offer([replace(item.offer(), done=done), replace(third.offer(), read=read), other.offer()])
    assert await ended([other, third]) == [Outcome.OK, Outcome.SERVER]
    assert await back.close(5) == 0


def test_payloads_are_what_they_seem() -> None:
    assert np.any(np.frombuffer(giving(1).sample.payload, np.uint8))
