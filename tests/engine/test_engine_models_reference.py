"""Small random Llama, Qwen2 and Qwen3 against transformers, in one unsplit pass.

Bounds, stated beforehand (docs/engine.md): in float32 logits agree within 1e-4 of the largest; in
bfloat16 and float16 both are compared with transformers in float32 on the same rounded weights, and
this engine's error is at most twice transformers' own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_hf import FAMILIES, ROPES, VOCAB, reload, save_random

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool, BlockTable
from kvstored_client.engine.checkpoint import load
from kvstored_client.engine.model import Model
from kvstored_client.engine.rope import inverse_frequencies, position_encoding
from kvstored_client.engine.types import Segment

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TOKENS = 200
RELATIVE_BOUND = 1e-4


def tokens(count: int = TOKENS) -> list[int]:
    drawn: list[int] = torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(5))
    return [int(token) for token in drawn]


def every_logit(model: Model, prompt: list[int]) -> torch.Tensor:
    """Logits after every token [tokens, vocab], chunk by chunk and then one by one."""
    table = BlockTable(BlockPool(model.config, 4, model.dtype, model.device), len(prompt))
    rows = []
    for a in range(0, len(prompt), CHUNK_TOKENS):
        whole = prompt[a : a + CHUNK_TOKENS]
        rows += model.forward(
            [Segment(table, [t], a + i, wants_logits=True) for i, t in enumerate(whole)]
        )
    return torch.stack([row.cpu() for row in rows if row is not None])


def reference(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt]), use_cache=False).logits[0]
    return logits.float()


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(
    tmp_path: Path, family: str, rope: str, device: str
) -> None:
    theirs = save_random(tmp_path, family, rope)
    ours = Model(load(tmp_path, device=device))
    expected = reference(theirs, tokens())
    assert error(every_logit(ours, tokens()), expected) <= RELATIVE_BOUND
    frequencies = theirs.model.rotary_emb.inv_freq
    assert torch.allclose(inverse_frequencies(ours.config), frequencies, rtol=1e-6, atol=0)
    factor = ours.config.rope_scaling.attention_factor
    assert factor == pytest.approx(theirs.model.rotary_emb.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_as_exact_as_transformers(
    tmp_path: Path, family: str, dtype: str
) -> None:
    half = getattr(torch, dtype)
    theirs = save_random(tmp_path, family, dtype=half)
    loaded = load(tmp_path)
    assert {tensor.dtype for tensor in loaded.tensors.values()} == {half}
    ours = Model(loaded)
    rough = reference(theirs, tokens())
    exact = reference(reload(tmp_path, family, torch.float32), tokens())
    assert 0 < error(every_logit(ours, tokens()), exact) <= 2 * error(rough, exact)
    # Converted on loading: the weights are the rounded ones, the arithmetic is not.
    full = Model(load(tmp_path, dtype="float32"))
    assert error(every_logit(full, tokens()), exact) <= RELATIVE_BOUND


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_embeddings_and_one_kv_head(tmp_path: Path, family: str) -> None:
    theirs = save_random(tmp_path, family, tie_word_embeddings=True, num_key_value_heads=1)
    loaded = load(tmp_path)
    assert "lm_head.weight" not in loaded.tensors
    assert error(every_logit(Model(loaded), tokens()), reference(theirs, tokens())) < RELATIVE_BOUND


def test_the_family_names_everything_that_turns_keys(tmp_path: Path) -> None:
    """Two models whose K would differ never share a position encoding."""
    seen: dict[str, list[float]] = {}
    for rope in ROPES:
        save_random(tmp_path / rope, "llama", rope)
        config = load(tmp_path / rope).config
        seen[position_encoding(config)] = inverse_frequencies(config).tolist()
    assert len(seen) == len(ROPES)
    assert "rope:default:halves theta=10000.0 dim=16 applied-to-k" in seen
