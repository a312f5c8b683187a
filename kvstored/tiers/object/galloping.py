"""How far a prefix is there, by few rounds of questions. Pure.

What is stored of a prefix is taken to be a leading run of its chunks. Round 1 asks for the first
and the last chunk, which settles the two common cases, nothing and everything; round 2 gallops, 1,
3, 7, 15, … chunks behind the first; each later one divides what is left between the last that is
there and the first that is not. A hole inside the run is not noticed here, but by whoever fetches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

ALL_AT_ONCE: Final = 4
"""A run of so few chunks is asked for in one round."""


class Gallop:
    """One search over `count` chunks, at most `width` questions a round.

    `leading`: how many are known to be there, or follow from that, at its end and at any time.
    """

    def __init__(self, count: int, width: int) -> None:
        self.leading = 0
        self.rounds = 0
        self._end = count  # the first that is not there, as far as known
        self._width = max(2, width)

    @property
    def done(self) -> bool:
        """Whether there is nothing left to ask."""
        return self.leading >= self._end

    def questions(self) -> list[int]:
        """Chunks to ask for in this round, in order; none of them twice in a search."""
        first, left = self.leading, self._end - self.leading
        self.rounds += 1
        if left <= min(ALL_AT_ONCE, self._width):
            return list(range(first, self._end))
        if self.rounds == 1:
            return [first, self._end - 1]
        if self.rounds == 2:
            steps = [(1 << n) - 1 for n in range(1, self._width + 1)]
            return [first + step - 1 for step in steps if step <= left]
        step = -(-left // (self._width + 1))
        return [first + at for at in range(step - 1, left, step)][: self._width]

    def answers(self, questions: Sequence[int], present: Sequence[bool]) -> None:
        """Take in the answers of a round: whether each was there. Not known is not there."""
        for at, there in zip(questions, present, strict=True):
            if not there:
                self._end = min(self._end, at)
        for at, there in zip(questions, present, strict=True):
            if there and at < self._end:
                self.leading = max(self.leading, at + 1)
