"""The engine's own prefixes: a tree over whole, computed blocks, so that prompts can share them.

A node is one chunk under all the chunks before it; its edge is labelled by the chunk's tokens
themselves, so no two prefixes are ever taken for each other. The tree holds one reference to each
block. A block that nobody else holds can be evicted, leaves first, in the order of last use.

SGLang's RadixAttention is the idea: https://arxiv.org/abs/2312.07104.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool
from kvstored_client.engine.types import Offer


@dataclass(eq=False, slots=True)
class Node:
    """One chunk under one prefix. A root stands for no chunk and has block -1. `offer`: the one by
    which the store has it, None where it was not offered.
    """

    block: int
    parent: Node | None
    label: bytes
    children: dict[bytes, Node] = field(default_factory=dict)
    offer: Offer | None = None

    @property
    def offered(self) -> bool:
        """Whether the store has the chunk, or is about to, as far as is known."""
        return self.offer is not None and not self.offer.lost


def chunk_label(token_ids: Sequence[int], chunk: int) -> bytes:
    """The tokens of chunk `chunk` as bytes: what an edge of the tree is labelled with."""
    return array("I", token_ids[chunk * CHUNK_TOKENS : (chunk + 1) * CHUNK_TOKENS]).tobytes()


class PrefixTree:
    """Whole blocks by the tokens before them, one tree for each salt. For the engine's thread."""

    def __init__(self, pool: BlockPool) -> None:
        self.evicted_blocks = 0
        self._pool = pool
        self._roots: dict[bytes, Node] = {}
        # In the order of last use, children before their parents: whoever uses a chunk uses those
        # before it, and is entered afterwards. So one walk from the front meets every leaf before
        # the node that becomes a leaf by its eviction.
        self._order: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        """Blocks in the tree."""
        return len(self._order)

    def root(self, salt: bytes) -> Node:
        """The root under which prompts of this salt are kept."""
        return self._roots.get(salt) or Node(-1, None, salt)

    def child(self, node: Node, label: bytes) -> Node | None:
        """The chunk `label` under `node`, marked as used now; None where it is not kept."""
        found = self._current(node).children.get(label)
        if found is not None:
            self._touch(found)
        return found

    def match(self, salt: bytes, labels: Sequence[bytes]) -> list[Node]:
        """The leading chunks of a prompt that are kept, in order, marked as used now."""
        found: list[Node] = []
        node = self.root(salt)
        for label in labels:
            below = node.children.get(label)
            if below is None:
                break
            found.append(below)
            node = below
        if found:
            self._touch(node)
        return found

    def insert(self, node: Node, label: bytes, block: int) -> Node:
        """Keep `block` as the chunk `label` under `node`, with a reference of the tree's own; or
        the block that is kept for it already. Returns the chunk's node.
        """
        if node.parent is None:
            node = self._roots.setdefault(node.label, node)
        found = node.children.get(label)
        if found is None:
            self._pool.hold([block])
            found = node.children[label] = Node(block, node, label)
            self._order[found] = None
        self._touch(found)
        return found

    def evictable(self) -> int:
        """Blocks that `evict` could give back now."""
        return sum(1 for node in self._order if self._pool.references(node.block) == 1)

    def evict(self, count: int) -> int:
        """Give back up to `count` blocks that only the tree holds, the least recently used leaves
        first. Returns how many.
        """
        gone: list[Node] = []
        for node in self._order:
            if len(gone) == count:
                break
            # Its children, if evicted, came before it in this walk and are detached already.
            if not node.children and self._pool.references(node.block) == 1:
                self._detach(node)
                gone.append(node)
        for node in gone:
            del self._order[node]
        self._pool.drop([node.block for node in gone])
        self.evicted_blocks += len(gone)
        return len(gone)

    def clear(self) -> None:
        """Forget everything. Blocks that sequences hold stay theirs."""
        blocks = [node.block for node in self._order]
        self._order.clear()
        self._roots.clear()
        self._pool.drop(blocks)

    def _current(self, node: Node) -> Node:
        """A root that lost its last chunk is forgotten, and another made later, while a sequence
        may still begin at the old one.
        """
        return node if node.parent is not None else self._roots.get(node.label, node)

    def _touch(self, node: Node) -> None:
        above: Node | None = node
        while above is not None and above.parent is not None:
            self._order.move_to_end(above)
            above = above.parent

    def _detach(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            raise ValueError("a root is not evicted")
        del parent.children[node.label]
        if parent.parent is None and not parent.children:
            del self._roots[parent.label]
