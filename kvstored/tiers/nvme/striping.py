"""Which volume each new object goes to. Pure.

Consecutive objects go to different volumes, each getting work in proportion to its speed, so that a
prefix can be read from all of them at once and all are done at the same time: an object goes where
it would be through first.

What was handed out before counts, so that the proportion also holds over many small calls. It is
forgotten where a new prefix may begin, that is when nothing is under way any more and enough was
handed out to be in proportion by itself: objects cannot be cut, and the last of a prefix would
otherwise make up for what another prefix did. How far back it goes is bounded in any case, so that
a volume that was full or away for a while is not flooded when it is back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstored.tiers.nvme import speed

MOST_AHEAD = 4.0
"""A volume's work counts as at most so many of the largest object ahead of the least busy one's."""

ENOUGH = 32
"""Objects that are in proportion by themselves."""


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
        self._planned = 0  # objects since it last began anew

    def plan(
        self, charges_bytes: Sequence[int], among: Sequence[Candidate], *, idle: bool = False
    ) -> list[int]:
        """The number of a volume for each object. `among` must not be empty. `idle`: nothing of
        what was planned before is under way.

        A volume without room for an object gets it only where none has room: its room is then for
        the caller to find out.
        """
        if len(among) == 1:
            return [among[0].number] * len(charges_bytes)
        if idle and self._planned >= ENOUGH:
            self._ahead_s.clear()
            self._planned = 0
        self._planned += len(charges_bytes)
        levelled = speed.levelled([c.bytes_per_s for c in among])
        speeds = {c.number: level for c, level in zip(among, levelled, strict=True)}
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
