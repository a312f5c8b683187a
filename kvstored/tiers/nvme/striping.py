"""Which volume each new object goes to. Pure.

Consecutive objects go to different volumes, each getting work in proportion to its speed, so that a
prefix can be read from all of them at once and all are done at the same time: an object goes where
it would be through first. What was handed out before counts, so that the proportion also holds over
many small calls; how far back is bounded, so that a volume that was full or away for a while is not
flooded when it is back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_AHEAD = 4.0
"""A volume's work counts as at most so many of the largest object ahead of the least busy one's."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A volume that takes objects. `bytes_per_s` 0.0: not known; `room_bytes`: what it can still be
    charged, as far as that is known.
    """

    number: int
    bytes_per_s: float = 0.0
    room_bytes: int = 1 << 62


class Striper:
    """Plans objects over volumes, remembering what it handed out."""

    def __init__(self) -> None:
        self._ahead_s: dict[int, float] = {}

    def plan(self, charges_bytes: Sequence[int], among: Sequence[Candidate]) -> list[int]:
        """The number of a volume for each object. `among` must not be empty.

        A volume without room for an object gets it only where none has room: its room is then for
        the caller to find out.
        """
        if len(among) == 1:
            return [among[0].number] * len(charges_bytes)
        speeds = _speeds(among)
        room = {c.number: c.room_bytes for c in among}
        ahead = {c.number: self._ahead_s.get(c.number, 0.0) for c in among}
        chosen: list[int] = []
        for charge in charges_bytes:
            number = min(ahead, key=lambda n: (room[n] < charge, ahead[n] + charge / speeds[n], n))
            ahead[number] += charge / speeds[number]
            room[number] -= charge
            chosen.append(number)
        self._remember(ahead, speeds, max(charges_bytes, default=0))
        return chosen

    def _remember(
        self, ahead: dict[int, float], speeds: dict[int, float], largest_bytes: int
    ) -> None:
        least = min(ahead.values())
        for number, seconds in ahead.items():
            most = MOST_AHEAD * largest_bytes / speeds[number]
            self._ahead_s[number] = min(seconds - least, most)


def _speeds(among: Sequence[Candidate]) -> dict[int, float]:
    """Bytes per second of each; one that is not known counts as the mean of those that are."""
    known = [c.bytes_per_s for c in among if c.bytes_per_s > 0]
    mean = sum(known) / len(known) if known else 1.0
    return {c.number: c.bytes_per_s if c.bytes_per_s > 0 else mean for c in among}
