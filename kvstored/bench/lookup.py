"""`kvctl bench lookup`: match among many objects, against a bare look-up. docs/benchmarks.md."""

from __future__ import annotations

import contextlib
import gc
import http.client
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstored.bench import payloads, processes, rounds
from kvstored.bench.echo import KEY_BYTES, Echo
from kvstored.bench.payloads import MIB, Bytes
from kvstored.bench.processes import BenchError, Child, Daemon
from kvstored.bench.report import MIN_ROUNDS, Case, Json
from kvstored.config.host import memory_allowed
from kvstored_client import KVClient, KVFamily, Prefix

OBJECT_BYTES = 4 << 10
PUT_CHUNKS = 8192
BUSY_SESSIONS = 4
BUSY_OBJECT_BYTES = 1 * MIB
SPARE_BYTES = 64 * MIB
# A bare dict, its keys, the daemon's index, and keys and hashes in the benchmark itself; generous.
OVERHEAD_BYTES = 1200
MAX_SEQUENCES = 2000
_SEED = 1

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure. `samples`: matches per round. `busy_s`: least time under load before the
    loop's lag is read. `busy_chunks`: of 1 MiB, of the prefix that each busy session reads.
    """

    indexed_objects: int = 1_000_000
    keys: int = 512
    rounds: int = 11
    samples: int = 2000
    busy_s: float = 62.0
    busy_chunks: int = 64


def run(settings: Settings, say: Say) -> list[Case]:
    """Measure; `say` takes lines of progress.

    Raises BenchError when the daemon cannot be used or an answer was wrong.
    """
    if settings.rounds < MIN_ROUNDS:
        raise BenchError(f"at least {MIN_ROUNDS} rounds are needed, not {settings.rounds}")
    count = _objects_that_fit(settings, say)
    load_bytes = BUSY_SESSIONS * settings.busy_chunks * BUSY_OBJECT_BYTES
    with tempfile.TemporaryDirectory(prefix="kvbench-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        say("starting a daemon")
        # A prefix that is read is leased, and one session may lease half.
        cap_bytes = count * OBJECT_BYTES * 21 // 20 + 2 * load_bytes + SPARE_BYTES
        daemon = stack.enter_context(processes.daemon(directory, cap_bytes))
        client = stack.enter_context(KVClient(daemon.target))
        say(f"starting a bare server with {count} keys")
        path = str(directory / "echo.sock")
        bare = processes.child("kvstored.bench.echo", path, count, _SEED)
        _, (bare_per_key,) = stack.enter_context(bare)
        echo = stack.enter_context(contextlib.closing(Echo(path)))
        objects = Objects(client, count)
        before = processes.private_bytes(daemon.pid)
        objects.index(say)
        grown = processes.private_bytes(daemon.pid) - before
        params: dict[str, Json] = {"object_bytes": OBJECT_BYTES, "indexed_objects": count}
        memory = Case("index_memory", params, "B/object")
        memory.add(grown / count, float(bare_per_key))
        objects.shuffle(settings.keys)
        matches = _Matches(settings, echo, objects)
        idle = matches.measure(0, say)
        busy = _Busy(settings, daemon, matches).measure(say)
        return [*idle, *busy, memory]


def _objects_that_fit(settings: Settings, say: Say) -> int:
    allowed, source = memory_allowed()
    load = 4 * BUSY_SESSIONS * settings.busy_chunks * BUSY_OBJECT_BYTES
    fit = (allowed // 2 - load - SPARE_BYTES) // (OBJECT_BYTES + OVERHEAD_BYTES)
    if fit < settings.keys:
        raise BenchError(f"{allowed >> 20} MiB of memory ({source}) are too few for this benchmark")
    if fit < settings.indexed_objects:
        say(
            f"{fit} objects instead of {settings.indexed_objects}: half of {allowed >> 20} MiB "
            f"({source}) does not hold more"
        )
    return min(fit, settings.indexed_objects)


class Objects:
    """Objects of the smallest size in a daemon, and matches of random ones among them."""

    def __init__(self, client: KVClient, count: int) -> None:
        self._client = client
        self._family: KVFamily = payloads.family(OBJECT_BYTES)
        # One array, no Python object per key: what the benchmark holds is not to slow its client.
        self.hashes = payloads.random_bytes(count * KEY_BYTES, _SEED).reshape(-1, KEY_BYTES)
        self.chosen: list[Bytes] = []
        """What each sequence consists of, once shuffled: shape [keys, 32]."""
        self._prefixes: list[Prefix] = []

    def index(self, say: Say) -> None:
        """Put every object."""
        source = payloads.random_bytes(PUT_CHUNKS * OBJECT_BYTES, _SEED + 1)
        said = 0
        for first in range(0, len(self.hashes), PUT_CHUNKS):
            prefix = self._foreign(self.hashes[first : first + PUT_CHUNKS])
            payloads.put(self._client, prefix, source[: len(prefix) * OBJECT_BYTES])
            done = first + len(prefix)
            if done * 10 // len(self.hashes) > said:
                said = done * 10 // len(self.hashes)
                say(f"{done} of {len(self.hashes)} objects are indexed")

    def shuffle(self, keys: int) -> None:
        """Make the sequences, all of which together are one permutation of the objects, and match
        each once.
        """
        order = np.random.default_rng(_SEED + 2).permutation(len(self.hashes))
        for first in range(0, min(len(order) // keys, MAX_SEQUENCES) * keys, keys):
            chosen = self.hashes[order[first : first + keys]]
            self.chosen.append(chosen)
            self._prefixes.append(self._foreign(chosen))
        for number in range(len(self._prefixes)):
            self.match(number)
        gc.collect()
        gc.freeze()  # an engine does not hold a million keys that a collection would walk

    def match(self, number: int) -> float:
        """Match the sequence of that number, modulo how many there are; the seconds it took.

        Raises BenchError unless everything is found.
        """
        prefix = self._prefixes[number % len(self._prefixes)]
        begin = time.perf_counter()
        result = self._client.match(prefix, timeout_s=payloads.TIMEOUT_S)
        took = time.perf_counter() - begin
        if result.chunks != len(prefix):
            raise BenchError(
                f"match found {result.chunks} of {len(prefix)} chunks that are held: "
                f"{result.reason} {result.detail}"
            )
        return took

    def transport(self) -> str:
        """How the client reaches the daemon."""
        return payloads.transport_of(self._client, self._prefixes[0])

    def still(self, transport: str) -> None:
        """Raises BenchError where it is not by that any more."""
        payloads.still(transport, self._client, self._prefixes[0])

    def _foreign(self, hashes: Bytes) -> Prefix:
        packed = hashes.tobytes()
        return self._family.foreign(
            packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)
        )


class _Matches:
    """Rounds of matches and bare look-ups."""

    def __init__(self, settings: Settings, echo: Echo, objects: Objects) -> None:
        self._settings = settings
        self._echo = echo
        self._objects = objects
        self._packed = [chosen.tobytes() for chosen in objects.chosen]

    def measure(self, busy_sessions: int, say: Say) -> list[Case]:
        """All rounds; one case per percentile."""
        latencies = self.latencies(busy_sessions)
        self.round(latencies, counts=False)
        for number in range(self._settings.rounds):
            say(f"match, round {number + 1}: {self.round(latencies)}")
        self.check(latencies)
        return latencies.cases

    def latencies(self, busy_sessions: int) -> rounds.Latencies:
        """The cases, without rounds yet."""
        params: dict[str, Json] = {
            "keys": self._settings.keys,
            "indexed_objects": len(self._objects.hashes),
            "busy_sessions": busy_sessions,
            "samples": self._settings.samples,
            "transport": self._objects.transport(),
        }
        return rounds.Latencies.of("match", params)

    def check(self, latencies: rounds.Latencies) -> None:
        """Raises BenchError where the client has gone over to another transport meanwhile."""
        self._objects.still(str(latencies.cases[0].params["transport"]))

    def round(self, latencies: rounds.Latencies, *, counts: bool = True) -> str:
        """One round; what it came to, in words."""
        samples = self._settings.samples
        return latencies.round(samples, self._objects.match, self._look_up, counts=counts)

    def _look_up(self, number: int) -> float:
        packed = self._packed[number % len(self._packed)]
        begin = time.perf_counter()
        answer = self._echo.look_up(packed)
        took = time.perf_counter() - begin
        if answer.count(1) != self._settings.keys:
            raise BenchError("the bare server did not find keys that it has")
        return took


class _Busy:
    """The same while sessions read at full speed, and how late the loop is meanwhile."""

    def __init__(self, settings: Settings, daemon: Daemon, matches: _Matches) -> None:
        self._settings = settings
        self._daemon = daemon
        self._matches = matches
        self._lag = Case("loop_lag", {"busy_sessions": BUSY_SESSIONS, "percentile": 99}, "us")

    def measure(self, say: Say) -> list[Case]:
        """All rounds, and as many readings of the lag."""
        latencies = self._matches.latencies(BUSY_SESSIONS)
        with contextlib.ExitStack() as stack:
            control, _ = stack.enter_context(processes.child("kvstored.bench.control"))
            say(f"starting {BUSY_SESSIONS} sessions that read")
            readers = [stack.enter_context(self._reader()) for _ in range(BUSY_SESSIONS)]
            begin = time.monotonic()
            self._matches.round(latencies, counts=False)
            for number in self._rounds():
                say(f"match, busy, round {number}: {self._matches.round(latencies)}")
                if time.monotonic() - begin >= self._settings.busy_s:
                    self._read_lag(control, time.monotonic() - begin)
            self._matches.check(latencies)
            totals = [reader.finish().split() for reader in readers]
        speed = sum(int(nbytes) / float(took_s) for nbytes, took_s, _ in totals) / 1e9
        verified = sum(int(total[2]) for total in totals)
        cases = [*latencies.cases, self._lag]
        for case in cases:
            case.params["busy_gb_per_s"] = round(speed, 3)
            case.verified_bytes = verified
        return cases

    def _rounds(self) -> Iterator[int]:
        number = 0
        while number < self._settings.rounds or len(self._lag.values) < MIN_ROUNDS:
            number += 1
            yield number

    @contextlib.contextmanager
    def _reader(self) -> Iterator[Child]:
        arguments = (self._daemon.target, self._settings.busy_chunks, BUSY_OBJECT_BYTES)
        with processes.child("kvstored.bench.reader", *arguments) as (reader, _):
            yield reader

    def _read_lag(self, control: Child, busy_for_s: float) -> None:
        self._lag.params.setdefault("window_s", round(min(busy_for_s, 60.0), 1))
        bare_us = float(control.ask("lag"))
        self._lag.add(later_us(loop_lag_us(self._daemon.http), bare_us), bare_us)


def later_us(lag_us: float, control_us: float) -> float:
    """How much later than the control the loop is; not at all where the control is later."""
    return max(0.0, lag_us - control_us)


def loop_lag_us(http_socket: Path) -> float:
    """p99 of the daemon's loop lag over the last minute, from its metrics. Raises BenchError."""
    connection = http.client.HTTPConnection("localhost", timeout=payloads.TIMEOUT_S)
    with socket.socket(socket.AF_UNIX) as connection.sock:
        connection.sock.connect(str(http_socket))
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    found = re.search(r'^kvstored_loop_lag_seconds\{quantile="0.99"\} (\S+)$', text, re.MULTILINE)
    if found is None:
        raise BenchError("the daemon's metrics do not tell its loop's lag")
    return float(found[1]) * 1e6
