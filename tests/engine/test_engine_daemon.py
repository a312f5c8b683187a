"""The engine with a real daemon: hits from memory and from disk, and a daemon that is killed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from engine_support import NO_EOS, TINY, same_bits, tiny_model, tiny_prompt
from support_daemon import Daemon, running_daemon

from kvstored_client import KVClient, Timeouts
from kvstored_client.engine.engine import Completion, Engine, make_engine
from kvstored_client.engine.hook import family_of
from kvstored_client.engine.model import Model
from kvstored_client.engine.sampler import Sampling
from kvstored_client.engine.tokenizer import Tokenizer
from kvstored_client.identity import Prefix
from kvstored_client.results import MatchResult

WEIGHTS = "12" * 32
GREEDY = Sampling(max_tokens=80, ignore_eos=True)
PUT_S = 60.0


@pytest.fixture(scope="module")
def tiny() -> Model:
    return tiny_model()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        yield running


def client_of(daemon: Daemon) -> KVClient:
    return KVClient(daemon.target, timeouts=Timeouts(match_s=30, get_s=60, put_s=60))


def engine_on(model: Model, client: KVClient) -> Engine:
    return make_engine(model, NO_EOS, store=client, weights=WEIGHTS, context_tokens=768)


def run(engine: Engine, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
    done = []
    for prompt in prompts:
        done.append(engine.generate(prompt, sampling, keep_logits=True))
        assert engine.hook is None or engine.hook.drain(PUT_S)
    return done


def all_same(got: list[Completion], expected: list[Completion]) -> bool:
    return all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


def hits(completions: list[Completion]) -> list[int]:
    return [completion.cached_tokens for completion in completions]


def test_hits_from_memory_and_from_disk_give_the_same_bits(daemon: Daemon, tiny: Model) -> None:
    first = tiny_prompt(200)
    prompts = [first, first[:128], [*first[:150], *tiny_prompt(90, seed=3)]]
    expected = run(make_engine(tiny, NO_EOS), prompts, GREEDY)
    with client_of(daemon) as client:
        cold = run(engine_on(tiny, client), prompts, GREEDY)
        warm = run(engine_on(tiny, client), prompts, GREEDY)
    assert hits(cold) == [0, 127, 128]
    assert hits(warm) == [192, 127, 192]
    daemon.stop()
    daemon.start()
    with client_of(daemon) as client:
        restarted = run(engine_on(tiny, client), prompts, GREEDY)
    assert hits(restarted) == hits(warm)
    assert set(restarted[0].bytes_by_tier) == {"nvme"}
    for got in (cold, warm, restarted):
        assert all_same(got, expected)


def test_real_model_from_memory_and_from_disk(
    daemon: Daemon, model: Model, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode("The harbour lay quiet under a grey sky, and no ship came in. " * 12)
    prompts = [prompt[:140]]
    sampling = Sampling(max_tokens=3, ignore_eos=True)
    expected = run(make_engine(model, NO_EOS, context_tokens=512), prompts, sampling)
    with client_of(daemon) as client:
        engine = engine_on(model, client)
        got = run(engine, prompts * 2, sampling)
    daemon.stop()
    daemon.start()
    with client_of(daemon) as client:
        got += run(engine_on(model, client), prompts, sampling)
    assert hits(got) == [0, 128, 128]
    assert [set(c.bytes_by_tier) for c in got] == [set(), {"ram"}, {"nvme"}]
    assert sum(got[1].bytes_by_tier.values()) == 2 * engine.pool.block_bytes
    assert all_same(got, expected * 3)


def test_wrong_bytes_in_the_store_are_told_from_right_ones(daemon: Daemon, tiny: Model) -> None:
    prompt = tiny_prompt(100)
    (expected,) = run(make_engine(tiny, NO_EOS), [prompt], GREEDY)
    family = family_of(TINY, WEIGHTS)
    with client_of(daemon) as client:
        wrong = np.random.default_rng(1).standard_normal(3 * 2 * 64 * 2 * 16).astype(np.float32)
        assert client.put(family.prefix(prompt), [wrong]).stored == 1
        (got,) = run(engine_on(tiny, client), [prompt], GREEDY)
    assert got.cached_tokens == 64
    assert not same_bits(got, expected)


def test_daemon_killed_while_decoding(daemon: Daemon, tiny: Model) -> None:
    """kill -9 in the middle of a run: the same tokens, and after a restart hits resume."""
    prompts = [tiny_prompt(200, seed) for seed in range(3)]
    expected = run(make_engine(tiny, NO_EOS), prompts, GREEDY)
    with client_of(daemon) as client:
        engine = engine_on(tiny, client)
        got = run(engine, prompts[:1], GREEDY)
        seen: list[int] = []

        def kill_at_the_tenth(token: int) -> None:
            seen.append(token)
            if len(seen) == 10:
                daemon.kill()

        got.append(
            engine.generate(prompts[1], GREEDY, on_token=kill_at_the_tenth, keep_logits=True)
        )
        got += run(engine, prompts[2:], GREEDY)
        assert all_same(got, expected)
        assert got[2].cached_tokens == 0
        assert got[2].miss_reason == "unreachable"
        daemon.start()
        refilled = run(engine, prompts, GREEDY)
        resumed = run(engine, prompts, GREEDY)
    assert hits(resumed) == [192] * 3
    assert all_same(refilled, expected)
    assert all_same(resumed, expected)


class KillsBeforeGet(KVClient):
    """The daemon dies between a match and the get that follows."""

    daemon: Daemon

    def match(self, prefix: Prefix, *_: object, **__: object) -> MatchResult:
        answer = super().match(prefix)
        self.daemon.kill()
        return answer


def test_daemon_killed_between_match_and_get(daemon: Daemon, tiny: Model) -> None:
    prompts = [tiny_prompt(300)]
    expected = run(make_engine(tiny, NO_EOS), prompts, GREEDY)
    with client_of(daemon) as client:
        run(engine_on(tiny, client), prompts, GREEDY)
        assert client.match(family_of(TINY, WEIGHTS).prefix(prompts[0][:256])).chunks == 4
    with KillsBeforeGet(daemon.target) as killer:
        killer.daemon = daemon
        got = run(engine_on(tiny, killer), prompts, GREEDY)
    assert got[0].cached_tokens == 0
    assert got[0].miss_reason == "unreachable"
    assert all_same(got, expected)
