"""What tests of the object tier's parts share: buckets that are real, and can be made to fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tiers.conformance import Sample, make_sample
from tiers.object_servers import REGION, S3Server

from kvstored.supervise import Supervisor
from kvstored.tiers.base import ObjectMeta
from kvstored.tiers.nvme.breaker import Patience
from kvstored.tiers.object import format as stored
from kvstored.tiers.object.api import ObjectName, Offer, Outcome
from kvstored.tiers.object.backend import Bucket, Entry, Got, Head, Page, Sink
from kvstored.tiers.object.guarded import GuardedBucket
from kvstored.tiers.object.naming import path_of
from kvstored.tiers.object.obstore_bucket import ObstoreBucket
from kvstored.tiers.object.settings import ObjectSettings

QUICK = Patience(failures=3, probe_first_s=0.02, probe_longest_s=0.05, look_every_s=0.01)


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def bucket_settings(kind: str, server: S3Server, directory: Path) -> ObjectSettings:
    """Of a real server ("s3") or a directory ("file")."""
    if kind == "file":
        return ObjectSettings(url=f"file://{directory}")
    return ObjectSettings(
        url=server.url(), endpoint=server.endpoint, region=REGION, allow_http=True
    )


class Obstacles(Bucket):
    """A real bucket of which requests can be made to fail or to wait.

    `fail[verb]`: outcomes for the next requests of that verb, which are not made; the last one
    stays if it is in `forever`. `hold[verb]`: its requests wait for the event, once they are made.
    `asked`: (verb, path) of every request.
    """

    def __init__(self, inner: Bucket) -> None:
        self.inner = inner
        self.fail: dict[str, list[Outcome]] = {}
        self.forever: set[str] = set()
        self.hold: dict[str, asyncio.Event] = {}
        self.asked: list[tuple[str, str]] = []
        self.given_s: list[float] = []  # to each put
        self.under_way = 0
        self.most_under_way = 0
        self._stir = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something is so; looked at whenever a request comes."""
        while not true():
            self._stir.clear()
            await self._stir.wait()

    async def _meet(self, verb: str, path: str) -> Outcome:
        self.asked.append((verb, path))
        self.loop.call_soon_threadsafe(self._stir.set)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(0)
            if verb in self.hold:
                await self.hold[verb].wait()
        finally:
            self.under_way -= 1
        outcomes = self.fail.get(verb, [])
        if not outcomes:
            return Outcome.OK
        return outcomes[0] if len(outcomes) == 1 and verb in self.forever else outcomes.pop(0)

    def count(self, verb: str) -> int:
        return sum(asked == verb for asked, _ in self.asked)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def detail(self) -> str:
        return self.inner.detail

    async def open(self) -> None:
        await self.inner.open()

    async def close(self) -> None:
        await self.inner.close()

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        await self.inner.run(work)

    async def head(self, path: str, deadline: float) -> Head:
        outcome = await self._meet("head", path)
        return await self.inner.head(path, deadline) if outcome is Outcome.OK else Head(outcome)

    async def get(
        self, path: str, start_bytes: int, length_bytes: int, sink: Sink, deadline: float
    ) -> Got:
        outcome = await self._meet("get", path)
        if outcome is not Outcome.OK:
            return Got(outcome)
        return await self.inner.get(path, start_bytes, length_bytes, sink, deadline)

    async def put_if_absent(
        self, path: str, pieces: Sequence[bytes | memoryview], deadline: float
    ) -> Outcome:
        self.given_s.append(deadline - time.monotonic())
        outcome = await self._meet("put", path)
        if outcome is not Outcome.OK:
            return outcome
        return await self.inner.put_if_absent(path, pieces, deadline)

    async def list_pages(self, prefix: str, deadline: float) -> AsyncIterator[Page]:
        outcome = await self._meet("list", prefix)
        if outcome is not Outcome.OK:
            yield Page(outcome)
            return
        async for page in self.inner.list_pages(prefix, deadline):
            yield page

    async def delete(self, paths: Sequence[str], deadline: float) -> Outcome:
        outcome = await self._meet("delete", " ".join(paths))
        return await self.inner.delete(paths, deadline) if outcome is Outcome.OK else outcome


@dataclass
class Bench:
    """A bucket that is open, as parts see it (`guarded`), and as tests do (`bucket`)."""

    settings: ObjectSettings
    bucket: Obstacles
    guarded: GuardedBucket
    supervisor: Supervisor

    async def paths(self, prefix: str = "v1") -> set[str]:
        return {entry.path for entry in await self.entries(prefix)}

    async def entries(self, prefix: str = "v1") -> list[Entry]:
        found: list[Entry] = []
        async for page in self.bucket.inner.list_pages(prefix, soon()):
            assert page.outcome is Outcome.OK
            found += page.entries
        return found

    async def put(self, sample: Sample, written_ms: int = 1) -> str:
        """Store an object as another node would; its path."""
        path = path_of(name_of(sample.meta))
        block = stored.encode(sample.meta, written_ms, "other")
        outcome = await self.bucket.inner.put_if_absent(path, [block, sample.data], soon())
        assert outcome is Outcome.OK
        return path

    async def read(self, path: str) -> bytes:
        head = await self.bucket.inner.head(path, soon())
        assert head.outcome is Outcome.OK
        into = memoryview(bytearray(head.length_bytes))
        got = await self.bucket.inner.get_range(path, 0, into, soon())
        assert got.outcome is Outcome.OK
        return bytes(into)


@asynccontextmanager
async def make_bench(settings: ObjectSettings, patience: Patience = QUICK) -> AsyncIterator[Bench]:
    """A bench over a real bucket, closed at the end."""
    supervisor = Supervisor(lambda death: None)
    bucket = Obstacles(ObstoreBucket(settings))
    guarded = GuardedBucket(bucket, patience)
    await guarded.open()
    supervisor.start("breaker", guarded.watch)
    try:
        yield Bench(settings, bucket, guarded, supervisor)
    finally:
        await supervisor.stop()
        await guarded.close()


def name_of(meta: ObjectMeta) -> ObjectName:
    return ObjectName(meta.namespace, meta.family, meta.key, meta.part)


@dataclass
class Giving:
    """Offers of one sample, and what became of them."""

    sample: Sample
    gone: bool = False
    reads: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    memory: bytearray = field(default_factory=bytearray)
    view: memoryview | None = None

    def offer(self) -> Offer:
        return Offer(self.sample.meta, self._read, self._done)

    async def _read(self) -> memoryview | None:
        await asyncio.sleep(0)
        self.reads += 1
        if self.gone:
            return None
        self.memory = bytearray(self.sample.payload)
        self.view = memoryview(self.memory)
        return self.view

    def _done(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.ended.set()
        if self.view is not None:
            self.view.release()
            try:
                self.memory.clear()
            except BufferError:  # something still looks at it
                self.outcomes.append(Outcome.CORRUPT)


def giving(seed: int, length_bytes: int = 10_000, **more: str) -> Giving:
    sample = make_sample(length_bytes, seed)
    return Giving(replace(sample, meta=replace(sample.meta, expires_ms=0, **more)))
