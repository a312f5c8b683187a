"""A bucket in memory that obeys kvstored.tiers.object.api, shared by any number of stores."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import xxhash
from store.support_store import MIB, fail_on_death

from kvstored.store.loader import piece_checksums
from kvstored.store.pooling import PoolingSettings
from kvstored.store.store import Store, StoreSettings
from kvstored.supervise import Supervisor
from kvstored.tiers.base import ObjectMeta
from kvstored.tiers.nvme.volume_tier import VolumeTier
from kvstored.tiers.object.api import (
    Fetch,
    Fetched,
    ObjectName,
    Offer,
    Outcome,
    Pool,
    PoolStatus,
    Swept,
)
from kvstored.tiers.ram.tier import RamTier


@dataclass
class Shelf:
    """What all nodes see."""

    objects: dict[ObjectName, tuple[ObjectMeta, bytes]] = field(default_factory=dict)


class MemoryPool(Pool):
    """One node's view of a shelf. `gate`: fetches wait for it; `body`: they wait for it once they
    have memory. `fails`: outcomes by name.
    """

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.gate = asyncio.Event()
        self.gate.set()
        self.body = asyncio.Event()
        self.body.set()
        self.landing = asyncio.Event()
        self.fails: dict[ObjectName, Outcome] = {}
        self.fetched: list[ObjectName] = []
        self.asked: list[ObjectName] = []
        self.fetching = asyncio.Event()
        self.refuses_deletes = False
        self.health = "ok"
        self.left: list[ObjectName] = []
        self.disowned: list[ObjectName] = []
        self.most_offers = 1 << 30
        self.offered = 0
        self.closed = False
        self._uploads: set[asyncio.Task[None]] = set()
        self.lift = asyncio.Event()  # uploads wait for it
        self.lift.set()
        self._pending: list[Offer] = []

    async def open(self) -> None: ...

    async def close(self, timeout_s: float) -> int:
        self.closed = True
        await self.drained()
        return 0

    async def drained(self) -> None:
        """Wait until nothing is owed."""
        while self._uploads:
            await asyncio.wait(self._uploads)

    def _length(self, name: ObjectName) -> int | None:
        self.asked.append(name)
        if name not in self.shelf.objects or self.health != "ok":
            return None
        return self.shelf.objects[name][0].length_bytes

    async def leading(
        self, names: Sequence[Sequence[ObjectName]], deadline: float
    ) -> list[Sequence[int]]:
        found: list[Sequence[int]] = []
        for lengths in await self.each(names, deadline):
            if lengths is None:
                break
            found.append(lengths)
        return found

    async def each(
        self, names: Sequence[Sequence[ObjectName]], deadline: float
    ) -> list[Sequence[int] | None]:
        await asyncio.sleep(0)
        found: list[Sequence[int] | None] = []
        for parts in names:
            lengths = [self._length(name) for name in parts]
            found.append(None if None in lengths else [n for n in lengths if n is not None])
        return found

    async def fetch(
        self,
        items: Sequence[Fetch],
        deadline: float,
        arrived: Callable[[int, Fetched], None],
    ) -> None:
        left = set(range(len(items)))

        def settle(i: int, fetched: Fetched) -> None:
            left.discard(i)
            arrived(i, fetched)

        self.fetching.set()
        try:
            async with asyncio.timeout_at(_loop_time(deadline)):
                await self.gate.wait()
                for i, item in enumerate(items):
                    await asyncio.sleep(0)
                    settle(i, await self._bring(item))
        except TimeoutError:
            for i in sorted(left):
                settle(i, Fetched(Outcome.DEADLINE))
        finally:
            for i in sorted(left):
                settle(i, Fetched(Outcome.CANCELLED))

    async def _bring(self, item: Fetch) -> Fetched:
        self.fetched.append(item.name)
        if item.name in self.fails:
            return Fetched(self.fails[item.name])
        if item.name not in self.shelf.objects:
            return Fetched(Outcome.ABSENT)
        meta, data = self.shelf.objects[item.name]
        if item.length_bytes not in (0, meta.length_bytes):
            return Fetched(Outcome.LENGTH, meta)
        memory = item.into(meta)
        if memory is None:
            return Fetched(Outcome.CANCELLED, meta)
        self.landing.set()
        await self.body.wait()
        memory[: len(data)] = data
        if xxhash.xxh3_128_digest(memory[: len(data)]) != meta.checksum:
            del self.shelf.objects[item.name]
            return Fetched(Outcome.CORRUPT, meta)
        return Fetched(Outcome.OK, meta)

    def offer(self, offers: Sequence[Offer]) -> int:
        taken = 0 if self.closed else min(len(offers), self.most_offers)
        self.offered += taken
        for offer in offers[:taken]:
            task = asyncio.ensure_future(self._upload(offer))
            self._uploads.add(task)
            task.add_done_callback(self._uploads.discard)
        return taken

    async def _upload(self, offer: Offer) -> None:
        await self.lift.wait()
        read = cast("Callable[[], Awaitable[memoryview | None]]", offer.read)
        view = await read()
        if view is None:
            offer.done(Outcome.CANCELLED)
            return
        data, meta = bytes(view[: offer.meta.length_bytes]), offer.meta
        assert meta.piece_checksums == piece_checksums(memoryview(data))
        name = ObjectName(meta.namespace, meta.family, meta.key, meta.part)
        there = self.shelf.objects.setdefault(name, (meta, data))
        if there[1] is data:
            offer.done(Outcome.OK)
        elif len(there[1]) != len(data):
            offer.done(Outcome.LENGTH)
        else:
            offer.done(Outcome.EXISTED if there[1] == data else Outcome.CONFLICT)

    def owed(self) -> Sequence[ObjectName]:
        return self.left

    def disown(self, names: Sequence[ObjectName]) -> None:
        self.disowned += names

    async def delete(self, names: Sequence[ObjectName], deadline: float) -> bool:
        await self.drained()
        if self.refuses_deletes:
            return False
        for name in names:
            self.shelf.objects.pop(name, None)
        return True

    async def delete_all(self, namespace: str, tenant: str, deadline: float) -> Swept:
        if self.refuses_deletes:
            return Swept(0, Outcome.NETWORK)
        gone = [
            name
            for name, (meta, _) in self.shelf.objects.items()
            if name.namespace == namespace and tenant in ("", meta.tenant)
        ]
        for name in gone:
            del self.shelf.objects[name]
        return Swept(len(gone), Outcome.OK)

    def status(self) -> PoolStatus:
        return PoolStatus(url="memory", health=self.health)

    def spoil(self, name: ObjectName) -> None:
        """Let the stored bytes of an object rot."""
        meta, data = self.shelf.objects[name]
        self.shelf.objects[name] = (meta, bytes([data[0] ^ 1]) + data[1:])

    def alter(self, name: ObjectName, **changes: object) -> None:
        """Change what the stored header says."""
        meta, data = self.shelf.objects[name]
        self.shelf.objects[name] = (replace(meta, **changes), data)  # type: ignore[arg-type]


def _loop_time(deadline: float) -> float:
    return deadline  # asyncio's clock is time.monotonic()


@contextlib.asynccontextmanager
async def node(
    pool: MemoryPool,
    directory: Path | None = None,
    *,
    ram_bytes: int = 16 * MIB,
    write_back: str = "all",
    promote: bool = True,
) -> AsyncIterator[Store]:
    """A store over a shelf; NVMe only where a directory is given."""
    ram = RamTier(ram_bytes)
    nvme = VolumeTier(directory, 64 * MIB) if directory is not None else None
    supervisor = Supervisor(fail_on_death)
    settings = StoreSettings(pooling=PoolingSettings(write_back, 64 * MIB if promote else 0))
    store = Store(ram, nvme, settings, supervisor, pool)
    await store.open()
    try:
        yield store
        pool.gate.set()
        pool.body.set()
        pool.lift.set()
    finally:
        report = await store.close(20.0)
        await supervisor.stop()
        assert pool.closed
        assert not any(supervisor.restarts.values())
        assert report.lost_objects == 0
        assert store.ram.leased_bytes == 0
