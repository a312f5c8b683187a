"""Has places reserved: in slots that are free, and where there is none, in those that a growth
brings about. On the verbs' loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby

from kvstored.tiers.base import MAX_OBJECT_BYTES, NoRoom
from kvstored.tiers.ram.growth import Growth
from kvstored.tiers.ram.places import Places
from kvstored.tiers.ram.running import Running
from kvstored.tiers.ram.slabs import Slabs

_FEW = 5  # places of one length that are quicker taken one by one than in numpy's steps
_ZEROS = bytes(4096)


class Reserving:
    """Reserves places, whose padding reads as zeros from then on."""

    def __init__(self, slabs: Slabs, places: Places, growth: Growth, running: Running) -> None:
        self._slabs = slabs
        self._places = places
        self._growth = growth
        self._running = running

    async def reserve(self, namespace: str, lengths_bytes: Sequence[int]) -> list[int | NoRoom]:
        """See RamTier."""
        places: list[int] = []
        missing = len(lengths_bytes)
        try:
            while missing:
                rest = lengths_bytes[-missing:]
                places += self._take(namespace, rest)
                missing = len(lengths_bytes) - len(places)
                if not missing:
                    break
                grown = await self._grow(namespace, lengths_bytes[-missing:])
                if isinstance(grown, NoRoom):
                    return [*places, *[grown] * missing]
                self._clear_padding(grown)
                places.append(grown)
                missing -= 1
        except BaseException:
            for place in places:
                self._places.cancel(place)
            raise
        return list(places)

    def _take(self, namespace: str, lengths_bytes: Sequence[int]) -> list[int]:
        """Places in free slots for the first lengths, up to one for which there is none."""
        places: list[int] = []
        for length_bytes, run in groupby(lengths_bytes):
            count = sum(1 for _ in run)
            if count < _FEW:
                if not self._take_few(namespace, length_bytes, count, places):
                    break
                continue
            reserved = self._places.reserve_many(namespace, length_bytes, count)
            places += reserved.places
            padding = _ZEROS[: -length_bytes % len(_ZEROS)]
            for segment_id, offsets in reserved.extents if padding else ():
                memory = self._growth.memory[segment_id].memory
                for offset in offsets:
                    end = offset + length_bytes
                    memory[end : end + len(padding)] = padding
            if len(reserved.places) < count:
                break
        return places

    def _take_few(self, namespace: str, length_bytes: int, count: int, places: list[int]) -> bool:
        """The same one by one, for short runs. True: all were had."""
        for _ in range(count):
            place = self._places.reserve(namespace, length_bytes)
            if place is None:
                return False
            self._clear_padding(place)
            places.append(place)
        return True

    async def _grow(self, namespace: str, lengths_bytes: Sequence[int]) -> int | NoRoom:
        """A place for the first of these lengths; the others of its size say how much to make."""
        first = lengths_bytes[0]
        if first > self._slabs.cap_of(namespace):
            return NoRoom.NEVER
        if not 0 < first <= MAX_OBJECT_BYTES:
            raise ValueError(f"an object of {first} bytes")
        slot_bytes = self._slabs.slot_bytes(namespace, first)
        wanted_bytes = slot_bytes * sum(length == first for length in lengths_bytes)
        growing = self._running.start(
            self._growth.grow(
                namespace, slot_bytes, wanted_bytes, lambda: self._places.reserve(namespace, first)
            )
        )
        try:
            return await asyncio.shield(growing)
        except asyncio.CancelledError:
            # The growth goes on without its caller; the place it takes is nobody's.
            growing.add_done_callback(self._abandon)
            raise

    def _abandon(self, growing: asyncio.Task[int | NoRoom]) -> None:
        if not growing.cancelled() and growing.exception() is None:
            place = growing.result()
            if not isinstance(place, NoRoom):
                self._places.cancel(place)

    def _clear_padding(self, place: int) -> None:
        where = self._places.locate(place)
        padding_bytes = -where.length_bytes % len(_ZEROS)
        if padding_bytes:
            end = where.offset + where.length_bytes
            memory = self._growth.memory[where.segment_id].memory
            memory[end : end + padding_bytes] = _ZEROS[:padding_bytes]
