"""What `kvctl bench engine` asks the engine: five kinds of traffic. Pure.

Prompts are token ids drawn at random: how long an answer takes depends on the number of tokens and
on which of them were seen before, not on what they say. docs/benchmarks.md has the table.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeAlias

Tokens: TypeAlias = "list[int]"

NAMES = ("chat", "documents", "rag", "template", "unique")


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of tokens. `shared`: so many beginnings of prompts, of `shared_tokens` each, are used
    in turn by the sessions; 0: nothing is shared. A session has `turns`; each adds `turn_tokens`
    that nobody else has, after the answer before it.
    """

    name: str
    shared: int
    shared_tokens: int
    turns: int
    turn_tokens: int

    def longest_tokens(self, answer_tokens: int) -> int:
        """Of a session at its end, answers included."""
        own = self.turns * (self.turn_tokens + answer_tokens)
        return own + (self.shared_tokens if self.shared else 0)


FULL = {
    shape.name: shape
    for shape in (
        Shape("chat", 2, 256, 2, 32),
        Shape("documents", 3, 2000, 1, 32),
        Shape("rag", 1, 256, 1, 288),
        Shape("template", 1, 320, 1, 32),
        Shape("unique", 0, 0, 1, 96),
    )
}
QUICK = {
    shape.name: shape
    for shape in (
        Shape("chat", 2, 128, 2, 16),
        Shape("documents", 3, 192, 1, 16),
        Shape("rag", 1, 64, 1, 80),
        Shape("template", 1, 128, 1, 16),
        Shape("unique", 0, 0, 1, 70),
    )
}


class Workload:
    """One kind of traffic with ids below `vocab_size`. The same seed gives the same prompts."""

    def __init__(self, shape: Shape, vocab_size: int, seed: int) -> None:
        self.shape = shape
        self._vocab_size = vocab_size
        self._seed = seed
        self._shared = [
            self._draw(shape.shared_tokens, "shared", number) for number in range(shape.shared)
        ]

    def sessions(self, first: int, count: int, *of: object) -> list[list[Tokens]]:
        """Sessions `first` on of those named `of`, each a list of what its turns add to the prompt.
        Other names, other tokens, but for what is shared.
        """
        return [self._session(number, *of) for number in range(first, first + count)]

    def warming(self) -> list[list[Tokens]]:
        """Sessions of one turn that have used everything that is shared once, and ask what nobody
        asks again; one of its own where nothing is shared.
        """
        return [self._session(n, "warming")[:1] for n in range(max(1, self.shape.shared))]

    def cold(self, tokens: int, *of: object) -> Tokens:
        """A prompt that shares nothing with any other."""
        return self._draw(tokens, "cold", *of)

    def _session(self, number: int, *of: object) -> list[Tokens]:
        turns = [
            self._draw(self.shape.turn_tokens, *of, number, turn)
            for turn in range(self.shape.turns)
        ]
        if self._shared:
            turns[0] = self._shared[number % len(self._shared)] + turns[0]
        return turns

    def _draw(self, count: int, *of: object) -> Tokens:
        drawn = random.Random(repr((self._seed, self.shape.name, *of)))  # noqa: S311 (no secret)
        return [drawn.randrange(self._vocab_size) for _ in range(count)]
