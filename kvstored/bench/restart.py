"""`kvctl bench restart`: from nothing to READY with many objects on NVMe. docs/benchmarks.md."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstored.bench import payloads, processes, restart_volume
from kvstored.bench.diskshape import default_directory
from kvstored.bench.leftovers import removed
from kvstored.bench.payloads import MIB
from kvstored.bench.processes import BenchError
from kvstored.bench.report import MIN_ROUNDS, Case, Json
from kvstored.bench.restart_volume import CHAIN_CHUNKS, OBJECT_BYTES
from kvstored.bench.sparse import SparseFiles
from kvstored_client import KVClient, Prefix

START_S = 120.0
_SEED = 1
_RAM_BYTES = 256 * MIB

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """`directory`: where the volume is made; None: as for `bench disk`."""

    objects: int = 1_000_000
    rounds: int = MIN_ROUNDS
    directory: Path | None = None


def run(settings: Settings, say: Say) -> list[Case]:
    """Measure; `say` takes lines of progress.

    Raises BenchError when the daemon cannot be used or an answer was wrong.
    """
    if settings.rounds < MIN_ROUNDS:
        raise BenchError(f"at least {MIN_ROUNDS} rounds are needed, not {settings.rounds}")
    if settings.objects <= CHAIN_CHUNKS:
        raise BenchError(f"more than {CHAIN_CHUNKS} objects are needed, not {settings.objects}")
    place = settings.directory or default_directory(Path(tempfile.gettempdir()))
    sockets = Path(tempfile.mkdtemp(prefix="kvbench-"))
    work = Path(tempfile.mkdtemp(prefix="kvbench-", dir=place))
    with removed([sockets, work]) as keep:
        try:
            return _Restarts(settings, sockets, work, keep, say).measure()
        except OSError as error:
            raise BenchError(f"the disk could not be used: {error}") from error


class _Restarts:
    def __init__(self, settings: Settings, sockets: Path, work: Path, keep: int, say: Say) -> None:
        self._settings = settings
        self._sockets = sockets
        self._keep = keep
        self._say = say
        self._volume = work / "data" / "nvme"
        self._index = self._volume / "index" / "data.mdb"
        self._source = payloads.random_bytes(CHAIN_CHUNKS * OBJECT_BYTES, _SEED)
        self._into = payloads.random_bytes(len(self._source), _SEED + 1)
        self._prefix: Prefix = payloads.fresh_prefix(payloads.family(OBJECT_BYTES), CHAIN_CHUNKS)
        self._config = sockets / "kvstored.toml"
        self._config.write_text(
            f'[daemon]\ndata_dir = "{work}/data"\n'
            f'[listen]\nunix = "{sockets}/k.sock"\nhttp = "{sockets}/h.sock"\n'
            f"[ram]\ncap_bytes = {_RAM_BYTES}\n"
            f"[nvme]\ncap_bytes = {restart_volume.cap_bytes(settings.objects)}\n"
        )

    def measure(self) -> list[Case]:
        with self._daemon() as (pid, _), self._client() as client:
            empty_bytes = processes.private_bytes(pid)
            put = client.put(self._prefix, self._source, durability="durable")
            if put.stored != CHAIN_CHUNKS:
                raise BenchError(f"put stored {put.stored} of {CHAIN_CHUNKS} chunks: {put.reason}")
        self._say(f"entering {self._settings.objects} objects in the volume's index")
        restart_volume.fill(
            SparseFiles(), self._volume, self._settings.objects - CHAIN_CHUNKS, _SEED + 2
        )
        params: dict[str, Json] = {
            "indexed_objects": self._settings.objects,
            "object_bytes": OBJECT_BYTES,
            "data_file": "sparse",
        }
        memory = Case("index_memory", params, "B/object")
        warm = Case("ready", {**params, "page_cache": "warm"}, "s")
        cold = Case("ready", {**params, "page_cache": "cold"}, "s")
        bare_per_key = self._bare_per_key()
        self._start()  # does not count
        for number in range(1, self._settings.rounds + 1):
            for case in (warm, cold):
                ready_s, held_bytes = self._start(cold=case is cold)
                bare_s = self._bare(cold=case is cold)
                case.add(ready_s, bare_s)
                case.verified_bytes += len(self._source)
                if case is warm:
                    memory.add((held_bytes - empty_bytes) / self._settings.objects, bare_per_key)
                self._say(
                    f"{case.params['page_cache']}, round {number} of {self._settings.rounds}: "
                    f"ready after {ready_s:.2f} s (bare {bare_s:.2f} s)"
                )
        return [warm, cold, memory]

    # -- one start -----------------------------------------------------------------------------

    def _start(self, *, cold: bool = False) -> tuple[float, int]:
        """Start a daemon, compare what it serves; seconds to READY, and its private memory."""
        self._page_cache(cold=cold)
        with self._daemon() as (pid, ready_s), self._client() as client:
            held_bytes = processes.private_bytes(pid)
            self._check(client)
        return ready_s, held_bytes

    def _check(self, client: KVClient) -> None:
        objects = sum(tier.objects for tier in client.usage().tiers if tier.tier == "nvme")
        if objects != self._settings.objects:
            raise BenchError(f"the daemon holds {objects} objects, not {self._settings.objects}")
        payloads.get(client, self._prefix, self._into)
        payloads.compare(self._into, self._source)
        self._into[:] = 0

    @contextlib.contextmanager
    def _daemon(self) -> Iterator[tuple[int, float]]:
        """A daemon on the volume: its process id, and how long it took to say READY."""
        log = self._sockets / "log"
        notify = self._sockets / "notify"
        notify.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear, log.open("wb") as said:
            ear.bind(str(notify))
            ear.settimeout(0.1)
            environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORED_")}
            begin = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-m", "kvstored.bench.sparse", str(self._config)],
                env={**environ, "NOTIFY_SOCKET": str(notify)},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=(self._keep,),
            )
            try:
                while not _hears(ear, b"READY=1"):
                    if process.poll() is not None or time.perf_counter() - begin > START_S:
                        tail = log.read_text(errors="replace")[-2000:]
                        raise BenchError(f"the daemon did not start:\n{tail}")
                yield process.pid, time.perf_counter() - begin
            finally:
                _end(process)

    def _client(self) -> KVClient:
        return KVClient(f"unix://{self._sockets}/k.sock")

    # -- what it is compared with --------------------------------------------------------------

    def _page_cache(self, *, cold: bool) -> None:
        """Have the index in the page cache, or not."""
        with self._index.open("rb") as file:
            if cold:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(MIB):
                    pass

    def _bare(self, *, cold: bool) -> float:
        """Seconds until a bare process has every record of the index in an array."""
        self._page_cache(cold=cold)
        begin = time.perf_counter()
        arguments = [str(self._index.parent), str(self._settings.objects)]
        with processes.child("kvstored.bench.bare_index", *arguments) as (_, (count,)):
            took_s = time.perf_counter() - begin
        if int(count) != self._settings.objects:
            raise BenchError(f"the bare reader found {count} objects")
        return took_s

    def _bare_per_key(self) -> float:
        path = self._sockets / "echo.sock"
        bare = processes.child("kvstored.bench.echo", path, self._settings.objects, _SEED)
        with bare as (_, (per_key,)):
            return float(per_key)


def _hears(ear: socket.socket, word: bytes) -> bool:
    try:
        return word in ear.recv(4096)
    except TimeoutError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(processes.STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
