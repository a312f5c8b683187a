"""A small random Llama, a store in memory, and comparisons of completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kvstored_client.engine.checkpoint import Checkpoint, ModelConfig, TokenizerSpec
from kvstored_client.engine.engine import Completion
from kvstored_client.engine.model import Model
from kvstored_client.identity import Prefix

TINY = ModelConfig(
    name="tiny",
    vocab_size=256,
    hidden_size=96,
    intermediate_size=160,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=16,
    rope_theta=10000.0,
    rms_epsilon=1e-5,
    context_tokens=1024,
)
NO_EOS = -1


def random_tensors(config: ModelConfig, seed: int = 7) -> dict[str, torch.Tensor]:
    """Weights under Hugging Face names, scaled so that activations stay near 1."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    tensors = {
        "model.embed_tokens.weight": torch.randn(config.vocab_size, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config.layers):
        weights = {
            "input_layernorm": torch.rand(hidden, generator=generator) + 0.5,
            "self_attn.q_proj": matrix(q, hidden),
            "self_attn.k_proj": matrix(kv, hidden),
            "self_attn.v_proj": matrix(kv, hidden),
            "self_attn.o_proj": matrix(hidden, q),
            "post_attention_layernorm": torch.rand(hidden, generator=generator) + 0.5,
            "mlp.gate_proj": matrix(inner, hidden),
            "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner),
        }
        if config.qkv_bias:
            for part, rows in (("q", q), ("k", kv), ("v", kv)):
                bias = torch.randn(rows, generator=generator)
                tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = bias
        if config.qk_norm:
            for part in "qk":
                weights[f"self_attn.{part}_norm"] = (
                    torch.rand(config.head_dim, generator=generator) + 0.5
                )
        tensors |= {f"model.layers.{layer}.{name}.weight": w for name, w in weights.items()}
    return tensors


def tiny_model(seed: int = 7) -> Model:
    tokenizer = TokenizerSpec([], [], [], NO_EOS, "")
    return Model(Checkpoint(Path("tiny"), 0, TINY, tokenizer, random_tensors(TINY, seed)))


def tiny_prompt(tokens: int, seed: int = 0) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(0, TINY.vocab_size, tokens).tolist()
    return drawn


@dataclass(frozen=True)
class Answer:
    """What the hook reads of the client's answers."""

    chunks: int = 0
    stored: int = 0
    refused: int = 0
    reason: str = ""
    eta_ms: float = 0.0
    hold: None = None

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        return {"ram": self.chunks}


class DictStore:
    """Keeps chunks in a dict: for tests of the engine's arithmetic and of the hook alone.

    `delivers` bounds how many chunks a get gives; `broken` makes every verb raise;
    `refuses`: the reason for which puts are refused.
    """

    def __init__(self) -> None:
        self.chunks: dict[bytes, NDArray[np.uint8]] = {}
        self.delivers: int | None = None
        self.broken = False
        self.refuses = ""

    @staticmethod
    def keys(prefix: Prefix) -> list[bytes]:
        packed = prefix.keys(bytes(32))
        return [packed[i : i + 32] for i in range(0, len(packed), 32)]

    def match(self, prefix: Prefix, **_: object) -> Answer:
        self._check()
        held = [key in self.chunks for key in self.keys(prefix)]
        chunks = [*held, False].index(False)
        return Answer(chunks=chunks, reason="" if chunks == len(held) else "never_stored")

    def get(
        self,
        prefix: Prefix,
        into: Sequence[NDArray[np.uint8]],
        start: int,
        stop: int,
        **_: object,
    ) -> Answer:
        self._check()
        given = stop - start if self.delivers is None else min(stop - start, self.delivers)
        for buffer in into[given:]:
            buffer[:] = 0xFF  # half-written: float32 NaN, which a mask does not hide
        for buffer, key in zip(into[:given], self.keys(prefix)[start:stop], strict=False):
            buffer[:] = self.chunks[key]
        return Answer(chunks=given)

    def put(
        self, prefix: Prefix, views: Sequence[NDArray[np.uint8]], start: int, **_: object
    ) -> Answer:
        self._check()
        if self.refuses:
            return Answer(refused=len(views), reason=self.refuses)
        new = 0
        for key, view in zip(self.keys(prefix)[start:], views, strict=False):
            new += key not in self.chunks
            self.chunks.setdefault(key, view.copy())
        return Answer(stored=new)

    def _check(self) -> None:
        if self.broken:
            raise ConnectionError("the store is broken on purpose")


def same_bits(a: Completion, b: Completion) -> bool:
    """Tokens equal, and logits equal bit for bit."""
    return (
        a.token_ids == b.token_ids
        and len(a.logits) == len(b.logits) == len(a.token_ids)
        and all(torch.equal(x, y) for x, y in zip(a.logits, b.logits, strict=True))
    )
