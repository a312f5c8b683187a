"""The bucket behind its breaker, and the pool that is put together from its parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from tiers.conformance import MIB, Sample, aligned_buffer, make_sample

from kvstored.supervise import Supervisor
from kvstored.tiers.base import padded_bytes
from kvstored.tiers.nvme.breaker import Patience
from kvstored.tiers.object.api import Fetch, Fetched, ObjectName, Offer, Outcome, Swept
from kvstored.tiers.object.backend import Got, Head, Page, Sink
from kvstored.tiers.object.format import encode
from kvstored.tiers.object.guarded import GuardedBucket
from kvstored.tiers.object.naming import path_of
from kvstored.tiers.object.obstore_bucket import ObstoreBucket
from kvstored.tiers.object.parts import Backlog, Inventory
from kvstored.tiers.object.pool import BucketPool
from kvstored.tiers.object.settings import ObjectSettings

QUICK = Patience(failures=3, probe_first_s=0.02, probe_longest_s=0.04, look_every_s=0.01)


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


class Sometimes(ObstoreBucket):
    """A directory that can be away."""

    away = Outcome.OK
    asked = 0

    async def head(self, path: str, deadline: float) -> Head:
        self.asked += 1
        if self.away is not Outcome.OK:
            return Head(self.away)
        return await super().head(path, deadline)

    async def get(
        self, path: str, start_bytes: int, length_bytes: int, sink: Sink, deadline: float
    ) -> Got:
        self.asked += 1
        if self.away is not Outcome.OK:
            return Got(self.away)
        return await super().get(path, start_bytes, length_bytes, sink, deadline)

    async def list_pages(self, prefix: str, deadline: float) -> AsyncIterator[Page]:
        if self.away is not Outcome.OK:
            yield Page(self.away)
            return
        async for page in super().list_pages(prefix, deadline):
            yield page


class Parts:
    """The other parts, as far as the pool calls them here; theirs are tested on their own."""

    backlog = Backlog(1, 2, 3, 4)
    inventory = Inventory(5, 6, "resting")

    def __init__(self) -> None:
        self.forgotten: list[ObjectName] = []
        self.missing: list[ObjectName] = []
        self.ended: list[object] = []
        self.told = asyncio.Event()

    async def open(self) -> None: ...

    async def close(self, timeout_s: float = -1.0) -> int:
        self.ended.append(timeout_s)
        return 7

    def offer(self, offers: Sequence[Offer]) -> int:
        return len(offers)

    async def delete(self, names: Sequence[ObjectName], deadline: float) -> bool:
        return True

    async def leading(
        self, names: Sequence[Sequence[ObjectName]], deadline: float
    ) -> list[Sequence[int]]:
        return []

    async def each(
        self, names: Sequence[Sequence[ObjectName]], deadline: float
    ) -> list[Sequence[int] | None]:
        return [None] * len(names)

    def forget(self, names: Sequence[ObjectName]) -> None:
        self.forgotten += names
        self.told.set()

    def absent(self, names: Sequence[ObjectName]) -> None:
        self.missing += names

    async def cancel(self, namespace: str, tenant: str, deadline: float) -> bool:
        self.ended.append("uploads")
        return True

    async def delete_all(self, namespace: str, tenant: str, deadline: float) -> Swept:
        self.ended.append("objects")
        return Swept(9, Outcome.OK)

    def clear(self) -> None:
        self.ended.append("memory")


class Rig:
    """A pool over a directory."""

    def __init__(self, directory: Path) -> None:
        settings = ObjectSettings(f"file://{directory}/bucket", parallel=4, range_bytes=MIB)
        self.inner = Sometimes(settings)
        self.bucket = GuardedBucket(self.inner, QUICK)
        self.supervisor = Supervisor(lambda death: None)
        self.parts = Parts()
        self.pool = BucketPool(
            settings,
            self.bucket,
            self.supervisor,
            existence=self.parts,
            write_back=self.parts,
            janitor=self.parts,
        )

    async def put(self, sample: Sample, spoil_at: int = -1) -> ObjectName:
        body = bytearray(encode(sample.meta, 1) + sample.data)
        if spoil_at >= 0:
            body[spoil_at] ^= 1
        meta = sample.meta
        name = ObjectName(meta.namespace, meta.family, meta.key, meta.part)
        assert await self.bucket.put_if_absent(path_of(name), [body], soon()) is Outcome.OK
        return name

    async def fetch(self, names: Sequence[ObjectName]) -> list[Fetched]:
        found: dict[int, Fetched] = {}
        items = [
            Fetch(name, 0, lambda meta: aligned_buffer(padded_bytes(meta.length_bytes)))
            for name in names
        ]
        await self.pool.fetch(items, soon(), found.__setitem__)
        return [found[index] for index in range(len(names))]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    await rig.pool.open()
    yield rig
    await rig.supervisor.stop()
    assert await rig.pool.close(3.0) == 7
    assert rig.parts.ended == [-1.0, 3.0], "the janitor first, then what goes up"


@pytest.mark.parametrize("outcome", [Outcome.NETWORK, Outcome.DENIED, Outcome.NO_BUCKET])
async def test_a_bucket_that_fails_is_left_alone_until_it_is_back(
    rig: Rig, outcome: Outcome
) -> None:
    rig.inner.away = outcome
    heads = [(await rig.bucket.head("v1/x", soon())).outcome for _ in range(5)]
    assert heads == [outcome] * 3 + [Outcome.OPEN] * 2
    assert rig.inner.asked == 3
    assert rig.bucket.health.startswith("open: 3 requests in a row failed")
    assert (await rig.bucket.delete(["v1/x"], soon())) is Outcome.OPEN
    assert (await rig.bucket.put_if_absent("v1/x", [b""], soon())) is Outcome.OPEN
    assert [page.outcome async for page in rig.bucket.list_pages("v1", soon())] == [Outcome.OPEN]
    rig.inner.away = Outcome.OK
    await rig.bucket.until_closed()
    assert (await rig.bucket.head("v1/x", soon())).outcome is Outcome.ABSENT
    assert rig.bucket.health == "ok"
    counts = rig.pool.status().outcomes
    assert counts["head", outcome.value] == 3
    assert counts["head", "open"] == 2
    assert counts["put", "open"] == counts["delete", "open"] == counts["list", "open"] == 1


async def test_on_trial_the_first_failure_opens_again(rig: Rig) -> None:
    rig.inner.away = Outcome.SERVER
    for _ in range(3):
        await rig.bucket.head("v1/x", soon())
    rig.inner.away = Outcome.OK
    await rig.bucket.until_closed()
    rig.inner.away = Outcome.SERVER
    await rig.bucket.head("v1/x", soon())
    assert not rig.bucket.closed


async def test_what_was_not_given_a_chance_says_nothing_of_the_bucket(rig: Rig) -> None:
    rig.inner.away = Outcome.DEADLINE
    for _ in range(9):
        await rig.bucket.head("v1/x", soon(0.01))
    assert rig.bucket.closed
    for _ in range(3):
        await rig.bucket.head("v1/x", soon(1))
    assert not rig.bucket.closed


async def test_absent_objects_and_successes_are_not_failures(rig: Rig) -> None:
    for _ in range(9):
        await rig.bucket.head("v1/x", soon())
    assert rig.bucket.health == "ok"


async def test_a_fetch_with_an_open_breaker_asks_nothing(rig: Rig) -> None:
    name = await rig.put(make_sample(4096, 1))
    rig.inner.away = Outcome.NETWORK
    for _ in range(3):
        await rig.bucket.head("v1/x", soon())
    asked = rig.inner.asked
    (fetched,) = await rig.fetch([name])
    assert fetched.outcome is Outcome.OPEN
    assert rig.inner.asked == asked


async def test_fetches_are_counted_and_absent_ones_told(rig: Rig) -> None:
    sample = make_sample(3 * MIB, 1)
    name = await rig.put(sample)
    other = ObjectName("default", bytes(32), bytes(32), "kv")
    outcomes = [fetched.outcome for fetched in await rig.fetch([name, other])]
    assert outcomes == [Outcome.OK, Outcome.ABSENT]
    assert rig.parts.missing == [other]
    status = rig.pool.status()
    assert status.fetched_bytes == 3 * MIB
    assert (status.outcomes["get", "ok"], status.outcomes["get", "absent"]) == (1, 1)
    assert (status.backlog_objects, status.known_bytes, status.janitor) == (1, 5, "resting")


@pytest.mark.parametrize("at", [50, 5000])
async def test_rot_is_dropped_and_can_be_written_again(rig: Rig, at: int) -> None:
    sample = make_sample(8192, 1)
    name = await rig.put(sample, spoil_at=at)
    (fetched,) = await rig.fetch([name])
    assert fetched.outcome is Outcome.CORRUPT
    await rig.parts.told.wait()
    assert rig.parts.forgotten == [name]
    await rig.put(sample)
    (fetched,) = await rig.fetch([name])
    assert fetched.outcome is Outcome.OK


async def test_uploads_end_before_a_sweep(rig: Rig) -> None:
    assert await rig.pool.delete_all("default", "", soon()) == Swept(9, Outcome.OK)
    assert rig.parts.ended == ["uploads", "objects", "memory"]
    rig.parts.ended.clear()


async def test_what_took_the_place_of_rot_is_not_dropped(rig: Rig) -> None:
    """Another node has dropped and rewritten it before our own drop comes round."""
    sample, other = make_sample(8192, 1), make_sample(8192, 2)
    name = await rig.put(sample)
    await rig.pool._drop(name, other.meta)
    (fetched,) = await rig.fetch([name])
    assert fetched.outcome is Outcome.OK
