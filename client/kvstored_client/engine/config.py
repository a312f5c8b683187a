"""What a checkpoint says: a model's shape and constants, its tokenizer, its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

RopeKind = Literal["default", "linear", "llama3", "yarn"]


MOST_LAYERS = 10_000
"""More are a damaged number, of which not even the tensors' names are worth making."""


class CheckpointError(ValueError):
    """A checkpoint that is absent, or of a kind this engine does not run rightly."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How RoPE's frequencies are stretched beyond the context a model was first trained on.

    `original_context_tokens` is that context. `low_frequency_factor` and `high_frequency_factor`
    are llama3's; `fast_turns`, `slow_turns` (turns within that context between which frequencies
    are blended) and `whole_dimensions` are yarn's. `attention_factor` multiplies cos and sin.
    """

    kind: RopeKind = "default"
    factor: float = 1.0
    original_context_tokens: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    whole_dimensions: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a Llama, Qwen2 or Qwen3 model. Counts are counts.

    `rope_theta` is the RoPE base. `qkv_bias`: the projections to Q, K and V have biases (Qwen2);
    `qk_norm`: Q and K are normed head by head before they are rotated (Qwen3).
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rms_epsilon: float
    context_tokens: int
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.layers > MOST_LAYERS:
            raise CheckpointError(f"{self.layers} layers are more than any model has")
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise CheckpointError(f"{self.heads} heads cannot share {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise CheckpointError(f"RoPE turns pairs; a head of {self.head_dim} has none")


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """What a GGUF file says of its tokenizer. Ids index `tokens`; `special_ids` are control tokens
    that never arise from merging ordinary text. `pre` names the way a text is cut before merging.
    """

    tokens: list[str]
    merges: list[str]
    special_ids: list[int]
    eos_id: int
    chat_template: str
    pre: str = "smollm"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a Hugging Face directory says of its tokenizer.

    `tokenizer_json` is read by `tokenizers`; `chat_template` is "" where there is none.
    `special_tokens` are the names that templates use ("bos_token") and what they stand for. A
    token of `eos_ids` ends an answer.
    """

    tokenizer_json: Path
    chat_template: str
    special_tokens: Mapping[str, str]
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint. `path` is a file, of which `header_bytes` come before the data, or a
    directory.

    `tensors` are of one dtype and on one device, contiguous, row-major [out, in], named as in
    `transformers`' LlamaForCausalLM. Without "lm_head.weight" the embeddings are tied.
    """

    path: Path
    header_bytes: int
    config: ModelConfig
    tokenizer: TokenizerSpec | TokenizerFiles
    tensors: dict[str, torch.Tensor]


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model, "lm_head.weight" included."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    rows = {"q": config.heads * dim, "k": config.kv_heads * dim, "v": config.kv_heads * dim}
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, rows["q"]),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for part, out in rows.items():
        of_layer[f"self_attn.{part}_proj.weight"] = (out, hidden)
        if config.qkv_bias:
            of_layer[f"self_attn.{part}_proj.bias"] = (out,)
    if config.qk_norm:
        of_layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }
    for layer in range(config.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes
