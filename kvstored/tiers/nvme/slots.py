"""Which slot is used for what, in memory. Pure bookkeeping: no I/O, no waiting.

A region serves one slot size while any of its slots is used, and another only once it is empty.
What is asked for together gets adjacent slots where a region of the size has them: the region in
hand, or else the fullest, so that the emptiest get the chance to become empty. Where none has, the
holes of the fullest are filled before a region more is taken.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvstored.tiers.nvme.format import RegionEntry, RegionState, place_of, region_of, slot_of
from kvstored.tiers.nvme.layout import MIN_SLOT_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

NOBODY = 0xFFFFFFFF
"""Owner of a place without one."""


STRANDED = 8
"""At most this part of a volume may be free in slots of sizes that nobody wants."""

SPARED = 8
"""This part of a volume's regions is left to whatever size needs one, not made ready for any."""

CHOICES = 4
"""Regions that are named to whoever is to empty one."""


class PlaceState(enum.IntEnum):
    """Life of a place."""

    FREE = 0
    RESERVED = 1
    WRITING = 2
    LIVE = 3
    LEAVING = 4  # deleted, but readers or the commit are not through
    LOST = 5  # its header could not be voided; not used again in this run


def _runs(marked: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the runs of marked slots begin, and how long each is."""
    fenced = np.zeros(len(marked) + 2, np.int8)
    fenced[1:-1] = marked
    edges = np.flatnonzero(np.diff(fenced))
    return edges[0::2], edges[1::2] - edges[0::2]


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
    _longest: int = -1  # of its runs of free slots; -1: not known

    @property
    def slots(self) -> int:
        """Number of slots the region has at its present slot size."""
        return len(self.states)

    @property
    def empty(self) -> bool:
        """Whether no slot is used."""
        return self.free == self.slots

    @property
    def longest_run(self) -> int:
        """Most free slots side by side."""
        if self._longest < 0:
            self._longest = int(_runs(self.states == PlaceState.FREE)[1].max(initial=0))
        return self._longest

    @property
    def settled(self) -> bool:
        """Whether every slot holds an object or is free."""
        used = np.count_nonzero(self.states == PlaceState.LIVE)
        return bool(used + self.free == self.slots)

    def dedicate(self, entry: RegionEntry, region_bytes: int) -> None:
        """Take on a new table entry; every slot is free.

        Of the smallest slots not all are used: the index has room for so many records.
        """
        count = region_bytes // max(entry.slot_bytes, MIN_SLOT_BYTES) if entry.slot_bytes else 0
        self.entry = entry
        self.states = np.zeros(count, np.uint8)
        self.opened = np.zeros(count, np.bool_)
        self.owners = np.full(count, NOBODY, np.uint32)
        self.free = count
        self._longest = count

    def pick(self, count: int) -> list[int]:
        """Free slots, at most `count`: side by side where it has so many, open ones at best, in the
        smallest run that will do; else from its longest runs.
        """
        free = self.states == PlaceState.FREE
        for marked in (free & self.opened, free):
            starts, lengths = _runs(marked)
            enough = np.flatnonzero(lengths >= count)
            if len(enough):
                first = int(starts[enough[np.argmin(lengths[enough])]])
                return list(range(first, first + count))
        picked: list[int] = []
        for run in np.argsort(-lengths, kind="stable").tolist():
            first, last = int(starts[run]), int(starts[run] + lengths[run])
            picked.extend(range(first, min(last, first + count - len(picked))))
            if len(picked) == count:
                break
        return picked

    def use(self, slots: Sequence[int], owner: int) -> None:
        """Reserve free slots."""
        self.states[slots] = PlaceState.RESERVED
        self.owners[slots] = owner
        self.free -= len(slots)
        self._longest = -1

    def release(self, slots: Sequence[int]) -> None:
        """Make used slots free."""
        self.states[slots] = PlaceState.FREE
        self.owners[slots] = NOBODY
        self.free += len(slots)
        self._longest = -1

    def load(self, slots: NDArray[np.uint32], owners: NDArray[np.uint32]) -> None:
        """Mark recovered objects live."""
        self.states[slots] = PlaceState.LIVE
        self.owners[slots] = owners
        self.free -= len(slots)
        self._longest = -1


def by_region(places: Sequence[int]) -> list[tuple[int, slice | NDArray[np.int64], list[int]]]:
    """Places by region: its number, the rows of its places, and their slots."""
    if not places:
        return []
    first = places[0] >> 32
    if all(place >> 32 == first for place in places):  # the usual case
        return [(first, slice(None), [slot_of(place) for place in places])]
    rows: dict[int, list[int]] = {}
    for row, place in enumerate(places):
        rows.setdefault(region_of(place), []).append(row)
    return [
        (number, np.array(held, np.int64), [slot_of(places[row]) for row in held])
        for number, held in rows.items()
    ]


class SlotTable:
    """All regions of a volume."""

    def __init__(self, entries: list[RegionEntry], region_bytes: int) -> None:
        """`entries` is the region table as it was read, one for each region that exists."""
        self.region_bytes = region_bytes
        self.regions = [Region(entry) for entry in entries]
        self._sizes: dict[int, set[int]] = {}
        self._free: set[int] = set()
        self._current: dict[int, int] = {}
        self._kept: set[int] = set()
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

    def take(self, slot_bytes: int, owner: int, count: int) -> list[int]:
        """Reserve slots in regions that already have the size: the places, at most `count`."""
        places: list[int] = []
        while len(places) < count:
            number = self._choose(slot_bytes, count - len(places))
            if number is None:
                break
            region = self.regions[number]
            slots = region.pick(count - len(places))
            region.use(slots, owner)
            base = place_of(number, 0)
            places += [base | slot for slot in slots]
        return places

    def _choose(self, slot_bytes: int, count: int) -> int | None:
        """The region of the size that so many slots are to come from; None if none has any."""
        current = self._current.get(slot_bytes)
        if current is not None and self.regions[current].longest_run >= count:
            return current
        regions = self.regions
        fullest = sorted(
            (regions[n].free, n) for n in self._sizes.get(slot_bytes, ()) if regions[n].free
        )
        if not fullest:
            self._current.pop(slot_bytes, None)
            return None
        for free, number in fullest:
            if free >= count and regions[number].longest_run >= count:
                break
        else:
            in_hand = current is not None and regions[current].free
            number = current if in_hand and current is not None else fullest[0][1]
        self._current[slot_bytes] = number
        return number

    def spare_region(self) -> int | None:
        """A region that may be given another slot size: a free one, or else an empty one."""
        if self._free:
            return min(self._free)
        for numbers in self._sizes.values():
            for number in numbers:
                if self.regions[number].empty and number not in self._kept:
                    return number
        return None

    def ahead(self, slot_bytes: int, ahead_bytes: int) -> list[int]:
        """Regions without slots to be given that size now, so that `ahead_bytes` are free in it; no
        more than have it already, so that a size that is rare takes little; and some are left to
        whatever size comes.
        """
        having = self._sizes.get(slot_bytes, set())
        free = sum(self.regions[n].free for n in having) * slot_bytes
        wanted = min(-(-(ahead_bytes - free) // self.region_bytes), len(having))
        spare = len(self._free) - max(1, len(self.regions) // SPARED)
        return sorted(self._free)[: max(0, min(wanted, spare))]

    def keep(self, numbers: Sequence[int], kept: bool) -> None:
        """Whether dedicated regions are to keep their slot size, however empty they are."""
        if kept:
            self._kept.update(numbers)
        else:
            self._kept.difference_update(numbers)

    def crowded(self, slot_bytes: int) -> list[range]:
        """Places of regions that are to be emptied for slots of that size, the emptiest first.

        None as long as deleting what is oldest is likely to free slots of that size, or a region,
        soon enough: while what is free in regions of other sizes is less than 1/STRANDED of all,
        and no region of them is at least half free.
        """
        stranded = 0
        found: list[tuple[int, int]] = []
        for size, numbers in self._sizes.items():
            for number in numbers if size != slot_bytes else ():
                region = self.regions[number]
                stranded += region.free * size
                if region.settled:
                    found.append(((region.slots - region.free) * size, number))
        found.sort()
        if stranded * STRANDED < len(self.regions) * self.region_bytes:
            found = [(used, n) for used, n in found if 2 * used <= self._usable_bytes(n)]
        return [
            range(place_of(number, 0), place_of(number, self.regions[number].slots))
            for _, number in found[:CHOICES]
        ]

    def _usable_bytes(self, number: int) -> int:
        region = self.regions[number]
        return region.slots * region.entry.slot_bytes

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

    def states(self, places: Sequence[int]) -> NDArray[np.uint8]:
        """States of places that exist, in order."""
        found = np.empty(len(places), np.uint8)
        for number, rows, slots in by_region(places):
            found[rows] = self.regions[number].states[slots]
        return found

    def set_states(self, places: Sequence[int], state: PlaceState) -> None:
        """Move used places along; `release` makes them free."""
        for number, _, slots in by_region(places):
            self.regions[number].states[slots] = state

    def owner(self, place: int) -> int:
        """Namespace id that a used place is charged to."""
        return int(self.regions[region_of(place)].owners[slot_of(place)])

    def owners(self, places: Sequence[int]) -> NDArray[np.uint32]:
        """Namespace ids that used places are charged to, in order."""
        found = np.empty(len(places), np.uint32)
        for number, rows, slots in by_region(places):
            found[rows] = self.regions[number].owners[slots]
        return found

    def charges(self, places: Sequence[int]) -> NDArray[np.int64]:
        """What used places are charged, in order."""
        found = np.empty(len(places), np.int64)
        for number, rows, _ in by_region(places):
            found[rows] = self.regions[number].entry.slot_bytes
        return found

    def entry(self, place: int) -> RegionEntry:
        """Table entry of a place's region."""
        return self.regions[region_of(place)].entry

    def release(self, places: Sequence[int]) -> None:
        """Make used places free."""
        for number, _, slots in by_region(places):
            self.regions[number].release(slots)

    def load(self, number: int, slots: NDArray[np.uint32], owners: NDArray[np.uint32]) -> None:
        """Mark recovered objects of one region live."""
        self.regions[number].load(slots, owners)


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
