"""The engine's side of `kvctl bench engine`: a process that is told what to run, and times it.

`python -m kvstored_client.engine.bench` says "ready" and the model's facts as JSON, then answers
each line of JSON by one: `open` an engine, `run` sessions on it, time a prompt that it has to
`load` or to `store`, and `close` it. It ends with its standard input.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstored_client import KVClient
from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool
from kvstored_client.engine.checkpoint import Checkpoint, bundled_smollm2, load
from kvstored_client.engine.config import ModelConfig, TokenizerSpec, tensor_shapes
from kvstored_client.engine.engine import Engine
from kvstored_client.engine.family import family_of
from kvstored_client.engine.fingerprint import weights_fingerprint
from kvstored_client.engine.hook import KVStoreHook
from kvstored_client.engine.model import Model
from kvstored_client.engine.sampler import Sampling
from kvstored_client.engine.shadow import ShadowedHook
from kvstored_client.engine.types import EngineLimits, Request, TokenEvent

PUT_S = 120.0
SAY_EVERY_S = 5.0
QUEUED_CHUNKS = 32
SHADOW_CHUNKS = 8
TINY = ModelConfig("tiny", 256, 64, 96, 2, 4, 2, 16, 10000.0, 1e-5, 2048)

Reply = dict[str, Any]


@dataclass(slots=True)
class Turn:
    """One answer. Times are in ms from the request's arrival."""

    session: int
    prompt_tokens: int
    arrived_s: float
    own_tokens: int = 0
    loaded_tokens: int = 0
    miss_reason: str = ""
    ttft_ms: float = 0.0
    token_ids: list[int] = field(default_factory=list)


class Opened:
    """An engine with a pool of its own, and a hook and a client where it has a store."""

    def __init__(
        self, model: Model, weights: str, *, target: str, own: bool, blocks: int, running: int,
        salt: str, deadline_s: float = 1.0,
    ) -> None:  # fmt: skip
        """`target`: the store's, "" for none. `blocks`: all that the engine has, also for puts.
        `deadline_s`: the hook's.
        """
        self.model = model
        self.salt = salt.encode()
        self.client: KVClient | None = None
        self.hook: KVStoreHook | None = None
        self.shadow: ShadowedHook | None = None
        self.pool = BlockPool(model.config, blocks, model.dtype, model.device)
        if target:
            self.client = KVClient(target)
            self.client.check()
            family = family_of(model.config, weights, dtype=model.dtype)
            self.hook = KVStoreHook(
                self.client, family, self.pool, QUEUED_CHUNKS, deadline_s=deadline_s
            )
            # All hits are candidates, one of each pass is taken.
            self.shadow = ShadowedHook(
                self.hook, self.pool, lambda: model, 1.0, at_once=False, max_chunks=SHADOW_CHUNKS
            )
        limits = EngineLimits(max_running=running, own_prefixes=own)
        self.engine = Engine(model, self.pool, self.shadow, limits)

    def run(
        self, sessions: Sequence[Sequence[list[int]]], concurrency: int, answer_tokens: int
    ) -> Reply:
        """Run the sessions, so many at a time; then check a hit, and store all there is."""
        before, started = self._counts(), time.perf_counter()
        turns = _Sessions(self, sessions, answer_tokens).run(concurrency)
        seconds = time.perf_counter() - started
        self._drain()
        if self.shadow is not None:
            self.shadow.check()
        answers = [{k: v for k, v in asdict(t).items() if k != "arrived_s"} for t in turns]
        return {"seconds": seconds, "turns": answers, **_grown(before, self._counts())}

    def store(self, prompt: list[int]) -> Reply:
        """How long one prompt takes to its first token, and until all its chunks are stored."""
        started = time.perf_counter()
        done = self.engine.generate(prompt, _greedy(1), request_salt=self.salt)
        self._drain()
        return {"ttft_ms": done.ttft_ms, "stored_ms": (time.perf_counter() - started) * 1e3}

    def load(self, prompt: list[int], flipped: bool) -> Reply:
        """How fast the store's chunks of a prompt are loaded, and a bare `KVClient.get` of them."""
        if self.hook is None or self.client is None:
            raise ValueError("an engine without a store loads nothing")
        chunks = (len(prompt) - 1) // CHUNK_TOKENS
        into = np.ones((chunks, self.pool.block_bytes), np.uint8)
        prefix = self.hook.family.prefix(prompt[: chunks * CHUNK_TOKENS], self.salt)
        figures: Reply = {}
        before = self._counts()
        for what in ("bare", "load") if flipped else ("load", "bare"):
            if what == "load":
                done = self.engine.generate(prompt, _greedy(1), request_salt=self.salt)
                figures["load_ms"] = done.load_ms
                figures["load_bytes"] = sum(done.bytes_by_tier.values())
            else:
                started = time.perf_counter()
                got = self.client.get(prefix, list(into), timeout_s=30.0)
                figures["bare_ms"] = (time.perf_counter() - started) * 1e3
                figures["bare_bytes"] = got.chunks * self.pool.block_bytes
        if self.shadow is not None:
            self.shadow.check()
        return {**figures, **_grown(before, self._counts())}

    def close(self) -> Reply:
        """End the engine and its client."""
        self.engine.close(PUT_S)
        if self.client is not None:
            self.client.close()
        return {}

    def _drain(self) -> None:
        if self.hook is not None and not self.hook.drain(PUT_S):
            raise TimeoutError(f"the store did not take new chunks within {PUT_S:.0f} s")

    def _counts(self) -> Reply:
        """What the hook and the shadow check have counted."""
        if self.hook is None or self.shadow is None:
            return {}
        stats, checked = self.hook.stats, self.shadow.checked
        return {
            "declined": stats.declined,
            "late": stats.late,
            "failures": stats.failures,
            "dropped_chunks": stats.dropped_chunks,
            "compared_chunks": checked.chunks,
            "compared_bytes": checked.compared_bytes,
            "mismatched_chunks": checked.mismatched_chunks,
        }


class _Sessions:
    """A closed loop: when a turn has been answered its session's next begins, or another one."""

    def __init__(
        self, opened: Opened, sessions: Sequence[Sequence[list[int]]], answer_tokens: int
    ) -> None:
        self._opened = opened
        self._sampling = _greedy(answer_tokens)
        self._waiting = deque(enumerate([deque(turns) for turns in sessions]))
        self._left: dict[int, deque[list[int]]] = {}
        self._history: dict[int, list[int]] = {}
        self._active: dict[str, Turn] = {}
        self._done: list[Turn] = []
        self._turns = sum(len(turns) for turns in sessions)
        self._progress = _Progress()

    def run(self, concurrency: int) -> list[Turn]:
        """All turns, in the order in which they ended."""
        engine = self._opened.engine
        while self._waiting and len(self._active) < concurrency:
            self._begin_session()
        while engine.has_requests():
            engine.wait(0.2)
            for event in engine.step():
                self._take(event)
            self._progress.say(len(self._done), self._turns)
        return self._done

    def _begin_session(self) -> None:
        session, turns = self._waiting.popleft()
        self._left[session], self._history[session] = turns, []
        self._begin_turn(session)

    def _begin_turn(self, session: int) -> None:
        prompt = self._history[session] = self._history[session] + self._left[session].popleft()
        name = f"{session}.{len(self._left[session])}"
        request = Request(name, prompt, self._sampling, self._opened.salt)
        self._active[name] = Turn(session, len(prompt), time.perf_counter())
        self._opened.engine.add_request(request)

    def _take(self, event: TokenEvent) -> None:
        turn = self._active[event.request_id]
        if event.token_id is not None:
            if not turn.token_ids:
                turn.ttft_ms = (time.perf_counter() - turn.arrived_s) * 1e3
                turn.own_tokens = event.cache.own_tokens
                turn.loaded_tokens = event.cache.loaded_tokens
                turn.miss_reason = event.cache.miss_reason
            turn.token_ids.append(event.token_id)
        if event.finish_reason is None:
            return
        del self._active[event.request_id]
        self._done.append(turn)
        self._history[turn.session] = self._history[turn.session] + turn.token_ids
        if self._left[turn.session]:
            self._begin_turn(turn.session)
        elif self._waiting:
            self._begin_session()


class _Progress:
    """A line now and then of a pass that takes long."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def say(self, done: int, turns: int) -> None:
        """`done` of `turns` are answered."""
        if time.monotonic() - self._said >= SAY_EVERY_S:
            self._said = time.monotonic()
            sys.stderr.write(f"    {done} of {turns} answers ...\n")
            sys.stderr.flush()


def _greedy(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, ignore_eos=True)


def _grown(before: Reply, after: Reply) -> Reply:
    return {name: count - before[name] for name, count in after.items()}


def tiny_checkpoint() -> Checkpoint:
    """A small random Llama, for tests of the benchmark."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in tensor_shapes(TINY).items()
    }
    return Checkpoint(Path("tiny"), 0, TINY, TokenizerSpec([], [], [], -1, ""), tensors)


def _serve(model: Model, weights: str) -> None:
    opened: dict[str, Opened] = {}
    for line in sys.stdin:
        ask = json.loads(line)
        what, name = ask.pop("do"), ask.pop("engine")
        if what == "open":
            opened[name] = Opened(model, weights, **ask)
            reply: Reply = {}
        elif what == "close":
            reply = opened.pop(name).close()
        else:
            verbs: dict[str, Callable[..., Reply]] = {
                "run": opened[name].run,
                "store": opened[name].store,
                "load": opened[name].load,
            }
            reply = verbs[what](**ask)
        _say(json.dumps(reply))
    for engine in opened.values():
        engine.close()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run the process. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvstored_client.engine.bench")
    parser.add_argument("--model", type=Path, help="GGUF file or directory (SmolLM2-135M-Instruct)")
    parser.add_argument("--tiny", action="store_true", help="a small random model")
    arguments = parser.parse_args()
    if arguments.tiny:
        checkpoint, weights = tiny_checkpoint(), "00" * 32
    else:
        checkpoint = load(arguments.model or bundled_smollm2(), dtype="float32")
        weights = weights_fingerprint(checkpoint.path, checkpoint.header_bytes)
    model = Model(checkpoint)
    first = Opened(model, weights, target="", own=False, blocks=4, running=1, salt="")
    first.run([[[1] * 70]], 1, 2)  # what torch does once is not to be timed
    facts = {
        "model": model.config.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "vocab_size": model.config.vocab_size,
        "block_bytes": first.pool.block_bytes,
        "threads": torch.get_num_threads(),
        "spare_blocks": QUEUED_CHUNKS + SHADOW_CHUNKS,
    }
    _say("ready " + json.dumps(facts, separators=(",", ":")))
    try:
        _serve(model, weights)
    except KeyboardInterrupt:
        return 130  # whoever started it was interrupted as well, and says so
    return 0


if __name__ == "__main__":
    sys.exit(main())
