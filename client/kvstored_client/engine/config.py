"""What a model is: its shape and constants, whatever file they were read from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]


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
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise CheckpointError(f"{self.heads} heads cannot share {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise CheckpointError(f"RoPE turns pairs; a head of {self.head_dim} has none")
