"""Places for new objects, and the regions that they need: made ready before they are asked for.

Used on the verbs' loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvstored.tiers.base import NoRoom
from kvstored.tiers.nvme.changes import Changes
from kvstored.tiers.nvme.finishing import Finishing
from kvstored.tiers.nvme.slots import PlaceState
from kvstored.tiers.nvme.space import NeedsRegion, Space

AHEAD_BYTES = 512 << 20
"""As much as a device takes while it makes regions ready, whose syncs wait for all of that."""


class Reserving:
    """Reservations on one volume."""

    def __init__(
        self,
        space: Space,
        changes: Changes,
        works: Finishing,
        is_down: Callable[[], bool],
        ahead_bytes: int,
    ) -> None:
        """`ahead_bytes`: how much is to be free in slots of each size that is in use; 0: no region
        is made ready ahead. `is_down()`: whether the volume takes nothing more.
        """
        self._space = space
        self._changes = changes
        self._works = works
        self._is_down = is_down
        self._ahead_bytes = ahead_bytes
        self._one = asyncio.Lock()
        self._ahead: dict[int, asyncio.Task[bool]] = {}  # regions that are made ready, by slot size

    @property
    def making_ready(self) -> bool:
        """Whether regions are being given a slot size before they are needed."""
        return bool(self._ahead)

    async def reserve(self, namespace: str, lengths_bytes: Sequence[int]) -> list[int | NoRoom]:
        """See Tier."""
        places: list[int] = []
        if self._is_down():
            return [NoRoom.DOWN] * len(lengths_bytes)
        try:
            async with self._one:
                while len(places) < len(lengths_bytes):
                    taken, why = self._space.take(namespace, lengths_bytes[len(places) :])
                    places += taken
                    if isinstance(why, NeedsRegion):
                        why = None if await self._dedicate(why) else NoRoom.DOWN
                    if why is not None:
                        return [*places, *[why] * (len(lengths_bytes) - len(places))]
            for length in set(lengths_bytes):
                self._look_ahead(length)
        except asyncio.CancelledError:
            self.cancel(places)
            raise
        return list(places)

    def cancel(self, places: Sequence[int]) -> None:
        """See Tier."""
        for place in places:
            if self._space.state(place) is not PlaceState.RESERVED:
                raise ValueError(f"place {place:#x} is not reserved")
        self._space.release(places)

    async def _dedicate(self, needed: NeedsRegion) -> bool:
        ahead = self._ahead.get(needed.slot_bytes)
        if ahead is not None:
            await asyncio.wait([ahead])
            return not self._is_down()
        return await self._works.finish(self._changes.dedicate([needed.region], needed.slot_bytes))

    def _look_ahead(self, length_bytes: int) -> None:
        """Make more regions ready where slots for such objects are getting scarce: else the writes
        that need them would wait for their syncs, each of which waits for all that is written.
        """
        slot_bytes, regions = self._space.needs_soon(length_bytes, self._ahead_bytes)
        if not regions or slot_bytes in self._ahead:
            return
        for region in regions:
            self._space.slots.claim(region)
        task = self._works.start(self._changes.dedicate(regions, slot_bytes, opened=True))
        self._ahead[slot_bytes] = task
        task.add_done_callback(lambda _: self._ahead.pop(slot_bytes))
