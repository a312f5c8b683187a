"""`kvctl bench engine`: the reference engine with and without kvstored. docs/benchmarks.md.

The engine runs in a process of its own (`python -m kvstored_client.engine.bench`), for nothing here
may need torch. This side says what to run, starts the daemons, and compares answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstored.bench import processes, workloads
from kvstored.bench.engine_report import CACHES, Cell
from kvstored.bench.processes import BenchError, Child
from kvstored.bench.report import MIN_ROUNDS, Case
from kvstored.bench.workloads import Shape, Tokens, Workload
from kvstored.config.host import memory_allowed

CHUNK_TOKENS = 64
LEAST_RAM_BYTES = 256 << 20
PATIENT_S = 60.0
"""A load's deadline where it is not to decide anything."""
MODULE = "kvstored_client.engine.bench"

Say = Callable[[str], None]
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure. `model` None: SmolLM2-135M-Instruct. `rounds`: sessions in a cell at least;
    a pass has as many as run at once. `quick`: a tiny random model and short prompts, for tests.
    """

    model: Path | None = None
    workloads: tuple[str, ...] = workloads.NAMES
    concurrencies: tuple[int, ...] = (1, 8, 16)
    answer_tokens: int = 32
    cold_tokens: int = 1056
    rounds: int = 5
    quick: bool = False

    def shape(self, name: str) -> Shape:
        """Of a workload."""
        return (workloads.QUICK if self.quick else workloads.FULL)[name]

    def passes(self, concurrency: int) -> int:
        """How many passes a cell has."""
        return max(1, -(-self.rounds // concurrency))


QUICK = Settings(concurrencies=(1, 2), answer_tokens=4, cold_tokens=160, quick=True)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the engine's process says of itself. `spare_blocks`: those for puts and checks."""

    model: str
    dtype: str
    vocab_size: int
    block_bytes: int
    threads: int
    spare_blocks: int


class Engines:
    """The engine's process. Every answer that is not as it should be raises BenchError."""

    def __init__(self, child: Child, facts: Facts) -> None:
        self.facts = facts
        self._child = child

    def ask(self, what: str, engine: str, **arguments: object) -> Answer:
        """Have it do something with an engine; what it answers."""
        line = json.dumps({"do": what, "engine": engine, **arguments})
        answer: Answer = json.loads(self._child.ask(line))
        if answer.get("mismatched_chunks", 0):
            raise BenchError(
                f"{answer['mismatched_chunks']} of {answer['compared_chunks']} chunks that were "
                "computed again differ from what the store gave"
            )
        return answer

    def run(
        self, engine: str, sessions: list[list[Tokens]], concurrency: int, answer_tokens: int
    ) -> Answer:
        """Sessions, so many at a time."""
        return self.ask(
            "run",
            engine,
            sessions=sessions,
            concurrency=concurrency,
            answer_tokens=answer_tokens,
        )


def run(settings: Settings, say: Say) -> list[Case]:
    """Measure; `say` takes lines of progress.

    Raises BenchError when the engine or a daemon cannot be used, answers differ with and without a
    cache, or a chunk is not what the engine computes.
    """
    if settings.rounds < MIN_ROUNDS:
        raise BenchError(f"at least {MIN_ROUNDS} rounds are needed, not {settings.rounds}")
    if unknown := set(settings.workloads) - set(workloads.NAMES):
        raise BenchError(f"no workload {min(unknown)}: there are {', '.join(workloads.NAMES)}")
    if not settings.concurrencies or min(settings.concurrencies) < 1:
        raise BenchError("concurrencies are 1 or more")
    cases: list[Case] = []
    with _engines(settings, say) as engines:
        _check_memory(settings, engines.facts)
        seed = int.from_bytes(os.urandom(4))
        # One daemon for each workload, so that none finds the RAM tier full of another's.
        groups = [settings.workloads] if settings.quick else [(n,) for n in settings.workloads]
        for names in groups:
            shapes = [settings.shape(name) for name in names]
            cap_bytes = sum(_stored_bytes(settings, shape, engines.facts) for shape in shapes)
            with _daemon(cap_bytes) as target:
                for shape in shapes:
                    traffic = Workload(shape, engines.facts.vocab_size, seed)
                    cases += _Measured(settings, engines, target, traffic, say).measure()
        cold = Workload(workloads.FULL["unique"], engines.facts.vocab_size, seed)
        chunks = (settings.rounds + 1) * (settings.cold_tokens // CHUNK_TOKENS + 1)
        with _daemon(chunks * engines.facts.block_bytes) as target:
            cases += _storing_and_loading(settings, engines, target, cold, say)
    return cases


@contextlib.contextmanager
def _engines(settings: Settings, say: Say) -> Iterator[Engines]:
    say("starting the engine's process")
    arguments: list[object] = ["--tiny"] if settings.quick else []
    if settings.model is not None:
        arguments += ["--model", settings.model]
    with processes.child(MODULE, *arguments) as (child, words):
        facts = Facts(**json.loads(" ".join(words)))
        say(f"{facts.model}, {facts.dtype}, {facts.threads} threads")
        yield Engines(child, facts)


@contextlib.contextmanager
def _daemon(stored_bytes: int) -> Iterator[str]:
    """A daemon with room for so much and a quarter more, in RAM alone; its target."""
    cap_bytes = max(LEAST_RAM_BYTES, stored_bytes + stored_bytes // 4)
    with (
        tempfile.TemporaryDirectory(prefix="kvbench-") as name,
        processes.daemon(Path(name), cap_bytes) as daemon,
    ):
        yield daemon.target


def _blocks(settings: Settings, shape: Shape, concurrency: int, facts: Facts) -> int:
    """Blocks of each engine: what so many sessions need that share nothing, and the spare ones."""
    longest = -(-shape.longest_tokens(settings.answer_tokens) // CHUNK_TOKENS)
    return concurrency * (longest + 2) + facts.spare_blocks


def _stored_bytes(settings: Settings, shape: Shape, facts: Facts) -> int:
    """What a workload leaves in the store, two caches together, at most."""
    sessions = sum(c * settings.passes(c) for c in settings.concurrencies) + shape.shared + 1
    of_turn = -(-(shape.turn_tokens + settings.answer_tokens) // CHUNK_TOKENS) + 1
    shared = shape.shared * -(-shape.shared_tokens // CHUNK_TOKENS)
    return 2 * (sessions * shape.turns * of_turn + shared) * facts.block_bytes


def _check_memory(settings: Settings, facts: Facts) -> None:
    allowed, _ = memory_allowed()
    needed = 0
    for name in settings.workloads:
        shape = settings.shape(name)
        for concurrency in settings.concurrencies:
            pools = 1 if settings.passes(concurrency) == 1 else 3
            pool = _blocks(settings, shape, concurrency, facts) * facts.block_bytes
            needed = max(needed, pools * pool + _stored_bytes(settings, shape, facts))
    if needed > allowed * 3 // 4:
        raise BenchError(
            f"blocks and store need {needed / 1e9:.1f} GB beside the model, of {allowed / 1e9:.1f} "
            "GB that may be used: leave out the highest --concurrency or workloads"
        )


class _Measured:
    """One workload, at all concurrencies, with all caches in turn."""

    def __init__(
        self, settings: Settings, engines: Engines, target: str, traffic: Workload, say: Say
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._target = target
        self._traffic = traffic
        self._name = traffic.shape.name
        self._say = say
        self._open: set[str] = set()

    def measure(self) -> list[Case]:
        """Its cases."""
        # What a fresh engine finds in the store was put by another one.
        self._begin("filler", self._settings.concurrencies[0], salt="fresh_warm")
        self._warm("filler")
        self._end("filler")
        return [case for c in self._settings.concurrencies for case in self._at(c)]

    def _at(self, concurrency: int) -> list[Case]:
        cells = {cache: Cell(self._name, cache, concurrency) for cache in CACHES}
        passes = self._settings.passes(concurrency)
        for number in range(passes):
            sessions = self._traffic.sessions(number * concurrency, concurrency, concurrency)
            answers = {}
            # In turn from both ends, so that what drifts falls on all alike.
            for cache in CACHES if number % 2 == 0 else CACHES[::-1]:
                self._ready(cache, concurrency)
                answer = self._engines.run(
                    cache, sessions, concurrency, self._settings.answer_tokens
                )
                answers[cache] = _tokens(answer)
                _enter(cells[cache], answer)
                if cache in ("off", "fresh_warm") or number == passes - 1:
                    self._end(cache)
                self._tell(cells[cache], answer, number + 1, passes)
            for cache in CACHES:
                if answers[cache] != answers["off"]:
                    raise BenchError(f"{self._name}: answers differ between cache off and {cache}")
        return [case for cell in cells.values() for case in cell.cases(cells["off"])]

    def _ready(self, cache: str, concurrency: int) -> None:
        """Have the cache's engine open; of those that keep blocks, one that served before."""
        if cache not in self._open:
            self._begin(cache, concurrency, salt=cache)
            if cache in ("own", "warm"):
                self._warm(cache)

    def _begin(self, engine: str, concurrency: int, salt: str) -> None:
        self._engines.ask(
            "open",
            engine,
            target="" if engine in ("off", "own") else self._target,
            own=engine != "off",
            blocks=_blocks(self._settings, self._traffic.shape, concurrency, self._engines.facts),
            running=concurrency,
            salt=f"{self._name} {salt}",
            deadline_s=PATIENT_S if self._settings.quick else 1.0,
        )
        self._open.add(engine)

    def _warm(self, engine: str) -> None:
        self._say(f"{self._name}: serving what is shared once, {engine}")
        for session in self._traffic.warming():
            answer = self._engines.run(engine, [session], 1, 1)
            if answer.get("dropped_chunks", 0):
                raise BenchError(f"{self._name}: the store did not take all that is shared")

    def _end(self, engine: str) -> None:
        self._open.discard(engine)
        self._engines.ask("close", engine)

    def _tell(self, cell: Cell, answer: Answer, number: int, passes: int) -> None:
        turns = answer["turns"]
        ttft = sorted(turn["ttft_ms"] for turn in turns)
        hits = sum(turn["own_tokens"] + turn["loaded_tokens"] for turn in turns)
        self._say(
            f"{self._name}, {cell.concurrency} at once, {cell.cache}, pass {number} of {passes}: "
            f"TTFT {ttft[len(ttft) // 2]:.0f} ms, {cell.rates[-1]:.1f} tokens/s, {hits} of "
            f"{sum(turn['prompt_tokens'] for turn in turns)} prompt tokens hit"
        )


def _tokens(answer: Answer) -> dict[tuple[int, int], list[int]]:
    """All answers, by session and length of prompt."""
    return {(t["session"], t["prompt_tokens"]): t["token_ids"] for t in answer["turns"]}


def _enter(cell: Cell, answer: Answer) -> None:
    turns: Sequence[Answer] = answer["turns"]
    cell.ttft_ms += [turn["ttft_ms"] for turn in turns]
    cell.rates.append(sum(len(turn["token_ids"]) for turn in turns) / answer["seconds"])
    loaded = sum(turn["loaded_tokens"] for turn in turns)
    counts = {
        "answers": len(turns),
        "prompt_tokens": sum(turn["prompt_tokens"] for turn in turns),
        "hit_tokens": sum(turn["own_tokens"] for turn in turns) + loaded,
        "loaded_tokens": loaded,
        "declined": answer.get("declined", 0),
        "late": answer.get("late", 0),
        "compared_chunks": answer.get("compared_chunks", 0),
    }
    for name, count in counts.items():
        cell.counts[name] = cell.counts.get(name, 0) + count
    cell.verified_bytes += answer.get("compared_bytes", 0)


def _storing_and_loading(
    settings: Settings, engines: Engines, target: str, traffic: Workload, say: Say
) -> list[Case]:
    """What storing adds to cold prompts, one after the other; and how fast they are loaded."""
    tokens, at_once = settings.cold_tokens, Shape("cold", 0, 0, 1, settings.cold_tokens)
    blocks = _blocks(settings, at_once, 1, engines.facts)
    # The loader never computes so much that it knows how fast it is, and so declines nothing.
    for engine, to in (("off", ""), ("cold", target), ("loader", target)):
        engines.ask(
            "open",
            engine,
            target=to,
            own=False,
            blocks=blocks,
            running=1,
            salt="cold",
            deadline_s=PATIENT_S,
        )
    params: dict[str, Any] = {"prompt_tokens": tokens}
    overhead = Case("store_overhead", params, "fraction")
    load = Case("load", dict(params), "GB/s")
    for number in range(settings.rounds + 1):  # the first does not count
        prompt = traffic.cold(tokens, number)
        order = ("off", "cold") if number % 2 == 0 else ("cold", "off")
        took = {engine: engines.ask("store", engine, prompt=prompt) for engine in order}
        more = took["cold"]["stored_ms"] / took["off"]["ttft_ms"] - 1
        got = engines.ask("load", "loader", prompt=prompt, flipped=number % 2 == 1)
        whole = (tokens - 1) // CHUNK_TOKENS * engines.facts.block_bytes
        if not got["load_bytes"] == got["bare_bytes"] == whole:
            raise BenchError(f"of {whole} bytes stored {got['load_bytes']} were loaded")
        rates = [got[f"{n}_bytes"] / got[f"{n}_ms"] / 1e6 for n in ("load", "bare")]
        if number:
            overhead.add(more, 0.0)
            load.add(*rates)
            load.verified_bytes += got["compared_bytes"]
            say(
                f"storing, round {number} of {settings.rounds}: {more:+.1%} of "
                f"{took['off']['ttft_ms']:.0f} ms; loading {rates[0]:.2f} of {rates[1]:.2f} GB/s"
            )
    for engine in ("off", "cold", "loader"):
        engines.ask("close", engine)
    return [overhead, load]
