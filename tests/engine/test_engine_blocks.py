"""The pool of blocks, the table of a sequence, and the tree of prefixes, each by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_support import TINY, tiny_prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool, BlockTable, OutOfBlocks
from kvstored_client.engine.prefix_tree import Node, PrefixTree, chunk_label


def rows(tokens: int, value: float) -> torch.Tensor:
    return torch.full((tokens, TINY.kv_heads, TINY.head_dim), value)


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 5), max_size=12))
def test_free_and_used_blocks_add_up(counts: list[int]) -> None:
    pool = BlockPool(TINY, 6)
    held: list[list[int]] = []
    for count in counts:
        if count > pool.free_blocks():
            with pytest.raises(OutOfBlocks, match=f"{count} blocks of 64 tokens wanted"):
                pool.take(count)
            pool.drop(held.pop(0))
            continue
        held.append(pool.take(count))
        assert pool.free_blocks() + pool.used_blocks() == 6
        assert pool.used_blocks() == len({block for blocks in held for block in blocks})
    for blocks in held:
        pool.drop(blocks)
    assert pool.free_blocks() == 6


def test_a_pool_that_memory_has_no_room_for_says_how_much_it_is() -> None:
    with pytest.raises(MemoryError, match=r"KV blocks need \d+ MiB, more than cpu gives"):
        BlockPool(TINY, 10**12)


def test_a_held_block_stays_in_use_until_the_last_holder_drops_it() -> None:
    pool = BlockPool(TINY, 2)
    blocks = pool.take(1)
    pool.hold(blocks)
    pool.drop(blocks)
    assert pool.used_blocks() == 1
    pool.drop(blocks)
    assert pool.used_blocks() == 0
    with pytest.raises(ValueError, match="once too often"):
        pool.drop(blocks)
    with pytest.raises(ValueError, match="is free"):
        pool.hold(blocks)


def test_a_blocks_bytes_are_its_memory() -> None:
    pool = BlockPool(TINY, 3)
    table = BlockTable(pool, 2 * CHUNK_TOKENS)
    table.write(1, CHUNK_TOKENS + 5, rows(1, 2.0), rows(1, 3.0))
    view = pool.view(table.blocks[1])
    assert view.nbytes == pool.block_bytes == 3 * 2 * 64 * 2 * 16 * 4
    assert view.view("<f4").reshape(3, 2, 64, 2, 16)[1, :, 5, 0, 0].tolist() == [2.0, 3.0]
    view[:] = 0
    keys, values = table.read(1, 2)
    assert keys.shape == (TINY.kv_heads, 2 * CHUNK_TOKENS, TINY.head_dim)
    assert not keys.any()
    assert not values.any()


def test_sealed_blocks_are_never_written() -> None:
    pool = BlockPool(TINY, 3)
    table = BlockTable(pool, 2 * CHUNK_TOKENS)
    table.write(0, CHUNK_TOKENS, rows(1, 1.0), rows(1, 1.0))
    loaded = table.blocks[1]
    with pytest.raises(ValueError, match="no sealed block"):
        table.unseal_last(pool.take(1)[0])
    table.seal(2)
    with pytest.raises(ValueError, match="block 1 is shared"):
        table.write(0, 2 * CHUNK_TOKENS - 1, rows(1, 9.0), rows(1, 9.0))
    table.unseal_last(2)
    table.write(0, 2 * CHUNK_TOKENS - 1, rows(1, 9.0), rows(1, 9.0))
    keys, _ = table.read(0, 2)
    assert keys[0, CHUNK_TOKENS].eq(1.0).all()
    assert keys[0, 2 * CHUNK_TOKENS - 1].eq(9.0).all()
    assert loaded not in table.blocks
    assert not table.pool.kv[loaded, :, :, -1].any()
    with pytest.raises(ValueError, match="block 0 is shared"):
        table.write(0, 0, rows(1, 9.0), rows(1, 9.0))


def test_blocks_go_out_and_in_as_bytes() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pool = BlockPool(TINY, 2, dtype)
        pool.kv[0] = torch.randn(pool.kv[0].shape).to(dtype)
        copied = pool.copy_out(0)
        assert copied.nbytes == pool.block_bytes == TINY.layers * 2 * 64 * 2 * 16 * dtype.itemsize
        assert np.array_equal(copied, pool.view(0))
        assert not np.shares_memory(copied, pool.view(0))
        pool.copy_in(1, copied)
        assert torch.equal(pool.kv[1], pool.kv[0])
        pool.zero([1])
        assert not pool.kv[1].any()
        assert pool.kv[0].any()


def test_another_block_can_stand_for_a_chunk() -> None:
    pool = BlockPool(TINY, 3)
    table = BlockTable(pool, 2 * CHUNK_TOKENS)
    (other,) = pool.take(1)
    first, replaced = table.blocks
    assert table.index.tolist() == [first, replaced]
    table.replace(1, other)
    assert table.index.tolist() == table.blocks == [first, other]
    assert pool.references(replaced) == 0
    table.release()
    table.release()
    assert pool.free_blocks() == 3


class Grove:
    """A tree whose prompts are strings, one letter a chunk."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(TINY, blocks)
        self.tree = PrefixTree(self.pool)

    def keep(self, prompt: str, salt: bytes = b"") -> list[int]:
        """Keep a prompt as a sequence does that ends afterwards; its blocks."""
        node = self.tree.root(salt)
        for letter in prompt:
            (block,) = self.pool.take(1)
            node = self.tree.insert(node, letter.encode(), block)
            self.pool.drop([block])
        return self.match(prompt, salt)

    def match(self, prompt: str, salt: bytes = b"") -> list[int]:
        labels = [letter.encode() for letter in prompt]
        return [node.block for node in self.tree.match(salt, labels)]

    def kept(self, prompt: str, salt: bytes = b"") -> int:
        """Chunks that are kept, without using them."""
        node: Node | None = self.tree.root(salt)
        for depth, letter in enumerate(prompt):
            node = node.children.get(letter.encode()) if node is not None else None
            if node is None:
                return depth
        return len(prompt)


def test_prompts_share_the_chunks_they_begin_with() -> None:
    grove = Grove(8)
    first = grove.keep("abc")
    assert grove.match("abcd") == first
    assert grove.match("abx") == first[:2]
    assert grove.match("bc") == []
    assert grove.match("abc", b"salt") == []
    # What is kept already is not kept twice, and the block offered for it is free again.
    assert grove.keep("abd")[:2] == first[:2]
    assert len(grove.tree) == grove.pool.used_blocks() == 4
    assert grove.keep("abc", b"salt") != first
    grove.tree.clear()
    assert grove.pool.used_blocks() == len(grove.tree) == 0
    assert grove.match("abc") == []


def test_the_least_recently_used_leaves_go_first() -> None:
    grove = Grove(9)
    for prompt in ("abc", "abd", "ex"):
        grove.keep(prompt)
    grove.match("abc")
    assert grove.tree.evict(1) == 1
    assert [grove.kept(p) for p in ("abc", "abd", "ex")] == [3, 2, 2]
    assert grove.tree.evict(2) == 2  # all of "ex": its end, then what its end was under
    assert [grove.kept(p) for p in ("abc", "abd", "ex")] == [3, 2, 0]
    assert grove.tree.evict(9) == 3
    assert grove.tree.evict(1) == 0
    assert grove.tree.evicted_blocks == 6
    assert grove.pool.free_blocks() == 9


def test_blocks_in_use_are_not_evicted_nor_those_before_them() -> None:
    grove = Grove(4)
    blocks = grove.keep("abcd")
    grove.pool.hold(blocks[:2])  # a sequence that shares them
    assert grove.tree.evictable() == 2
    assert grove.tree.evict(4) == 2
    assert grove.match("abcd") == blocks[:2]
    grove.pool.hold(blocks[1:2])  # a put under way, after the sequence has ended
    grove.pool.drop(blocks[:2])
    assert grove.tree.evict(4) == 0
    grove.pool.drop(blocks[1:2])
    assert grove.tree.evict(4) == 2


def test_a_sequence_may_begin_at_a_root_that_lost_everything() -> None:
    grove = Grove(4)
    grove.keep("a")
    old = grove.tree.root(b"")
    assert grove.tree.evict(1) == 1
    kept = grove.keep("b")
    assert grove.tree.child(old, b"b") is not None
    grove.tree.insert(old, b"c", grove.pool.take(1)[0])
    assert grove.match("b") == kept
    assert len(grove.match("c")) == 1
    assert grove.tree.evict(4) == 1  # the block of "c" is still held by who computed it


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["keep", "match", "evict"]), st.text("ab", max_size=4)),
        max_size=25,
    )
)
def test_a_kept_prompt_is_whole_and_every_block_is_accounted_for(
    steps: list[tuple[str, str]],
) -> None:
    grove = Grove(40)
    for what, prompt in steps:
        if what == "keep":
            assert len(grove.keep(prompt)) == len(prompt)
        elif what == "match":
            assert len(grove.match(prompt)) == grove.kept(prompt)
        else:
            before = len(grove.tree)
            assert grove.tree.evict(len(prompt)) == min(len(prompt), before)
        assert grove.pool.used_blocks() == len(grove.tree) == grove.tree.evictable()
        assert grove.pool.free_blocks() + grove.pool.used_blocks() == 40


def test_labels_are_the_tokens_themselves() -> None:
    tokens = tiny_prompt(200)
    labels = [chunk_label(tokens, i) for i in range(3)]
    assert b"".join(labels) == np.array(tokens[:192], dtype="<u4").tobytes()
