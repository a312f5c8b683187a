"""`kvctl bench remote`: get and put over gRPC, against a bare stream. See docs/benchmarks.md."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstored.bench import processes
from kvstored.bench.bare import FRAME_BYTES, GET, PUT
from kvstored.bench.processes import BenchError
from kvstored.bench.report import MIN_ROUNDS, Case
from kvstored.config.host import memory_allowed
from kvstored.server.allocator import keep_freed_frames
from kvstored_client import KVClient, KVFamily, KVPart, Prefix
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.methods import GET as _GET
from kvstored_client.transports.channel import CHANNEL_OPTIONS
from kvstored_client.transports.grpc_types import blocking_channel

MIB = 1 << 20
CHUNK_TOKENS = 64
SPARE_BYTES = 64 * MIB
TIMEOUT_S = 300.0
_CHANNEL_OPTIONS = [*CHANNEL_OPTIONS, ("SingleThreadedUnaryStream", 1)]

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure. `target` None: a daemon of the benchmark's own."""

    target: str | None = None
    namespace: str = "default"
    token: str | None = None
    tcp: bool = False
    object_bytes: tuple[int, ...] = (1 * MIB, 4 * MIB)
    prefix_chunks: int = 64
    rounds: int = 21


def run(settings: Settings, say: Callable[[str], None]) -> list[Case]:
    """Measure; `say` takes lines of progress.

    Raises BenchError when the daemon cannot be used or a byte came back wrong.
    """
    if settings.rounds < MIN_ROUNDS:
        raise BenchError(f"at least {MIN_ROUNDS} rounds are needed, not {settings.rounds}")
    keep_freed_frames()
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="kvbench-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        sizes = {size: _chunks(settings, size) for size in settings.object_bytes}
        most = max(size * chunks for size, chunks in sizes.items())
        target = settings.target
        if target is None:
            say("starting a daemon")
            # What is deleted is given back in the background: room for two prefixes and a bit.
            cap_bytes = 2 * most + SPARE_BYTES
            target = stack.enter_context(processes.daemon(directory, cap_bytes, settings.tcp))
        client = stack.enter_context(KVClient(target, settings.namespace, settings.token))
        tcp = not target.startswith("unix:")
        for size, chunks in sizes.items():
            with _bare_client(directory, size * chunks, tcp) as bare:
                cases += _Prefix(settings, client, bare, size, chunks, tcp).measure(say)
    return cases


def _chunks(settings: Settings, object_bytes: int) -> int:
    """As many chunks as asked for, or as fit: source, destination, two prefixes in the daemon's
    tier and the bare server's payload must not take more than half of the memory.
    """
    allowed, _ = memory_allowed()
    return max(1, min(settings.prefix_chunks, allowed // 2 // (5 * object_bytes)))


@contextlib.contextmanager
def _bare_client(directory: Path, payload_bytes: int, tcp: bool) -> Iterator[_BareClient]:
    with processes.bare_server(directory, payload_bytes, tcp) as target:
        client = _BareClient(target)
        try:
            yield client
        finally:
            client.close()


class _BareClient:
    """The blocking gRPC streams that KVClient uses, with nothing around them."""

    def __init__(self, target: str) -> None:
        self._channel = blocking_channel(target, _CHANNEL_OPTIONS)

    def close(self) -> None:
        self._channel.close()

    def get(self, into: Bytes) -> None:
        """Read the server's payload into `into`, of the same size."""
        target, at = into.ctypes.data, 0
        call = self._channel.unary_stream(GET, request_serializer=_GET.request_serializer)
        for frame in call(pb.GetRequest(), timeout=TIMEOUT_S, metadata=()):
            ctypes.memmove(target + at, frame, len(frame))
            at += len(frame)
        if at != into.nbytes:
            raise BenchError(f"the bare stream brought {at} of {into.nbytes} bytes")

    def put(self, source: Bytes) -> None:
        """Send `source`."""
        view = source.data

        def frames() -> Iterator[bytes]:
            for at in range(0, len(view), FRAME_BYTES):
                yield bytes(view[at : at + FRAME_BYTES])

        for _ in self._channel.stream_stream(PUT)(frames(), timeout=TIMEOUT_S, metadata=()):
            pass


class _Prefix:
    """The rounds of one object size."""

    def __init__(
        self,
        settings: Settings,
        client: KVClient,
        bare: _BareClient,
        object_bytes: int,
        chunks: int,
        tcp: bool,
    ) -> None:
        self._settings = settings
        self._client = client
        self._bare = bare
        self._chunks = chunks
        self._nbytes = object_bytes * chunks
        self._family = KVFamily(
            model="kvstored-bench",
            weights="none",
            kv_dtype="bytes",
            chunk_tokens=CHUNK_TOKENS,
            parts=[KVPart(f"kv{object_bytes}", nbytes=object_bytes)],
        )
        random = np.random.default_rng()
        self._source = random.integers(0, 256, self._nbytes, np.uint8)
        self._into = np.ones(self._nbytes, np.uint8)
        self._bare_into = np.ones(self._nbytes, np.uint8)
        params = {
            "object_bytes": object_bytes,
            "prefix_chunks": chunks,
            "frame_bytes": FRAME_BYTES,
            "transport": "tcp" if tcp else "unix",
            "tier": "ram",
        }
        self._get = Case("get", {**params}, "GB/s")
        self._put = Case("put", {**params}, "GB/s")

    def measure(self, say: Callable[[str], None]) -> list[Case]:
        """The rounds of get, of one prefix; then those of put, each of a fresh one."""
        prefix = self._fresh_prefix()
        self._do_put(prefix)
        self._rounds(self._get, lambda flipped: self._get_round(prefix, flipped), say)
        self._client.delete(prefix, timeout_s=TIMEOUT_S)
        self._rounds(self._put, self._put_round, say)
        return [self._get, self._put]

    def _rounds(
        self,
        case: Case,
        work: Callable[[bool], tuple[float, float]],
        say: Callable[[str], None],
    ) -> None:
        """One round that does not count, then those that do."""
        work(False)
        for number in range(self._settings.rounds):
            # In turn, so that neither side is always the one that finds caches warm.
            value, ceiling = work(number % 2 == 1)
            case.add(value, ceiling)
            case.verified_bytes += self._nbytes
            say(
                f"{case.op}, objects of {self._nbytes // self._chunks >> 20} MiB, round "
                f"{number + 1} of {self._settings.rounds}: {value:.2f} of {ceiling:.2f} GB/s"
            )

    def _get_round(self, prefix: Prefix, flipped: bool) -> tuple[float, float]:
        rates = self._pair(
            lambda: self._do_get(prefix), lambda: self._bare.get(self._bare_into), flipped
        )
        self._compare()
        return rates

    def _put_round(self, flipped: bool) -> tuple[float, float]:
        prefix = self._fresh_prefix()
        rates = self._pair(
            lambda: self._do_put(prefix), lambda: self._bare.put(self._source), flipped
        )
        self._do_get(prefix)
        self._compare()
        self._client.delete(prefix, timeout_s=TIMEOUT_S)
        return rates

    def _fresh_prefix(self) -> Prefix:
        tokens = range(self._chunks * CHUNK_TOKENS)
        return self._family.prefix(tokens, request_salt=os.urandom(16))

    def _compare(self) -> None:
        if not np.array_equal(self._into, self._source):
            raise BenchError("bytes came back wrong")

    def _pair(
        self, value: Callable[[], None], ceiling: Callable[[], None], flipped: bool
    ) -> tuple[float, float]:
        """(value, ceiling) in GB/s, one right after the other."""
        if flipped:
            bare = self._rate(ceiling, self._bare_into)
            return self._rate(value, self._into), bare
        return self._rate(value, self._into), self._rate(ceiling, self._bare_into)

    def _rate(self, work: Callable[[], None], into: Bytes) -> float:
        into.fill(0)  # so that nothing of the round before passes for delivered
        begin = time.perf_counter()
        work()
        return self._nbytes / (time.perf_counter() - begin) / 1e9

    def _do_put(self, prefix: Prefix) -> None:
        result = self._client.put(prefix, self._source, timeout_s=TIMEOUT_S)
        if result.stored != self._chunks:
            raise BenchError(
                f"put stored {result.stored} of {self._chunks} chunks: {result.reason}"
            )

    def _do_get(self, prefix: Prefix) -> None:
        result = self._client.get(prefix, self._into, timeout_s=TIMEOUT_S)
        if result.chunks != self._chunks:
            raise BenchError(
                f"get brought {result.chunks} of {self._chunks} chunks: {result.reason}"
            )
