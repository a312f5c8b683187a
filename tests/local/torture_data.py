"""What the torture of the same-node path stores: every byte follows from a number."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvstored_client import KVFamily, KVPart, Prefix
from kvstored_client.objects import chunk_run
from kvstored_client.proto import kvstore_pb2 as pb

OBJECT_BYTES = 80 << 10
"""A whole number of pages, and more than an NVMe volume keeps in its small index."""
CHUNK_TOKENS = 64
FAMILY = KVFamily("torture", "w", "float32", parts=[KVPart("kv", OBJECT_BYTES)])


@lru_cache(maxsize=64)
def prefix_of(number: int, chunks: int) -> Prefix:
    """A prefix of its own for each number; fewer chunks are a part of more."""
    first = [number >> 16, number & 0xFFFF]
    return FAMILY.prefix([*first, *range(chunks * CHUNK_TOKENS - len(first))])


def content(number: int, chunk: int) -> NDArray[np.uint8]:
    """Bytes of one chunk."""
    raw = np.random.default_rng((number, chunk)).bytes(OBJECT_BYTES)
    return np.frombuffer(raw, np.uint8)


@lru_cache(maxsize=16)
def contents(number: int, chunks: int) -> NDArray[np.uint8]:
    """Bytes of a prefix, shape [chunks, OBJECT_BYTES]."""
    return np.stack([content(number, chunk) for chunk in range(chunks)])


def run_of(number: int, chunks: int, salt: bytes) -> pb.ChunkRun:
    """The same prefix for a client that speaks the protocol itself."""
    prefix = prefix_of(number, chunks)
    return chunk_run(prefix, 0, chunks, "default", prefix.keys(salt), ["kv"])
