"""Reservations over volumes: which volume, within the namespace's cap over all of them."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from kvstored.tiers.base import VOLUME_SHIFT, NoRoom
from kvstored.tiers.nvme import layout
from kvstored.tiers.nvme.member import Member, answers
from kvstored.tiers.nvme.striping import Candidate, Striper
from kvstored.tiers.nvme.volume_tier import VolumeTier

Answer = int | NoRoom


class Placing:
    """Reserves places for the tier. Used on the loop."""

    def __init__(
        self, members: Sequence[Member], namespace_cap: Callable[[str], int] | None
    ) -> None:
        self._members = members
        self._namespace_cap = namespace_cap
        self._striper = Striper()
        self._pending: Counter[str] = Counter()  # charged to namespaces, not yet to a volume

    async def reserve(self, namespace: str, lengths_bytes: Sequence[int]) -> list[Answer]:
        """See Tier.reserve."""
        charges = [layout.charge_bytes(length) for length in lengths_bytes]
        count, refusal = self._within_cap(namespace, charges)
        pending = sum(charges[:count])
        self._pending[namespace] += pending
        request = _Request(namespace, lengths_bytes[:count], charges[:count])
        try:
            await self._place(request)
        except asyncio.CancelledError:
            self.give_back(request.places)
            raise
        finally:
            self._pending[namespace] -= pending
        found: list[Answer] = []
        for i, place in enumerate(request.places):
            if place is None:
                why = request.refusal(i)
                self.give_back(request.places[i:])
                return found + [why] * (len(lengths_bytes) - i)
            found.append(place)
        return found + [refusal] * (len(lengths_bytes) - count)

    def _within_cap(self, namespace: str, charges: Sequence[int]) -> tuple[int, NoRoom]:
        """How many of the charges, from the first on, the namespace's cap allows; and what the
        next one is told.
        """
        if self._namespace_cap is None:
            return len(charges), NoRoom.NAMESPACE
        cap = self._namespace_cap(namespace)
        held = self._pending[namespace] + sum(
            m.tier.namespace_charged_bytes(namespace) for m in self._members if m.tier is not None
        )
        for i, charge in enumerate(charges):
            if charge > cap:
                return i, NoRoom.NEVER
            held += charge
            if held > cap:
                return i, NoRoom.NAMESPACE
        return len(charges), NoRoom.NAMESPACE

    async def _place(self, request: _Request) -> None:
        """Ask volume after volume, until each object has a place or all have refused it."""
        while groups := self._plan(request):
            asked = [_Asked(self._members[n], request, some) for n, some in groups.items()]
            found = await answers([ask.call for ask in asked])
            for ask, some in zip(asked, found, strict=True):
                ask.take(some)

    def _plan(self, request: _Request) -> dict[int, list[int]]:
        """Which objects to ask which volume for next. Nothing behind the first that is refused by
        all is asked for.
        """
        usable = [m for m in self._members if m.placeable]
        groups: dict[int, list[int]] = defaultdict(list)
        waiting: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, place in enumerate(request.places):
            if place is None:
                left = tuple(m.number for m in usable if m.number not in request.refusals[i])
                if not left:
                    break
                waiting[left].append(i)
        idle = not any(m.reserved or m.running for m in self._members)
        for numbers, indices in waiting.items():
            among = [self._candidate(self._members[n]) for n in numbers]
            chosen = self._striper.plan([request.charges[i] for i in indices], among, idle=idle)
            idle = False
            for i, number in zip(indices, chosen, strict=True):
                groups[number].append(i)
        return {number: sorted(some) for number, some in groups.items()}

    def _candidate(self, member: Member) -> Candidate:
        assert member.tier is not None
        usage = member.tier.usage()
        room = 0 if member.full else usage.cap_bytes - usage.charged_bytes
        speed = member.read_bytes_per_s or member.write_bytes_per_s
        return Candidate(member.number, speed, room)

    def give_back(self, places: Sequence[int | None]) -> None:
        """Cancel what there is among the places."""
        for place in places:
            if place is not None:
                member = self._members[place >> VOLUME_SHIFT]
                self.cancel(member, [place & (1 << VOLUME_SHIFT) - 1])

    def cancel(self, member: Member, places: Sequence[int]) -> None:
        """Give back reserved places of a volume; those of another life of it mean nothing."""
        member.full = False
        if member.life:
            places = [place for place in places if place in member.reserved]
        if member.tier is not None:
            member.tier.cancel(places)
        member.reserved.difference_update(places)


class _Request:
    """One call of `reserve` under way: places found so far, and who refused what."""

    def __init__(self, namespace: str, lengths: Sequence[int], charges: Sequence[int]) -> None:
        self.namespace = namespace
        self.lengths = lengths
        self.charges = charges
        self.places: list[int | None] = [None] * len(lengths)
        self.refusals: list[dict[int, NoRoom]] = [{} for _ in lengths]

    def refusal(self, index: int) -> NoRoom:
        """What to say of an object that found no place: what may change soonest counts."""
        said = self.refusals[index].values()
        for why in (NoRoom.TIER, NoRoom.DOWN, NoRoom.NEVER):
            if why in said:
                return why
        return NoRoom.DOWN


class _Asked:
    """What one volume was asked of a request."""

    def __init__(self, member: Member, request: _Request, indices: Sequence[int]) -> None:
        self._member = member
        self._life = member.life
        self._request = request
        self._indices = indices
        lengths = [request.lengths[i] for i in indices]
        self.call = member.begin(
            lambda tier: tier.reserve(request.namespace, lengths), _cancel, undo_cancelled=True
        )

    def take(self, found: Sequence[Answer] | None) -> None:
        """Note places and refusals."""
        member = self._member
        if found is None or member.life != self._life:
            found = [NoRoom.DOWN] * len(self._indices)
        for i, answer in zip(self._indices, found, strict=True):
            if isinstance(answer, int):
                member.reserved.add(answer)
                self._request.places[i] = member.number << VOLUME_SHIFT | answer
                continue
            self._request.refusals[i][member.number] = answer
            member.full = member.full or answer is NoRoom.TIER
            if answer is NoRoom.NEVER:
                break  # of those behind it nothing is known


def _cancel(tier: VolumeTier, found: Sequence[Answer]) -> None:
    """Give back what was reserved for somebody who no longer waits."""
    tier.cancel([answer for answer in found if isinstance(answer, int)])
