"""Attention groups: which chunks a boundary needs, and the longest boundary that is held.

A boundary b lies after the first b chunks of a prefix. A prompt can be resumed there when, for
every group, the chunks its rule names are present. Full attention needs all of them, a sliding
window only those that cover its last tokens, a recurrent state only the one that ends there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstored_client.identity.checks import text, uint
from kvstored_client.identity.errors import GroupError

RuleKind: TypeAlias = Literal["all", "trailing", "last"]


@dataclass(frozen=True, slots=True)
class GroupRule:
    """The rule of one attention group.

    `tokens` belongs to "trailing" alone: how many tokens before the boundary must be covered.
    `attention` is the attention kind in the engine's words, like "gqa", "mla" or "mamba2"; it
    counts in the family's fingerprint and for nothing else. Raises GroupError.
    """

    kind: RuleKind
    tokens: int = 0
    attention: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("all", "trailing", "last"):
            raise GroupError("kind", f'must be "all", "trailing" or "last", not {self.kind!r}')
        if self.kind == "trailing":
            uint("tokens", self.tokens, least=1, error=GroupError)
        elif self.tokens != 0:
            raise GroupError("tokens", f'must be 0 for "{self.kind}", not {self.tokens!r}')
        text("attention", self.attention, error=GroupError)

    @classmethod
    def all(cls, attention: str = "") -> GroupRule:
        """Every chunk before the boundary."""
        return cls("all", 0, attention)

    @classmethod
    def trailing(cls, tokens: int, attention: str = "") -> GroupRule:
        """The chunks that cover the last `tokens` tokens before the boundary."""
        return cls("trailing", tokens, attention)

    @classmethod
    def last(cls, attention: str = "") -> GroupRule:
        """The one chunk that ends at the boundary."""
        return cls("last", 0, attention)

    def chunks_needed(self, boundary: int, chunk_tokens: int, end_token: int = 0) -> range:
        """Indices of the chunks that must be present for a prefix to be resumed at `boundary`.

        `boundary` counts chunks from the start of the prefix. `end_token` is the number of tokens
        before it where its last chunk is short; 0: every chunk is full. Raises GroupError for an
        `end_token` that does not lie in the last chunk.
        """
        if boundary <= 0:
            return range(0)
        if end_token and -(-end_token // chunk_tokens) != boundary:
            problem = f"{end_token} tokens do not end in chunk {boundary - 1} of {chunk_tokens}"
            raise GroupError("end_token", problem)
        if self.kind == "all":
            return range(boundary)
        if self.kind == "last":
            return range(boundary - 1, boundary)
        before = end_token or boundary * chunk_tokens
        return range(max(0, before - self.tokens) // chunk_tokens, boundary)


def longest_boundary(
    present: Mapping[str, NDArray[np.bool_]],
    rules: Mapping[str, GroupRule],
    chunk_tokens: int,
    *,
    start: int = 0,
    end_token: int = 0,
) -> int:
    """The most chunks, counted from `start`, after which every group's rule holds.

    `present` gives for each group asked for, shape [chunks], whether chunk start + i is there in
    every part of that group; chunks before `start` count as present. `rules` may name more groups.
    `end_token` is the number of tokens up to the end of the last chunk, as in proto ChunkRun; 0:
    every chunk is full. 0 chunks always hold. Raises GroupError for arrays of different lengths,
    groups without a rule, and an `end_token` outside the last chunk.
    """
    lengths = {len(array) for array in present.values()}
    if len(lengths) > 1:
        raise GroupError("present", f"must have one length for all groups, not {sorted(lengths)}")
    missing = sorted(set(present) - set(rules))
    if missing:
        raise GroupError("present", f"group {missing[0]!r} has no rule")
    chunks = lengths.pop() if lengths else 0
    holds = np.ones(chunks + 1, np.bool_)
    for group, array in present.items():
        holds &= _boundaries(array, rules[group], chunk_tokens, start, end_token)
    return int(np.flatnonzero(holds)[-1])


def _boundaries(
    present: NDArray[np.bool_], rule: GroupRule, chunk_tokens: int, start: int, end_token: int
) -> NDArray[np.bool_]:
    """For each boundary after 0 to len(present) chunks, whether the rule holds."""
    chunks = len(present)
    holds = np.ones(chunks + 1, np.bool_)
    if chunks == 0:
        return holds
    # Only the boundary at the very end can lie behind a short chunk.
    needed_at_end = rule.chunks_needed(start + chunks, chunk_tokens, end_token)
    if rule.kind == "all":
        np.logical_and.accumulate(present, out=holds[1:])
    elif rule.kind == "last":
        holds[1:] = present
    else:
        # The nearest absent chunk before a boundary must lie before the first one needed.
        index = np.arange(chunks, dtype=np.int64)
        absent = np.maximum.accumulate(np.where(present, np.int64(-1), index))
        first = index + 1 - -(-rule.tokens // chunk_tokens)
        first[-1] = needed_at_end.start - start
        holds[1:] = absent < np.maximum(first, 0)
    return holds
