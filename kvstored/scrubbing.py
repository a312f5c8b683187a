"""Scrubs of a daemon's volumes: what reads them, what is dropped, what operators ask for."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvstored.tiers.base import VOLUME_SHIFT, ObjectRead, ReadOutcome
from kvstored.tiers.nvme.contents import Listed
from kvstored.tiers.nvme.scrub import Scrubber, ScrubStatus
from kvstored.tiers.nvme.status import VolumeStatus
from kvstored.tiers.nvme.tier import NvmeTier
from kvstored.tiers.nvme.volume_tier import VolumeTier


class _Volume:
    """One volume of a tier, through all of its lives. While it is away, it does not answer.

    Reads go by the tier, which asks nothing of a device that it does not trust.
    """

    def __init__(self, tier: NvmeTier, number: int) -> None:
        self._tier = tier
        self._number = number

    @property
    def there(self) -> VolumeTier | None:
        """The volume; None while it is away."""
        return self._tier.volume(self._number)

    def place(self, inner: int) -> int:
        """The tier's place of one of the volume's."""
        return self._number << VOLUME_SHIFT | inner

    async def read(self, items: Sequence[ObjectRead]) -> list[ReadOutcome]:
        """See Scrubbed."""
        return await self._tier.read([replace(i, place=self.place(i.place)) for i in items])

    async def list_after(self, place: int, most: int) -> list[Listed]:
        """See Scrubbed."""
        there = self.there
        if there is None:
            raise OSError(errno.ESHUTDOWN, "the volume is away")
        return await there.list_after(place, most)

    def is_live(self, place: int) -> bool:
        """See Scrubbed."""
        there = self.there
        return there is not None and there.is_live(place)

    @property
    def region_count(self) -> int:
        """See Scrubbed."""
        there = self.there
        return there.region_count if there is not None else 0


class Scrubbing:
    """The volumes of a tier, and a scrub of each. Made on the verbs' loop, once the tier is open.

    `drop(place, gone)` takes an object out of the store, by its place in the tier; `gone`: it was
    deleted, and is not damaged. `rate_bytes_per_s` is
    that of each volume's background scrub; 0: none. It is what operators see and do of volumes:
    `kvstored.server.ports.VolumesPort`.
    """

    def __init__(
        self, tier: NvmeTier, drop: Callable[[int, bool], object], rate_bytes_per_s: int
    ) -> None:
        self._tier = tier
        self._drop = drop
        self._volumes = [_Volume(tier, volume.number) for volume in tier.volumes()]
        self._scrubbers = [
            Scrubber(volume, partial(self._rotten, volume), rate_bytes_per_s=rate_bytes_per_s)
            for volume in self._volumes
        ]

    def _rotten(self, volume: _Volume, inner: int, gone: bool) -> None:
        self._drop(volume.place(inner), gone)

    def volumes(self) -> list[VolumeStatus]:
        """Each volume as it is now, by number."""
        return self._tier.volumes()

    async def drain(self, name: str) -> None:
        """See NvmeTier.drain."""
        await self._tier.drain(name)

    def scrub_status(self, number: int) -> ScrubStatus | None:
        """Where the scrub of a volume stands; None while the volume is away."""
        return self._scrubbers[number].status if self._volumes[number].there else None

    def scrub(self, number: int, rate_bytes_per_s: int) -> asyncio.Future[ScrubStatus] | None:
        """Begin a pass over a volume now, at a rate (0: as fast as it goes); done when it has
        ended. None for a volume that is away.
        """
        if self._volumes[number].there is None:
            return None
        return self._scrubbers[number].demand(rate_bytes_per_s)

    async def close(self, timeout_s: float) -> bool:
        """End every scrub, and wait for their last reads; False: some are still at it then."""
        ends = {asyncio.ensure_future(scrubber.close()) for scrubber in self._scrubbers}
        # Not wait_for: cancelled, they would still wait for what a device does not give.
        _, late = await asyncio.wait(ends, timeout=timeout_s)
        return not late
