"""Packs the segments of one step into rows: where each token is computed, written and attends.

A token's place among the rows of a product may be any. Its place in the sub-tile in which it
attends depends on its position alone. docs/engine.md has the reasons.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool
from kvstored_client.engine.types import Segment

_TOGETHER_KEYS = 4096
"""Keys that sequences which attend in one call may have together: what is gathered of them should
stay in the processor's cache.
"""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sub-tiles [first, last) of a batch, which attend in one call: those of one segment, or one
    each of several segments in chunks of the same number.

    `blocks` [tables, chunks] are read; `bias` [sub-tiles, 1, group * sub-tile rows, keys] is 0
    where a row may look and -inf where it may not.
    """

    first: int
    last: int
    blocks: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step. The first `rows` are tokens, the others fill the last tile.

    `token_ids` and `positions` [tiles * tile rows]. For each of the tokens: `block` and `slot`,
    where its KV goes, and `place`, its row among those of all sub-tiles. `stop` is beyond all
    positions; `wanted` are the rows whose logits are asked for, of the segments `asking`.
    """

    pool: BlockPool
    rows: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    stop: int
    block: torch.Tensor
    slot: torch.Tensor
    place: torch.Tensor
    subtiles: int
    groups: list[AttentionGroup]
    wanted: torch.Tensor
    asking: list[int]


@dataclass(frozen=True, slots=True)
class Shape:
    """What packing depends on: rows of a product, rows of a sub-tile, Q heads per KV head."""

    tile_rows: int
    subtile_rows: int
    head_group: int
    dtype: torch.dtype

    def bias(self, starts: Sequence[int]) -> torch.Tensor:
        """What is added to the scores of sub-tiles that begin at these positions, all in chunks of
        the same number: [sub-tiles, 1, head_group * subtile_rows, keys].
        """
        chunks = starts[0] // CHUNK_TOKENS + 1
        keys = torch.arange(CHUNK_TOKENS)
        queries = torch.tensor([s % CHUNK_TOKENS for s in starts])[:, None] + torch.arange(
            self.subtile_rows
        )
        beyond = keys[None, None, :] > queries[:, :, None]
        bias = torch.zeros(
            len(starts), self.head_group, self.subtile_rows, chunks * CHUNK_TOKENS, dtype=self.dtype
        )
        bias[..., -CHUNK_TOKENS:].masked_fill_(beyond[:, None], -torch.inf)
        return bias.view(len(starts), 1, self.head_group * self.subtile_rows, -1)


def pack(segments: Sequence[Segment], shape: Shape) -> Batch:
    """Place the segments' tokens. Raises ValueError for a segment that is empty, not in one chunk,
    beyond its table, in a block that is shared, or in another pool than the first.
    """
    pool = segments[0].table.pool
    for segment in segments:
        _check(segment, pool)
    rows = sum(len(segment.token_ids) for segment in segments)
    padding = [0] * (-rows % shape.tile_rows)
    token_ids = [token for segment in segments for token in segment.token_ids]
    positions = [p for s in segments for p in range(s.start, s.start + len(s.token_ids))]
    blocks = [s.table.blocks[s.start // CHUNK_TOKENS] for s in segments for _ in s.token_ids]
    groups, first_subtile = _groups(segments, shape)
    place: list[int] = []
    wanted: list[int] = []
    row = 0
    for segment, first in zip(segments, first_subtile, strict=True):
        within = first * shape.subtile_rows + segment.start % shape.subtile_rows
        place += range(within, within + len(segment.token_ids))
        row += len(segment.token_ids)
        if segment.wants_logits:
            wanted.append(row - 1)
    device = pool.kv.device

    def tensor(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=device)

    return Batch(
        pool=pool,
        rows=rows,
        token_ids=tensor(token_ids + padding),
        positions=tensor(positions + padding),
        stop=max(positions) + 1,
        block=tensor(blocks),
        slot=tensor([p % CHUNK_TOKENS for p in positions]),
        place=tensor(place),
        subtiles=groups[-1].last,
        groups=groups,
        wanted=tensor(wanted),
        asking=[i for i, segment in enumerate(segments) if segment.wants_logits],
    )


def _check(segment: Segment, pool: BlockPool) -> None:
    start, stop = segment.start, segment.start + len(segment.token_ids)
    chunk = start // CHUNK_TOKENS
    if stop == start or chunk != (stop - 1) // CHUNK_TOKENS:
        raise ValueError(f"positions {start} to {stop} do not lie in one chunk")
    if chunk < segment.table.sealed:
        raise ValueError(f"block {chunk} is shared and must not be written")
    if chunk >= len(segment.table.blocks):
        raise ValueError(f"position {start} is beyond its table of {len(segment.table.blocks)}")
    if segment.table.pool is not pool:
        raise ValueError("the segments of one step are in different pools")


def _groups(segments: Sequence[Segment], shape: Shape) -> tuple[list[AttentionGroup], list[int]]:
    """The groups, in the order of their sub-tiles, and each segment's first sub-tile."""
    starts = [_subtile_starts(segment, shape.subtile_rows) for segment in segments]
    members: list[list[int]] = []
    singles: defaultdict[int, list[int]] = defaultdict(list)
    for i, own in enumerate(starts):
        if len(own) > 1:
            members.append([i])
        else:
            singles[segments[i].start // CHUNK_TOKENS + 1].append(i)
    for chunks, alike in singles.items():
        together = max(1, _TOGETHER_KEYS // (chunks * CHUNK_TOKENS))
        members += [alike[i : i + together] for i in range(0, len(alike), together)]
    groups, firsts, subtile = [], [0] * len(segments), 0
    for indices in members:
        first = subtile
        for i in indices:
            firsts[i] = subtile
            subtile += len(starts[i])
        chunks = segments[indices[0]].start // CHUNK_TOKENS + 1
        blocks = torch.stack([segments[i].table.index[:chunks] for i in indices])
        bias = shape.bias([start for i in indices for start in starts[i]])
        groups.append(AttentionGroup(first, subtile, blocks, bias.to(blocks.device)))
    return groups, firsts


def _subtile_starts(segment: Segment, subtile_rows: int) -> list[int]:
    stop = segment.start + len(segment.token_ids)
    first = segment.start - segment.start % subtile_rows
    return list(range(first, stop, subtile_rows))
