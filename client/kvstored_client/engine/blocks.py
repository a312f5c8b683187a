"""Paged KV: a pool of blocks, and the table of blocks that one sequence reads and writes.

One block holds the KV of CHUNK_TOKENS tokens over all layers as one contiguous piece of memory,
[layer, 2 (K, V), token, kv_head, head_dim]. So a block is exactly one object of kvstored: it is
put and got in place, without a copy.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray

from kvstored_client.engine.checkpoint import LlamaConfig

CHUNK_TOKENS = 64
"""Tokens in a block, and in a chunk of kvstored."""


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than a sequence needs."""


class BlockPool:
    """Fixed number of blocks, each counted: a sequence holds one reference to every block it uses,
    and a put under way another. Thread-safe, because puts end on a thread of their own.
    """

    def __init__(self, config: LlamaConfig, blocks: int) -> None:
        shape = (blocks, config.layers, 2, CHUNK_TOKENS, config.kv_heads, config.head_dim)
        # Zeroed, not empty: attention reads rows of a block beyond what was written, under a mask
        # that gives them weight 0, and 0 times NaN would be NaN. It also touches every page now.
        self.kv = torch.zeros(shape, dtype=torch.float32)
        self.blocks = blocks
        self.block_bytes = self.kv[0].nbytes
        self._bytes: NDArray[np.uint8] = self.kv.view(blocks, -1).view(torch.uint8).numpy()
        self._lock = threading.Lock()
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks, with one reference each. Raises OutOfBlocks, taking none."""
        with self._lock:
            if count > len(self._free):
                raise OutOfBlocks(
                    f"{count} blocks of {CHUNK_TOKENS} tokens wanted, {len(self._free)} of "
                    f"{self.blocks} free; use a shorter prompt or a larger pool"
                )
            taken = [self._free.pop() for _ in range(count)]
            for block in taken:
                self._references[block] = 1
            return taken

    def hold(self, blocks: list[int]) -> None:
        """Add a reference to each block, which must be in use."""
        with self._lock:
            for block in blocks:
                if self._references[block] == 0:
                    raise ValueError(f"block {block} is free and cannot be held")
                self._references[block] += 1

    def drop(self, blocks: list[int]) -> None:
        """Give back a reference to each block; a block without references is free."""
        with self._lock:
            for block in blocks:
                if self._references[block] == 0:
                    raise ValueError(f"block {block} was given back once too often")
                self._references[block] -= 1
                if self._references[block] == 0:
                    self._free.append(block)

    def free_blocks(self) -> int:
        """Number of blocks without references."""
        with self._lock:
            return len(self._free)

    def used_blocks(self) -> int:
        """Number of blocks with references; with `free_blocks` it adds up to `blocks`."""
        with self._lock:
            return sum(1 for count in self._references if count)

    def view(self, block: int) -> NDArray[np.uint8]:
        """The block's memory as bytes [block_bytes], writable, not copied."""
        view: NDArray[np.uint8] = self._bytes[block]
        return view


class BlockTable:
    """The blocks of one sequence, in order: token `p` lives in block `p // CHUNK_TOKENS`, slot
    `p % CHUNK_TOKENS`. Blocks before `sealed` were loaded from the store and are never written.
    """

    def __init__(self, pool: BlockPool, tokens: int, spare: int = 0) -> None:
        """Take blocks for `tokens` tokens and `spare` more for private copies.

        Raises OutOfBlocks.
        """
        count = -(-tokens // CHUNK_TOKENS)
        taken = pool.take(count + spare)
        self.pool = pool
        self.blocks, self._spare = taken[:count], taken[count:]
        self.sealed = 0
        self._index = torch.tensor(self.blocks)

    def unseal_last(self) -> None:
        """Replace the last sealed block by a private copy, in a spare one, so that it can be
        written. Raises ValueError when no block is sealed.
        """
        if self.sealed == 0:
            raise ValueError("there is no sealed block to copy")
        i = self.sealed - 1
        copy = self._spare.pop()
        self.pool.kv[copy].copy_(self.pool.kv[self.blocks[i]])
        self.pool.drop([self.blocks[i]])
        self.blocks[i] = copy
        self._index[i] = copy
        self.sealed = i

    def clear(self, first: int, last: int) -> None:
        """Zero blocks [first, last), which hold a load that came to nothing."""
        for block in self.blocks[first:last]:
            self.pool.kv[block].zero_()

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Place K and V [tokens, kv_heads, head_dim] of the tokens from position `start` on, which
        all lie in one block.
        """
        chunk, slot = divmod(start, CHUNK_TOKENS)
        if chunk < self.sealed:
            raise ValueError(f"block {chunk} was loaded and must not be written")
        rows = slice(slot, slot + keys.shape[0])
        self.pool.kv[self.blocks[chunk], layer, 0, rows] = keys
        self.pool.kv[self.blocks[chunk], layer, 1, rows] = values

    def read(self, layer: int, chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first `chunks` blocks, each [kv_heads, chunks * CHUNK_TOKENS, head_dim],
        rows not written yet included.
        """
        kv = self.pool.kv
        index = self._index[:chunks]
        shape = (chunks * CHUNK_TOKENS, kv.shape[4], kv.shape[5])
        keys = kv[:, layer, 0].index_select(0, index).view(shape)
        values = kv[:, layer, 1].index_select(0, index).view(shape)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def release(self) -> None:
        """Give the sequence's references back. The table is not used afterwards. Idempotent."""
        blocks, self.blocks, self._spare = self.blocks + self._spare, [], []
        self.pool.drop(blocks)
