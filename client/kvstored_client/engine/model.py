"""Llama, Qwen2 and Qwen3 on paged KV: one step computes segments of many sequences.

A matrix product's rows do not influence each other, but their last bits depend on how many rows
there are: kernels choose their order of summation by shape. So rows of all segments are packed into
*tiles*, and every product has exactly TILE_ROWS rows, some of them padding. Attention is computed
for *sub-tiles* of a few consecutive positions, over keys up to the end of their chunk. So every
kernel sees the same shapes whether a token is one of a long prompt, the rest after a cache hit, or
decoded, alone or among others. docs/engine.md has the argument in full.

Llama: https://arxiv.org/abs/2302.13971 (RMSNorm before each sub-layer, SwiGLU, RoPE); grouped-query
attention: https://arxiv.org/abs/2305.13245; Qwen3 norms Q and K: https://arxiv.org/abs/2505.09388.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvstored_client.engine.batch import AttentionGroup, Batch, Shape, pack
from kvstored_client.engine.blocks import BlockPool
from kvstored_client.engine.config import Checkpoint, ModelConfig
from kvstored_client.engine.rope import RopeTable, rotate
from kvstored_client.engine.types import Segment

TILE_ROWS = 32
"""Rows of every matrix product with weights."""

SUBTILE_PRODUCT_ROWS = 16
"""Rows, at most, of the products in which one sub-tile attends: its positions times the Q heads
that share a KV head. Fewer waste less when one token is decoded, more are faster in prefill.
"""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer, [out, in]. `qkv` is Q, K, V rows stacked, `gate_up` gate and up."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Model:
    """A decoder in its checkpoint's dtype and on its device. Holds no state of any sequence.

    Not thread-safe: one step at a time.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        tensors = checkpoint.tensors
        self._embeddings = tensors["model.embed_tokens.weight"]
        self._norm = tensors["model.norm.weight"]
        self._lm_head = tensors.get("lm_head.weight", self._embeddings)
        self._layers = [_layer_weights(tensors, i, self.config) for i in range(self.config.layers)]
        self._rope = RopeTable(self.config, self.dtype, self.device)
        self._head_group = self.config.heads // self.config.kv_heads
        self._shape = Shape(TILE_ROWS, subtile_rows(self._head_group), self._head_group, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV."""
        return self._embeddings.dtype

    @property
    def device(self) -> torch.device:
        """Where it computes, and where its pool must be."""
        return self._embeddings.device

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor | None]:
        """Compute the segments and place their KV in their tables. Returns, for each, the logits
        after its last token, float32 [vocab_size], None where they are not wanted.

        Raises ValueError, before anything is written, for segments that cannot be computed.
        """
        if not segments:
            return []
        batch = pack(segments, self._shape)
        self._check(batch.pool)
        cos, sin = self._rope.rows(batch.positions, batch.stop)
        rotations = list(zip(_tiles(cos), _tiles(sin), strict=True))
        embedded = functional.embedding(batch.token_ids, self._embeddings)
        hidden = _tiles(embedded)
        for i, layer in enumerate(self._layers):
            projected = [
                self._project(layer, x, *rotation)
                for x, rotation in zip(hidden, rotations, strict=True)
            ]
            query, keys, values = (torch.cat(parts) for parts in zip(*projected, strict=True))
            self._write(i, batch, keys, values)
            mixed = _tiles(self._attend(i, batch, query))
            for n, x in enumerate(hidden):
                x = x + functional.linear(mixed[n], layer.output)
                hidden[n] = x + self._mlp(layer, x)
        logits: list[torch.Tensor | None] = [None] * len(segments)
        for segment, row in zip(batch.asking, self._logits(hidden, batch.wanted), strict=True):
            logits[segment] = row
        return logits

    def _check(self, pool: BlockPool) -> None:
        if (pool.kv.dtype, pool.kv.device) != (self.dtype, self.device):
            raise ValueError(
                f"the pool holds {pool.kv.dtype} on {pool.kv.device}, the model computes "
                f"{self.dtype} on {self.device}; make the pool with the model's"
            )

    def _project(
        self, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q [TILE_ROWS, heads, head_dim] and K, V [TILE_ROWS, kv_heads, head_dim], Q and K
        rotated.
        """
        config = self.config
        qkv = functional.linear(self._rms_norm(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(TILE_ROWS, config.heads + 2 * config.kv_heads, config.head_dim)
        heads = [config.heads, config.kv_heads, config.kv_heads]
        query, keys, values = torch.split(qkv, heads, dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._rms_norm(query, layer.query_norm)
            keys = self._rms_norm(keys, layer.key_norm)
        return rotate(query, cos, sin), rotate(keys, cos, sin), values

    def _write(self, layer: int, batch: Batch, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Place K and V of the batch's tokens; padding goes nowhere."""
        kv = batch.pool.kv[:, layer]
        kv[:, 0].index_put_((batch.block, batch.slot), keys[: batch.rows])
        kv[:, 1].index_put_((batch.block, batch.slot), values[: batch.rows])

    def _attend(self, layer: int, batch: Batch, query: torch.Tensor) -> torch.Tensor:
        """Attention of Q [rows, heads, head_dim] over what is in the pool. Result
        [rows, heads * head_dim], 0 in rows that are padding.
        """
        config, size = self.config, self._shape.subtile_rows
        shape = (batch.subtiles, size, config.kv_heads, self._head_group, config.head_dim)
        places = query.new_zeros(batch.subtiles * size, config.heads, config.head_dim)
        places.index_copy_(0, batch.place, query[: batch.rows])
        # Heads that share a KV head become further rows of the same product.
        stacked = places.view(shape).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mixed = torch.empty_like(stacked)
        for group in batch.groups:
            mixed[group.first : group.last] = self._attend_group(
                layer, batch.pool, group, stacked[group.first : group.last]
            )
        unstacked = (batch.subtiles, config.kv_heads, self._head_group, size, config.head_dim)
        rows = mixed.view(unstacked).permute(0, 3, 1, 2, 4)
        rows = rows.reshape(batch.subtiles * size, config.heads * config.head_dim)
        out = query.new_zeros(query.shape[0], rows.shape[1])
        out[: batch.rows] = rows.index_select(0, batch.place)
        return out

    def _attend_group(
        self, layer: int, pool: BlockPool, group: AttentionGroup, query: torch.Tensor
    ) -> torch.Tensor:
        """Attention of Q [sub-tiles, kv_heads, rows, head_dim] over one group's blocks."""
        tables = group.blocks.shape[0]
        index = group.blocks.flatten()

        def gather(which: int) -> torch.Tensor:
            read = pool.kv[:, layer, which].index_select(0, index)
            read = read.view(tables, -1, self.config.kv_heads, self.config.head_dim)
            return read.transpose(1, 2).expand(len(query), -1, -1, -1)

        return functional.scaled_dot_product_attention(
            query, gather(0), gather(1), attn_mask=group.bias
        )

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        gate_up = functional.linear(self._rms_norm(x, layer.mlp_norm), layer.gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, layer.down)

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm: x / rms(x) * weight over the last axis (https://arxiv.org/abs/1910.07467), in
        float32, as the checkpoints were trained.
        """
        exact = x.float()
        mean_square = exact.square().mean(dim=-1, keepdim=True)
        return (exact * torch.rsqrt(mean_square + self.config.rms_epsilon)).to(x.dtype) * weight

    def _logits(self, hidden: Sequence[torch.Tensor], wanted: torch.Tensor) -> list[torch.Tensor]:
        """Logits of the wanted rows of the last layer's output, float32 [vocab_size] each."""
        if not len(wanted):
            return []
        tiles = -(-len(wanted) // TILE_ROWS)
        rows = hidden[0].new_zeros(tiles * TILE_ROWS, self.config.hidden_size)
        rows[: len(wanted)] = torch.cat(list(hidden)).index_select(0, wanted)
        logits = []
        for n, tile in enumerate(_tiles(rows)):
            values = functional.linear(self._rms_norm(tile, self._norm), self._lm_head)
            # Each a copy of its own: a row that is kept should not keep its whole tile.
            asked = values[: len(wanted) - n * TILE_ROWS]
            logits += [row.to(torch.float32, copy=True) for row in asked]
        return logits


def subtile_rows(head_group: int) -> int:
    """Positions of a sub-tile: the power of two, up to the bound on its products' rows."""
    size = 1
    while 2 * size * head_group <= SUBTILE_PRODUCT_ROWS:
        size *= 2
    return size


def _tiles(rows: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.split(rows, TILE_ROWS))


def _layer_weights(
    tensors: dict[str, torch.Tensor], layer: int, config: ModelConfig
) -> LayerWeights:
    def tensor(name: str) -> torch.Tensor:
        return tensors[f"model.layers.{layer}.{name}"]

    def stacked(kind: str) -> torch.Tensor:
        return torch.cat([tensor(f"self_attn.{part}_proj.{kind}") for part in "qkv"])

    gate_up = [tensor("mlp.gate_proj.weight"), tensor("mlp.up_proj.weight")]
    return LayerWeights(
        attention_norm=tensor("input_layernorm.weight"),
        qkv=stacked("weight"),
        qkv_bias=stacked("bias") if config.qkv_bias else None,
        query_norm=tensor("self_attn.q_norm.weight") if config.qk_norm else None,
        key_norm=tensor("self_attn.k_norm.weight") if config.qk_norm else None,
        output=tensor("self_attn.o_proj.weight"),
        mlp_norm=tensor("post_attention_layernorm.weight"),
        gate_up=torch.cat(gate_up),
        down=tensor("mlp.down_proj.weight"),
    )
