"""The daemon's life: start, serve, stop. `serve` is all of `kvstored serve` behind the settings."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import NoReturn, TypeVar

import uvloop
from prometheus_client import CollectorRegistry

from kvstored import __version__, assembly, logs, process, scheduling
from kvstored.config import Loaded
from kvstored.datadir import DataDirectory
from kvstored.errors import KvstoredError
from kvstored.io.base import Files
from kvstored.looplag import LoopLagProbe
from kvstored.scrubbing import Scrubbing
from kvstored.sdnotify import Notifier
from kvstored.server.dispatcher import Dispatcher
from kvstored.server.grpc_server import GrpcServer
from kvstored.server.http import Health, HttpServer
from kvstored.server.local.figures import LocalFigures
from kvstored.server.local.listener import LocalServer
from kvstored.server.metrics import (
    CallAccounts,
    MetricsCollector,
    MetricsSources,
    RamFigures,
    Snapshot,
    take_snapshot,
)
from kvstored.server.operators import volumes_reply
from kvstored.server.status_page import Json, status_page
from kvstored.stopping import StopWatch, leave
from kvstored.store.store import Store
from kvstored.supervise import OnDeath, Supervisor, TaskDeath
from kvstored.tiers.nvme.tier import NvmeTier

log = logging.getLogger("kvstored.daemon")

EXIT_BUG = 1
EXIT_MISTAKE = 2
SNAPSHOT_TIMEOUT_S = 2.0
END_SCRUBS_S = 2.0
START_PING_S = 5.0
START_EXTENSION_S = 30.0

T = TypeVar("T")


class Daemon:
    """One daemon over a claimed data directory. Everything runs on the verbs' loop but where said.

    `stopwatch` decides when to stop and by when; see `stop_requested`.
    """

    def __init__(
        self, loaded: Loaded, data: DataDirectory, notifier: Notifier, files: Files | None
    ) -> None:
        self._settings = loaded.settings
        self._files = files
        self._data = data
        self._notifier = notifier
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._probe = LoopLagProbe()
        self._supervisor = Supervisor(self._task_died)
        self._store: Store | None = None
        self._opened = False
        self._scrubbing: Scrubbing | None = None
        self._grpc: GrpcServer | None = None
        self._local: LocalServer | None = None
        self._http: HttpServer | None = None
        self._started_s = time.time()
        self.phase = "starting"
        """"starting", "ready" or "draining"; may be read from any thread."""
        self.stopwatch: StopWatch | None = None

    # ---- life ------------------------------------------------------------------------------------

    async def run(self, stopwatch: StopWatch) -> int:
        """Start, serve until a stop is asked for, stop. Returns the exit status.

        Raises KvstoredError where the daemon cannot start for a reason that an operator can mend.
        """
        self.stopwatch = stopwatch
        start = asyncio.create_task(self._start())
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
        try:
            if start.done():
                await start
                await stop
        except Exception as error:
            # From here on, too, there is a deadline.
            mistake = isinstance(error, KvstoredError)
            stopwatch.begin(f"cannot start: {error}", EXIT_MISTAKE if mistake else EXIT_BUG)
            raise
        finally:
            await _end(start)
            await _end(stop)
            await self._shut_down()
        return stopwatch.status

    def request_stop(self, reason: str) -> None:
        """Begin a clean stop. May be called from any thread."""

        def begin() -> None:
            log.info("stopping", extra={"fields": {"reason": reason}})
            self._stop.set()

        self._loop.call_soon_threadsafe(begin)

    def unfinished(self) -> str:
        """What a stop at this moment leaves undone, in words. May be called from any thread."""
        writer = self._store.writer if self._store is not None else None
        dirty_bytes = writer.dirty_bytes if writer is not None else 0
        if not dirty_bytes:
            return "nothing that was accepted"
        return f"{dirty_bytes} bytes that were accepted are not durable"

    def _task_died(self, death: TaskDeath) -> None:
        if self.stopwatch is not None:
            self.stopwatch.begin(str(death), EXIT_BUG)

    # ---- start -----------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Listen for probes first, for verbs last: READY means that a call will be answered."""
        settings = self._settings
        self._supervisor.start("loop-lag", self._probe.run)
        if self._notifier.watchdog_interval_s:
            self._supervisor.start("watchdog", self._feed_watchdog, OnDeath.FATAL)
        self._supervisor.start("start-pings", self._ask_for_patience)
        http = settings.listen.http
        if isinstance(http, Path):
            process.prepare_socket_directory(http.parent, "listen.http")
        self._http = HttpServer(http, self._registry(), self._health(), self._page)
        http_at = self._http.start()

        began = time.monotonic()
        secret = settings.daemon.deployment_secret
        salts = assembly.build_salts(
            settings.namespaces,
            secret.reveal().encode() if secret else self._data.deployment_secret(),
        )
        self._store = assembly.build_store(settings, self._supervisor, self._files)
        await self._store.open()
        self._opened = True
        if isinstance(self._store.nvme, NvmeTier):
            self._scrubbing = Scrubbing(
                self._store.nvme, self._store.drop_rotten, settings.nvme.scrub_bytes_per_s
            )
        frozen = process.freeze_heap()

        dispatcher = Dispatcher(
            self._store,
            assembly.build_auth(settings),
            salts,
            limits=assembly.build_limits(settings),
            durable=settings.nvme.enabled,
            local=settings.local.enabled,
            volumes=self._scrubbing,
            observer=CallAccounts(self._store.accounts),
        )
        process.prepare_socket_directory(settings.listen.unix.parent, "listen.unix")
        tcp = settings.listen.tcp
        grpc = GrpcServer(
            dispatcher,
            self._loop,
            unix_path=settings.listen.unix,
            tcp_address=str(tcp) if tcp else None,
        )
        if settings.local.enabled:
            # Before gRPC: whoever finds the one socket must find the other.
            local = LocalServer(dispatcher, self._loop, settings.listen.unix, self._store.ram)
            await local.start()
            self._local = local
        port = await grpc.start()
        self._grpc = grpc  # one that could not start has left nothing to stop
        self.phase = "ready"
        self._notifier.ready(f"serving on {settings.listen.unix}")
        log.info(
            "ready",
            extra={
                "fields": {
                    "version": __version__,
                    "pid": os.getpid(),
                    "unix": settings.listen.unix,
                    "tcp": f"{tcp.host}:{port}" if tcp else "off",
                    "http": http_at,
                    "data_dir": settings.daemon.data_dir,
                    "start_s": round(time.monotonic() - began, 3),
                    "frozen_objects": frozen,
                }
            },
        )

    async def _feed_watchdog(self) -> None:
        while True:
            self._notifier.watchdog()
            await asyncio.sleep(self._notifier.watchdog_interval_s)

    async def _ask_for_patience(self) -> None:
        """Rebuilding an index may take longer than any fixed start timeout: while the loop turns,
        the service manager is asked for more time.
        """
        while True:
            if self.phase == "starting":
                self._notifier.extend_timeout(START_EXTENSION_S)
            await asyncio.sleep(START_PING_S)

    # ---- stop ------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        """Every step is bounded by what is left of the deadline, and none stops the next."""
        self.phase = "draining"
        self._notifier.stopping("finishing calls, writing what was accepted")
        if self._grpc is not None:
            # Half of the time for calls, the rest for writing: the flush goes on meanwhile.
            await self._step("drain", self._grpc.drain(self._left_s() / 2))
            await self._step("close listeners", self._grpc.stop(min(5.0, self._left_s() / 2)))
        if self._local is not None:
            await self._step("end local sessions", self._local.stop(min(5.0, self._left_s() / 2)))
        if self._scrubbing is not None:
            left_s = min(END_SCRUBS_S, self._left_s() / 4)
            await self._step("end scrubs", self._scrubbing.close(left_s))
        if self._store is not None and self._opened:
            report = await self._step("close store", self._store.close(0.9 * self._left_s()))
            if report is None:
                log.error("not durable", extra={"fields": {"unfinished": self.unfinished()}})
            elif report.lost_objects:
                log.error(
                    "what was accepted could not all be made durable",
                    extra={"fields": {"objects": report.lost_objects, "bytes": report.lost_bytes}},
                )
        await self._step("stop tasks", self._supervisor.stop())
        if self._http is not None:
            await self._step("stop http", asyncio.to_thread(self._http.stop))
        log.info("stopped")

    async def _step(self, what: str, work: Coroutine[object, object, T]) -> T | None:
        """Run one step of the stop; None where it failed or its time was over."""
        try:
            return await asyncio.wait_for(work, self._left_s())
        except TimeoutError:
            log.warning("a step of the stop took too long", extra={"fields": {"step": what}})
        except Exception:
            log.exception("a step of the stop failed", extra={"fields": {"step": what}})
        return None

    def _left_s(self) -> float:
        assert self.stopwatch is not None, "run comes first"
        return self.stopwatch.left_s()

    # ---- what the HTTP thread sees ---------------------------------------------------------------

    def _health(self) -> Health:
        return Health(phase=lambda: self.phase, loop_silent_s=self._probe.silent_s)

    def _registry(self) -> CollectorRegistry:
        registry = CollectorRegistry()
        sources = MetricsSources(
            snapshot=self._snapshot,
            lag=self._probe.lag,
            task_restarts=lambda: self._supervisor.restarts,
            phase=lambda: self.phase,
            started_s=self._started_s,
        )
        registry.register(MetricsCollector(sources))
        return registry

    def _snapshot(self) -> Snapshot:
        """Called from HTTP threads; see MetricsSources."""
        answer: concurrent.futures.Future[Snapshot] = concurrent.futures.Future()

        def take() -> None:
            try:
                answer.set_result(self._take_snapshot())
            except Exception as error:
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(take)
        return answer.result(SNAPSHOT_TIMEOUT_S)

    def _take_snapshot(self) -> Snapshot:
        store = self._store
        if store is None:
            return Snapshot()
        not_written = store.writer.not_written if store.writer is not None else {}
        local = self._local.figures() if self._local is not None else LocalFigures()
        return take_snapshot(
            store.accounts,
            store.status(),
            not_written,
            local,
            RamFigures.of(store.ram),
            volumes_reply(self._scrubbing),
        )

    def _page(self) -> dict[str, Json]:
        """What /status shows; as `_snapshot`."""
        snapshot = self._snapshot()
        return status_page(self.phase, snapshot.status, snapshot.volumes)


async def _end(task: asyncio.Task[T]) -> None:
    """Cancel a task unless it is done, and wait for its end."""
    task.cancel()
    await asyncio.wait((task,))


def serve(loaded: Loaded, files: Files | None = None) -> NoReturn:
    """Run a daemon until it is told to stop; then ends the process.

    `block_signals` must have been called before any thread was started. `files`: how files
    are reached; None: as usual.
    Raises KvstoredError where the daemon cannot start for a reason that an operator can mend. The
    caller must then end the process by `leave` too.
    """
    settings = loaded.settings
    process.prepare()
    scheduling.favour_this_thread()  # before any other is started
    data = DataDirectory.claim(settings.daemon.data_dir, files)
    log_stream = logs.configure(settings.log.level, settings.log.format)
    for warning in loaded.warnings:
        log.warning(warning)
    loop = uvloop.new_event_loop()
    try:
        status = loop.run_until_complete(_main(loaded, data, log_stream, files))
    except KvstoredError:
        log_stream.drain(1.0)
        raise
    except Exception:
        log.exception("the daemon failed")
        status = EXIT_BUG
    leave(status, log_stream)


async def _main(
    loaded: Loaded, data: DataDirectory, log_stream: logs.QueuedHandler, files: Files | None
) -> int:
    daemon = Daemon(loaded, data, Notifier.from_environment(os.environ), files)
    stopwatch = StopWatch(
        loaded.settings.daemon.stop_timeout_s, daemon.request_stop, daemon.unfinished, log_stream
    )
    stopwatch.start()
    return await daemon.run(stopwatch)
