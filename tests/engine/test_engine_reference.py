"""Against transformers' Llama on the same weights, in one unsplit pass. Bounds: docs/engine.md."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from engine_support import DictStore

from kvstored_client.engine.blocks import BlockPool, BlockTable
from kvstored_client.engine.checkpoint import Checkpoint
from kvstored_client.engine.engine import Engine, make_engine
from kvstored_client.engine.model import Model
from kvstored_client.engine.sampler import Sampling
from kvstored_client.engine.tokenizer import Tokenizer
from kvstored_client.engine.types import Segment

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that transformers imports
    from transformers import LlamaConfig, LlamaForCausalLM

LOGIT_TOLERANCE = 1e-3
MARGIN_BOUND = 2e-3

TEXT = (
    "A lighthouse keeper wrote in the log each night: the wind, the height of the sea, the ships "
    "that passed and the oil that was burned. In the spring of 1884 the entries stop for 9 days. "
    "When they begin again they are in another hand, and nothing is said of what happened. "
)


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> LlamaForCausalLM:
    config = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=config.rms_epsilon,
            max_position_embeddings=config.context_tokens,
            tie_word_embeddings=True,
        )
    ).eval()
    unplaced = model.load_state_dict(checkpoint.tensors, strict=False)
    assert unplaced.unexpected_keys == []
    assert unplaced.missing_keys == ["lm_head.weight"]  # tied to the embeddings
    return model


def reference_logits(reference: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def close(logits: list[torch.Tensor], expected: torch.Tensor) -> bool:
    return float((torch.stack(logits) - expected).abs().max()) <= LOGIT_TOLERANCE


def agrees(token_ids: list[int], expected: torch.Tensor) -> bool:
    """Greedy tokens are the reference's, up to a first place where its top two are close."""
    for token, row in zip(token_ids, expected, strict=True):
        best, second = torch.topk(row, 2).values.tolist()
        if token != int(row.argmax()):
            return best - second <= MARGIN_BOUND
    return True


def test_positions_all_over_a_prompt_match(
    model: Model, tokenizer: Tokenizer, reference: LlamaForCausalLM
) -> None:
    tokens = tokenizer.encode(TEXT * 2)[:72]
    table = BlockTable(BlockPool(model.config, 2), len(tokens))
    cuts = [Segment(table, tokens[i : i + 8], i, wants_logits=True) for i in range(0, 72, 8)]
    logits = [row for row in model.forward(cuts) if row is not None]
    assert len(logits) == 9
    assert close(logits, reference_logits(reference, tokens)[7::8])


def test_answers_match_with_and_without_hits_and_not_with_a_corrupt_chunk(
    model: Model, tokenizer: Tokenizer, reference: LlamaForCausalLM
) -> None:
    prompt = tokenizer.encode(TEXT * 3)[:150]
    sampling = Sampling(max_tokens=8, ignore_eos=True)
    store = DictStore()
    engine = make_engine(
        model, tokenizer.eos_id, store=store, weights="cd" * 32, context_tokens=512
    )
    cold = engine.generate(prompt, sampling, keep_logits=True)
    assert engine.hook is not None
    assert engine.hook.drain(60)
    warm = engine.generate(prompt, sampling, keep_logits=True)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 128)
    expected = reference_logits(reference, prompt + cold.token_ids)[len(prompt) - 1 : -1]
    for completion in (cold, warm):
        assert close(completion.logits, expected)
        assert agrees(completion.token_ids, expected)
    assert not close(logits_after_corruption(engine, store, prompt), expected)


def logits_after_corruption(
    engine: Engine, store: DictStore, prompt: list[int]
) -> list[torch.Tensor]:
    """Logits over the same tokens when one loaded chunk has the bytes of another."""
    assert engine.hook is not None
    first, second = store.keys(engine.hook.family.prefix(prompt))[:2]
    store.chunks[second] = np.array(store.chunks[first])
    got = engine.generate(prompt, Sampling(max_tokens=8, ignore_eos=True), keep_logits=True)
    assert got.cached_tokens == 128
    return got.logits


def test_the_model_knows_the_capital_of_france(model: Model, tokenizer: Tokenizer) -> None:
    """What the reference cannot tell, for it has the same tensors: that they are in right order."""
    prompt = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    answer = make_engine(model, tokenizer.eos_id, context_tokens=128).generate(
        prompt, Sampling(max_tokens=12)
    )
    assert tokenizer.decode(answer.token_ids) == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
