"""`kvctl bench object`: into a bucket and from it, against bare obstore. docs/benchmarks.md."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstored.bench import payloads, processes, rounds, seaweed
from kvstored.bench.bucketshape import Shape, shape_of
from kvstored.bench.diskshape import default_directory
from kvstored.bench.leftovers import removed
from kvstored.bench.memory import Written
from kvstored.bench.payloads import MIB, Bytes
from kvstored.bench.processes import BenchError
from kvstored.bench.rawobject import RawObjects
from kvstored.bench.report import MIN_ROUNDS, Case, Json
from kvstored.kvctl.wire import Wire
from kvstored.server.allocator import keep_freed_frames
from kvstored.tiers.object.settings import ObjectSettings
from kvstored_client import KVClient, Prefix
from kvstored_client.proto import admin_pb2 as admin
from kvstored_client.proto import methods

COLD = "evicted from RAM by reads of other prefixes; the server's page cache is as it is"
LOOK_S, LOOK_SHARE = 0.004, 0.02
"""It is asked whether all is up after pauses of this part of the time that a put has lasted, and
seems to last so much longer at most; first when most of the quickest put's time is over. If it were
asked more often, the asking would be measured.
"""

_SHIFT = 4096 + 64  # between the payloads of two prefixes, which are windows of one random source
_GIVEN = ObjectSettings()
_DAY_S = 86_400.0  # of all questions together

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure. `delays_ms`: what is added to each request, one after the other.
    `directory`: where the server has its data; None: where temporary files are.
    """

    object_bytes: tuple[int, ...] = (1 * MIB, 4 * MIB, 16 * MIB)
    prefix_chunks: int = 64
    rounds: int = 11
    delays_ms: tuple[int, ...] = (0, 30)
    directory: Path | None = None


QUICK = Settings(object_bytes=(1 * MIB,), prefix_chunks=8, rounds=MIN_ROUNDS)


def run(settings: Settings, say: Say) -> list[Case]:
    """Measure; `say` takes lines of progress.

    Raises BenchError when server or daemon cannot be used, or a byte came back wrong.
    """
    if settings.rounds < MIN_ROUNDS:
        raise BenchError(f"at least {MIN_ROUNDS} rounds are needed, not {settings.rounds}")
    keep_freed_frames()
    place = settings.directory or default_directory(Path(tempfile.gettempdir()))
    cases: list[Case] = []
    for size in settings.object_bytes:
        for delay_ms in settings.delays_ms:
            shape = shape_of(size, settings.prefix_chunks, settings.rounds, place)
            cases += _measure(shape, place, delay_ms, say)
    return cases


def _measure(shape: Shape, place: Path, delay_ms: int, say: Say) -> list[Case]:
    """One object size and delay: a new server and daemon, and everything removed again."""
    with contextlib.ExitStack() as stack:
        work = Path(tempfile.mkdtemp(prefix="kvbench-", dir=place))
        sockets = Path(tempfile.mkdtemp(prefix="kvbench-"))
        keep = stack.enter_context(removed([work, sockets]))
        say(f"starting SeaweedFS and a daemon; {delay_ms} ms are added to each request")
        server = stack.enter_context(seaweed.seaweed(work / "weed", [keep]))
        port = stack.enter_context(_line(server.port, delay_ms))
        own = processes.daemon(
            sockets,
            shape.ram_cap_bytes,
            data_dir=work / "data",
            keep=[keep],
            more=_section(port),
            variables=seaweed.CREDENTIALS,
        )
        daemon = stack.enter_context(own)
        client = stack.enter_context(KVClient(daemon.target))
        operators = Wire(f"unix://{sockets}/kvstored-admin.sock", "default", None, _DAY_S)
        stack.callback(operators.close)
        raw = RawObjects(seaweed.store(port, "raw"), _GIVEN.parallel, _GIVEN.range_bytes)
        stack.callback(raw.close)
        segment = stack.enter_context(contextlib.closing(Written(shape.prefix_bytes)))
        measured = Prefixes(shape, client, Uploads(operators), raw, segment, daemon.pid)
        try:
            return measured.measure(delay_ms, say)
        finally:
            measured.close()


@contextlib.contextmanager
def _line(port: int, delay_ms: int) -> Iterator[int]:
    """A port at which the server is so far away."""
    if not delay_ms:
        yield port
        return
    with processes.child("kvstored.bench.delay", port, delay_ms) as (_, (there,)):
        yield int(there)


def _section(port: int) -> str:
    return (
        f'[object]\nurl = "s3://{seaweed.BUCKET}/daemon"\nendpoint = "http://127.0.0.1:{port}"\n'
        f'region = "{seaweed.REGION}"\nallow_http = true\njanitor = false\nrange_timeout_s = 60\n'
    )


class Uploads:
    """What a daemon has brought up so far."""

    def __init__(self, operators: Wire) -> None:
        self._operators = operators
        self._quickest_s = 0.0

    def done(self, begin: float) -> int:
        """Objects, once no more are owed, of a put that began then (time.monotonic()).

        Raises BenchError where one could not be brought up.
        """
        pause_s = max(0.0, 0.75 * self._quickest_s - (time.monotonic() - begin))
        looks = 0
        while True:
            time.sleep(pause_s)  # the daemon has no word for it but its status
            looks += 1
            now, lasted_s = self._bucket(), time.monotonic() - begin
            if not now.backlog_objects:
                break
            if lasted_s > payloads.TIMEOUT_S:
                raise BenchError(f"the bucket does not take what it is given: {now.health}")
            pause_s = max(LOOK_S, lasted_s * LOOK_SHARE)
        # Done at the first look: it was quicker than that, who knows by how much.
        self._quickest_s = (
            lasted_s / 2 if looks == 1 else min(self._quickest_s or lasted_s, lasted_s)
        )
        ends = {row.outcome: row.count for row in now.outcomes if row.verb == "upload"}
        if ends.keys() - {"ok"}:
            raise BenchError(f"some objects did not go up: {ends}")
        return ends.get("ok", 0)

    def _bucket(self) -> admin.BucketStatus:
        status = self._operators.ask(methods.STATUS, admin.StatusRequest(), admin.StatusReply)
        return status.bucket


class Prefixes:
    """The rounds of one object size, on a daemon and a bucket that are new."""

    def __init__(
        self,
        shape: Shape,
        client: KVClient,
        uploads: Uploads,
        raw: RawObjects,
        segment: Written,
        pid: int,
    ) -> None:
        self._shape = shape
        self._client = client
        self._uploads = uploads
        self._raw = raw
        self._family = payloads.family(shape.object_bytes)
        seed = int.from_bytes(os.urandom(4))
        self._random = payloads.random_bytes(shape.prefix_bytes + shape.prefixes * _SHIFT, seed)
        self._prefixes: list[Prefix] = []
        self._turn = -1
        self._cpu = Cpu(pid)
        self._into: Bytes | None = segment.array().reshape(shape.chunks, shape.object_bytes)

    def close(self) -> None:
        """Let go of the segment."""
        self._into = None

    @property
    def _memory(self) -> Bytes:
        """Where bare reads go, written over."""
        assert self._into is not None
        self._into.fill(0)
        return self._into

    def measure(self, delay_ms: int, say: Say) -> list[Case]:
        """Put prefixes, each put a round, and read them again."""
        params: dict[str, Json] = {
            "object_bytes": self._shape.object_bytes,
            "prefix_chunks": self._shape.chunks,
            "delay_ms": delay_ms,
            "parallel": _GIVEN.parallel,
            "range_bytes": _GIVEN.range_bytes,
            "prefixes": self._shape.prefixes,
            "ram_cap_bytes": self._shape.ram_cap_bytes,
        }
        for _ in range(self._shape.warming - 1):  # the round that does not count is the last
            self._put()
        put, get = (Case(op, dict(params), "GB/s") for op in ("put", "get_cold"))
        times = self._shape.rounds
        rounds.rates(put, times, lambda number, flip: self._put_round(put, number, flip), say)
        put.params |= self._cpu.taken()
        rounds.rates(get, times, lambda _, flip: self._get_round(get, flip), say)
        get.params |= self._cpu.taken() | {"cold": COLD}
        return [put, get]

    def _source(self, number: int) -> Bytes:
        start = number * _SHIFT
        window = self._random[start : start + self._shape.prefix_bytes]
        return window.reshape(self._shape.chunks, self._shape.object_bytes)

    def _rate(self, work: Callable[[], None], *, bare: bool) -> float:
        with self._cpu.measured(self._shape.prefix_bytes, bare=bare):
            seconds = rounds.seconds(work)
        return self._shape.prefix_bytes / seconds / 1e9

    # ---- put ---------------------------------------------------------------------------------

    def _put_round(self, case: Case, number: int, flipped: bool) -> tuple[float, float]:
        source = self._source(number)
        figures = rounds.pair(
            self._put,
            lambda: self._rate(lambda: self._raw.put(str(number), source), bare=True),
            flipped,
        )
        case.verified_bytes += self._look(number)
        return figures

    def _put(self) -> float:
        """Rate at which a new prefix gets into the bucket, all of it."""
        prefix = payloads.fresh_prefix(self._family, self._shape.chunks)
        source = self._source(len(self._prefixes))
        self._prefixes.append(prefix)
        done: list[int] = []

        def work() -> None:
            begin = time.monotonic()
            payloads.put(self._client, prefix, source.reshape(-1))
            done.append(self._uploads.done(begin))

        rate = self._rate(work, bare=False)
        if done != [len(self._prefixes) * self._shape.chunks]:
            raise BenchError(f"{done} objects are up, not those of {len(self._prefixes)} prefixes")
        return rate

    def _look(self, number: int) -> int:
        """Compare what the bare put of that round has put; the daemon's is read in `get_cold`."""
        into = self._memory
        self._raw.read(str(number), into)
        return payloads.compare(into, self._source(number))

    # ---- get ---------------------------------------------------------------------------------

    def _get_round(self, case: Case, flipped: bool) -> tuple[float, float]:
        self._turn += 1
        figures = rounds.pair(self._acquire, self._read, flipped)
        case.verified_bytes += self._shape.prefix_bytes
        return figures

    def _acquire(self) -> float:
        """Rate of an acquire of the prefix that was read the longest ago, from the bucket."""
        number = self._turn % len(self._prefixes)
        prefix, leases = self._prefixes[number], []

        def work() -> None:
            leases.append(self._client.acquire(prefix, timeout_s=payloads.TIMEOUT_S))

        rate = self._rate(work, bare=False)
        with leases[0] as lease:
            if lease.chunks != self._shape.chunks:
                raise BenchError(
                    f"acquire granted {lease.chunks} of {self._shape.chunks}: {lease.reason}"
                )
            if lease.bytes_by_tier != {"object": self._shape.prefix_bytes}:
                raise BenchError(
                    f"what should have come from the bucket came from {lease.bytes_by_tier}"
                )
            source = self._source(number)
            for chunk in range(self._shape.chunks):
                payloads.compare(np.frombuffer(lease[chunk], np.uint8), source[chunk])
        return rate

    def _read(self) -> float:
        """Rate of the bare read of what the round of that number put."""
        number = self._turn % (self._shape.rounds + 1)
        into = self._memory
        rate = self._rate(lambda: self._raw.read(str(number), into), bare=True)
        payloads.compare(into, self._source(number))
        return rate


class Cpu:
    """CPU time of daemon and client, and of the bare client, per GB; medians."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")
        self._taken: dict[bool, list[float]] = {False: [], True: []}

    @contextlib.contextmanager
    def measured(self, nbytes: int, *, bare: bool) -> Iterator[None]:
        """Count what the block takes."""
        before = self._now(bare)
        yield
        self._taken[bare].append((self._now(bare) - before) / nbytes * 1e9)

    def taken(self) -> dict[str, Json]:
        """Of all blocks since it was last asked, for a case's params."""
        own, bare = (statistics.median(self._taken[bare]) for bare in (False, True))
        for taken in self._taken.values():
            taken.clear()
        return {"cpu_s_per_gb": round(own, 2), "ceiling_cpu_s_per_gb": round(bare, 2)}

    def _now(self, bare: bool) -> float:
        own = time.process_time()
        if bare:
            return own
        fields = self._stat.read_text().rpartition(")")[2].split()
        return own + (int(fields[11]) + int(fields[12])) * self._tick_s
