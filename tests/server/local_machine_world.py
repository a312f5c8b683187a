"""A real local server on a real store, whose loop runs only while a step of the machine does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import uvloop
from server.local_machine_book import ALL_PARTS, CHUNKS, PREFIXES, SPEC, Span
from server.serving import MIB, SALTS, TOKEN

from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault, FaultyFiles
from kvstored.server.auth import Auth, NamespaceAuth, token_hash
from kvstored.server.dispatcher import Dispatcher
from kvstored.server.limits import Limits, LocalLimits
from kvstored.server.local.listener import LocalServer
from kvstored.server.local.session import Session, State
from kvstored.store.index import NONE, TIER_BIT
from kvstored.store.store import NamespaceSettings, Store, StoreSettings
from kvstored.supervise import Supervisor
from kvstored.tiers.base import NoRoom, TierKind
from kvstored.tiers.nvme.volume_tier import VolumeTier
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.proto import kvstore_pb2 as pb

GIVE_UP_S = 15.0
CAPS = {"default": 1024 << 10, "locked": 512 << 10}
CAP_BYTES = 1024 << 10
RING_BYTES = 64 << 10
LIMITS = replace(
    Limits(),
    local=LocalLimits(
        max_requests=6,
        max_leases=8,
        ring_bytes=RING_BYTES,
        max_staging_bytes=2 * MIB,  # two areas
        max_total_staging_bytes=16 * MIB,
    ),
)
_T = TypeVar("_T")


class World:
    """The daemon's side. `disk`: with an NVMe tier, whose reads wait while `gate` is clear."""

    def __init__(self, disk: bool) -> None:
        self.fds = open_fds()
        self.folder = Path(tempfile.mkdtemp(prefix="kv"))
        self.data = self.folder.with_suffix(".data")
        self.errors: list[object] = []
        self.loop = uvloop.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self.gate = threading.Event()
        self.gate.set()
        self.disk = disk
        self.do(self._open())

    def do(self, work: Coroutine[object, object, _T]) -> _T:
        """Run the loop until the work is done."""
        return self.loop.run_until_complete(asyncio.wait_for(work, GIVE_UP_S))

    async def _open(self) -> None:
        self.ram = RamTier(CAP_BYTES, CAPS.__getitem__, hugepages=False, threads=1)
        nvme = None
        if self.disk:
            files = FaultyFiles(RealFiles())
            nvme = VolumeTier(self.data, 64 * MIB, files=files)
        self.supervisor = Supervisor(lambda death: self.errors.append(death))
        settings = StoreSettings(namespaces=tuple(NamespaceSettings(n) for n in SALTS))
        self.store = Store(self.ram, nvme, settings, self.supervisor)
        await self.store.open()
        if self.disk:
            files.inject(Fault("preadv", "*/data", stuck=self.gate))
        auth = Auth(
            [
                NamespaceAuth("default", anonymous_unix=True),
                NamespaceAuth("locked", (token_hash(TOKEN),)),
            ]
        )
        self.dispatcher = Dispatcher(self.store, auth, SALTS, limits=LIMITS, local=True)
        self.server = LocalServer(self.dispatcher, self.loop, self.folder / "k.sock", self.ram)
        await self.server.start()
        for namespace in SALTS:
            await self.store.declare(namespace, SPEC)

    @property
    def path(self) -> Path:
        return self.folder / "k-local.sock"

    async def until(self, so: Callable[[], object]) -> None:
        """Let the loop turn until something is so."""
        while not so():  # noqa: ASYNC110 - what it waits for is the loop's next turns
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Return when what sessions gave back has been given back."""
        await self.until(lambda: not any(s._inbox.frames for s in self.server._sessions))
        await self.until(lambda: all(map(_waits_for_the_client, self.server._cleaning)))
        await self.server._staging.settled()

    def session(self, number: int) -> Session | None:
        """A session by its number, while it is not over."""
        found = [s for s in self.server._sessions if s.number == number]
        return found[0] if found else None

    def quarantined(self, number: int) -> bool:
        session = self.session(number)
        return session is not None and session.state is State.QUARANTINED

    def holds(self, namespace: str) -> Counter[bytes]:
        """How often each key is held from eviction."""
        return Counter(self.store.namespaces[namespace].holds._counts)

    def held(self, namespace: str, key: bytes) -> bool:
        """Whether a chunk is in some tier."""
        return self.store.namespaces[namespace].index.find(key) != NONE

    def in_ram(self, namespace: str, key: bytes) -> bool:
        """Whether something of a chunk is in RAM."""
        index = self.store.namespaces[namespace].index
        chunk = index.find(key)
        return chunk != NONE and bool(index.tiers[chunk] & TIER_BIT[TierKind.RAM])

    async def delete_everything(self) -> None:
        """Of every namespace, and show that its memory can serve others."""
        for namespace in CAPS:
            for prefix in range(PREFIXES):
                run = Span(prefix, 0, CHUNKS, ALL_PARTS).run(namespace)
                await self.store.delete(self.dispatcher.run_of(run, pb.Context()))
        for tier in self.store.tiers.values():
            assert (tier.usage().charged_bytes, tier.usage().objects) == (0, 0)
        (place,) = await self.ram.reserve("default", [CAP_BYTES])
        assert not isinstance(place, NoRoom)
        self.ram.cancel([place])

    async def time_passes(self) -> None:
        """What clients are late to unmap is overdue."""
        for leaving in [*self.ram._retirement._leaving]:
            self.ram._retirement._give_up(leaving)

    def counted(self) -> dict[int, int]:
        """Sizes of the segments that count."""
        return {i: record.size_bytes for i, record in self.ram._slabs.segments.items()}

    async def quiet(self) -> None:
        """Return when nothing is on its way to the disk, or from it."""
        self.gate.set()
        await self.dispatcher.idle()
        if self.store.writer is not None and (waiting := self.store.writer.in_flight()):
            await asyncio.wait(waiting)
        if self.store._loader is not None:
            while self.store._loader._tasks:
                await asyncio.wait(self.store._loader._tasks)

    def close(self) -> None:
        """Stop, and show that nothing is left."""
        self.gate.set()
        try:
            self.do(self._close())
        finally:
            self.loop.close()
            shutil.rmtree(self.folder)
            shutil.rmtree(self.data, ignore_errors=True)

    async def _close(self) -> None:
        await self.server.stop()
        await self.supervisor.stop()
        await self.store.close(5.0)


def _waits_for_the_client(cleaning: asyncio.Task[None]) -> bool:
    """Whether all that is left to do is what a quarantined session may have mapped."""
    awaited = getattr(cleaning.get_coro(), "cr_await", None)
    return getattr(awaited, "__qualname__", "") == "Event.wait"


def open_fds() -> Counter[str]:
    """What the descriptors of this process are, by kind."""
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            kinds[os.readlink(f"/proc/self/fd/{fd}").split(":[")[0]] += 1
    return kinds


def shared_maps() -> int:
    """How many mappings of a daemon's memory this process has."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:kvstored" in line for line in maps)
