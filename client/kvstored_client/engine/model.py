"""Llama on paged KV, computed in tiles, so that a token's KV has the same bits however it came.

A matrix product's rows do not influence each other, but their last bits depend on how many rows
there are: kernels choose their order of summation by shape. So the model computes in *tiles* of
exactly TILE_TOKENS consecutive positions, aligned in the sequence; every kernel sees the same
shapes whether a token is one of a long prefill, the rest after a cache hit, or decoded alone, and
a token always sits in the same row. Rows that are not asked for are padding. Attention reads keys
up to the end of the tile's chunk, under a mask. docs/engine.md has the argument in full.

Llama: https://arxiv.org/abs/2302.13971 (RMSNorm before each sub-layer, SwiGLU, RoPE); grouped-query
attention: https://arxiv.org/abs/2305.13245.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockTable
from kvstored_client.engine.checkpoint import Checkpoint, LlamaConfig
from kvstored_client.engine.types import Segment

TILE_TOKENS = 32
"""Rows of every matrix product. Divides CHUNK_TOKENS, so that a tile lies in one chunk."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer, [out, in]. `qkv` is Q, K, V rows stacked, `gate_up` gate and up."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """Positions [start, stop) of a sequence that are computed, within the tile that holds them.

    `rotation` is cos and sin [TILE_TOKENS, 1, head_dim]; `mask` is [TILE_TOKENS, keys], 0 where a
    row may look and -inf where it may not.
    """

    start: int
    stop: int
    rotation: tuple[torch.Tensor, torch.Tensor]
    mask: torch.Tensor

    @property
    def rows(self) -> slice:
        """Rows of the tile that are computed; the others are padding."""
        first = self.start % TILE_TOKENS
        return slice(first, first + self.stop - self.start)


class LlamaModel:
    """A Llama in float32. Holds no state of any sequence."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        tensors = checkpoint.tensors
        self._embeddings = tensors["model.embed_tokens.weight"]
        self._norm = tensors["model.norm.weight"]
        self._lm_head = tensors.get("lm_head.weight", self._embeddings)
        self._layers = [_layer_weights(tensors, i) for i in range(self.config.layers)]
        self._cos, self._sin = rope_tables(self.config)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor | None]:
        """Compute the segments and place their KV in their tables. Returns, for each, the logits
        [vocab_size] after its last token, None where they are not wanted.
        """
        logits: list[torch.Tensor | None] = []
        for segment in segments:
            hidden = self._hidden(segment.token_ids, segment.start, segment.table)
            last = segment.start + len(segment.token_ids) - 1
            logits.append(self._logits(hidden[-1], last) if segment.wants_logits else None)
        return logits

    def _hidden(self, token_ids: Sequence[int], start: int, table: BlockTable) -> torch.Tensor:
        """Compute the tokens at positions from `start` on and place their KV in `table`.

        The tokens lie in one chunk, and the KV of all positions before `start` is in place.
        Returns the last layer's output, normed, [tokens, hidden_size].
        """
        tiles = self._tiles(start, start + len(token_ids))
        chunks = start // CHUNK_TOKENS + 1
        hidden = [self._embed(token_ids, start, tile) for tile in tiles]
        for i, layer in enumerate(self._layers):
            queries = []
            for tile, x in zip(tiles, hidden, strict=True):
                query, keys, values = self._project(layer, x, tile)
                table.write(i, tile.start, keys[tile.rows], values[tile.rows])
                queries.append(query)
            keys, values = table.read(i, chunks)
            for n, (tile, query) in enumerate(zip(tiles, queries, strict=True)):
                x = hidden[n]
                x = x + self._attend(query, keys, values, tile.mask) @ layer.output.T
                hidden[n] = x + self._mlp(layer, x)
        rows = [self._rms_norm(x, self._norm)[t.rows] for t, x in zip(tiles, hidden, strict=True)]
        return torch.cat(rows)

    def _logits(self, hidden: torch.Tensor, position: int) -> torch.Tensor:
        """Logits [vocab_size] of one row [hidden_size] of `_hidden`'s result."""
        tile = torch.zeros(TILE_TOKENS, self.config.hidden_size)
        row = position % TILE_TOKENS
        tile[row] = hidden
        return (tile @ self._lm_head.T)[row]

    def _tiles(self, start: int, stop: int) -> list[Tile]:
        if start // CHUNK_TOKENS != (stop - 1) // CHUNK_TOKENS:
            raise ValueError(f"positions {start} to {stop} do not lie in one chunk")
        keys = torch.arange((start // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
        tiles = []
        for first in range(start - start % TILE_TOKENS, stop, TILE_TOKENS):
            positions = slice(first, first + TILE_TOKENS)
            beyond = keys[None, :] > torch.arange(first, first + TILE_TOKENS)[:, None]
            tiles.append(
                Tile(
                    start=max(start, first),
                    stop=min(stop, first + TILE_TOKENS),
                    rotation=(self._cos[positions], self._sin[positions]),
                    mask=torch.zeros(beyond.shape).masked_fill_(beyond, -torch.inf),
                )
            )
        return tiles

    def _embed(self, token_ids: Sequence[int], start: int, tile: Tile) -> torch.Tensor:
        padded = torch.zeros(TILE_TOKENS, dtype=torch.long)
        padded[tile.rows] = torch.tensor(token_ids[tile.start - start : tile.stop - start])
        return functional.embedding(padded, self._embeddings)

    def _project(
        self, layer: LayerWeights, x: torch.Tensor, tile: Tile
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q [TILE_TOKENS, heads, head_dim] and K, V [TILE_TOKENS, kv_heads, head_dim], Q and K
        rotated.
        """
        config = self.config
        qkv = self._rms_norm(x, layer.attention_norm) @ layer.qkv.T
        qkv = qkv.view(TILE_TOKENS, config.heads + 2 * config.kv_heads, config.head_dim)
        rotated = rotate(qkv[:, : -config.kv_heads], *tile.rotation)
        return rotated[:, : config.heads], rotated[:, config.heads :], qkv[:, -config.kv_heads :]

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attention of Q [TILE_TOKENS, heads, head_dim] over K, V [kv_heads, keys, head_dim].

        Heads that share a KV head become further rows of the same product. Result
        [TILE_TOKENS, heads * head_dim].
        """
        config = self.config
        group = config.heads // config.kv_heads
        rows = query.transpose(0, 1).reshape(config.kv_heads, group * TILE_TOKENS, config.head_dim)
        scores = (rows @ keys.transpose(1, 2)) * config.head_dim**-0.5
        scores = scores.view(config.kv_heads, group, TILE_TOKENS, -1) + mask
        weights = torch.softmax(scores, dim=-1).view(config.kv_heads, group * TILE_TOKENS, -1)
        mixed = (weights @ values).view(config.heads, TILE_TOKENS, config.head_dim)
        return mixed.transpose(0, 1).reshape(TILE_TOKENS, -1)

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        gate_up = self._rms_norm(x, layer.mlp_norm) @ layer.gate_up.T
        gate, up = gate_up.chunk(2, dim=-1)
        return (functional.silu(gate) * up) @ layer.down.T

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm: x / rms(x) * weight over the last axis (https://arxiv.org/abs/1910.07467)."""
        mean_square = x.square().mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.config.rms_epsilon) * weight


def rope_tables(config: LlamaConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE's cos and sin, each [context_tokens, 1, head_dim] (https://arxiv.org/abs/2104.09864), of
    the angles position * theta ** (-2i / head_dim) for i < head_dim / 2, twice over.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    positions = torch.arange(config.context_tokens, dtype=torch.float32)
    angles = torch.outer(positions, frequencies).repeat(1, 2).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + head_dim / 2) of x [tokens, heads, head_dim] by their angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _layer_weights(tensors: dict[str, torch.Tensor], layer: int) -> LayerWeights:
    def weight(name: str) -> torch.Tensor:
        return tensors[f"model.layers.{layer}.{name}.weight"]

    return LayerWeights(
        attention_norm=weight("input_layernorm"),
        qkv=torch.cat([weight(f"self_attn.{part}_proj") for part in "qkv"]),
        output=weight("self_attn.o_proj"),
        mlp_norm=weight("post_attention_layernorm"),
        gate_up=torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]),
        down=weight("mlp.down_proj"),
    )
