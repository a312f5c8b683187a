"""One sequence: a request's tokens, how many of them have KV, and in which blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockTable
from kvstored_client.engine.prefix_tree import Node, chunk_label
from kvstored_client.engine.sampler import Sampler
from kvstored_client.engine.types import CacheUse, PendingLoad, Request, Segment

ChunkKey = tuple[int, bytes, bytes]
"""One chunk under one prefix: the block of the chunk before it, the salt, the chunk's tokens."""


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one request between `add_request` and its last event.

    `tokens`: the prompt and what was sampled; the first `computed` of them have KV in `table`.
    After n sampled tokens that is all but the last. Chunks before `settled` are in the prefix tree,
    `node` being the last of them; chunks before `stored` are not to be offered to the store
    any more: this sequence has done so, or they came from there. `pending`, `reserved`, `loading`:
    the load under way, the blocks taken for what the prompt still needs, and the key of the first
    chunk that is loaded; `may_load`: the store was not asked yet. `served_at`: the last step that
    computed part of its prompt. A sequence that waits or was preempted has no blocks at all.
    """

    request: Request
    sampler: Sampler
    table: BlockTable
    tokens: list[int]
    node: Node
    arrival: int = 0
    computed: int = 0
    settled: int = 0
    stored: int = 0
    pending: PendingLoad | None = None
    reserved: list[int] = field(default_factory=list)
    loading: ChunkKey | None = None
    may_load: bool = True
    asked_at_s: float = 0.0
    served_at: int = -1
    cache: CacheUse = field(default_factory=CacheUse)
    labels: list[bytes] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def decodes(self) -> bool:
        """Whether one token is all that is left to compute before the next is sampled."""
        return len(self.tokens) - self.computed == 1

    @property
    def shareable_chunks(self) -> int:
        """Chunks that a hit may cover: whole ones, and the last token is always computed."""
        return (len(self.tokens) - 1) // CHUNK_TOKENS

    def label(self, chunk: int) -> bytes:
        """The tokens of a whole chunk, as the prefix tree wants them."""
        while len(self.labels) <= chunk:
            self.labels.append(chunk_label(self.tokens, len(self.labels)))
        return self.labels[chunk]

    def key(self, chunk: int) -> ChunkKey:
        """What chunk `chunk` is, for sequences whose chunks before it are those of `node`."""
        return self.node.block, self.request.request_salt, self.label(chunk)

    def segment(self, start: int) -> Segment:
        """The tokens from position `start` to the end of its chunk, or of the sequence."""
        stop = min(len(self.tokens), (start // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
        return Segment(
            self.table, self.tokens[start:stop], start, wants_logits=stop == len(self.tokens)
        )
