"""`kvctl bench local`: an engine on the daemon's node, against bare copies. docs/benchmarks.md."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstored.bench import payloads, processes, rounds
from kvstored.bench.echo import Echo
from kvstored.bench.memory import Reading, Written
from kvstored.bench.payloads import MIB
from kvstored.bench.processes import BenchError
from kvstored.bench.report import MIN_ROUNDS, Case, Json
from kvstored.config.host import memory_allowed
from kvstored_client import KVClient, Prefix
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import HEADER_BYTES

SPARE_BYTES = 64 * MIB
MAX_PREFIXES = 16

Say = Callable[[str], None]


MOST_CAP_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure. `target` None: a daemon of the benchmark's own. `samples`: of acquire, per
    round.
    """

    target: str | None = None
    namespace: str = "default"
    token: str | None = None
    object_bytes: tuple[int, ...] = (1 * MIB, 4 * MIB)
    prefix_chunks: int = 64
    rounds: int = 21
    samples: int = 1000


@dataclass(frozen=True, slots=True)
class Shape:
    """One object size: how many chunks make a prefix, and how many prefixes are used in turn."""

    object_bytes: int
    chunks: int
    prefixes: int

    @property
    def prefix_bytes(self) -> int:
        """Of one prefix."""
        return self.object_bytes * self.chunks

    @property
    def tier_bytes(self) -> int:
        """What the daemon must have room for: the prefixes, one that is put while another is given
        back, and so much that the leases of one prefix are less than half.
        """
        return (self.prefixes + 2) * self.prefix_bytes + SPARE_BYTES

    @classmethod
    def of(cls, settings: Settings, object_bytes: int) -> Shape:
        """As asked for, or as fits."""
        wanted = settings.prefix_chunks
        enough = -(-2 * payloads.cache_bytes() // (wanted * object_bytes))
        prefixes = max(2, min(enough, MAX_PREFIXES))
        # Source, its copy in the bare mapping, the tier, two destinations of one prefix.
        copies = 3 * prefixes + 4
        chunks = payloads.chunks_that_fit(wanted, copies * object_bytes)
        return cls(object_bytes, chunks, prefixes)


def _cap_bytes(shapes: Iterable[Shape]) -> int:
    """A RAM tier as a node would have: segments, of which there are many in a small one, are as
    large as they are there. Memory is taken only as it is used.
    """
    allowed, _ = memory_allowed()
    needed = max(shape.tier_bytes for shape in shapes)
    return max(needed, min(MOST_CAP_BYTES, allowed // 4))


def run(settings: Settings, say: Say) -> list[Case]:
    """Measure; `say` takes lines of progress.

    Raises BenchError when the daemon cannot be used or a byte came back wrong.
    """
    if settings.rounds < MIN_ROUNDS:
        raise BenchError(f"at least {MIN_ROUNDS} rounds are needed, not {settings.rounds}")
    cases: list[Case] = []
    shapes = [Shape.of(settings, size) for size in settings.object_bytes]
    with tempfile.TemporaryDirectory(prefix="kvbench-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        target = settings.target
        if target is None:
            say("starting a daemon")
            own = processes.daemon(directory, _cap_bytes(shapes))
            target = stack.enter_context(own).target
        path = str(directory / "echo.sock")
        stack.enter_context(processes.child("kvstored.bench.echo", path, 0, 0))
        echo = stack.enter_context(contextlib.closing(Echo(path)))
        client = stack.enter_context(KVClient(target, settings.namespace, settings.token))
        for shape in shapes:
            cases += _measure(settings, client, echo, shape, say)
    return cases


def _measure(
    settings: Settings, client: KVClient, echo: Echo, shape: Shape, say: Say
) -> list[Case]:
    seed = int.from_bytes(os.urandom(4))
    total = shape.prefixes * shape.prefix_bytes
    with contextlib.ExitStack() as stack:
        bare, (fd,) = stack.enter_context(processes.child("kvstored.bench.memory", total, seed))
        reading = stack.enter_context(contextlib.closing(Reading(bare.pid, int(fd), total)))
        written = stack.enter_context(contextlib.closing(Written(shape.prefix_bytes)))
        return _Prefixes(settings, client, echo, shape, seed, reading, written).measure(say)


class _Prefixes:
    """The rounds of one object size."""

    def __init__(
        self,
        settings: Settings,
        client: KVClient,
        echo: Echo,
        shape: Shape,
        seed: int,
        reading: Reading,
        written: Written,
    ) -> None:
        self._settings = settings
        self._client = client
        self._echo = echo
        self._shape = shape
        self._reading = reading
        self._written = written
        self._family = payloads.family(shape.object_bytes)
        source = payloads.random_bytes(shape.prefixes * shape.prefix_bytes, seed)
        self._sources = source.reshape(shape.prefixes, shape.prefix_bytes)
        self._into = np.ones(shape.prefix_bytes, np.uint8)
        self._prefixes: list[Prefix] = []

    def measure(self, say: Say) -> list[Case]:
        """Get and acquire of prefixes that stay; then put, each time of a fresh one."""
        for source in self._sources:
            prefix = payloads.fresh_prefix(self._family, self._shape.chunks)
            payloads.put(self._client, prefix, source)
            self._prefixes.append(prefix)
        params = self._params()
        if params["transport"] != "local":
            say(f"no local session: what follows went over gRPC ({params['transport']})")
        get = Case("get_copy", dict(params), "GB/s")
        times = self._settings.rounds
        rounds.rates(get, times, lambda at, flip: self._get_round(get, at, flip), say)
        acquire = self._acquire(params, say)
        for prefix in self._prefixes[1:]:
            payloads.delete(self._client, prefix)
        put = Case("put", dict(params), "GB/s")
        rounds.rates(put, times, lambda at, flip: self._put_round(put, at, flip), say)
        payloads.still(str(params["transport"]), self._client, self._prefixes[0])
        payloads.delete(self._client, self._prefixes[0])
        return [get, put, *acquire]

    def _params(self) -> dict[str, Json]:
        return {
            "object_bytes": self._shape.object_bytes,
            "prefix_chunks": self._shape.chunks,
            "prefixes": self._shape.prefixes,
            "transport": payloads.transport_of(self._client, self._prefixes[0]),
            "tier": "ram",
            "threads": 1,
        }

    # ---- get ---------------------------------------------------------------------------------

    def _get_round(self, case: Case, number: int, flipped: bool) -> tuple[float, float]:
        at = number % self._shape.prefixes
        into, source, prefix = self._into, self._sources[at], self._prefixes[at]

        def rate(work: Callable[[], None]) -> float:
            into.fill(0)  # touched, and nothing of before passes for delivered
            speed = self._rate(work)
            payloads.compare(into, source)
            return speed

        case.verified_bytes += source.nbytes
        return rounds.pair(
            lambda: rate(lambda: payloads.get(self._client, prefix, into)),
            lambda: rate(lambda: self._copy_out(at)),
            flipped,
        )

    def _copy_out(self, at: int) -> None:
        base = self._reading.address + at * self._shape.prefix_bytes
        _copy(self._into.ctypes.data, base, self._shape)

    # ---- put ---------------------------------------------------------------------------------

    def _put_round(self, case: Case, number: int, flipped: bool) -> tuple[float, float]:
        source = self._sources[number % self._shape.prefixes]
        prefix = payloads.fresh_prefix(self._family, self._shape.chunks)
        figures = rounds.pair(
            lambda: self._rate(lambda: payloads.put(self._client, prefix, source)),
            lambda: self._rate(
                lambda: _copy(self._written.address, source.ctypes.data, self._shape)
            ),
            flipped,
        )
        payloads.compare(self._written.array(), source)
        self._into.fill(0)
        payloads.get(self._client, prefix, self._into)
        case.verified_bytes += payloads.compare(self._into, source)
        payloads.delete(self._client, prefix)
        return figures

    def _rate(self, work: Callable[[], None]) -> float:
        return self._shape.prefix_bytes / rounds.seconds(work) / 1e9

    # ---- acquire -----------------------------------------------------------------------------

    def _acquire(self, params: dict[str, Json], say: Say) -> list[Case]:
        if params["transport"] != "local":
            say("acquire is left out: it needs the local session")
            return []
        latencies = rounds.Latencies.of("acquire", params)
        request, reply, release = _acquire_bytes(
            self._settings, self._family.fingerprint, self._shape
        )

        def value(number: int) -> float:
            prefix = self._prefixes[number % self._shape.prefixes]
            return rounds.seconds(lambda: self._acquire_and_release(prefix))

        def bare() -> None:
            self._echo.call(request, reply)
            self._echo.call(release, 0)

        for number in range(self._settings.rounds + 1):
            words = latencies.round(
                self._settings.samples,
                value,
                lambda _: rounds.seconds(bare),
                counts=number > 0,
            )
            verified = self._compare_views(number % self._shape.prefixes)
            if number:
                for case in latencies.cases:
                    case.verified_bytes += verified
                say(f"acquire, {self._shape.object_bytes >> 20} MiB, round {number}: {words}")
        return latencies.cases

    def _acquire_and_release(self, prefix: Prefix) -> None:
        lease = self._client.acquire(prefix)
        if lease.chunks != len(prefix):
            raise BenchError(
                f"acquire granted {lease.chunks} of {len(prefix)} chunks: {lease.reason}"
            )
        lease.release()

    def _compare_views(self, at: int) -> int:
        objects = self._sources[at].reshape(self._shape.chunks, self._shape.object_bytes)
        with self._client.acquire(self._prefixes[at]) as lease:
            return sum(
                payloads.compare(np.frombuffer(lease[chunk], np.uint8), objects[chunk])
                for chunk in range(self._shape.chunks)
            )


def _copy(target: int, source: int, shape: Shape) -> None:
    """Copy a prefix object by object."""
    for at in range(0, shape.prefix_bytes, shape.object_bytes):
        ctypes.memmove(target + at, source + at, shape.object_bytes)


def _acquire_bytes(
    settings: Settings, fingerprint: bytes, shape: Shape
) -> tuple[bytes, int, bytes]:
    """Messages as long as those of an acquire: request, length of the reply, release."""
    run = pb.ChunkRun(
        namespace=settings.namespace,
        family=fingerprint,
        keys=bytes(32 * shape.chunks),
        end_token=shape.chunks * payloads.CHUNK_TOKENS,
        parts=[part.name for part in payloads.family(shape.object_bytes).parts],
    )
    context = pb.Context(deadline_ms=2000)
    request = pb.AcquireRequest(ctx=context, run=run, lease_id=1)
    rows = range(shape.chunks)
    reply = pb.AcquireReply(
        indices=rows,
        segment_ids=rows,
        offsets_bytes=[row * shape.object_bytes for row in rows],
        lengths_bytes=[shape.object_bytes] * shape.chunks,
        checksums=bytes(16 * shape.chunks),
        tiers=bytes(shape.chunks),
        states=bytes(shape.chunks),
    )
    release = pb.ReleaseRequest(lease_ids=[1])
    return (
        bytes(HEADER_BYTES) + request.SerializeToString(),
        HEADER_BYTES + reply.ByteSize(),
        bytes(HEADER_BYTES) + release.SerializeToString(),
    )
