"""Paged KV: a pool of blocks, and the table of blocks that one sequence reads and writes.

One block holds the KV of CHUNK_TOKENS tokens over all layers as one contiguous piece of memory,
[layer, 2 (K, V), token, kv_head, head_dim]. So a block is exactly one object of kvstored: in main
memory it is put and got in place, without a copy.

vLLM's paper has the idea of paging: https://arxiv.org/abs/2309.06180.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

CHUNK_TOKENS = 64
"""Tokens in a block, and in a chunk of kvstored."""


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than a sequence needs."""


class KVShape(Protocol):
    """What a pool reads of a model's config."""

    @property
    def layers(self) -> int:
        """Layers, each with KV of its own."""

    @property
    def kv_heads(self) -> int:
        """Heads of K and of V."""

    @property
    def head_dim(self) -> int:
        """Elements of one head."""


class BlockPool:
    """Fixed number of blocks, each counted: a sequence holds one reference to every block it uses,
    the prefix tree one to every block it keeps, and a put under way one more. Thread-safe, because
    puts and loads end on threads of their own.
    """

    def __init__(
        self,
        config: KVShape,
        blocks: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises MemoryError where there is no room for them."""
        shape = (blocks, config.layers, 2, CHUNK_TOKENS, config.kv_heads, config.head_dim)
        # Zeroed, not empty: attention reads rows of a block beyond what was written, under a mask
        # that gives them weight 0, and 0 times NaN would be NaN. It also touches every page now.
        try:
            self.kv = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            needed_mib = (math.prod(shape) * dtype.itemsize) >> 20
            raise MemoryError(
                f"{blocks} KV blocks need {needed_mib} MiB, more than {device} gives; take fewer"
            ) from error
        self.blocks = blocks
        self.block_bytes = self.kv[0].nbytes
        self._bytes = self.kv.view(blocks, -1).view(torch.uint8)
        self._lock = threading.Lock()
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks

    @property
    def in_main_memory(self) -> bool:
        """Whether `view` gives blocks in place; on an accelerator they are copied out and in."""
        return self.kv.device.type == "cpu"

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

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block, which must be in use."""
        with self._lock:
            for block in blocks:
                if self._references[block] == 0:
                    raise ValueError(f"block {block} is free and cannot be held")
                self._references[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """Give back a reference to each block; a block without references is free."""
        with self._lock:
            for block in blocks:
                if self._references[block] == 0:
                    raise ValueError(f"block {block} was given back once too often")
                self._references[block] -= 1
                if self._references[block] == 0:
                    self._free.append(block)

    def references(self, block: int) -> int:
        """How many hold the block."""
        with self._lock:
            return self._references[block]

    def free_blocks(self) -> int:
        """Number of blocks without references."""
        with self._lock:
            return len(self._free)

    def used_blocks(self) -> int:
        """Number of blocks with references; with `free_blocks` it adds up to `blocks`."""
        with self._lock:
            return sum(1 for count in self._references if count)

    def view(self, block: int) -> NDArray[np.uint8]:
        """The block's memory as bytes [block_bytes], writable, not copied. Raises TypeError where
        the pool is not in main memory.
        """
        view: NDArray[np.uint8] = self._bytes[block].numpy()
        return view

    def copy_out(self, block: int) -> NDArray[np.uint8]:
        """A copy of the block's bytes [block_bytes] in main memory, wherever the pool is."""
        copied: NDArray[np.uint8] = self._bytes[block].to("cpu", copy=True).numpy()
        return copied

    def copy_in(self, block: int, data: NDArray[np.uint8]) -> None:
        """Write a block's bytes [block_bytes] from main memory, wherever the pool is."""
        self._bytes[block].copy_(torch.from_numpy(data))

    def zero(self, blocks: Sequence[int]) -> None:
        """Zero blocks that hold a load that came to nothing: its bytes may read as NaN."""
        for block in blocks:
            self.kv[block].zero_()


class BlockTable:
    """The blocks of one sequence, in order: token `p` lives in block `p // CHUNK_TOKENS`, slot
    `p % CHUNK_TOKENS`. The table owns one reference to each.

    Blocks before `sealed` are shared, with the prefix tree or with what was loaded from the store,
    and are never written.
    """

    def __init__(self, pool: BlockPool, tokens: int = 0) -> None:
        """Take blocks for `tokens` tokens. Raises OutOfBlocks."""
        self.pool = pool
        self.blocks = pool.take(-(-tokens // CHUNK_TOKENS))
        self.sealed = 0
        self._index: torch.Tensor | None = None

    @property
    def index(self) -> torch.Tensor:
        """The blocks' numbers, int64 [blocks], where the pool is. To be read only."""
        if self._index is None:
            self._index = torch.tensor(self.blocks, dtype=torch.long, device=self.pool.kv.device)
        return self._index

    @property
    def room_tokens(self) -> int:
        """Tokens the blocks have room for."""
        return len(self.blocks) * CHUNK_TOKENS

    def append(self, blocks: Sequence[int]) -> None:
        """Add blocks at the end; their references are the table's from now on."""
        self.blocks.extend(blocks)
        self._index = None

    def replace(self, chunk: int, block: int) -> None:
        """Let another block stand for the one of `chunk`, with the reference that comes with it.
        The former's is given back.
        """
        self.pool.drop([self.blocks[chunk]])
        self.blocks[chunk] = block
        self._index = None

    def seal(self, chunks: int) -> None:
        """The first `chunks` blocks are whole and shared: writing to them is an error."""
        self.sealed = max(self.sealed, chunks)

    def unseal_last(self, copy: int) -> None:
        """Replace the last sealed block by a private copy of it, in the block `copy`, so that it
        can be written. Raises ValueError when no block is sealed.
        """
        if self.sealed == 0:
            raise ValueError("there is no sealed block to copy")
        i = self.sealed - 1
        self.pool.kv[copy].copy_(self.pool.kv[self.blocks[i]])
        self.replace(i, copy)
        self.sealed = i

    def clear(self, first: int, last: int) -> None:
        """Zero blocks [first, last), which hold a load that came to nothing."""
        self.pool.zero(self.blocks[first:last])

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Place K and V [tokens, kv_heads, head_dim] of the tokens from position `start` on, which
        all lie in one block.
        """
        chunk, slot = divmod(start, CHUNK_TOKENS)
        if chunk < self.sealed:
            raise ValueError(f"block {chunk} is shared and must not be written")
        rows = slice(slot, slot + keys.shape[0])
        self.pool.kv[self.blocks[chunk], layer, 0, rows] = keys
        self.pool.kv[self.blocks[chunk], layer, 1, rows] = values

    def read(self, layer: int, chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first `chunks` blocks, each [kv_heads, chunks * CHUNK_TOKENS, head_dim],
        rows not written yet included.
        """
        kv = self.pool.kv
        index = self.index[:chunks]
        shape = (chunks * CHUNK_TOKENS, kv.shape[4], kv.shape[5])
        keys = kv[:, layer, 0].index_select(0, index).view(shape)
        values = kv[:, layer, 1].index_select(0, index).view(shape)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def release(self) -> None:
        """Give the sequence's references back. The table is not used afterwards. Idempotent."""
        blocks, self.blocks = self.blocks, []
        self.sealed = 0
        self._index = None
        self.pool.drop(blocks)
