"""The janitor against a real server and a directory: within cap and age, one node at a time."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers.conformance import Sample, make_sample
from tiers.object_helpers import Bench, bucket_settings, make_bench, soon
from tiers.object_servers import S3Server

from kvstored.io.base import RealFiles
from kvstored.tiers.object import format as stored
from kvstored.tiers.object import obstore_bucket
from kvstored.tiers.object.api import Outcome, Swept
from kvstored.tiers.object.backend import Entry
from kvstored.tiers.object.eviction import Candidate, Survey, victims, window
from kvstored.tiers.object.janitor import Janitor, JanitorLimits
from kvstored.tiers.object.lease import Lease
from kvstored.tiers.object.leftovers import leftovers_of
from kvstored.tiers.object.sweep import Sweeper

EXPIRES_S = 10.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


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


def make_lease(bench: Bench, owner: str, clock: Clock) -> Lease:
    return Lease(bench.guarded, "janitor", owner, EXPIRES_S, now=clock)


def make(bench: Bench, clock: Clock | None = None, owner: str = "a", **limits: float) -> Janitor:
    lease = make_lease(bench, owner, clock or Clock())
    settings = JanitorLimits(interval_s=300.0, expires_s=EXPIRES_S, **limits)
    return Janitor(bench.guarded, lease, Sweeper(bench.guarded, 8), bench.supervisor, settings)


def chain(seed: int, length: int, nbytes: int = 4096, **more: str) -> list[Sample]:
    """A prefix of so many chunks of one part."""
    samples = [make_sample(nbytes, 1000 * seed + depth) for depth in range(length)]
    parents = [b"", *(sample.meta.key for sample in samples)]
    return [
        replace(
            sample,
            meta=replace(
                sample.meta,
                family=bytes(32),
                parent=parent,
                depth=depth,
                expires_ms=0,
                **{"tenant": "a"} | more,
            ),
        )
        for depth, (sample, parent) in enumerate(zip(samples, parents, strict=False))
    ]


async def store(bench: Bench, samples: list[Sample]) -> list[str]:
    return list(await asyncio.gather(*map(bench.put, samples)))


# ---- the lease ---------------------------------------------------------------------------------


async def test_a_lease_is_held_by_one_and_passes_on_when_nothing_is_heard(bench: Bench) -> None:
    clock = Clock()
    one, other = make_lease(bench, "one", clock), make_lease(bench, "other", clock)
    assert await one.take({"n": 1})
    assert one.held
    for _ in range(3):
        assert not await other.take({})
        clock.now += EXPIRES_S - 1
        assert await one.take({"n": 1}), "whoever had it last need not wait"
    assert not await other.take({})
    assert other.words == {"owner": "one", "n": 1}
    clock.now += EXPIRES_S - 1
    assert not await other.take({})
    assert not one.held, "its holder has long stopped then"
    clock.now += 1
    assert await other.take({})
    assert not await one.take({})
    assert one.changed
    assert len(await bench.paths("control/janitor")) == 1


async def test_holding_on_keeps_others_out(bench: Bench) -> None:
    clock = Clock()
    one, other = make_lease(bench, "one", clock), make_lease(bench, "other", clock)
    await one.take({})
    for _ in range(12):
        clock.now += EXPIRES_S / 4
        assert await one.keep({})
        assert not await other.take({})
    clock.now += EXPIRES_S
    assert not await one.keep({}), "too late"


async def test_of_many_at_once_one_takes_it(bench: Bench) -> None:
    clock = Clock()
    leases = [make_lease(bench, f"node {number}", clock) for number in range(6)]
    for _ in range(3):
        await asyncio.gather(*(lease.take({}) for lease in leases))
        assert sum(lease.held for lease in leases) == 1
        for lease in leases:
            lease.leave()
        clock.now += EXPIRES_S


async def test_a_number_from_the_past_is_worth_nothing(local: Bench) -> None:
    clock = Clock()
    one, late = make_lease(local, "one", clock), make_lease(local, "late", clock)
    await one.take({})
    await late.take({})
    clock.now += EXPIRES_S
    listed, go_on = asyncio.Event(), asyncio.Event()
    entries = late._entries

    async def slow() -> dict[int, Entry] | None:
        found = await entries()
        if not listed.is_set():
            listed.set()
            await go_on.wait()
        return found

    late._entries = slow  # type: ignore[method-assign]
    taking = asyncio.ensure_future(late.take({}))
    await listed.wait()
    for _ in range(3):
        assert await one.keep({}, always=True) or await one.take({})
    go_on.set()
    assert not await taking, "the number it wants is free again, but not the highest"
    assert len(await local.paths("control/janitor")) == 1
    assert one.held


@pytest.mark.parametrize("verb", ["list", "put"])
async def test_without_an_answer_there_is_no_lease(local: Bench, verb: str) -> None:
    lease = make_lease(local, "one", Clock())
    local.bucket.fail[verb] = [Outcome.DEADLINE]
    assert not await lease.take({})
    assert await lease.take({})


# ---- what goes first ---------------------------------------------------------------------------

AGES = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@given(st.lists(AGES, min_size=1, max_size=4), st.integers(1, 10**6), st.randoms())
def test_no_chunk_goes_before_what_goes_on_from_it(
    ages: list[list[int]], need: int, rng: random.Random
) -> None:
    candidates, children = [], {}
    for number, line in enumerate(ages):
        samples = CHAINS[number][: len(line)]
        for depth, (sample, age) in enumerate(zip(samples, line, strict=True)):
            entry = Entry(f"{number}/{depth}", 10_000 * (depth + 1), age)
            candidates.append(Candidate(entry, sample.meta))
            children[entry] = depth + 1 < len(line) and f"{number}/{depth + 1}"
    rng.shuffle(candidates)
    found = victims(candidates, need, now_ms=10)
    gone = {entry.path for entry in found}
    assert len(gone) == len(found)
    assert all(child in gone for entry, child in children.items() if child and entry.path in gone)
    total = sum(entry.length_bytes for entry in found)
    assert total >= need or len(found) == len(candidates)
    assert total - found[-1].length_bytes < need, "not more than must be"


def test_useless_objects_go_first_then_the_oldest() -> None:
    (old,), (young,), (late,) = chain(1, 1), chain(2, 1), chain(3, 1)
    expired = replace(late.meta, expires_ms=9)
    entries = [Entry(name, 100, age) for name, age in (("old", 1), ("young", 2), ("dead", 3))]
    rotten, newer = Entry("rotten", 100, 4), Entry("newer", 100, 0)
    candidates = [
        Candidate(entries[1], young.meta),
        Candidate(entries[0], old.meta),
        Candidate(entries[2], expired),
        Candidate(rotten, None),
        Candidate(newer, None, newer=True),
    ]
    order = [entry.path for entry in victims(candidates, 500, now_ms=10)]
    assert order == ["dead", "rotten", "newer", "old", "young"]
    assert [entry.path for entry in victims(candidates, 150, now_ms=10)] == ["dead", "rotten"]


def test_all_parts_of_a_chunk_go_together() -> None:
    (sample,), (other,) = chain(1, 1), chain(2, 1)
    parts = [
        Candidate(Entry(part, 100, 1), replace(sample.meta, part=part)) for part in ("x", "y", "z")
    ]
    candidates = [parts[0], Candidate(Entry("other", 100, 1), other.meta), *parts[1:]]
    assert {entry.path for entry in victims(candidates, 1, now_ms=10)} in (
        {"x", "y", "z"},
        {"other"},
    )


def test_a_survey_keeps_the_oldest_in_bounded_memory() -> None:
    survey = Survey(most_oldest=10)
    paths = [f"v1/a/{'0' * 64}/{number:064x}.kv" for number in range(100)]
    ages = [(37 * number) % 100 for number in range(100)]
    survey.add(Entry(path, 10, age) for path, age in zip(paths, ages, strict=True))
    survey.add([Entry("v1/a/other", 10, 0), Entry("control/x", 10, 0)])
    assert (survey.objects, survey.bytes) == (100, 1000)
    oldest = survey.oldest()
    assert [entry.modified_ms for entry in oldest] == list(range(10))
    assert window(oldest, 10**9) == window(oldest, 1) == oldest, "all came within a minute"
    apart = [replace(entry, modified_ms=100_000 * entry.modified_ms) for entry in oldest]
    assert window(apart, 15) == apart[:3]


# ---- the janitor -------------------------------------------------------------------------------

CHAINS = [chain(seed, 8) for seed in range(4)]
SIZE = stored.stored_bytes(4096)


async def test_the_cap_is_kept_and_prefixes_stay_prefixes(bench: Bench) -> None:
    paths = [await store(bench, samples) for samples in CHAINS]
    await bench.bucket.inner.put_if_absent("other/x", [b"x"], soon())
    cap = 20 * SIZE
    janitor = make(bench, cap_bytes=cap)
    assert await janitor.turn() == 300.0
    left = await bench.paths()
    assert cap * 14 / 16 < len(left) * SIZE <= cap * 15 / 16
    for line in paths:
        there = [path in left for path in line]
        assert there == sorted(there, reverse=True), "a head without its tail, never the reverse"
    assert await bench.paths("other") == {"other/x"}
    inventory = janitor.inventory
    assert (inventory.known_objects, inventory.known_bytes) == (len(left), len(left) * SIZE)
    assert janitor.dropped_objects == 32 - len(left)
    await janitor.turn()
    assert await bench.paths() == left, "and no more than that"


async def test_what_is_too_old_goes(bench: Bench, tmp_path: Path) -> None:
    (line, *_) = CHAINS
    paths = await store(bench, line)
    janitor = make(bench, ttl_s=3600.0)
    await janitor.turn()
    assert await bench.paths() == set(paths)
    if bench.settings.url.startswith("file"):
        for path in paths[3:]:
            hours_ago = time.time() - 2 * 3600
            os.utime(tmp_path / "b" / path, (hours_ago, hours_ago))
        await janitor.turn()
        assert await bench.paths() == set(paths[:3])
    now_ms = janitor._lease.bucket_now_ms
    janitor._lease.bucket_now_ms = lambda: now_ms() + 3_700_000  # type: ignore[method-assign]
    await janitor.turn()
    assert await bench.paths() == set()


async def test_the_cap_is_kept_while_two_nodes_write(bench: Bench) -> None:
    clock, cap = Clock(), 10 * SIZE
    janitors = [make(bench, clock, owner, cap_bytes=cap) for owner in "ab"]
    lines = [chain(seed, 6) for seed in range(10, 18)]

    async def write(part: list[list[Sample]]) -> None:
        for line in part:
            for sample in line:
                await bench.put(sample)

    async def clean() -> None:
        for _ in range(4):
            await asyncio.gather(*(janitor.turn() for janitor in janitors))
            clock.now += EXPIRES_S

    await asyncio.gather(write(lines[:4]), write(lines[4:]), clean())
    await clean()
    assert 0 < len(await bench.paths()) <= 10


async def test_one_node_at_a_time_and_the_others_know_what_it_found(local: Bench) -> None:
    clock = Clock()
    await store(local, CHAINS[0])
    one, other = make(local, clock, "one"), make(local, clock, "other")
    await one.turn()
    lists = local.bucket.asked.count(("list", "v1"))
    assert await other.turn() == EXPIRES_S
    assert local.bucket.asked.count(("list", "v1")) == lists
    assert other.inventory.known_objects == 8
    assert other.inventory.known_bytes == 8 * SIZE
    assert "one" in other.inventory.words
    clock.now += EXPIRES_S
    await one.turn()
    assert await other.turn() == 300.0, "somebody does it"
    clock.now += EXPIRES_S
    await other.turn()
    assert local.bucket.asked.count(("list", "v1")) == lists + 2


async def test_who_loses_the_lease_drops_nothing(local: Bench) -> None:
    clock = Clock()
    paths = await store(local, CHAINS[0])
    janitor = make(local, clock, cap_bytes=SIZE)
    headers = janitor._sweeper.headers

    async def slow(*args: object) -> list[Candidate]:
        clock.now += EXPIRES_S  # as a machine that slept
        return await headers(*args)  # type: ignore[arg-type]

    janitor._sweeper.headers = slow  # type: ignore[method-assign]
    await janitor.turn()
    assert await local.paths() == set(paths)
    assert janitor.inventory.words == "another node took over"
    janitor._sweeper.headers = headers  # type: ignore[method-assign]
    await janitor.turn()
    assert await local.paths() == set()


@pytest.mark.parametrize("verb", ["list", "get", "delete"])
async def test_a_bucket_that_fails_stops_a_run_and_not_the_janitor(local: Bench, verb: str) -> None:
    await store(local, CHAINS[0])
    janitor = make(local, cap_bytes=4 * SIZE)
    await janitor.turn()
    await store(local, CHAINS[1])
    if verb == "list":
        list_pages = local.bucket.list_pages
        local.bucket.list_pages = lambda prefix, deadline: (  # type: ignore[method-assign]
            list_pages(prefix, deadline if prefix != "v1" else 0.0)
        )
    else:
        # the first delete is of the lease's last number
        fine = [Outcome.OK] if verb == "delete" else []
        local.bucket.fail[verb] = [*fine, *[Outcome.NETWORK] * 2]
    before = await local.paths()
    await janitor.turn()
    assert janitor.inventory.words.startswith("stopped: ")
    assert await local.paths() == before
    if verb == "list":
        local.bucket.list_pages = list_pages  # type: ignore[method-assign]
    local.bucket.fail.clear()
    await janitor.turn()
    assert len(await local.paths()) <= 4


async def test_a_run_that_could_not_do_it_all_says_that_there_is_more(
    local: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in CHAINS:
        await store(local, line)
    monkeypatch.setattr("kvstored.tiers.object.janitor.Survey", lambda: Survey(most_oldest=5))
    janitor = make(local, cap_bytes=10 * SIZE)
    turns = 0
    while await janitor.turn() == 0.0:
        turns += 1
    assert 4 <= turns <= 6
    assert len(await local.paths()) <= 10


async def test_it_runs_by_itself(local: Bench) -> None:
    await store(local, CHAINS[0])
    janitor = make(local, cap_bytes=2 * SIZE)
    await janitor.open()
    await local.bucket.until(lambda: local.bucket.count("delete") > 0)
    await local.bucket.until(lambda: local.bucket.count("put") > 1)
    await janitor.close()
    off = Janitor(
        local.guarded,
        make_lease(local, "c", Clock()),
        Sweeper(local.guarded, 8),
        local.supervisor,
        JanitorLimits(),
        enabled=False,
    )
    await off.open()
    assert off.inventory.words == "off"


async def test_what_a_kill_left_in_a_directory_goes(local: Bench, tmp_path: Path) -> None:
    kept = await store(local, CHAINS[0])
    directory = (tmp_path / "b" / kept[0]).parent
    old, fresh = directory / "x.kv#1", directory / "y.kv#23"
    for path in (old, fresh, tmp_path / "b" / "v1" / "x#y", tmp_path / "b" / "z#1"):
        path.write_bytes(b"z")
        if path != fresh:
            os.utime(path, (1, 1))
    leftovers = leftovers_of(local.settings.url, RealFiles())
    janitor = make(local)
    janitor._leftovers = leftovers
    await janitor.turn()
    assert fresh.exists()
    assert not old.exists()
    assert not (tmp_path / "b" / "z#1").exists()
    assert (tmp_path / "b" / "v1" / "x#y").exists()
    assert await local.paths() >= set(kept)
    assert leftovers_of("s3://bucket/x", RealFiles()) is None


# ---- sweeps ------------------------------------------------------------------------------------


async def test_a_namespace_goes_and_its_neighbours_stay(bench: Bench) -> None:
    janitor = make(bench)
    await store(bench, chain(1, 5, namespace="nämespace/1"))
    others = await store(bench, chain(2, 3, namespace="nämespace"))
    assert await janitor.delete_all("nämespace/1", "", soon()) == Swept(5, Outcome.OK)
    assert await bench.paths() == set(others)
    assert await janitor.delete_all("nämespace/1", "", soon()) == Swept(0, Outcome.OK)


@pytest.mark.parametrize("rot", [b"rot" * 3000, b"r", b""])
async def test_a_tenant_goes_and_the_others_stay(bench: Bench, rot: bytes) -> None:
    janitor = make(bench)
    await store(bench, chain(1, 5, tenant="x"))
    others = await store(bench, chain(2, 3, tenant="y"))
    others += await store(bench, chain(3, 3, tenant="x", namespace="other"))
    rotten = chain(4, 1, tenant="y")[0]
    path = await bench.put(rotten)
    await bench.bucket.inner.delete([path], soon())
    await bench.bucket.inner.put_if_absent(path, [rot], soon())
    assert await janitor.delete_all("default", "x", soon()) == Swept(6, Outcome.OK)
    assert await bench.paths() == set(others)


async def test_what_only_a_newer_version_can_read_is_left_and_said(local: Bench) -> None:
    (sample,) = chain(1, 1, tenant="x")
    path = await local.put(sample)
    block = bytearray((await local.read(path))[:4096])
    block[8:10] = (2).to_bytes(2, "little")
    block[2040:2048] = bytes(8)
    block[2040:2048] = stored.xxhash.xxh3_64_intdigest(block).to_bytes(8, "little")
    await local.bucket.inner.delete([path], soon())
    await local.bucket.inner.put_if_absent(path, [bytes(block), sample.data], soon())
    assert await make(local).delete_all("default", "x", soon()) == Swept(0, Outcome.CONFLICT)
    assert await local.paths() == {path}
    assert await make(local).delete_all("default", "", soon()) == Swept(1, Outcome.OK)


async def test_thousands_of_objects(local: Bench, tmp_path: Path) -> None:
    (sample,) = chain(1, 1)
    path = await local.put(sample)
    directory = (tmp_path / "b" / path).parent
    for number in range(1500):
        (directory / f"{number:064x}.kv").write_bytes(b"")
    assert await make(local).delete_all("default", "", soon()) == Swept(1501, Outcome.OK)
    assert await local.paths() == set()


@pytest.mark.parametrize("verb", ["list", "get", "delete"])
async def test_a_sweep_that_fails_says_so(local: Bench, verb: str) -> None:
    await store(local, chain(1, 5, tenant="x"))
    local.bucket.fail[verb] = [Outcome.DENIED] * 8
    swept = await make(local).delete_all("default", "x", soon())
    assert swept == Swept(0, Outcome.DENIED)
    local.bucket.fail.clear()


@pytest.mark.parametrize("wait_s", [599, 601])
async def test_a_sweep_of_a_tenant_goes_on_where_it_ran_out_of_time(
    wait_s: int, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore_bucket, "LIST_PAGE", 10)
    clock = Clock()
    async with make_bench(bucket_settings("s3", s3_server, tmp_path)) as bench:
        sweeper = Sweeper(bench.guarded, 4, clock)
        others = await store(bench, chain(1, 25, tenant="y"))
        await store(bench, chain(2, 5, tenant="x"))
        bench.bucket.fail["get"] = [Outcome.OK] * 12 + [Outcome.DEADLINE]
        first = await sweeper.sweep("default", "x", soon())
        assert first.outcome is Outcome.DEADLINE
        bench.bucket.fail.clear()
        bench.bucket.asked.clear()
        clock.now += wait_s
        second = await sweeper.sweep("default", "x", soon())
        assert (second.outcome, first.objects + second.objects) == (Outcome.OK, 5)
        assert await bench.paths() == set(others)
        once_more = 25  # until nothing is found
        goes_on = bench.bucket.count("get") == 20 + once_more
        assert goes_on == (wait_s < 600)


async def test_what_the_server_has_lost_keeps_nothing_else_from_going(local: Bench) -> None:
    mine = await store(local, chain(1, 20, tenant="x"))
    local.bucket.fail["get"] = [Outcome.SERVER] * 2
    swept = await Sweeper(local.guarded, 1).sweep("default", "x", soon())
    assert swept == Swept(18, Outcome.SERVER)
    lost = await local.paths()
    assert len(lost) == 2
    await store(local, chain(2, 10, nbytes=4096))
    local.bucket.fail["get"] = [Outcome.SERVER] * 2
    janitor = make(local, cap_bytes=6 * 8192)
    await janitor.turn()
    assert janitor.dropped_objects >= 6
    assert lost < set(mine)
    assert not lost & await local.paths(), "by their age"


async def test_a_sweep_meets_what_is_written_meanwhile(local: Bench) -> None:
    first, later = chain(1, 5), chain(2, 5)
    await store(local, first)
    sweeper = Sweeper(local.guarded, 4)
    drop = sweeper.drop

    async def slow(paths: list[str], deadline: float) -> Outcome:
        if paths and later:
            await store(local, [later.pop()])
        return await drop(paths, deadline)

    sweeper.drop = slow  # type: ignore[method-assign, assignment]
    swept = await sweeper.sweep("default", "", soon())
    assert swept.outcome is Outcome.EXISTED, "somebody writes without end"
    assert await sweeper.sweep("default", "", soon()) == Swept(2, Outcome.OK)
