"""The families that volumes know: every volume keeps each. Belongs to the verbs' loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from kvstored.tiers.nvme.member import Member
from kvstored.tiers.nvme.volume_tier import VolumeTier

Names = tuple[str, bytes]
"""Namespace and fingerprint."""


class Families:
    """Specs of families, for the volumes to remember."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._known: dict[Names, bytes] = {}

    async def remember(self, namespace: str, fingerprint: bytes, spec: bytes) -> None:
        """See NvmeTier.remember_family."""
        self._known[namespace, fingerprint] = spec
        await self._tell([(m, [(namespace, fingerprint)]) for m in self._usable()])

    async def share(self, known: Mapping[Names, bytes] | None = None) -> None:
        """Have every volume know each family, also those: objects of any may come to it."""
        self._known |= known or {}
        await self._tell(
            [(m, [n for n in self._known if n not in m.families]) for m in self._usable()]
        )

    def _usable(self) -> list[Member]:
        return [m for m in self._members if m.placeable]

    async def _tell(self, missing: Sequence[tuple[Member, list[Names]]]) -> None:
        calls = []
        for member, some in missing:
            for names in some:
                member.families.add(names)
                work = partial(_remember, names=names, spec=self._known[names])
                calls.append((member, names, member.begin(work, _ignore)))
        for member, names, call in calls:
            if call is None or await call.answer() is None:
                member.families.discard(names)


async def _remember(tier: VolumeTier, names: Names, spec: bytes) -> bool:
    await tier.remember_family(*names, spec)
    return True


def _ignore(tier: VolumeTier, answer: bool) -> None:
    del tier, answer
