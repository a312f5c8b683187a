"""Deletes that hold also on volumes that are away, or about to be. Belongs to the loop.

What was deleted is noted for every volume that is not there. It is also kept in memory for a while:
a volume that fails in the middle of deletes may not have them durably, and is told of them again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstored.tiers.nvme.away import Away
from kvstored.tiers.nvme.member import Member
from kvstored.tiers.nvme.registry import Tombstone
from kvstored.tiers.nvme.status import VolumeState

RECENT_S = 120.0
"""For so long a delete may still be on its way to a volume."""
MOST_RECENT = 100_000


@dataclass(frozen=True, slots=True)
class _Recent:
    """A delete of a moment ago: a volume that fails now may not have it, durably, yet."""

    at: float
    namespace: str
    family: bytes
    keys: Sequence[bytes]
    through: dict[int, int]  # volume number -> sequence


class Deletes:
    """Notes of what was deleted, for volumes that cannot be told."""

    def __init__(self, away: Away, members: Sequence[Member]) -> None:
        self._away = away
        self._members = members
        self._recent: deque[_Recent] = deque()
        self._recent_keys = 0
        self._overflowed_at = -RECENT_S

    async def record(self, member: Member) -> None:
        """Note recent deletes for a volume. Raises DeleteNotDurable."""
        if time.monotonic() - self._overflowed_at < RECENT_S:
            await self._away.void(member.uuid)
            return
        stones = [
            Tombstone(recent.namespace, recent.family, key, recent.through[member.number])
            for recent in self._recent
            if member.number in recent.through
            for key in recent.keys
        ]
        await self._away.add(member.uuid, stones)

    async def forget(self, namespace: str, family: bytes, keys: Sequence[bytes]) -> None:
        """See NvmeTier.forget."""
        if not keys:
            return
        present = {m.uuid: m for m in self._members if m.state is VolumeState.OK}
        through = {m.number: m.tier.sequence for m in present.values() if m.tier is not None}
        self._recent.append(_Recent(time.monotonic(), namespace, family, keys, through))
        self._recent_keys += len(keys)
        self._forget_old()
        absent = self._away.absent(present)
        if not absent:
            return
        stones = [Tombstone(namespace, family, key) for key in keys]
        done = await asyncio.gather(
            *(self._away.add(uuid, self._bounded(uuid, stones)) for uuid in absent),
            return_exceptions=True,
        )
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome

    def _bounded(self, uuid: str, stones: Sequence[Tombstone]) -> Sequence[Tombstone]:
        """For a volume that is open but suspect: what it gets later is not meant."""
        for member in self._members:
            if member.uuid == uuid and member.tier is not None:
                through = member.tier.sequence
                return [replace(stone, through=through) for stone in stones]
        return stones

    def _forget_old(self) -> None:
        now = time.monotonic()
        while self._recent and self._recent[0].at < now - RECENT_S:
            self._recent_keys -= len(self._recent.popleft().keys)
        while self._recent_keys > MOST_RECENT:
            self._recent_keys -= len(self._recent.popleft().keys)
            self._overflowed_at = now
