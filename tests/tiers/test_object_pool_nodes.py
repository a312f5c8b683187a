"""Two nodes over one bucket, and nothing else between them: whole pools, as the daemon has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tiers.conformance import MIB, aligned_buffer
from tiers.object_helpers import QUICK, Giving, bucket_settings, giving, name_of, soon
from tiers.object_servers import S3Server

from kvstored.io.base import RealFiles
from kvstored.supervise import Supervisor
from kvstored.tiers.object.api import Fetch, Fetched, ObjectName, Outcome, Pool, Swept
from kvstored.tiers.object.assembly import make_pool
from kvstored.tiers.object.format import stored_bytes
from kvstored.tiers.object.janitor import JanitorLimits
from kvstored.tiers.object.settings import ObjectSettings


@pytest.fixture(params=["s3", "file"])
def settings(request: pytest.FixtureRequest, s3_server: S3Server, tmp_path: Path) -> ObjectSettings:
    return replace(bucket_settings(request.param, s3_server, tmp_path / "b"), janitor=False)


@asynccontextmanager
async def node(
    settings: ObjectSettings, directory: Path, limits: JanitorLimits | None = None
) -> AsyncIterator[Pool]:
    """A node; killed, not stopped, if its pool is not closed before the end."""
    supervisor = Supervisor(lambda death: None)
    pool = make_pool(
        settings,
        supervisor,
        RealFiles(),
        directory / "object",
        directory.name,
        patience=QUICK,
        limits=limits,
    )
    await pool.open()
    try:
        yield pool
    finally:
        await supervisor.stop()
        await pool.close(5)
    assert not any(supervisor.restarts.values())


async def offered(pool: Pool, items: Sequence[Giving]) -> list[Outcome]:
    assert pool.offer([item.offer() for item in items]) == len(items)
    await asyncio.gather(*(item.ended.wait() for item in items))
    return [item.outcomes[0] for item in items]


async def fetched(pool: Pool, names: Sequence[ObjectName], length: int) -> list[bytes | None]:
    memory = [aligned_buffer(length) for _ in names]
    found: dict[int, Fetched] = {}
    items = [Fetch(name, 0, lambda meta, at=at: memory[at]) for at, name in enumerate(names)]
    await pool.fetch(items, soon(), found.__setitem__)
    return [
        bytes(memory[at][:length]) if found[at].outcome is Outcome.OK else None
        for at in range(len(names))
    ]


async def test_what_one_stored_the_other_finds(settings: ObjectSettings, tmp_path: Path) -> None:
    items = [giving(seed, MIB + 5) for seed in range(6)]
    names = [name_of(item.sample.meta) for item in items]
    chunks = [[name] for name in names]
    async with node(settings, tmp_path / "a") as a, node(settings, tmp_path / "b2") as b:
        assert await b.leading(chunks, soon()) == []
        assert await offered(a, items[:4]) == [Outcome.OK] * 4
        assert len(await a.leading(chunks, soon())) == 4, "what it stored itself, at once"
        assert await fetched(b, names, MIB + 5) == [
            *(item.sample.data for item in items[:4]),
            None,
            None,
        ]
        same = [Giving(item.sample) for item in items]
        assert await offered(b, same) == [Outcome.EXISTED] * 4 + [Outcome.OK] * 2
        assert await b.delete(names[2:4], soon())
        assert await a.each(chunks[2:4], soon()) != [None, None], "remembered for a moment"
        assert await fetched(a, names[2:4], MIB + 5) == [None, None]
        assert await a.each(chunks[2:4], soon()) == [None, None]
        assert await offered(a, [Giving(items[2].sample)]) == [Outcome.OK]
        assert a.status().backlog_objects == 0
    async with node(settings, tmp_path / "c") as c:
        assert await c.delete_all("default", "tenant-0", soon()) == Swept(2, Outcome.OK)
        assert await c.delete_all("default", "", soon()) == Swept(3, Outcome.OK)
        assert await c.leading(chunks, soon()) == []


async def test_what_one_life_owed_the_next_one_brings_up(
    settings: ObjectSettings, tmp_path: Path
) -> None:
    away = replace(settings, url="s3://kvbucket/x", endpoint="http://127.0.0.1:9", allow_http=True)
    items = [giving(seed) for seed in range(4)]
    names = [name_of(item.sample.meta) for item in items]
    async with node(away, tmp_path / "a") as a:
        assert a.offer([item.offer() for item in items]) == 4
        assert await a.close(0.2) == 4
    async with node(settings, tmp_path / "a") as a:
        assert list(a.owed()) == names
        assert await offered(a, [Giving(item.sample) for item in items[1:]]) == [Outcome.OK] * 3
        a.disown(names)
        assert await a.close(5) == 0
    async with node(settings, tmp_path / "a") as a:
        assert list(a.owed()) == []
        assert len(await a.leading([[name] for name in names[1:]], soon())) == 3


async def test_the_cap_holds_while_both_write(settings: ObjectSettings, tmp_path: Path) -> None:
    settings = replace(settings, janitor=True, negative_ttl_s=0.0)
    limits = JanitorLimits(cap_bytes=100_000, interval_s=0.05, expires_s=0.5)
    items = [giving(seed) for seed in range(40)]
    async with (
        node(settings, tmp_path / "a", limits) as a,
        node(settings, tmp_path / "b2", limits) as b,
    ):
        await asyncio.gather(offered(a, items[:20]), offered(b, items[20:]))
        names = [[name_of(item.sample.meta)] for item in items]
        async with asyncio.timeout(20):
            while True:
                left = [lengths for lengths in await a.each(names, soon()) if lengths]
                if len(left) * stored_bytes(10_000) <= 100_000:
                    break
                await asyncio.sleep(0.02)
        assert left
