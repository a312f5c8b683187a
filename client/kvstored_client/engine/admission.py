"""How a prompt gets its blocks: what the engine has of it, what the store has, room for the rest.

A sequence is admitted with every block its prompt needs, so only decoding can run out of them.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Literal

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool, BlockTable, OutOfBlocks
from kvstored_client.engine.prefix_tree import Node, PrefixTree
from kvstored_client.engine.sequence import ChunkKey, Sequence
from kvstored_client.engine.types import CacheUse, EngineStats, Loaded, Offer, StoreHook

Outcome = Literal["admitted", "deferred", "no room"]


class Admission:
    """Gives blocks to sequences and takes them back. For the engine's thread.

    `own_prefixes` False: nothing is kept in the tree, nor looked for.
    """

    def __init__(
        self, pool: BlockPool, hook: StoreHook | None, stats: EngineStats, *, own_prefixes: bool
    ) -> None:
        self.tree = PrefixTree(pool)
        self._pool = pool
        self._hook = hook
        self._stats = stats
        self.own_prefixes = own_prefixes
        self._loading: set[ChunkKey] = set()

    def begin(self, sequence: Sequence, spare: int) -> Outcome:
        """Give a sequence its blocks, and begin to load. It is admitted when that leaves `spare`
        blocks; deferred while another one loads the chunk that it would load first.
        """
        self._share(sequence)
        own = sequence.settled
        whole = len(sequence.tokens) // CHUNK_TOKENS
        loads = self._hook is not None and sequence.may_load and own < whole
        if loads and self.own_prefixes and sequence.key(own) in self._loading:
            self.release(sequence)
            self._stats.deferred += 1
            return "deferred"
        try:
            # The one more is for the tokens after the last whole chunk; where there are none, for
            # a private copy, in case all of the prompt is held.
            sequence.reserved = self.take(whole + 1 - own, spare)
        except OutOfBlocks:
            self.release(sequence)
            return "no room"
        sequence.asked_at_s = time.perf_counter()
        if not loads:
            self._place(sequence, Loaded())
            return "admitted"
        sequence.may_load = False
        self._load(sequence)
        return "admitted"

    def settle_load(self, sequence: Sequence) -> bool:
        """Go on with a sequence whose load is decided. False: a load that came too late keeps its
        blocks a while, and there are no others; the sequence has none any more.
        """
        if sequence.pending is None:
            raise ValueError("no load is under way")
        loaded = sequence.pending.finish()
        self._forget_load(sequence)
        try:
            self._place(sequence, loaded)
        except OutOfBlocks:
            self.release(sequence)
            return False
        return True

    def settle(self, sequence: Sequence) -> None:
        """Seal the chunks that are computed to their end, and keep them for other prompts."""
        table = sequence.table
        for chunk in range(sequence.settled, sequence.computed // CHUNK_TOKENS):
            if self.own_prefixes:
                block = table.blocks[chunk]
                sequence.node = self.tree.insert(sequence.node, sequence.label(chunk), block)
                if sequence.node.block != block:
                    # Another sequence computed the same in the meantime: one block is enough.
                    self._pool.hold([sequence.node.block])
                    table.replace(chunk, sequence.node.block)
            sequence.settled = chunk + 1
        table.seal(sequence.settled)

    def adopt(self, sequence: Sequence) -> None:
        """Use chunks that others have computed since this sequence was admitted."""
        while sequence.settled < sequence.shareable_chunks and (
            node := self.tree.child(sequence.node, sequence.label(sequence.settled))
        ):
            self._pool.hold([node.block])
            sequence.table.replace(sequence.settled, node.block)
            sequence.node = node
            sequence.settled += 1
            sequence.table.seal(sequence.settled)
            sequence.computed += CHUNK_TOKENS
            if sequence.sampled == 0:
                own = sequence.cache.own_tokens + CHUNK_TOKENS
                sequence.cache = replace(sequence.cache, own_tokens=own)

    def first_to_offer(self, sequence: Sequence) -> int:
        """The first chunk that the store has not been offered, by this sequence or another one, or
        that it did not take.
        """
        nodes, first = _chain(sequence.node), sequence.stored
        while first < len(nodes) and nodes[first].offered:
            first += 1
        return first

    def mark_offered(self, sequence: Sequence, start: int, offer: Offer) -> None:
        """Chunks from `start` to `sequence.stored` are offered, or came from the store."""
        for node in _chain(sequence.node)[start : sequence.stored]:
            node.offer = offer

    def take(self, count: int, spare: int = 0) -> list[int]:
        """Take blocks, evicting own prefixes where too few are free. Raises OutOfBlocks, taking
        none, also where less than `spare` more could be taken after that.
        """
        missing = count - self._pool.free_blocks()
        if missing + spare > 0:
            room = self.tree.evictable()
            if room < missing + spare:
                short = missing + spare - room
                raise OutOfBlocks(f"{count} and {spare} blocks wanted, {short} too many")
        if missing > 0:
            self.tree.evict(missing)
        return self._pool.take(count)

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back, ending a load. What is in the tree stays there. Idempotent."""
        if sequence.pending is not None:
            sequence.pending.cancel()
        self._forget_load(sequence)
        reserved, sequence.reserved = sequence.reserved, []
        self._pool.drop(reserved)
        sequence.table.release()
        sequence.node = self.tree.root(sequence.request.request_salt)
        sequence.computed = sequence.settled = 0

    def _share(self, sequence: Sequence) -> None:
        """Let the sequence hold what the tree has of its full chunks."""
        salt = sequence.request.request_salt
        labels = [sequence.label(i) for i in range(len(sequence.tokens) // CHUNK_TOKENS)]
        nodes = self.tree.match(salt, labels) if self.own_prefixes else []
        blocks = [node.block for node in nodes]
        self._pool.hold(blocks)
        sequence.table = BlockTable(self._pool)
        sequence.table.append(blocks)
        sequence.table.seal(len(blocks))
        sequence.node = nodes[-1] if nodes else self.tree.root(salt)
        sequence.settled = len(nodes)
        sequence.computed = len(nodes) * CHUNK_TOKENS

    def _load(self, sequence: Sequence) -> None:
        if self._hook is None:
            raise ValueError("there is no store to load from")
        reserved = sequence.reserved

        def take_reserved(count: int) -> list[int]:
            if count > len(reserved):
                raise OutOfBlocks(f"{count} blocks wanted, {len(reserved)} are left for the prompt")
            return [reserved.pop() for _ in range(count)]

        sequence.loading = sequence.key(sequence.settled)
        self._loading.add(sequence.loading)
        sequence.pending = self._hook.begin_match(
            sequence.request,
            sequence.tokens,
            sequence.settled,
            take_reserved,
            self._stats.prefill_tokens_per_s,
        )

    def _forget_load(self, sequence: Sequence) -> None:
        if sequence.loading is not None:
            self._loading.discard(sequence.loading)
        sequence.pending = sequence.loading = None

    def _place(self, sequence: Sequence, loaded: Loaded) -> None:
        """Append what was loaded, and blocks for the rest. Raises OutOfBlocks."""
        table, tokens = sequence.table, len(sequence.tokens)
        own = sequence.settled
        table.append(loaded.blocks)
        table.seal(own + len(loaded.blocks))
        sequence.computed = table.room_tokens
        self.settle(sequence)
        if loaded.blocks:  # it has those before them too
            sequence.stored = max(sequence.stored, sequence.settled)
            self.mark_offered(sequence, 0, Offer())
        short = -(-tokens // CHUNK_TOKENS) - len(table.blocks)
        whole_hit = sequence.computed == tokens
        # Blocks of a load that came to nothing are the pool's again, or will be when nothing more
        # is written to them; then they cannot be counted on.
        missing = short + int(whole_hit) - len(sequence.reserved)
        if missing > 0:
            sequence.reserved.extend(self.take(missing))
        if whole_hit:
            self._recompute_last(sequence)
        table.append([sequence.reserved.pop() for _ in range(short)])
        self._pool.drop(sequence.reserved)
        sequence.reserved = []
        if sequence.sampled == 0:
            sequence.cache = _cache_use(sequence, own * CHUNK_TOKENS, loaded)

    def _recompute_last(self, sequence: Sequence) -> None:
        """All of the prompt is held, but no logits are: compute the last token once more. Its KV
        goes to a copy, for a shared block is never written.
        """
        sequence.table.unseal_last(sequence.reserved.pop())
        sequence.settled -= 1
        sequence.computed -= 1
        if sequence.node.parent is not None:
            sequence.node = sequence.node.parent


def _chain(node: Node) -> list[Node]:
    """The chunks from the first one to `node`; none for a root."""
    nodes = []
    above: Node | None = node
    while above is not None and above.parent is not None:
        nodes.append(above)
        above = above.parent
    return nodes[::-1]


def _cache_use(sequence: Sequence, own_tokens: int, loaded: Loaded) -> CacheUse:
    own_tokens = min(own_tokens, sequence.computed)
    return CacheUse(
        own_tokens=own_tokens,
        loaded_tokens=sequence.computed - own_tokens,
        bytes_by_tier=loaded.bytes_by_tier,
        miss_reason=loaded.reason,
        load_ms=(time.perf_counter() - sequence.asked_at_s) * 1e3,
    )
