"""What an open volume goes through before anything of it is used. Belongs to the verbs' loop."""

from __future__ import annotations

import logging
from dataclasses import replace

from kvstored.tiers.base import Recovered
from kvstored.tiers.nvme import merging
from kvstored.tiers.nvme.away import Away, unseen
from kvstored.tiers.nvme.member import Member
from kvstored.tiers.nvme.registry import Known
from kvstored.tiers.nvme.speed import differ
from kvstored.tiers.nvme.volume_tier import VolumeTier

_log = logging.getLogger(__name__)

PURGE_AT_ONCE = 1024


class Arrivals:
    """Has the registry know volumes, and volumes what they missed."""

    def __init__(self, away: Away) -> None:
        self._away = away

    async def recognise(self, member: Member, tier: VolumeTier) -> str:
        """Know the volume by its UUID from now on. Raises OSError."""
        uuid = tier.uuid.hex()
        known = self._away.known(uuid) or Known(uuid, "", "")
        member.read_bytes_per_s = member.read_bytes_per_s or known.read_bytes_per_s
        member.write_bytes_per_s = member.write_bytes_per_s or known.write_bytes_per_s
        directory = member.spec.directory
        other = self._away.at(directory)
        if other is not None and other.uuid != uuid:  # it is elsewhere now, or gone
            await self._away.remember(replace(other, directory=""))
        await self._away.remember(
            replace(known, directory=str(directory), name=member.spec.name, drained=False)
        )
        member.uuid = uuid
        return uuid

    async def note_speed(self, member: Member) -> None:
        """Remember a speed over restarts; again only once it is another."""
        known = self._away.known(member.uuid)
        if known is not None and differ(member.read_bytes_per_s, known.read_bytes_per_s):
            read, write = round(member.read_bytes_per_s), round(member.write_bytes_per_s)
            await self._away.remember(
                replace(known, read_bytes_per_s=read, write_bytes_per_s=write)
            )

    async def purged(
        self, member: Member, tier: VolumeTier, uuid: str, found: Recovered
    ) -> Recovered:
        """What is left once the volume has been told of every delete that it missed."""
        stand_in = unseen(member.spec.directory)
        while True:
            known = self._away.known(uuid)
            empty = known is not None and known.empty
            missed = {name: self._away.pending(name) for name in (uuid, stand_in)}
            if not empty and not any(missed.values()):
                break
            gone = merging.doomed(found, missed[uuid] + missed[stand_in])
            if empty:
                gone[:] = True
            places = found.place[gone].tolist()
            for at in range(0, len(places), PURGE_AT_ONCE):
                await tier.delete(places[at : at + PURGE_AT_ONCE])
            found = merging.rows(found, ~gone)
            _log.info("volume %s: %d deletes made up for", member.spec.name, len(places))
            for name, tombstones in missed.items():
                await self._away.told(name, len(tombstones), emptied=empty and name == uuid)
        if self._away.known(stand_in) is not None:
            await self._away.drop(stand_in)
            if self._away.pending(uuid):
                return await self.purged(member, tier, uuid, found)
        return found
