"""With the store on or off, logits are equal bit for bit; decoded KV equals prefilled KV."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_support import NO_EOS, DictStore, same_bits, tiny_model, tiny_prompt

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool, BlockTable
from kvstored_client.engine.engine import Engine, make_engine
from kvstored_client.engine.model import Model
from kvstored_client.engine.sampler import Sampling
from kvstored_client.engine.tokenizer import Tokenizer
from kvstored_client.engine.types import Segment

WEIGHTS = "ab" * 32
CASES = [(length, 0.0) for length in (1, 32, 63, 64, 65, 127, 128, 300)] + [(65, 0.8), (256, 0.8)]
GREEDY = Sampling(max_tokens=70, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny() -> Model:
    return tiny_model()


def with_store(model: Model, store: DictStore) -> Engine:
    return make_engine(model, NO_EOS, store=store, weights=WEIGHTS, context_tokens=768)


def drained(engine: Engine) -> None:
    assert engine.hook is not None
    assert engine.hook.drain(60)


@pytest.mark.parametrize(("length", "temperature"), CASES)
def test_hit_gives_the_same_bits_as_no_store(tiny: Model, length: int, temperature: float) -> None:
    prompt = tiny_prompt(length)
    sampling = Sampling(max_tokens=70, temperature=temperature, seed=3, ignore_eos=True)
    plain = make_engine(tiny, NO_EOS, context_tokens=768)
    cached = with_store(tiny, DictStore())
    expected = plain.generate(prompt, sampling, keep_logits=True)
    for hit_chunks in (0, length // CHUNK_TOKENS):
        got = cached.generate(prompt, sampling, keep_logits=True)
        drained(cached)
        assert got.cached_tokens == min(hit_chunks * CHUNK_TOKENS, length - 1)
        assert same_bits(got, expected)
    # The next turn: its prefix holds tokens that were decoded, and stored as such.
    turn = [*prompt, *expected.token_ids, *tiny_prompt(20, seed=1)]
    got = cached.generate(turn, sampling, keep_logits=True)
    assert got.cached_tokens == (length + 69) // CHUNK_TOKENS * CHUNK_TOKENS
    assert same_bits(got, plain.generate(turn, sampling, keep_logits=True))
    assert cached.close()
    assert cached.pool.used_blocks() == plain.pool.used_blocks() == 0


def test_hit_in_part_gives_the_same_bits(tiny: Model) -> None:
    store = DictStore()
    engine = with_store(tiny, store)
    prompt = tiny_prompt(300)
    expected = make_engine(tiny, NO_EOS).generate(prompt, GREEDY, keep_logits=True)
    engine.generate(prompt, GREEDY)
    drained(engine)
    for delivered in (0, 1, 3):
        store.delivers = delivered
        got = engine.generate(prompt, GREEDY, keep_logits=True)
        assert got.cached_tokens == delivered * CHUNK_TOKENS
        assert same_bits(got, expected)


def test_one_corrupt_chunk_breaks_the_equality(tiny: Model) -> None:
    store = DictStore()
    engine = with_store(tiny, store)
    prompt = tiny_prompt(200)
    expected = engine.generate(prompt, GREEDY, keep_logits=True)
    drained(engine)
    first = store.keys(engine.hook.family.prefix(prompt))[0] if engine.hook else b""
    values = store.chunks[first].view(np.float32)
    values[values.size // 2] += 0.5
    got = engine.generate(prompt, GREEDY, keep_logits=True)
    assert got.cached_tokens == 192
    assert not same_bits(got, expected)


def kv_of(table: BlockTable, tokens: int) -> torch.Tensor:
    """KV as [token, layer, 2, kv_heads, head_dim], copied."""
    blocks = table.pool.kv[torch.tensor(table.blocks)]
    return blocks.permute(0, 3, 1, 2, 4, 5).flatten(0, 1)[:tokens].clone()


def steps(model: Model, tokens: list[int], cuts: list[int]) -> torch.Tensor:
    table = BlockTable(BlockPool(model.config, 8), len(tokens))
    for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        model.forward([Segment(table, tokens[start:stop], start, wants_logits=False)])
    return kv_of(table, len(tokens))


def test_kv_does_not_depend_on_how_a_prompt_is_cut(tiny: Model) -> None:
    tokens = tiny_prompt(170)
    expected = steps(tiny, tokens, [64, 128])
    assert torch.equal(steps(tiny, tokens, list(range(1, 170))), expected)
    assert torch.equal(steps(tiny, tokens, [3, 40, 64, 65, 127, 128, 159, 160, 161]), expected)


def test_kv_of_the_real_model_is_the_same_decoded_and_prefilled(
    model: Model, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("It was the best of times, it was the worst of times. " * 6)[:80]
    prefilled = steps(model, tokens, [64])
    decoded = steps(model, tokens, [20, *range(21, 36), 64, *range(65, 80)])
    assert torch.equal(decoded, prefilled)


def test_real_model_gives_the_same_bits_with_a_hit(model: Model, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Call me Ishmael. Some years ago, never mind how long. " * 12)[:150]
    sampling = Sampling(max_tokens=4, ignore_eos=True)
    plain = make_engine(model, tokenizer.eos_id, context_tokens=512)
    cached = make_engine(
        model, tokenizer.eos_id, store=DictStore(), weights=WEIGHTS, context_tokens=512
    )
    for length, hit in ((150, 0), (150, 128), (128, 127)):
        got = cached.generate(prompt[:length], sampling, keep_logits=True)
        drained(cached)
        assert got.cached_tokens == hit
        assert same_bits(got, plain.generate(prompt[:length], sampling, keep_logits=True))
