"""A real local server on a real store, on a uvloop of its own, for tests that block on sockets."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import uvloop
from server.local_wire import LocalWire
from server.serving import FAMILY, MIB, PART_BYTES, SALTS, SPEC, TOKEN, run

from kvstored.io.base import Files
from kvstored.server.auth import Auth, NamespaceAuth, token_hash
from kvstored.server.dispatcher import Dispatcher
from kvstored.server.frames import FrameJoiner
from kvstored.server.limits import Limits
from kvstored.server.local.figures import LocalFigures
from kvstored.server.local.listener import LocalServer
from kvstored.store.api import PutOffer
from kvstored.store.store import NamespaceSettings, Store, StoreSettings
from kvstored.supervise import Supervisor
from kvstored.tiers.nvme.volume_tier import VolumeTier
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.proto import kvstore_pb2 as pb

__all__ = ["FAMILY", "MIB", "PART_BYTES", "SPEC", "TOKEN", "LocalServed", "local_serving", "run"]

GIVE_UP_S = 20.0
_T = TypeVar("_T")


class LocalServed:
    """A running local server. Its objects belong to its loop: reach them by `do` or `look`."""

    def __init__(
        self, folder: Path, limits: Limits, cap_bytes: int, files: Files | None = None
    ) -> None:
        self._folder = folder
        self._files = files
        self._limits = limits
        self._cap_bytes = cap_bytes
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="verbs", daemon=True)
        self.errors: list[object] = []
        self.ended: list[tuple[str, str]] = []
        """Verb and outcome of every call, in the order in which they ended."""

    def call_ended(self, verb: str, outcome: str, seconds: float, tier: str) -> None:
        """See CallObserver."""
        self.ended.append((verb, outcome))

    def start(self) -> None:
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self._thread.start()
        self.do(self._start())

    def stop(self) -> None:
        self.do(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        assert self.errors == []

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def _start(self) -> None:
        self.ram = RamTier(self._cap_bytes, hugepages=False)
        self.supervisor = Supervisor(lambda death: None)
        settings = StoreSettings(namespaces=tuple(NamespaceSettings(n) for n in SALTS))
        nvme = None
        if self._files is not None:
            data = self._folder.with_suffix(".data")
            nvme = VolumeTier(data, 192 * MIB, files=self._files)
        self.store = Store(self.ram, nvme, settings, self.supervisor)
        await self.store.open()
        auth = Auth(
            [
                NamespaceAuth("default", anonymous_unix=True),
                NamespaceAuth("locked", (token_hash(TOKEN),)),
            ]
        )
        self.dispatcher = Dispatcher(
            self.store, auth, SALTS, limits=self._limits, local=True, observer=self
        )
        unix = self._folder / "k.sock"
        self.server = LocalServer(self.dispatcher, self.loop, unix, self.ram)
        await self.server.start()
        for namespace in SALTS:
            await self.store.declare(namespace, SPEC)

    async def _stop(self) -> None:
        await self.server.stop()
        await self.supervisor.stop()
        await self.store.close(5.0)
        assert os.listdir(self._folder) == []

    @property
    def path(self) -> Path:
        return self._folder / "k-local.sock"

    def do(self, work: Coroutine[object, object, _T]) -> _T:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(GIVE_UP_S)

    def look(self, function: Callable[[], _T]) -> _T:
        """Call a function on the server's loop."""
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def call() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)

        self.loop.call_soon_threadsafe(call)
        return answer.result(GIVE_UP_S)

    @property
    def figures(self) -> LocalFigures:
        return self.look(self.server.figures)

    def becomes(self, condition: Callable[[], bool], within_s: float = GIVE_UP_S) -> None:
        """Wait until something is so on the server's loop."""
        until = time.monotonic() + within_s
        while not self.look(condition):
            assert time.monotonic() < until, f"not within {within_s} s: {self.figures}"
            time.sleep(0.005)  # between looks at figures that nobody signals

    def nothing_held(self) -> bool:
        """Whether no session keeps anything in place."""
        figures = self.server.figures()
        return (
            self.ram.leased_bytes == 0
            and figures.leased_bytes == 0
            and figures.staging_bytes == 0
            and self.dispatcher.open_payload_calls == 0
            and not any(ns.holds for ns in self.store.namespaces.values())
        )

    def fill(self, chunks: pb.ChunkRun, objects: Sequence[bytes], durable: bool = False) -> None:
        """Store objects, one per object of the run."""
        self.do(self._fill(chunks, objects, durable))

    def push_down(self, chunks: pb.ChunkRun, objects: Sequence[bytes]) -> None:
        """Store objects, durably, and fill RAM with others until none of them is there. Of more
        than 64 KiB each: smaller ones are read from the disk by other ways than preadv.
        """
        self.fill(chunks, objects, durable=True)
        size = len(objects[0])
        batch = [content(i, size) for i in range(16)]
        fillers = [
            run(16, salt=b"fill%d" % i, parts=[*chunks.parts])
            for i in range(self._cap_bytes // size // 8)
        ]
        for filler in fillers:
            self.fill(filler, batch, durable=True)
        assert self.states(chunks) == bytes([pb.IN_NVME]) * len(objects), self.states(chunks)
        for filler in fillers:
            self.delete(filler)

    def delete(self, chunks: pb.ChunkRun) -> None:
        """Drop a run's chunks."""
        self.do(self.store.delete(self.look(lambda: self.dispatcher.run_of(chunks, pb.Context()))))

    def _states(self, chunks: pb.ChunkRun) -> bytes:
        ready = self.dispatcher.run_of(chunks, pb.Context())
        return self.store.match(ready, pb.EACH, pb.DEPTH_NODE).states

    def states(self, chunks: pb.ChunkRun) -> bytes:
        """Where the chunks of a run are."""
        return self.look(lambda: self._states(chunks))

    async def _fill(self, chunks: pb.ChunkRun, objects: Sequence[bytes], durable: bool) -> None:
        ready = self.dispatcher.run_of(chunks, pb.Context())
        offer = PutOffer(ready, [*map(len, objects)], b"", durable, True, 0, time.monotonic() + 10)
        ticket = await self.store.begin_put(offer)
        joiner = FrameJoiner(ticket.wanted, 64 * MIB)
        for wanted in ticket.wanted:
            joiner.add(objects[wanted.index])
        received = joiner.finish()
        joiner.let_go()
        states = await self.store.commit_put(ticket, received)
        assert set(states) <= {pb.STORED, pb.EXISTED}, (
            list(states),
            self.store.writer and self.store.writer.not_written,
        )

    @contextlib.contextmanager
    def session(self, namespace: str = "default", **fields: object) -> Iterator[LocalWire]:
        """An opened session."""
        wire = LocalWire(self.path)
        try:
            wire.open(namespace, **fields)
            yield wire
        finally:
            wire.close()


def content(i: int, size: int = PART_BYTES) -> bytes:
    """Bytes of the i-th object, unlike any other's."""
    return (i.to_bytes(4, "little") + bytes([i % 251 + 1] * 60)) * (size // 64)


@contextlib.contextmanager
def local_serving(
    limits: Limits | None = None, *, cap_bytes: int = 32 * MIB, files: Files | None = None
) -> Iterator[LocalServed]:
    """A server for namespaces "default" and "locked" (TOKEN). Nothing may be left of its sessions'
    at the end but what the stop ends. `files`: with an NVMe tier that uses them.
    """
    folder = Path(tempfile.mkdtemp(prefix="kv"))
    served = LocalServed(folder, limits or Limits(), cap_bytes, files)
    try:
        served.start()
        yield served
        served.stop()
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(folder.with_suffix(".data"), ignore_errors=True)
