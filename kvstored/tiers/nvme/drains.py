"""Volumes that are emptied and given up. Belongs to the verbs' loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace

from kvstored.errors import DataDirectoryError, KvstoredError
from kvstored.tiers.base import Recovered, Tier
from kvstored.tiers.nvme import draining, merging
from kvstored.tiers.nvme.arrivals import Arrivals
from kvstored.tiers.nvme.away import Away
from kvstored.tiers.nvme.failures import FAILURES
from kvstored.tiers.nvme.member import Member
from kvstored.tiers.nvme.status import VolumeState
from kvstored.tiers.nvme.volume_tier import VolumeTier

_log = logging.getLogger(__name__)


class UnknownVolume(KvstoredError):
    """No volume of that name is configured."""


class LastVolume(KvstoredError):
    """The only volume that takes objects cannot be drained."""


class Drains:
    """Empties volumes, one or more at a time."""

    def __init__(
        self,
        owner: Tier,
        members: Sequence[Member],
        away: Away,
        start: Callable[[Coroutine[object, object, None]], None],
        ready: Callable[[], Coroutine[object, object, object]],
        lose: Callable[[Member], None],
    ) -> None:
        """`owner` has the callbacks `on_lost` and `on_found`; `start` runs a task; `ready()` waits
        until the store takes objects; `lose` gives a volume up for now, and opens it anew.
        """
        self._owner = owner
        self._members = members
        self._away = away
        self._arrivals = Arrivals(away)
        self._start = start
        self._ready = ready
        self._lose = lose
        self._one = asyncio.Lock()  # so that two are not drained to one another

    def why(self, member: Member) -> str:
        """Why an open volume is to be drained; "" if it is not."""
        if member.spec.drain:
            return "as configured"
        known = self._away.known(member.uuid)
        return "as was asked for before the start" if known is not None and known.draining else ""

    async def drain(self, name: str) -> None:
        """See NvmeTier.drain."""
        member = next((m for m in self._members if m.spec.name == name), None)
        if member is None:
            names = ", ".join(m.spec.name for m in self._members)
            raise UnknownVolume(f"there is no volume {name}", f"the volumes are: {names}")
        async with self._one:
            if member.state in (VolumeState.DRAINING, VolumeState.DRAINED):
                return
            if not any(m is not member and m.placeable for m in self._members):
                raise LastVolume(
                    f"{name} is the only volume that takes objects", "add another volume first"
                )
            try:
                await self._begin(member)
            except OSError as error:
                raise DataDirectoryError(
                    f"the drain of {name} cannot be noted: {error.strerror or error}",
                    "look at the disk of daemon.data_dir, and drain once more",
                ) from error

    async def _begin(self, member: Member) -> None:
        known = self._away.known(member.uuid)
        if known is not None and member.state is not VolumeState.LOST:
            await self._away.remember(replace(known, draining=True))
        if member.state is VolumeState.LOST:  # also in the meantime
            await self._done(member)
            return
        tier = member.take_out()
        member.state, member.detail = VolumeState.DRAINING, "what it holds is looked up"
        if self._owner.on_lost is not None:
            self._owner.on_lost(member.number)
        self._start(self._again(member, tier))

    async def _again(self, member: Member, tier: VolumeTier | None) -> None:
        """Close a volume and open it for draining alone."""
        if tier is not None:
            try:
                await tier.close()
            except FAILURES as error:
                _log.warning("volume %s: %s", member.spec.name, error)
        try:
            found = await member.open(True)
            assert member.tier is not None
            found = await self._arrivals.purged(member, member.tier, member.uuid, found)
        except FAILURES as error:
            _log.error("volume %s: what it holds is dropped: %s", member.spec.name, error)
            await self._done(member)
            return
        await self.out(member, member.tier, merging.numbered(found, member.number))

    async def out(self, member: Member, tier: VolumeTier, found: Recovered) -> None:
        """Move what an open volume holds elsewhere, and have it count as empty from then on.

        Without its index child small objects cannot be read, though they are there: then it is
        opened anew, and the move begins again. What was moved already is known to be elsewhere.
        """
        await self._ready()
        move = draining.Move(self._owner, tier, found, self._lives)
        async with contextlib.aclosing(move.slices()) as slices:
            async for moved in slices:
                gone = merging.doomed(moved.found, self._away.pending(member.uuid))
                await move.hand_over(moved, ~gone)
                member.detail = (
                    f"{move.seen} of {len(found.place)} objects seen, {move.moved} moved"
                )
                if tier.index_died:
                    member.look()
                    member.detail = f"{tier.index_died}, after {member.detail}"
                    self._lose(member)
                    return
        await self._away.void(member.uuid)
        member.take_out()
        try:
            await tier.close()
        except FAILURES as error:
            _log.warning("volume %s: %s", member.spec.name, error)
        await self._done(member)

    def _lives(self) -> list[int]:
        return [m.life for m in self._members]

    async def _done(self, member: Member) -> None:
        """Durably: what the volume holds is void, and it is not used."""
        known = self._away.known(member.uuid)
        if known is not None:
            await self._away.void(member.uuid)
            await self._away.remember(replace(known, empty=True, drained=True, draining=False))
        member.state, member.detail = VolumeState.DRAINED, ""
        _log.warning("volume %s is drained", member.spec.name)
