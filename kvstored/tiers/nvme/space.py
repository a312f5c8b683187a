"""Room on a volume: which places are used, by whom, and what that is charged. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from kvstored.tiers.base import NoRoom
from kvstored.tiers.nvme import layout
from kvstored.tiers.nvme.format import RegionEntry, is_small, slot_of, small_place
from kvstored.tiers.nvme.recovery import opened_slots
from kvstored.tiers.nvme.slots import PlaceState, SlotTable, SmallTable
from kvstored.tiers.nvme.walker import Loaded


@dataclass(frozen=True, slots=True)
class NeedsRegion:
    """There is room once `region` has been given this slot size."""

    region: int
    slot_bytes: int


class Space:
    """Slots and small objects of one volume, and the accounts of its namespaces."""

    def __init__(
        self,
        table: list[RegionEntry],
        plan: layout.Plan,
        namespace_cap: Callable[[str], int] | None,
    ) -> None:
        """`namespace_cap(name)` gives a namespace's cap in bytes; None: the tier's alone counts."""
        self.slots = SlotTable(table, plan.region_bytes)
        self.small = SmallTable(plan.small_capacity_bytes)
        self._region_bytes = plan.region_bytes
        self._namespace_cap = namespace_cap
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._charged: Counter[int] = Counter()
        self.charged_bytes = 0
        self.objects = 0

    def number(self, namespace: str) -> int:
        """The tier's own number of a namespace."""
        known = self._numbers.get(namespace)
        if known is None:
            known = self._numbers[namespace] = len(self._names)
            self._names.append(namespace)
        return known

    def namespace_charged_bytes(self, namespace: str) -> int:
        """What a namespace's objects and reservations are charged."""
        return self._charged[self._numbers.get(namespace, -1)]

    def load(self, index: Loaded, small: Loaded) -> None:
        """Take over what was recovered."""
        owners = self._owners(index)
        places = index.records["place"].astype(np.uint64)
        regions = (places >> np.uint64(32)).astype(np.int64)
        numbers = (places & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        order = np.argsort(regions, kind="stable")
        bounds = np.flatnonzero(np.diff(regions[order])) + 1
        for rows in np.split(order, bounds) if len(order) else []:
            region = int(regions[rows[0]])
            self.slots.load(region, numbers[rows], owners[rows])
        sizes = np.array([r.entry.slot_bytes for r in self.slots.regions], np.uint64)
        self._count(owners, sizes[regions])
        self.slots.reclaim()
        for region, bitmap in index.opened.items():
            if region < len(self.slots.regions):
                held = self.slots.regions[region]
                held.opened[opened_slots(bitmap, held.slots)] = True
        lengths, inverse = np.unique(small.records["length_bytes"], return_inverse=True)
        charges = np.array([layout.charge_bytes(int(n)) for n in lengths], np.uint32)[inverse]
        owners = self._owners(small)
        numbers = (small.records["place"] & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        self.small.load(numbers, owners, charges)
        self._count(owners, charges.astype(np.uint64))

    def _owners(self, loaded: Loaded) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        names = [name.decode() for name in loaded.names.in_order("n")]
        numbers = np.array([self.number(name) for name in names] or [0], np.uint32)
        owners: np.ndarray[tuple[int], np.dtype[np.uint32]] = numbers[loaded.records["namespace"]]
        return owners

    def _count(
        self,
        owners: np.ndarray[tuple[int], np.dtype[np.uint32]],
        charges: np.ndarray[tuple[int], np.dtype[np.uint64]],
    ) -> None:
        for owner in np.unique(owners):
            self._charged[int(owner)] += int(charges[owners == owner].sum())
        self.charged_bytes += int(charges.sum())
        self.objects += len(owners)

    # ---- life of a place ----------------------------------------------------------------------

    def take(
        self, namespace: str, lengths_bytes: Sequence[int]
    ) -> tuple[list[int], NoRoom | NeedsRegion | None]:
        """Reserve and charge places for objects of those lengths, in order.

        Gives the places, and why there are not as many as lengths.
        """
        places: list[int] = []
        for length, alike in groupby(lengths_bytes):
            count = sum(1 for _ in alike)
            taken, why = self._take_alike(namespace, length, count)
            places += taken
            if why is not None:
                return places, why
        return places, None

    def _take_alike(
        self, namespace: str, length_bytes: int, count: int
    ) -> tuple[list[int], NoRoom | NeedsRegion | None]:
        """`take` for so many objects of one length."""
        if length_bytes > layout.SMALL_MAX_BYTES:
            return self._take_slots(namespace, length_bytes, count)
        charge = layout.charge_bytes(length_bytes)
        owner = self.number(namespace)
        places = self._take_small(charge, owner, self._allowed(namespace, charge, count))
        self._charge(owner, charge * len(places))
        if len(places) == count:
            return places, None
        # What they share in LMDB is little: beyond it they go where all others go.
        more, why = self._take_slots(namespace, length_bytes, count - len(places))
        return places + more, why

    def _take_slots(
        self, namespace: str, length_bytes: int, count: int
    ) -> tuple[list[int], NoRoom | NeedsRegion | None]:
        """`take` for so many objects of one length, in slots."""
        charge = layout.slot_bytes(length_bytes)
        cap = self._namespace_cap(namespace) if self._namespace_cap else None
        if charge > self._region_bytes or (cap is not None and charge > cap):
            return [], NoRoom.NEVER
        owner = self.number(namespace)
        allowed = self._allowed(namespace, charge, count)
        places = self.slots.take(charge, owner, allowed)
        self._charge(owner, charge * len(places))
        if len(places) == count:
            return places, None
        if len(places) == allowed:
            return places, NoRoom.NAMESPACE
        region = self.slots.spare_region()
        return places, NoRoom.TIER if region is None else NeedsRegion(region, charge)

    def needs_soon(self, length_bytes: int, ahead_bytes: int) -> tuple[int, list[int]]:
        """The slot size for objects of that length, and the regions to make ready for it: none
        where so much is free in slots of the size, or few regions are left that have no slots.
        """
        slot_bytes = layout.slot_bytes(length_bytes)
        if length_bytes <= layout.SMALL_MAX_BYTES or slot_bytes > self._region_bytes:
            return slot_bytes, []
        return slot_bytes, self.slots.ahead(slot_bytes, ahead_bytes)

    def _allowed(self, namespace: str, charge: int, count: int) -> int:
        """How many of so many objects the namespace's cap lets in."""
        cap = self._namespace_cap(namespace) if self._namespace_cap else None
        if cap is None:
            return count
        return min(count, max(0, cap - self._charged[self.number(namespace)]) // charge)

    def _charge(self, owner: int, charge_bytes: int) -> None:
        self._charged[owner] += charge_bytes
        self.charged_bytes += charge_bytes

    def _take_small(self, charge: int, owner: int, count: int) -> list[int]:
        places: list[int] = []
        while len(places) < count:
            number = self.small.take(charge, owner)
            if number is None:
                break
            places.append(small_place(number))
        return places

    def crowded(self, length_bytes: int) -> list[range]:
        """See Tier.crowded."""
        return self.slots.crowded(layout.slot_bytes(length_bytes))

    def state(self, place: int) -> PlaceState:
        """State of any place; FREE for one that does not exist."""
        if is_small(place):
            return self.small.state(slot_of(place))
        return self.slots.state(place)

    def are(self, places: Sequence[int], state: PlaceState) -> bool:
        """Whether all these places are in that state."""
        return all(self.state(place) is state for place in places)

    def set_states(self, places: Sequence[int], state: PlaceState) -> None:
        """Move used places along, counting objects; `release` makes them free."""
        slots = [place for place in places if not is_small(place)]
        before = int((self.slots.states(slots) == PlaceState.LIVE).sum())
        self.slots.set_states(slots, state)
        if len(slots) != len(places):
            for place in places:
                if is_small(place):
                    before += self.small.state(slot_of(place)) is PlaceState.LIVE
                    self.small.set_state(slot_of(place), state)
        self.objects += (len(places) if state is PlaceState.LIVE else 0) - before

    def namespace(self, place: int) -> str:
        """Namespace that a used place is charged to."""
        owner = self.small.owner(slot_of(place)) if is_small(place) else self.slots.owner(place)
        return self._names[owner]

    def entry(self, place: int) -> RegionEntry | None:
        """Table entry of a slot's region; None for a small object."""
        return None if is_small(place) else self.slots.entry(place)

    def release(self, places: Sequence[int]) -> None:
        """Make used places free, and charge them no longer."""
        slots = [place for place in places if not is_small(place)]
        self.objects -= int((self.slots.states(slots) == PlaceState.LIVE).sum())
        owners, charges = self.slots.owners(slots), self.slots.charges(slots)
        self.slots.release(slots)
        for owner in np.unique(owners):
            self._credit(int(owner), int(charges[owners == owner].sum()))
        for place in places if len(slots) != len(places) else ():
            if is_small(place):
                number = slot_of(place)
                self.objects -= self.small.state(number) is PlaceState.LIVE
                self._credit(self.small.owner(number), self.small.charge_bytes(number))
                self.small.release(number)

    def _credit(self, owner: int, charge_bytes: int) -> None:
        self._charged[owner] -= charge_bytes
        self.charged_bytes -= charge_bytes
