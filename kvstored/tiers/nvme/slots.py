"""Which slot is used for what, in memory. Pure bookkeeping: no I/O, no waiting.

A region serves one slot size while any of its slots is used, and another only once it is empty.
Slots are handed out from the fullest region of their size, lowest first, so that a prefix lies
together and the emptiest regions get the chance to become empty.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvstored.tiers.nvme.format import RegionEntry, RegionState, place_of, region_of, slot_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

NOBODY = 0xFFFFFFFF
"""Owner of a place without one."""


class PlaceState(enum.IntEnum):
    """Life of a place."""

    FREE = 0
    RESERVED = 1
    WRITING = 2
    LIVE = 3
    LEAVING = 4  # deleted, but readers or the commit are not through
    LOST = 5  # its header could not be voided; not used again in this run


@dataclass(slots=True)
class Region:
    """One region with its slots.

    `opened[i]`: the index says, durably, that slot i may be written (see docs/nvme-format.md).
    """

    entry: RegionEntry
    states: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    opened: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    owners: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    free: int = 0

    @property
    def slots(self) -> int:
        """Number of slots the region has at its present slot size."""
        return len(self.states)

    @property
    def empty(self) -> bool:
        """Whether no slot is used."""
        return self.free == self.slots

    def dedicate(self, entry: RegionEntry, region_bytes: int) -> None:
        """Take on a new table entry; every slot is free."""
        count = region_bytes // entry.slot_bytes if entry.slot_bytes else 0
        self.entry = entry
        self.states = np.zeros(count, np.uint8)
        self.opened = np.zeros(count, np.bool_)
        self.owners = np.full(count, NOBODY, np.uint32)
        self.free = count


class SlotTable:
    """All regions of a volume."""

    def __init__(self, entries: list[RegionEntry], region_bytes: int) -> None:
        """`entries` is the region table as it was read, one for each region that exists."""
        self.region_bytes = region_bytes
        self.regions = [Region(entry) for entry in entries]
        self._sizes: dict[int, set[int]] = {}
        self._free: set[int] = set()
        self._current: dict[int, int] = {}
        for number, region in enumerate(self.regions):
            if region.entry.state is RegionState.DEDICATED:
                self.dedicated(region.entry)
            elif region.entry.state is RegionState.FREE:
                self._free.add(number)
            else:
                region.dedicate(region.entry, region_bytes)

    def dedicated(self, entry: RegionEntry) -> None:
        """A region's new entry is on the device: its slots can be handed out."""
        region = self.regions[entry.region]
        self._forget(entry.region)
        region.dedicate(entry, self.region_bytes)
        self._sizes.setdefault(entry.slot_bytes, set()).add(entry.region)

    def abandon(self, entry: RegionEntry) -> None:
        """Hand out no more slots of a region; what is live in it stays readable."""
        self._forget(entry.region)
        self.regions[entry.region].entry = entry

    def _forget(self, number: int) -> None:
        old = self.regions[number].entry.slot_bytes
        self._free.discard(number)
        self._sizes.get(old, set()).discard(number)
        if self._current.get(old) == number:
            del self._current[old]

    def take(self, slot_bytes: int, owner: int) -> int | None:
        """Reserve a slot in a region that already has the size; None if there is none."""
        number = self._current.get(slot_bytes)
        if number is None or not self.regions[number].free:
            open_regions = [n for n in self._sizes.get(slot_bytes, ()) if self.regions[n].free]
            if not open_regions:
                self._current.pop(slot_bytes, None)
                return None
            number = min(open_regions, key=lambda n: (self.regions[n].free, n))
            self._current[slot_bytes] = number
        region = self.regions[number]
        free = region.states == PlaceState.FREE
        ready = free & region.opened
        slot = int(np.argmax(ready)) if ready.any() else int(np.argmax(free))
        region.states[slot] = PlaceState.RESERVED
        region.owners[slot] = owner
        region.free -= 1
        return place_of(number, slot)

    def spare_region(self) -> int | None:
        """A region that may be given another slot size: a free one, or else an empty one."""
        if self._free:
            return min(self._free)
        for numbers in self._sizes.values():
            for number in numbers:
                if self.regions[number].empty:
                    return number
        return None

    @property
    def abandoned(self) -> int:
        """Number of regions that are not written any more."""
        return sum(r.entry.state is RegionState.ABANDONED for r in self.regions)

    def claim(self, number: int) -> None:
        """Keep a spare region from being handed out while its new entry is being written."""
        self._forget(number)

    def unclaim(self, number: int) -> None:
        """The new entry could not be written. What is on the device is unknown, so that the region
        has no slots until another entry is written.
        """
        self.regions[number].dedicate(RegionEntry(number), self.region_bytes)
        self._free.add(number)

    def reclaim(self) -> None:
        """After a restart: abandoned regions that hold nothing may be dedicated anew."""
        for number, region in enumerate(self.regions):
            if region.entry.state is RegionState.ABANDONED and region.empty:
                self._free.add(number)

    def state(self, place: int) -> PlaceState:
        """State of a place; FREE for one that does not exist."""
        number, slot = region_of(place), slot_of(place)
        if number >= len(self.regions) or slot >= self.regions[number].slots:
            return PlaceState.FREE
        return PlaceState(int(self.regions[number].states[slot]))

    def set_state(self, place: int, state: PlaceState) -> None:
        """Move a used place along; `release` makes it free."""
        self.regions[region_of(place)].states[slot_of(place)] = state

    def owner(self, place: int) -> int:
        """Namespace id that a used place is charged to."""
        return int(self.regions[region_of(place)].owners[slot_of(place)])

    def charge_bytes(self, place: int) -> int:
        """What a used place is charged."""
        return self.regions[region_of(place)].entry.slot_bytes

    def entry(self, place: int) -> RegionEntry:
        """Table entry of a place's region."""
        return self.regions[region_of(place)].entry

    def release(self, place: int) -> None:
        """Make a used place free."""
        region = self.regions[region_of(place)]
        slot = slot_of(place)
        region.states[slot] = PlaceState.FREE
        region.owners[slot] = NOBODY
        region.free += 1

    def load(self, number: int, slots: NDArray[np.uint32], owners: NDArray[np.uint32]) -> None:
        """Mark recovered objects of one region live."""
        region = self.regions[number]
        region.states[slots] = PlaceState.LIVE
        region.owners[slots] = owners
        region.free -= len(slots)


class SmallTable:
    """Numbers of small objects: as many as needed, the lowest freed one first."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._states = np.zeros(64, np.uint8)
        self._owners = np.full(64, NOBODY, np.uint32)
        self._charges = np.zeros(64, np.uint32)
        self._free: list[int] = list(range(63, -1, -1))

    def take(self, charge_bytes: int, owner: int) -> int | None:
        """Reserve a number; None if the capacity does not allow it."""
        if self.used_bytes + charge_bytes > self.capacity_bytes:
            return None
        if not self._free:
            self._grow(2 * len(self._states))
        number = self._free.pop()
        self._use(number, charge_bytes, owner, PlaceState.RESERVED)
        return number

    def _grow(self, count: int) -> None:
        old = len(self._states)
        self._states = np.concatenate([self._states, np.zeros(count - old, np.uint8)])
        self._owners = np.concatenate([self._owners, np.full(count - old, NOBODY, np.uint32)])
        self._charges = np.concatenate([self._charges, np.zeros(count - old, np.uint32)])
        self._free.extend(range(count - 1, old - 1, -1))

    def _use(self, number: int, charge_bytes: int, owner: int, state: PlaceState) -> None:
        self._states[number] = state
        self._owners[number] = owner
        self._charges[number] = charge_bytes
        self.used_bytes += charge_bytes

    def load(
        self, numbers: NDArray[np.uint32], owners: NDArray[np.uint32], charges: NDArray[np.uint32]
    ) -> None:
        """Take over recovered objects; the table must be new."""
        if not len(numbers):
            return
        self._grow(max(64, int(numbers.max()) + 1))
        self._states[numbers] = PlaceState.LIVE
        self._owners[numbers] = owners
        self._charges[numbers] = charges
        self.used_bytes = int(charges.sum(dtype=np.uint64))
        self._free = np.flatnonzero(self._states == PlaceState.FREE)[::-1].tolist()

    def state(self, number: int) -> PlaceState:
        """State of a number; FREE for one that does not exist."""
        if number >= len(self._states):
            return PlaceState.FREE
        return PlaceState(int(self._states[number]))

    def set_state(self, number: int, state: PlaceState) -> None:
        """Move a used number along; `release` makes it free."""
        self._states[number] = state

    def owner(self, number: int) -> int:
        """Namespace id that a used number is charged to."""
        return int(self._owners[number])

    def charge_bytes(self, number: int) -> int:
        """What a used number is charged."""
        return int(self._charges[number])

    def release(self, number: int) -> None:
        """Make a used number free."""
        self.used_bytes -= int(self._charges[number])
        self._states[number] = PlaceState.FREE
        self._owners[number] = NOBODY
        self._free.append(number)
