"""`make bench-peers`: paired with other stores on the same machine. See docs/benchmarks.md.

Usage: python -m kvstored.bench.peers [--json] [--rounds N] [--chunks N] [--object-mib N,N]
                                      [--indexed-objects N] [--samples N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstored.bench import local, lookup, payloads, processes, redis, report, rounds
from kvstored.bench.payloads import MIB, Bytes
from kvstored.bench.processes import BenchError
from kvstored.bench.redis import Redis
from kvstored.bench.report import MIN_ROUNDS, Case, Json
from kvstored_client import KVClient, Prefix

HOW_TO_INSTALL = (
    "redis-server is not installed: `apt-get install redis-server` brings it on Debian and Ubuntu. "
    "Nothing was measured."
)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure. `samples`: matches per round."""

    object_bytes: tuple[int, ...] = (1 * MIB, 4 * MIB)
    prefix_chunks: int = 64
    rounds: int = 11
    indexed_objects: int = 100_000
    keys: int = 512
    samples: int = 1000


def run(settings: Settings, say: Say) -> list[Case]:
    """Measure; `say` takes lines of progress. Raises BenchError."""
    if settings.rounds < MIN_ROUNDS:
        raise BenchError(f"at least {MIN_ROUNDS} rounds are needed, not {settings.rounds}")
    cases: list[Case] = []
    shapes = [
        local.Shape.of(local.Settings(prefix_chunks=settings.prefix_chunks), size)
        for size in settings.object_bytes
    ]
    with tempfile.TemporaryDirectory(prefix="kvbench-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        say("starting redis-server and a daemon")
        peer = stack.enter_context(
            contextlib.closing(Redis(stack.enter_context(redis.server(directory))))
        )
        indexed_bytes = settings.indexed_objects * lookup.OBJECT_BYTES * 21 // 20
        cap_bytes = indexed_bytes + max(shape.tier_bytes for shape in shapes)
        daemon = stack.enter_context(processes.daemon(directory, cap_bytes))
        client = stack.enter_context(KVClient(daemon.target))
        for shape in shapes:
            cases += _Payload(settings, client, peer, shape).measure(say)
        cases += _match(settings, client, peer, say)
    return cases


class _Payload:
    """Get and put of one object size."""

    def __init__(
        self, settings: Settings, client: KVClient, peer: Redis, shape: local.Shape
    ) -> None:
        self._settings = settings
        self._client = client
        self._peer = peer
        self._shape = shape
        self._family = payloads.family(shape.object_bytes)
        source = payloads.random_bytes(
            shape.prefixes * shape.prefix_bytes, int.from_bytes(os.urandom(4))
        )
        self._sources = source.reshape(shape.prefixes, shape.chunks, shape.object_bytes)
        self._into = np.ones_like(self._sources[0])
        self._flat = self._into.reshape(-1)

    def measure(self, say: Say) -> list[Case]:
        """Both cases."""
        held = [self._fresh() for _ in self._sources]
        for (prefix, keys), source in zip(held, self._sources, strict=True):
            payloads.put(self._client, prefix, source.reshape(-1))
            self._peer.put(keys, source)
        params: dict[str, Json] = {
            "peer": "redis",
            "object_bytes": self._shape.object_bytes,
            "prefix_chunks": self._shape.chunks,
            "prefixes": self._shape.prefixes,
            "transport": payloads.transport_of(self._client, held[0][0]),
        }
        get, put = Case("get_copy", dict(params), "GB/s"), Case("put", dict(params), "GB/s")

        def get_round(number: int, flipped: bool) -> tuple[float, float]:
            at = number % len(held)
            return self._get_round(get, held[at], self._sources[at], flipped)

        times = self._settings.rounds
        rounds.rates(get, times, get_round, say)
        for prefix, keys in held:
            payloads.delete(self._client, prefix)
            self._peer.delete(keys)
        rounds.rates(put, times, lambda at, flip: self._put_round(put, at, flip), say)
        return [get, put]

    def _fresh(self) -> tuple[Prefix, list[bytes]]:
        prefix = payloads.fresh_prefix(self._family, self._shape.chunks)
        return prefix, [os.urandom(32) for _ in range(self._shape.chunks)]

    def _get_round(
        self, case: Case, held: tuple[Prefix, list[bytes]], source: Bytes, flipped: bool
    ) -> tuple[float, float]:
        prefix, keys = held
        case.verified_bytes += source.nbytes
        return rounds.pair(
            lambda: self._read(lambda: payloads.get(self._client, prefix, self._flat), source),
            lambda: self._read(lambda: self._peer.get(keys, self._into), source),
            flipped,
        )

    def _put_round(self, case: Case, number: int, flipped: bool) -> tuple[float, float]:
        source = self._sources[number % self._shape.prefixes]
        prefix, keys = self._fresh()
        figures = rounds.pair(
            lambda: self._rate(lambda: payloads.put(self._client, prefix, source.reshape(-1))),
            lambda: self._rate(lambda: self._peer.put(keys, source)),
            flipped,
        )
        self._read(lambda: payloads.get(self._client, prefix, self._flat), source)
        self._read(lambda: self._peer.get(keys, self._into), source)
        case.verified_bytes += source.nbytes
        payloads.delete(self._client, prefix)
        self._peer.delete(keys)
        return figures

    def _read(self, work: Callable[[], None], source: Bytes) -> float:
        self._into.fill(0)
        speed = self._rate(work)
        payloads.compare(self._flat, source.reshape(-1))
        return speed

    def _rate(self, work: Callable[[], None]) -> float:
        return self._shape.prefix_bytes / rounds.seconds(work) / 1e9


def _match(settings: Settings, client: KVClient, peer: Redis, say: Say) -> list[Case]:
    objects = lookup.Objects(client, settings.indexed_objects)
    objects.index(say)
    hashes, step = objects.hashes, 1000
    blank = payloads.random_bytes(step * lookup.OBJECT_BYTES, 0).reshape(step, -1)
    for first in range(0, len(hashes), step):
        keys = [row.tobytes() for row in hashes[first : first + step]]
        peer.put(keys, blank[: len(keys)])
    objects.shuffle(settings.keys)
    params: dict[str, Json] = {
        "peer": "redis",
        "keys": settings.keys,
        "indexed_objects": settings.indexed_objects,
        "transport": objects.transport(),
    }
    latencies = rounds.Latencies.of("match", params)
    # Made before the clock starts, as kvstored's keys are.
    questions = [redis.exists([row.tobytes() for row in rows]) for rows in objects.chosen]

    def bare(number: int) -> float:
        return rounds.seconds(lambda: peer.exist(questions[number % len(questions)], settings.keys))

    for number in range(settings.rounds + 1):
        words = latencies.round(settings.samples, objects.match, bare, counts=number > 0)
        say(f"match, round {number}: {words}")
    return latencies.cases


def main(argv: Sequence[str] | None = None) -> int:
    """See the module; the exit status, which is 0 where there is no peer to be paired with."""
    default = Settings()
    parser = argparse.ArgumentParser(prog="kvstored.bench.peers", description="See benchmarks.md.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=default.rounds)
    parser.add_argument("--chunks", type=int, default=default.prefix_chunks)
    parser.add_argument("--object-mib", default="1,4")
    parser.add_argument("--indexed-objects", type=int, default=default.indexed_objects)
    parser.add_argument("--samples", type=int, default=default.samples)
    args = parser.parse_args(argv)
    if not redis.installed():
        _say(HOW_TO_INSTALL)
        return 0
    settings = Settings(
        object_bytes=tuple(int(word) << 20 for word in args.object_mib.split(",")),
        prefix_chunks=args.chunks,
        rounds=args.rounds,
        indexed_objects=args.indexed_objects,
        samples=args.samples,
    )
    try:
        cases = run(settings, _say)
    except (BenchError, OSError) as error:
        _say(f"bench peers: {error}")
        return 1
    text = json.dumps(report.report("peers", cases)) if args.json else report.table(cases)
    sys.stdout.write(text + "\n")
    return 0


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
