"""`kvctl bench remote`: get and put over gRPC, against a bare stream. See docs/benchmarks.md."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstored.bench import payloads, processes, rounds
from kvstored.bench.bare import FRAME_BYTES, GET, PUT
from kvstored.bench.payloads import MIB, TIMEOUT_S, Bytes
from kvstored.bench.processes import BenchError
from kvstored.bench.report import MIN_ROUNDS, Case, Json
from kvstored.server.allocator import keep_freed_frames
from kvstored_client import KVClient, Prefix
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.methods import GET as _GET
from kvstored_client.transports.channel import CHANNEL_OPTIONS
from kvstored_client.transports.grpc_types import blocking_channel

SPARE_BYTES = 64 * MIB
COPIES = 5  # source, destination, two prefixes in the daemon's tier, the bare server's payload
_CHANNEL_OPTIONS = [*CHANNEL_OPTIONS, ("SingleThreadedUnaryStream", 1)]


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
        sizes = {
            size: payloads.chunks_that_fit(settings.prefix_chunks, COPIES * size)
            for size in settings.object_bytes
        }
        most = max(size * chunks for size, chunks in sizes.items())
        target = settings.target
        if target is None:
            say("starting a daemon")
            # What is deleted is given back in the background: room for two prefixes and a bit.
            cap_bytes = 2 * most + SPARE_BYTES
            own = processes.daemon(directory, cap_bytes, settings.tcp)
            target = stack.enter_context(own).target
        tcp = not target.startswith("unix:")
        if not tcp:
            target = _without_local_session(directory, target)
        client = stack.enter_context(KVClient(target, settings.namespace, settings.token))
        for size, chunks in sizes.items():
            with _bare_client(directory, size * chunks, tcp) as bare:
                cases += _Prefix(settings, client, bare, size, chunks, tcp).measure(say)
    return cases


def _without_local_session(directory: Path, target: str) -> str:
    """The same socket by another name, beside which there is no local session to be preferred."""
    folder = directory / "grpc"
    folder.mkdir()
    link = folder / "kvstored.sock"
    link.symlink_to(target.removeprefix("unix://"))
    return f"unix://{link}"


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
        self._family = payloads.family(object_bytes)
        self._source = payloads.random_bytes(self._nbytes, int.from_bytes(os.urandom(4)))
        self._into = np.ones(self._nbytes, np.uint8)
        self._bare_into = np.ones(self._nbytes, np.uint8)
        params: dict[str, Json] = {
            "object_bytes": object_bytes,
            "prefix_chunks": chunks,
            "frame_bytes": FRAME_BYTES,
            "tier": "ram",
        }
        self._get = Case("get", dict(params), "GB/s")
        self._put = Case("put", dict(params), "GB/s")

    def measure(self, say: Callable[[str], None]) -> list[Case]:
        """The rounds of get, of one prefix; then those of put, each of a fresh one."""
        prefix = payloads.fresh_prefix(self._family, self._chunks)
        payloads.put(self._client, prefix, self._source)
        for case in (self._get, self._put):
            case.params["transport"] = payloads.transport_of(self._client, prefix)
        times = self._settings.rounds
        rounds.rates(self._get, times, lambda _, flip: self._get_round(prefix, flip), say)
        payloads.delete(self._client, prefix)
        rounds.rates(self._put, times, lambda _, flip: self._put_round(flip), say)
        return [self._get, self._put]

    def _get_round(self, prefix: Prefix, flipped: bool) -> tuple[float, float]:
        rates = rounds.pair(
            lambda: self._rate(lambda: payloads.get(self._client, prefix, self._into), self._into),
            lambda: self._rate(lambda: self._bare.get(self._bare_into), self._bare_into),
            flipped,
        )
        self._get.verified_bytes += payloads.compare(self._into, self._source)
        return rates

    def _put_round(self, flipped: bool) -> tuple[float, float]:
        prefix = payloads.fresh_prefix(self._family, self._chunks)
        rates = rounds.pair(
            lambda: self._rate(
                lambda: payloads.put(self._client, prefix, self._source), self._into
            ),
            lambda: self._rate(lambda: self._bare.put(self._source), self._bare_into),
            flipped,
        )
        payloads.get(self._client, prefix, self._into)
        self._put.verified_bytes += payloads.compare(self._into, self._source)
        payloads.delete(self._client, prefix)
        return rates

    def _rate(self, work: Callable[[], None], into: Bytes) -> float:
        into.fill(0)  # so that nothing of the round before passes for delivered
        return self._nbytes / rounds.seconds(work) / 1e9
