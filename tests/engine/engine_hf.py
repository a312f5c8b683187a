"""Small random Llama, Qwen2 and Qwen3 models, made and saved by transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that transformers imports
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

ROPES: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "theta": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn_tuned": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 0.9,
        "truncate": False,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
}

VOCAB = 300


def save_random(
    folder: Path,
    family: str,
    rope: str = "default",
    dtype: torch.dtype = torch.float32,
    shard_bytes: int | None = None,
    **changes: object,
) -> Any:
    """Make a model of the family and save it in `folder`. Returns transformers' model."""
    kind, cls = FAMILIES[family]
    settings: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24 if family == "qwen3" else 16,
        "max_position_embeddings": 512,
        "rope_parameters": dict(ROPES[rope]),
        "initializer_range": 0.2,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    torch.manual_seed(len(family + rope))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = cls(kind(**{**settings, **changes})).eval()
        for name, weight in model.named_parameters():  # norms and biases are 1 and 0 otherwise
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.uniform_(weight, 0.5, 1.5)
        model = model.to(dtype)
        sharding = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
        model.save_pretrained(folder, **sharding)
    return reload(folder, family, dtype)


def reload(folder: Path, family: str, dtype: torch.dtype) -> Any:
    """The saved model as transformers runs it in `dtype`; RoPE's frequencies are float32 then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FAMILIES[family][1].from_pretrained(folder, dtype=dtype).eval()


def change_json(file: Path, **changes: object) -> None:
    """Rewrite some fields; None takes a field away."""
    fields = json.loads(file.read_text()) if file.exists() else {}
    fields.update(changes)
    file.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
