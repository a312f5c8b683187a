"""`kvctl bench disk`: from a device and onto it, against bare O_DIRECT. docs/benchmarks.md."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstored.bench import extents, payloads, processes, rawdisk, rounds
from kvstored.bench.diskshape import (
    Shape,
    default_directory,
    disk_there_is,
    file_system,
    shape_of,
)
from kvstored.bench.leftovers import removed
from kvstored.bench.memory import Written
from kvstored.bench.payloads import MIB, Bytes
from kvstored.bench.processes import BenchError, Volume
from kvstored.bench.rawdisk import Aligned, RawFiles
from kvstored.bench.report import MIN_ROUNDS, Case, Json
from kvstored_client import KVClient, Prefix

COLD = "evicted from RAM by reads of other prefixes; O_DIRECT on both sides, no page cache"
_SHIFT = 4096 + 64  # between the payloads of two prefixes, which are windows of one random source
_MIXED = 0.01

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure. `directories`: one volume in each; none: one, where temporary files are.
    `weights`: how much of a payload the ceiling has in each directory; none: the same in all.
    `disk_bytes` bounds what each directory's volume and files take; 0: what `disk_there_is` says.
    `params` are added to those of each case. `puts`: also `put_durable`.
    """

    object_bytes: tuple[int, ...] = (1 * MIB, 4 * MIB, 16 * MIB)
    prefix_chunks: int = 64
    rounds: int = 11
    directories: tuple[Path, ...] = ()
    weights: tuple[float, ...] = ()
    disk_bytes: int = 0
    params: dict[str, Json] = field(default_factory=dict)
    puts: bool = True


def run(settings: Settings, say: Say) -> list[Case]:
    """Measure; `say` takes lines of progress.

    Raises BenchError when a disk or the daemon cannot be used or a byte came back wrong.
    """
    if settings.rounds < MIN_ROUNDS:
        raise BenchError(f"at least {MIN_ROUNDS} rounds are needed, not {settings.rounds}")
    places = settings.directories or (default_directory(Path(tempfile.gettempdir())),)
    disk_bytes = settings.disk_bytes or min(map(disk_there_is, places)) // len(places)
    cases: list[Case] = []
    for size in settings.object_bytes:
        fills = settings.rounds if settings.puts else MIN_ROUNDS
        shape = shape_of(size, settings.prefix_chunks, fills, disk_bytes)
        try:
            cases += _measure(settings, shape, places, say)
        except OSError as error:
            raise BenchError(f"the disk could not be used: {error}") from error
    return cases


def _measure(settings: Settings, shape: Shape, places: Sequence[Path], say: Say) -> list[Case]:
    """One object size: a daemon with new volumes, and everything removed again."""
    with contextlib.ExitStack() as stack:
        sockets = Path(tempfile.mkdtemp(prefix="kvbench-"))
        work = [Path(tempfile.mkdtemp(prefix="kvbench-", dir=place)) for place in places]
        keep = stack.enter_context(removed([sockets, *work]))
        volumes = [Volume(place / "data" / "nvme", shape.volume_cap_bytes) for place in work]
        for volume in volumes:
            volume.directory.mkdir(parents=True)
        say(f"starting a daemon with {len(volumes)} x {shape.volume_cap_bytes >> 20} MiB")
        own = processes.daemon(
            sockets,
            shape.ram_cap_bytes,
            data_dir=work[0] / "data",
            volumes=volumes,
            keep=[keep],
        )
        daemon = stack.enter_context(own)
        client = stack.enter_context(KVClient(daemon.target))
        segment = stack.enter_context(contextlib.closing(Written(shape.prefix_bytes)))
        pool = stack.enter_context(rawdisk.threads(len(places)))
        measured = Prefixes(settings, shape, client, segment, Place(work, volumes, pool))
        try:
            return measured.measure(say)
        finally:
            measured.close()


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ceiling's files are, the daemon's volumes, and the threads of the ceiling."""

    directories: Sequence[Path]
    volumes: Sequence[Volume]
    pool: ThreadPoolExecutor

    def unwritten_bytes(self) -> int | None:
        """Of all volumes' data files; None where it cannot be told."""
        total = 0
        for volume in self.volumes:
            found = extents.unwritten_bytes(volume.directory / "data")
            if found is None:
                return None
            total += found
        return total


class Prefixes:
    """The rounds of one object size, on a daemon whose volumes are new."""

    def __init__(
        self, settings: Settings, shape: Shape, client: KVClient, segment: Written, place: Place
    ) -> None:
        self._settings = settings
        self._shape = shape
        self._client = client
        self._place = place
        self._family = payloads.family(shape.object_bytes)
        seed = int.from_bytes(os.urandom(4))
        self._random = payloads.random_bytes(shape.prefix_bytes + shape.prefixes * _SHIFT, seed)
        self._into = Aligned(shape.prefix_bytes).array
        self._segment: Bytes | None = segment.array()
        self._prefixes = [self._fresh() for _ in range(shape.prefixes)]
        self._turn = 0
        self._raw: RawFiles | None = None

    def close(self) -> None:
        """Let go of the segment and the files."""
        self._segment = None
        if self._raw is not None:
            self._raw.close()

    def measure(self, say: Say) -> list[Case]:
        """Fill the new volumes, read from them, and put into them again."""
        params = self._params()
        cases = self._fill(params, say)
        get, to_client = self._case("get_cold", params), self._case("get_cold_client", params)
        for case in (get, to_client):
            case.params |= {"cold": COLD, "extents": "written"}
        self._raw = self._new_files()
        self._write_raw(self._raw, self._source(0))
        times = self._settings.rounds
        rounds.rates(get, times, lambda _, flip: self._get_round(get, flip), say)
        rounds.rates(to_client, times, lambda _, flip: self._client_round(to_client, flip), say)
        cases += [get, to_client]
        if self._settings.puts:
            cases.append(self._overwrite(params, say))
        return cases

    def _params(self) -> dict[str, Json]:
        return {
            "object_bytes": self._shape.object_bytes,
            "prefix_chunks": self._shape.chunks,
            "prefixes": self._shape.prefixes,
            "ram_cap_bytes": self._shape.ram_cap_bytes,
            "volumes": len(self._place.volumes),
            "file_system": file_system(self._place.directories[0]),
            "ceiling_in_flight": rawdisk.IN_FLIGHT,
            "ceiling_request_bytes": self._request_bytes(),
            **self._settings.params,
        }

    def _case(self, op: str, params: dict[str, Json]) -> Case:
        return Case(op, dict(params), "GB/s")

    def _request_bytes(self) -> int:
        return min(self._shape.object_bytes, rawdisk.MOST_REQUEST_BYTES)

    def _fresh(self) -> Prefix:
        return payloads.fresh_prefix(self._family, self._shape.chunks)

    def _source(self, number: int) -> Bytes:
        start = number % self._shape.prefixes * _SHIFT
        return self._random[start : start + self._shape.prefix_bytes]

    def _memory(self) -> Bytes:
        assert self._segment is not None
        return self._segment

    def _new_files(self) -> RawFiles:
        place = self._place
        weights = self._settings.weights or (1.0,) * len(place.directories)
        size, request = self._shape.prefix_bytes, self._request_bytes()
        return RawFiles(place.directories, weights, size, request, place.pool)

    def _rate(self, work: Callable[[], None]) -> float:
        return self._shape.prefix_bytes / rounds.seconds(work) / 1e9

    # ---- get ---------------------------------------------------------------------------------

    def _next(self) -> int:
        """The prefix whose turn it is: the one that was read the longest ago."""
        self._turn += 1
        return self._turn % self._shape.prefixes

    def _get_round(self, case: Case, flipped: bool) -> tuple[float, float]:
        figures = rounds.pair(
            lambda: self._acquire(self._next()), lambda: self._read_raw(self._memory()), flipped
        )
        case.verified_bytes += self._shape.prefix_bytes
        return figures

    def _acquire(self, number: int) -> float:
        """Rate of an acquire, all of whose bytes must come from NVMe, and be right."""
        prefix, chunks = self._prefixes[number], self._shape.chunks
        leases = []
        rate = self._rate(
            lambda: leases.append(self._client.acquire(prefix, timeout_s=payloads.TIMEOUT_S))
        )
        with leases[0] as lease:
            if lease.chunks != chunks:
                raise BenchError(f"acquire granted {lease.chunks} of {chunks}: {lease.reason}")
            self._must_be_cold(lease.bytes_by_tier)
            objects = self._source(number).reshape(chunks, self._shape.object_bytes)
            for chunk in range(chunks):
                payloads.compare(np.frombuffer(lease[chunk], np.uint8), objects[chunk])
        return rate

    def _must_be_cold(self, bytes_by_tier: object) -> None:
        if bytes_by_tier != {"nvme": self._shape.prefix_bytes}:
            raise BenchError(f"what should have come from NVMe came from {bytes_by_tier}")

    def _read_raw(self, into: Bytes) -> float:
        """Rate of the bare read of what `measure` wrote."""
        raw = self._raw
        assert raw is not None
        into.fill(0)
        rate = self._rate(lambda: raw.read(into))
        payloads.compare(into, self._source(0))
        return rate

    def _client_round(self, case: Case, flipped: bool) -> tuple[float, float]:
        figures = rounds.pair(
            lambda: self._get(self._next()), lambda: self._read_raw(self._into), flipped
        )
        case.verified_bytes += self._shape.prefix_bytes
        return figures

    def _get(self, number: int) -> float:
        """Rate of a get, all of whose bytes must come from NVMe, and be right."""
        prefix, into = self._prefixes[number], self._into
        into.fill(0)
        results = []
        rate = self._rate(
            lambda: results.append(
                self._client.get(prefix, into, timeout_s=payloads.TIMEOUT_S),
            )
        )
        if results[0].chunks != self._shape.chunks:
            raise BenchError(f"get brought {results[0].chunks} chunks: {results[0].reason}")
        self._must_be_cold(results[0].bytes_by_tier)
        payloads.compare(into, self._source(number))
        return rate

    # ---- put ---------------------------------------------------------------------------------

    def _fill(self, params: dict[str, Json], say: Say) -> list[Case]:
        """Put every prefix into the new volumes; each put is a round."""
        case = self._case("put_durable", params)
        extent_state = _Extents(self._place, self._shape.prefix_bytes)
        converted: list[float | None] = []
        warming = self._shape.warming - 1  # the round that does not count is the last of them

        def work(number: int, flipped: bool) -> tuple[float, float]:
            with contextlib.closing(self._new_files()) as raw:
                before = extent_state.now()
                figures = self._put_round(case, number + warming, raw, flipped)
                converted.append(extent_state.since(before))
                return figures

        if not self._settings.puts:
            self._learn(say)
            return []
        for number in range(warming):
            self._put(number)
        rounds.rates(case, self._shape.prefixes - warming - 1, work, say)
        case.params["extents"] = _state(converted)
        return [case]

    def _learn(self, say: Say) -> None:
        """Put every prefix twice: the daemon knows the first time only what its volumes can do."""
        everything = range(self._shape.prefixes)
        for number in everything:
            self._put(number)
        for number in everything:
            rate = self._acquire(number)
            say(f"first reads, to show how fast the volumes are: {rate:.2f} GB/s")
        for number in everything:
            self._renew(number)
            self._put(number)

    def _overwrite(self, params: dict[str, Json], say: Say) -> Case:
        """Put prefixes where deleted ones were, into volumes that have been full."""
        case = self._case("put_durable", params)
        extent_state = _Extents(self._place, self._shape.prefix_bytes)
        converted: list[float | None] = []
        raw = self._raw
        assert raw is not None

        def work(number: int, flipped: bool) -> tuple[float, float]:
            self._renew(number)
            before = extent_state.now()
            figures = self._put_round(case, number, raw, flipped)
            converted.append(extent_state.since(before))
            return figures

        # What is left of the last regions is written first.
        for number in range(self._shape.prefixes):
            self._renew(number)
            before = extent_state.now()
            self._put(number)
            if not extent_state.since(before):
                break
        rounds.rates(case, self._settings.rounds, work, say)
        case.params["extents"] = _state(converted[1:])
        self._read_back(case)
        return case

    def _renew(self, number: int) -> None:
        """Delete a prefix; another one, that has not been put, takes its number."""
        at = number % self._shape.prefixes
        payloads.delete(self._client, self._prefixes[at])
        self._prefixes[at] = self._fresh()

    def _put_round(
        self, case: Case, number: int, raw: RawFiles, flipped: bool
    ) -> tuple[float, float]:
        source = self._source(number)
        figures = rounds.pair(
            lambda: self._put(number), lambda: self._write_raw(raw, source), flipped
        )
        self._into.fill(0)
        payloads.get(self._client, self._prefixes[number % self._shape.prefixes], self._into)
        case.verified_bytes += payloads.compare(self._into, source)
        return figures

    def _put(self, number: int) -> float:
        """Rate of a put that must be durable."""
        prefix = self._prefixes[number % self._shape.prefixes]
        source = self._source(number)
        results = []
        rate = self._rate(
            lambda: results.append(
                self._client.put(
                    prefix, source, durability="durable", timeout_s=payloads.TIMEOUT_S
                ),
            )
        )
        if results[0].stored != len(prefix) or results[0].reason:
            raise BenchError(f"put stored {results[0].stored} chunks: {results[0].reason}")
        return rate

    def _write_raw(self, raw: RawFiles, source: Bytes) -> float:
        """Rate of the bare write, read back outside the clock."""
        memory = self._memory()
        np.copyto(memory, source)
        rate = self._rate(lambda: raw.write(memory))
        memory.fill(0)
        raw.read(memory)
        payloads.compare(memory, source)
        return rate

    def _read_back(self, case: Case) -> None:
        """Compare all that is on the device now, however much of it is in RAM as well."""
        for number, prefix in enumerate(self._prefixes):
            self._into.fill(0)
            payloads.get(self._client, prefix, self._into)
            case.verified_bytes += payloads.compare(self._into, self._source(number))


class _Extents:
    """What part of a prefix met extents that nobody had written yet; None: it cannot be told."""

    def __init__(self, place: Place, prefix_bytes: int) -> None:
        self._place = place
        self._prefix_bytes = prefix_bytes

    def now(self) -> int | None:
        return self._place.unwritten_bytes()

    def since(self, before: int | None) -> float | None:
        after = self._place.unwritten_bytes()
        if before is None or after is None:
            return None
        return max(0, before - after) / self._prefix_bytes


def _state(converted: Sequence[float | None]) -> str:
    """Of all puts: "unwritten", "written", "mixed" or "unknown"."""
    known = [part for part in converted if part is not None]
    if len(known) < len(converted):
        return "unknown"
    if max(known) <= _MIXED:
        return "written"
    return "unwritten" if min(known) >= 1 - _MIXED else "mixed"
