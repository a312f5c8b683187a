"""`make demo`: the same conversations with the store off, empty, warm, and after a restart.

The last line of output is one JSON object; docs/engine.md says what the passes are. Exit status 0
only if every pass gave the same tokens and the restarted daemon gave what the warm one had given.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import logging
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvstored_client import KVClient
from kvstored_client.engine.checkpoint import Checkpoint, bundled_smollm2, load
from kvstored_client.engine.demo_daemon import DaemonFailed, PrivateDaemon
from kvstored_client.engine.demo_progress import PrefillProgress
from kvstored_client.engine.engine import Completion, Engine, make_engine
from kvstored_client.engine.fingerprint import weights_fingerprint
from kvstored_client.engine.model import Model
from kvstored_client.engine.sampler import Sampling
from kvstored_client.engine.tokenizer import Tokenizer

SYSTEM = "You answer questions about the document below, in one short sentence each.\n\n"
CONVERSATIONS = (
    (
        "How long is the term of a Senator?",
        "And how old must one be to become a Senator?",
        "Who has the sole power to try impeachments?",
    ),
    (
        "Where do all bills for raising revenue begin?",
        "Within how many days must the President return a bill?",
        "And what happens if the President does not return it?",
    ),
)
NOTES = (
    "1st TTFT: of the first turn; TTFT p50: median of all turns; computed, saved: prompt tokens of",
    "all turns. With the store on and empty the first turn computes and stores what the others",
    "hit: only its 1st TTFT is cold, its median is as good as warm.",
)
ANSWER = Sampling(max_tokens=12)
PUT_WAIT_S = 120.0


@dataclass(slots=True)
class Pass:
    """One run of all conversations: its completions, in order."""

    title: str
    completions: list[Completion] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(c.prompt_tokens for c in self.completions)

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that came from the store."""
        return sum(c.cached_tokens for c in self.completions)

    @property
    def ttft_ms_p50(self) -> float:
        """Median time to first token."""
        return statistics.median(c.ttft_ms for c in self.completions)

    @property
    def first_ttft_ms(self) -> float:
        """Time to first token of the first turn, before which nothing of this pass was stored."""
        return self.completions[0].ttft_ms

    @property
    def bytes_by_tier(self) -> Counter[str]:
        """Bytes that came from the store."""
        total: Counter[str] = Counter()
        for completion in self.completions:
            total.update(completion.bytes_by_tier)
        return total

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens of every answer."""
        return [c.token_ids for c in self.completions]


@dataclass(frozen=True, slots=True)
class Workbench:
    """What all passes share."""

    checkpoint: Checkpoint
    model: Model
    tokenizer: Tokenizer
    weights: str
    document: str

    @contextlib.contextmanager
    def engine(self, target: str | None) -> Iterator[Engine]:
        """A fresh engine, its blocks empty; with a client of the daemon at `target`, if given."""
        with contextlib.ExitStack() as stack:
            store = None if target is None else stack.enter_context(KVClient(target))
            engine = make_engine(
                self.model, self.tokenizer.eos_ids, store=store, weights=self.weights
            )
            yield engine
            engine.close(PUT_WAIT_S)


def main() -> int:
    """Run the demo. Returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    # Terminated as if interrupted: the blocks below clean up.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return _demo()
    except KeyboardInterrupt:
        _say("\nstopped; the demo's daemon and its files are gone")
        return 130
    except DaemonFailed as error:
        _say(f"\nthe demo's daemon failed: {error}")
        return 1


def _demo() -> int:
    with PrivateDaemon() as daemon:
        bench = _workbench()
        shared = len(bench.tokenizer.encode(SYSTEM + bench.document))
        _say(f"{bench.checkpoint.config.name}, float32; {shared} tokens shared by all prompts.")
        _say("A model this small is often wrong. What counts: with the store it says the same.\n")
        passes = [_run(bench, "store off", None)]
        daemon.start()
        passes.append(_run(bench, "store on, empty", daemon.target))
        passes.append(_run(bench, "store on, warm", daemon.target))
        _say("restarting the daemon; a fresh engine follows")
        daemon.stop()
        daemon.start()
        passes.append(_run(bench, "after restart", daemon.target))
        daemon.stop()
    _say(_table(passes, bench.model))
    report, good = _report(bench.checkpoint.config.name, passes)
    _say(json.dumps(report))
    return 0 if good else 1


def _workbench() -> Workbench:
    _say("loading the model ...")
    checkpoint = load(bundled_smollm2())
    text = importlib.resources.files("kvstored_client.engine").joinpath("data/constitution.txt")
    return Workbench(
        checkpoint,
        Model(checkpoint),
        Tokenizer(checkpoint.tokenizer),
        weights_fingerprint(checkpoint.path, checkpoint.header_bytes),
        text.read_text(encoding="utf-8"),
    )


def _run(bench: Workbench, title: str, target: str | None) -> Pass:
    """All conversations, turn by turn; each turn's prompt holds the answers before it."""
    _say(title)
    done = Pass(title)
    with bench.engine(target) as engine:
        for questions in CONVERSATIONS:
            messages = [{"role": "system", "content": SYSTEM + bench.document}]
            for question in questions:
                _say(f"  {question}")
                messages.append({"role": "user", "content": question})
                completion = _generate(engine, bench.tokenizer.chat(messages))
                answer = bench.tokenizer.decode(completion.token_ids)
                messages.append({"role": "assistant", "content": answer})
                done.completions.append(completion)
                _progress(answer, completion)
                # While the user reads the answer, what is new gets stored.
                if engine.hook is not None and not engine.hook.drain(PUT_WAIT_S):
                    raise DaemonFailed(f"it did not take new chunks within {PUT_WAIT_S:.0f} s")
    _say("")
    return done


def _generate(engine: Engine, prompt: list[int]) -> Completion:
    progress = PrefillProgress(sys.stdout)
    try:
        return engine.generate(prompt, ANSWER, on_prefill=progress.step)
    finally:
        progress.end()


def _progress(answer: str, completion: Completion) -> None:
    tiers = "".join(f", {b / 1e6:.0f} MB {tier}" for tier, b in completion.bytes_by_tier.items())
    hit = f"{completion.cached_tokens} of {completion.prompt_tokens} tokens from the store{tiers}"
    _say(f"    {' '.join(answer.split())}")
    _say(f"    {completion.ttft_ms:.0f} ms to the first token; {hit}")


def _table(passes: Sequence[Pass], model: Model) -> str:
    config = model.config
    token_bytes = config.layers * 2 * config.kv_heads * config.head_dim * 4
    head = f"{'':16} {'1st TTFT':>10} {'TTFT p50':>10} {'speedup':>8} {'computed':>9} {'saved':>8}"
    lines = [f"{head} {'saved KV':>9} {'from RAM':>9} {'from NVMe':>9}"]
    for each in passes:
        tiers = each.bytes_by_tier
        lines.append(
            f"{each.title:16} {each.first_ttft_ms:7.0f} ms {each.ttft_ms_p50:7.0f} ms"
            f" {passes[0].ttft_ms_p50 / each.ttft_ms_p50:7.1f}x"
            f" {each.prompt_tokens - each.hit_tokens:9d} {each.hit_tokens:8d}"
            f" {each.hit_tokens * token_bytes / 1e6:6.0f} MB"
            f" {tiers['ram'] / 1e6:6.0f} MB {tiers['nvme'] / 1e6:6.0f} MB"
        )
    return "\n".join([*lines, *NOTES, ""])


def _report(model: str, passes: Sequence[Pass]) -> tuple[dict[str, object], bool]:
    """The JSON object of the last line, and whether all is as it should be."""
    off, _, warm, restarted = passes
    identical = all(each.tokens == off.tokens for each in passes)
    report = {
        "model": model,
        "prompts": len(warm.completions),
        "prompt_tokens": warm.prompt_tokens,
        "cold_ttft_ms_p50": round(off.ttft_ms_p50, 1),
        "warm_ttft_ms_p50": round(warm.ttft_ms_p50, 1),
        "ttft_speedup": round(off.ttft_ms_p50 / warm.ttft_ms_p50, 2),
        "hit_tokens": warm.hit_tokens,
        "miss_tokens": warm.prompt_tokens - warm.hit_tokens,
        "tokens_identical": identical,
        "after_restart": {
            "hit_tokens": restarted.hit_tokens,
            "ttft_ms_p50": round(restarted.ttft_ms_p50, 1),
        },
    }
    from_disk = restarted.bytes_by_tier["nvme"] > 0
    same_hits = warm.hit_tokens == restarted.hit_tokens > 0
    return report, identical and same_hits and from_disk


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
