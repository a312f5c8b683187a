"""The shadow check: right chunks are found right, wrong ones counted, answers are as without."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from engine_served import SPEC
from engine_support import NO_EOS, TINY, DictStore, same_bits, tiny_model, tiny_prompt

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool
from kvstored_client.engine.engine import Engine, make_engine
from kvstored_client.engine.family import family_of
from kvstored_client.engine.hook import KVStoreHook
from kvstored_client.engine.model import Model
from kvstored_client.engine.sampler import Sampling
from kvstored_client.engine.server.metrics import Metrics
from kvstored_client.engine.server.runner import EngineRunner
from kvstored_client.engine.server.service import Service
from kvstored_client.engine.server.weights import WeightUpdater
from kvstored_client.engine.shadow import ShadowedHook
from kvstored_client.engine.tokenizer import Tokenizer
from kvstored_client.engine.types import EngineLimits, Segment

WEIGHTS = "cd" * 32
SHORT = Sampling(max_tokens=3, ignore_eos=True)
PROMPT = tiny_prompt(200)
CHUNKS = 3
PUT_S = 60.0


@pytest.fixture(scope="module")
def tiny() -> Model:
    return tiny_model()


@pytest.fixture
def store(tiny: Model) -> DictStore:
    """Holds PROMPT's chunks."""
    store = DictStore()
    engine = make_engine(tiny, NO_EOS, store=store, weights=WEIGHTS, context_tokens=512)
    engine.generate(PROMPT, SHORT)
    assert engine.close(PUT_S)
    assert len(store.chunks) == CHUNKS
    return store


def checking(model: Model, store: DictStore, fraction: float = 1.0) -> tuple[Engine, ShadowedHook]:
    engine = make_engine(
        model, NO_EOS, store=store, weights=WEIGHTS, context_tokens=512, shadow_fraction=fraction
    )
    assert isinstance(engine.hook, ShadowedHook)
    return engine, engine.hook


def spoil(store: DictStore, chunk: int) -> None:
    key = store.keys(family_of(TINY, WEIGHTS).prefix(PROMPT))[chunk]
    wrong = store.chunks[key].view(np.float32).copy()
    wrong[7] += 0.25
    store.chunks[key] = wrong.view(np.uint8)


def test_right_chunks_are_found_right(tiny: Model, store: DictStore) -> None:
    engine, shadow = checking(tiny, store)
    expected = make_engine(tiny, NO_EOS).generate(PROMPT, SHORT, keep_logits=True)
    got = engine.generate(PROMPT, SHORT, keep_logits=True)
    assert same_bits(got, expected)
    assert got.cached_tokens == CHUNKS * CHUNK_TOKENS
    checked = shadow.checked
    assert (checked.hits, checked.checks, checked.chunks) == (1, 1, CHUNKS)
    assert checked.compared_bytes == CHUNKS * engine.pool.block_bytes
    assert (checked.mismatched_chunks, checked.failures) == (0, 0)
    assert shadow.stats is not None
    assert engine.close(PUT_S)
    assert engine.pool.used_blocks() == 0


def test_a_wrong_chunk_is_counted_and_said_once(
    tiny: Model, store: DictStore, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(store, 1)
    engine, shadow = checking(tiny, store)
    with caplog.at_level(logging.ERROR):
        engine.generate(PROMPT, SHORT)
        engine.generate(PROMPT, SHORT)
    assert (shadow.checked.chunks, shadow.checked.mismatched_chunks) == (2 * CHUNKS, 2)
    assert shadow.checked.largest_difference == pytest.approx(0.25)
    (record,) = caplog.records
    assert "chunk 1 of a hit differs" in record.message
    assert engine.close(PUT_S)


def test_what_was_checked_is_on_the_metrics_page(tiny: Model, store: DictStore) -> None:
    engine, _ = checking(tiny, store)
    spoil(store, 1)
    engine.generate(PROMPT, SHORT)
    runner = EngineRunner(engine)
    service = Service(runner, Tokenizer(SPEC), "tiny")
    page = Metrics(service, WeightUpdater(runner, None)).text().decode().splitlines()
    service.close()
    assert "kvstored_engine_shadow_checks_total 1.0" in page
    assert "kvstored_engine_shadow_mismatched_chunks_total 1.0" in page
    (largest,) = (line for line in page if line.startswith("kvstored_engine_shadow_largest"))
    assert float(largest.removeprefix("kvstored_engine_shadow_largest_difference ")) > 0
    assert any(line.startswith("kvstored_engine_store_loaded_chunks_total ") for line in page)
    assert engine.close(PUT_S)


def test_a_sample_of_the_hits_is_checked(tiny: Model, store: DictStore) -> None:
    engine, shadow = checking(tiny, store, fraction=0.5)
    for _ in range(40):
        engine.generate(PROMPT, Sampling(max_tokens=1))
    assert shadow.checked.hits == 40
    assert 8 < shadow.checked.checks < 32
    assert engine.close(PUT_S)


def test_a_miss_is_not_checked(tiny: Model, store: DictStore) -> None:
    engine, shadow = checking(tiny, store)
    engine.generate(tiny_prompt(200, seed=9), SHORT)
    assert shadow.checked.hits == 0
    assert engine.close(PUT_S)


class Later:
    """An engine that keeps own prefixes, and a shadow check that is made when told."""

    def __init__(self, model: Model, store: DictStore, max_chunks: int) -> None:
        self.pool = BlockPool(TINY, 24)
        hook = KVStoreHook(store, family_of(TINY, WEIGHTS), self.pool, 4)
        self.shadow = ShadowedHook(
            hook, self.pool, lambda: self.engine.model, 1.0, at_once=False, max_chunks=max_chunks
        )
        self.engine = Engine(model, self.pool, self.shadow, EngineLimits())


@pytest.fixture
def later(tiny: Model, store: DictStore) -> Iterator[Later]:
    later = Later(tiny, store, max_chunks=2)
    yield later
    assert later.engine.close(PUT_S)
    assert later.pool.used_blocks() == 0


def test_a_hit_is_kept_until_it_is_checked(later: Later, store: DictStore) -> None:
    later.engine.generate(PROMPT, SHORT)
    assert later.shadow.checked.checks == 0
    assert later.shadow.max_queued_chunks == 4 + 2
    kept = [b for b in range(24) if later.pool.references(b) == 2]  # by the tree and the check
    assert len(kept) == 2
    later.shadow.check()
    assert (later.shadow.checked.checks, later.shadow.checked.chunks) == (1, 2)
    assert later.shadow.checked.mismatched_chunks == 0
    assert all(later.pool.references(block) == 1 for block in kept)
    later.shadow.check()
    assert later.shadow.checked.checks == 1


def test_other_weights_forget_the_hit_that_is_kept(later: Later) -> None:
    later.engine.generate(PROMPT, SHORT)
    later.engine.update_weights(tiny_model(seed=8), 1)
    later.shadow.check()
    assert later.shadow.checked.checks == 0


class Failing:
    """A model that cannot compute what the check asks for."""

    config = TINY
    dtype = torch.float32
    device = torch.device("cpu")

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor | None]:
        raise MemoryError("on purpose")


def test_a_check_that_fails_is_counted_and_no_more(
    tiny: Model, store: DictStore, caplog: pytest.LogCaptureFixture
) -> None:
    pool = BlockPool(TINY, 16)
    hook = KVStoreHook(store, family_of(TINY, WEIGHTS), pool, 4)
    shadow = ShadowedHook(hook, pool, Failing, 1.0)
    engine = Engine(tiny, pool, shadow, EngineLimits(own_prefixes=False))
    expected = make_engine(tiny, NO_EOS).generate(PROMPT, SHORT, keep_logits=True)
    assert same_bits(engine.generate(PROMPT, SHORT, keep_logits=True), expected)
    assert (shadow.checked.failures, shadow.checked.checks) == (1, 0)
    assert "could not be checked" in caplog.text
    assert engine.close(PUT_S)


@pytest.mark.parametrize(("fraction", "max_chunks"), [(1.5, 4), (-0.1, 4), (0.5, 0)])
def test_wrong_settings_are_refused(fraction: float, max_chunks: int, tiny: Model) -> None:
    pool = BlockPool(TINY, 4)
    hook = KVStoreHook(DictStore(), family_of(TINY, WEIGHTS), pool)
    with pytest.raises(ValueError, match="is"):
        ShadowedHook(hook, pool, lambda: tiny, fraction, max_chunks=max_chunks)
    assert hook.close(PUT_S)
