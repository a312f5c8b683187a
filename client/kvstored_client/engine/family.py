"""The family of this engine's KV: everything that decides what a block's bytes mean."""

from __future__ import annotations

import torch

from kvstored_client.engine.blocks import CHUNK_TOKENS
from kvstored_client.engine.config import ModelConfig
from kvstored_client.engine.rope import position_encoding
from kvstored_client.identity import KVFamily, KVPart

ENGINE_FORMAT = "kvstored-engine/2"
"""Raised when the same weights and tokens come to give other bytes."""


def family_of(
    config: ModelConfig,
    weights: str,
    weights_epoch: int = 0,
    dtype: torch.dtype = torch.float32,
) -> KVFamily:
    """The family of one model's KV. `weights`: what `fingerprint.weights_fingerprint` says."""
    shape = f"{config.layers},2,{CHUNK_TOKENS},{config.kv_heads},{config.head_dim}"
    elements = config.layers * 2 * CHUNK_TOKENS * config.kv_heads * config.head_dim
    return KVFamily(
        model=config.name,
        weights=weights,
        kv_dtype=str(dtype).removeprefix("torch."),
        chunk_tokens=CHUNK_TOKENS,
        parts=(KVPart("kv", nbytes=elements * dtype.itemsize, layers=(0, config.layers)),),
        weights_epoch=weights_epoch,
        position_encoding=position_encoding(config),
        memory_order=f"layer,kv,token,head,dim={shape}:little-endian",
        engine_format=ENGINE_FORMAT,
    )
