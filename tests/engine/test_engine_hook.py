"""Whatever the store does, the engine's answers are the same, and its blocks come back."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from engine_support import NO_EOS, TINY, Answer, DictStore, same_bits, tiny_model, tiny_prompt
from numpy.typing import NDArray

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockTable
from kvstored_client.engine.engine import Engine, PromptError, make_engine
from kvstored_client.engine.hook import family_of
from kvstored_client.engine.model import LlamaModel
from kvstored_client.engine.sampler import Sampling
from kvstored_client.identity import KVFamily, Prefix

WEIGHTS = "ef" * 32
SHORT = Sampling(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny() -> LlamaModel:
    return tiny_model()


class SlowStore(DictStore):
    """A store whose puts wait until `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def put(self, prefix: Prefix, views: Sequence[NDArray[np.uint8]], start: int) -> Answer:
        assert self.gate.wait(60)
        return super().put(prefix, views, start)


@pytest.fixture
def slow() -> Iterator[SlowStore]:
    store = SlowStore()
    yield store
    store.gate.set()


def with_store(model: LlamaModel, store: DictStore, queue: int = 64) -> Engine:
    return make_engine(
        model, NO_EOS, store=store, weights=WEIGHTS, context_tokens=512, max_queued_chunks=queue
    )


def test_a_store_that_fails_is_a_miss_and_said_once(
    tiny: LlamaModel, caplog: pytest.LogCaptureFixture
) -> None:
    store = DictStore()
    store.broken = True
    engine = with_store(tiny, store)
    prompt = tiny_prompt(200)
    expected = make_engine(tiny, NO_EOS).generate(prompt, SHORT, keep_logits=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            got = engine.generate(prompt, SHORT, keep_logits=True)
            assert got.cached_tokens == 0
            assert same_bits(got, expected)
        assert engine.close(60)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert engine.hook is not None
    assert engine.hook.stats.failures == 4
    assert engine.pool.used_blocks() == 0


def test_blocks_of_a_put_under_way_are_not_reused(tiny: LlamaModel, slow: SlowStore) -> None:
    engine = with_store(tiny, slow)
    first, second = tiny_prompt(130), tiny_prompt(450, seed=9)
    engine.generate(first, SHORT)
    assert engine.pool.used_blocks() == 2
    engine.generate(second, SHORT)
    slow.gate.set()
    assert engine.close(60)
    plain = make_engine(tiny, NO_EOS)
    check = with_store(tiny, slow)
    for prompt, hit in ((first, 128), (second, 448)):
        got = check.generate(prompt, SHORT, keep_logits=True)
        assert got.cached_tokens == hit
        assert same_bits(got, plain.generate(prompt, SHORT, keep_logits=True))


def test_a_full_queue_drops_the_tail_and_never_blocks(tiny: LlamaModel, slow: SlowStore) -> None:
    engine = with_store(tiny, slow, queue=3)
    assert engine.hook is not None
    prompt = tiny_prompt(330)
    engine.generate(prompt, SHORT)
    engine.generate(tiny_prompt(200, seed=4), SHORT)
    assert engine.pool.used_blocks() == 3
    # The first run's tail is offered again when its sequence ends, and dropped again.
    assert engine.hook.stats.dropped_chunks == 2 + 2 + 3 + 3
    assert not engine.hook.drain(0)
    slow.gate.set()
    assert engine.hook.drain(60)
    assert engine.hook.stats.stored_chunks == 3
    assert engine.generate(prompt, SHORT).cached_tokens == 3 * CHUNK_TOKENS


def test_only_computed_tokens_are_stored(tiny: LlamaModel) -> None:
    """126 prompt tokens and 3 sampled: the third has no KV, so one full chunk would be too many."""
    store = DictStore()
    engine = with_store(tiny, store)
    engine.generate(tiny_prompt(125), SHORT)
    engine.generate(tiny_prompt(126, seed=5), SHORT)
    assert engine.close(60)
    prefixes = [family_of(TINY, WEIGHTS).prefix(tiny_prompt(n, s)) for n, s in ((125, 0), (126, 5))]
    assert len(store.chunks) == 1 + 2
    assert store.match(prefixes[0]).chunks == 1


def test_a_load_seals_what_came_and_zeroes_what_did_not(tiny: LlamaModel) -> None:
    store = DictStore()
    engine = with_store(tiny, store)
    assert engine.hook is not None
    prompt = tiny_prompt(192)
    engine.generate(prompt, SHORT)
    assert engine.hook.drain(60)
    table = BlockTable(engine.pool, len(prompt))
    store.delivers = 1
    loaded = engine.hook.load(prompt, table, b"")
    assert (loaded.chunks, table.sealed) == (1, 1)
    assert engine.pool.kv[table.blocks[0]].any()
    # A block that goes back to the pool with NaN in it would spoil whoever has it next.
    assert not engine.pool.kv[table.blocks[1:]].any()


def test_request_salt_keeps_prompts_apart(tiny: LlamaModel) -> None:
    engine = with_store(tiny, DictStore())
    prompt = tiny_prompt(100)
    assert engine.hook is not None
    for salt, hit in ((b"a", 0), (b"b", 0), (b"a", 64), (b"", 0)):
        assert engine.generate(prompt, SHORT, request_salt=salt).cached_tokens == hit
        assert engine.hook.drain(60)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "empty"),
        ([0] * 600, "do not fit into 512"),
        ([256], "outside 0 to 255"),
        ([-1], "outside"),
    ],
)
def test_prompts_that_cannot_run_are_refused(
    tiny: LlamaModel, prompt: list[int], problem: str
) -> None:
    engine = make_engine(tiny, NO_EOS, context_tokens=512)
    with pytest.raises(PromptError, match=problem):
        engine.generate(prompt, SHORT)


def test_the_longest_prompt_runs_with_a_hit_and_a_full_queue(
    tiny: LlamaModel, slow: SlowStore
) -> None:
    engine = with_store(tiny, slow, queue=8)
    one = Sampling(max_tokens=1)
    prompt = tiny_prompt(511)
    slow.gate.set()
    engine.generate(prompt, one)
    assert engine.hook is not None
    assert engine.hook.drain(60)
    slow.gate.clear()
    engine.generate(tiny_prompt(511, seed=2), one)
    assert engine.pool.used_blocks() == 7
    assert engine.generate(prompt, one).cached_tokens == 448
    assert engine.generate(prompt[:448], Sampling(max_tokens=64)).cached_tokens == 447
    with pytest.raises(PromptError, match="512 prompt tokens and 1 more do not fit into 512"):
        engine.generate([*prompt, 0], one)


def test_stops_at_the_end_token(tiny: LlamaModel) -> None:
    prompt = tiny_prompt(10)
    free = make_engine(tiny, NO_EOS).generate(prompt, Sampling(max_tokens=8))
    assert free.finish_reason == "length"
    stopping = make_engine(tiny, free.token_ids[2])
    seen: list[int] = []
    got = stopping.generate(prompt, Sampling(max_tokens=8), on_token=seen.append)
    first = free.token_ids.index(free.token_ids[2]) + 1
    assert got.token_ids == seen == free.token_ids[:first]
    assert got.finish_reason == "stop"


@pytest.mark.parametrize(
    "other",
    [
        family_of(TINY, "aa" * 32),
        family_of(TINY, WEIGHTS, weights_epoch=1),
        family_of(dataclasses.replace(TINY, rope_theta=5e5), WEIGHTS),
        family_of(dataclasses.replace(TINY, layers=4), WEIGHTS),
    ],
    ids=["weights", "epoch", "rope", "layers"],
)
def test_what_changes_the_bytes_changes_the_family(other: KVFamily) -> None:
    family = family_of(TINY, WEIGHTS)
    assert family.parts[0].nbytes == 3 * 2 * 64 * 2 * 16 * 4
    assert other.fingerprint != family.fingerprint


def test_prefill_says_how_far_it_is(tiny: LlamaModel) -> None:
    steps: list[tuple[int, int]] = []
    store = DictStore()
    for prompt, expected in (
        (tiny_prompt(130), [(0, 130), (64, 130), (128, 130), (130, 130)]),
        (tiny_prompt(130), [(128, 130), (130, 130)]),
        (tiny_prompt(128), [(127, 128), (128, 128)]),
    ):
        engine = with_store(tiny, store)
        steps.clear()
        engine.generate(prompt, SHORT, on_prefill=lambda *step: steps.append(step))
        assert steps == expected
        assert engine.close(60)
