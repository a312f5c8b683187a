"""Which memory is cut into what: namespaces, size classes, segments and caps. Bookkeeping only.

A segment holds slots of one size for one namespace, for life. `plan` names the next step towards a
free slot; `growth.py` does it and reports back. Figures change when a step begins or ends here, so
the sum of all segments, also those being made or given back, never passes a cap.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Set
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvstored.tiers.base import ALIGNMENT_BYTES, MAX_OBJECT_BYTES, NoRoom, padded_bytes, piece_count

MAX_SEGMENT_BYTES = MAX_OBJECT_BYTES
MAX_SLOTS = 16_384  # of a segment: keeps walking one short
MAX_EXACT_CLASSES = 64  # of a namespace; further sizes are rounded up
PIECE_CHECKSUM_BYTES = 8

_CAP_FRACTION = 128  # a segment is at most this part of the cap
_CLASS_FRACTION = 8  # and this part of what its class holds already,
_LEAST_FRACTION = 16  # but not less than this part of the largest
_OPEN_SAMPLE = 16  # how many segments are looked at for the fullest


@dataclass(slots=True, eq=False)
class SlabSegment:
    """One segment's slots. `pinned` counts those whose object must not move."""

    segment_id: int
    namespace: str
    slot_bytes: int
    slots: int
    busy: bytearray
    owners: array[int]  # per busy slot: the table row of its object, or MOVER
    pieces: bytearray  # per slot: the XXH3-64 of each piece, where there can be several
    used: int = 0
    pinned: int = 0
    draining: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of memory: slots times slot size, no remainder."""
        return self.slots * self.slot_bytes

    @property
    def free(self) -> int:
        """Slots without an object."""
        return self.slots - self.used

    @property
    def piece_stride(self) -> int:
        """Bytes of `pieces` per slot; 0 where the object's own checksum has its only piece's."""
        return _piece_stride(self.slot_bytes)


@dataclass(slots=True, eq=False)
class SizeClass:
    """The segments in use for one slot size of one namespace."""

    slot_bytes: int
    segments: dict[int, SlabSegment] = field(default_factory=dict)
    open: dict[int, SlabSegment] = field(default_factory=dict)  # free slots, not draining
    free_slots: int = 0  # of the open ones
    size_bytes: int = 0  # also of segments being made
    smallest_slots: int = 0  # of any segment
    current: SlabSegment | None = None

    def choose(self) -> SlabSegment | None:
        """Where the next object goes: one segment until it is full, then the fullest of a sample,
        so that the emptiest get a chance to empty.
        """
        segment = self.current
        if segment is None or segment.segment_id not in self.open:
            sample = islice(self.open.values(), _OPEN_SAMPLE)
            segment = self.current = min(sample, key=lambda s: s.free, default=None)
        return segment


@dataclass(slots=True, eq=False)
class Space:
    """What one namespace holds."""

    footprint_bytes: int = 0
    charged_bytes: int = 0
    objects: int = 0
    classes: dict[int, SizeClass] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Create:
    """Make a segment of that many slots."""

    slots: int


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Empty this segment (nothing in it is pinned) and give it back."""

    segment: SlabSegment


class Slabs:
    """All segments of a tier. `namespace_cap(name)` is asked at each growth; None: the tier's cap.

    `footprint_bytes` is the sum of all segments; `spaces` has the same per namespace. `floors`:
    bytes that no other namespace may take of the cap.
    """

    def __init__(
        self,
        cap_bytes: int,
        namespace_cap: Callable[[str], int] | None = None,
        floors: Mapping[str, int] | None = None,
    ) -> None:
        if cap_bytes < ALIGNMENT_BYTES:
            raise ValueError(f"cap of {cap_bytes} bytes is less than a page")
        self.cap_bytes = cap_bytes
        self.footprint_bytes = 0
        self.segments: dict[int, SlabSegment] = {}
        self.spaces: dict[str, Space] = {}
        self._namespace_cap = namespace_cap
        self.floors = dict(floors or {})
        self._next_id = 0
        self._expected: dict[int, SlabSegment] = {}  # retired ones whose memory comes back soon

    def cap_of(self, namespace: str) -> int:
        """Most bytes that the namespace's segments may take."""
        if self._namespace_cap is None:
            return self.cap_bytes
        return min(self.cap_bytes, self._namespace_cap(namespace))

    def most_of(self, namespace: str) -> int:
        """Most bytes that the namespace can ever have: its cap, less what others are sure of."""
        others = sum(floor for name, floor in self.floors.items() if name != namespace)
        return min(self.cap_of(namespace), self.cap_bytes - others)

    def slot_bytes(self, namespace: str, length_bytes: int) -> int:
        """Slot size for an object: exact for the namespace's first MAX_EXACT_CLASSES sizes, then
        rounded up to one of eight per power of two.
        """
        exact = padded_bytes(length_bytes)
        space = self.spaces.get(namespace)
        if space is None or exact in space.classes or len(space.classes) < MAX_EXACT_CLASSES:
            return exact
        step = max(ALIGNMENT_BYTES, 1 << (exact - 1).bit_length() - 4)
        coarse = -(-exact // step) * step
        return coarse if coarse <= self.cap_of(namespace) else exact

    def has_free(self, namespace: str, slot_bytes: int) -> bool:
        """True when `take` would find a slot."""
        space = self.spaces.get(namespace)
        size_class = space.classes.get(slot_bytes) if space else None
        return size_class is not None and size_class.free_slots > 0

    def take(self, namespace: str, slot_bytes: int, owner: int) -> tuple[SlabSegment, int] | None:
        """A free slot of that class, now busy and owned; None when there is none."""
        space = self.spaces.get(namespace)
        size_class = space.classes.get(slot_bytes) if space else None
        segment = size_class.choose() if size_class else None
        if size_class is None or segment is None:
            return None
        slot = segment.busy.find(0)
        segment.busy[slot] = 1
        segment.owners[slot] = owner
        segment.used += 1
        size_class.free_slots -= 1
        if not segment.free:
            del size_class.open[segment.segment_id]
        return segment, slot

    def take_many(
        self, namespace: str, slot_bytes: int, limit: int
    ) -> tuple[SlabSegment, NDArray[np.int64]] | None:
        """Free slots of one segment of that class, up to `limit`, now busy; None when there is
        none. The caller sets their owners.
        """
        space = self.spaces.get(namespace)
        size_class = space.classes.get(slot_bytes) if space else None
        segment = size_class.choose() if size_class else None
        if size_class is None or segment is None:
            return None
        busy = np.frombuffer(segment.busy, np.uint8)
        slots = np.flatnonzero(busy == 0)[:limit]
        busy[slots] = 1
        segment.used += len(slots)
        size_class.free_slots -= len(slots)
        if not segment.free:
            del size_class.open[segment.segment_id]
        return segment, slots

    def give(self, segment: SlabSegment, slot: int) -> None:
        """Free a busy slot."""
        segment.busy[slot] = 0
        segment.used -= 1
        if not segment.draining:
            size_class = self._class_of(segment)
            size_class.free_slots += 1
            size_class.open[segment.segment_id] = segment

    def plan(
        self,
        namespace: str,
        slot_bytes: int,
        demand_bytes: int,
        skip: Container[int] = (),
        stuck: Set[int] = frozenset(),
    ) -> Create | Reclaim | NoRoom:
        """Next step towards a free slot of that size, where there is none.

        `demand_bytes`: what the call at hand still wants in this class. `skip`: ids of segments
        that turned out not to be reclaimable. `stuck`: of segments whose memory would not come
        back, as a client that maps them does not answer.
        """
        space = self.spaces.get(namespace) or Space()
        cap = self.cap_of(namespace)
        if slot_bytes > self.most_of(namespace):
            return NoRoom.NEVER
        free_to_it = min(cap, self.cap_bytes - self._kept_for_others(namespace))
        own_room = free_to_it - space.footprint_bytes
        room = min(own_room, self.cap_bytes - self.footprint_bytes)
        if room >= slot_bytes:
            wanted = self._wanted_slots(space, slot_bytes, demand_bytes, cap)
            return Create(min(wanted, room // slot_bytes))
        if self._room_comes(namespace, slot_bytes - own_room, slot_bytes - room):
            return NoRoom.PENDING
        own_binds = own_room < slot_bytes and free_to_it < self.cap_bytes
        spaces = [space] if own_binds else list(self.spaces.values())
        victim = _cheapest(spaces, skip)
        if victim is not None:
            return Reclaim(victim)
        if stuck and (hopeless := _hopeless(space, slot_bytes, spaces, stuck)) is not None:
            return hopeless
        return NoRoom.NAMESPACE if own_binds else NoRoom.TIER

    def _kept_for_others(self, namespace: str) -> int:
        """What is left of the floors of the other namespaces."""
        spaces = self.spaces
        return sum(
            max(0, floor - (spaces[name].footprint_bytes if name in spaces else 0))
            for name, floor in self.floors.items()
            if name != namespace
        )

    def begin_segment(self, namespace: str, slot_bytes: int, slots: int) -> SlabSegment:
        """A segment to be made: counted from now on, without slots to take before `activate`."""
        self._next_id += 1
        segment = SlabSegment(
            segment_id=self._next_id,
            namespace=namespace,
            slot_bytes=slot_bytes,
            slots=slots,
            busy=bytearray(slots),
            owners=array("I", bytes(4 * slots)),
            pieces=bytearray(slots * _piece_stride(slot_bytes)),
            draining=True,
        )
        self.segments[segment.segment_id] = segment
        space = self.spaces.setdefault(namespace, Space())
        space.footprint_bytes += segment.size_bytes
        self.footprint_bytes += segment.size_bytes
        size_class = space.classes.setdefault(slot_bytes, SizeClass(slot_bytes))
        size_class.size_bytes += segment.size_bytes
        size_class.segments[segment.segment_id] = segment
        size_class.smallest_slots = min(s.slots for s in size_class.segments.values())
        return segment

    def activate(self, segment: SlabSegment) -> None:
        """Slots of a segment just made, or spared, can be taken."""
        segment.draining = False
        if segment.free:
            size_class = self._class_of(segment)
            size_class.free_slots += segment.free
            size_class.open[segment.segment_id] = segment

    def drain(self, segment: SlabSegment) -> None:
        """No slot of this segment is taken any more."""
        segment.draining = True
        size_class = self._class_of(segment)
        if size_class.open.pop(segment.segment_id, None) is not None:
            size_class.free_slots -= segment.free

    def retire(self, segment: SlabSegment) -> None:
        """A drained, empty segment leaves its class; it counts until `retired`."""
        if segment.used or not segment.draining:
            raise ValueError(f"segment {segment.segment_id} is in use")
        space = self.spaces[segment.namespace]
        size_class = self._class_of(segment)
        del size_class.segments[segment.segment_id]
        size_class.size_bytes -= segment.size_bytes
        if size_class.segments:
            size_class.smallest_slots = min(s.slots for s in size_class.segments.values())
        else:
            del space.classes[segment.slot_bytes]

    def expect(self, segment: SlabSegment) -> None:
        """A retired segment's memory comes back soon: while it is enough, `plan` names no other."""
        self._expected[segment.segment_id] = segment

    def overdue(self, segment: SlabSegment) -> None:
        """Nobody knows when the segment's memory comes back."""
        self._expected.pop(segment.segment_id, None)

    def retired(self, segment: SlabSegment) -> None:
        """The segment's memory is the machine's again."""
        del self.segments[segment.segment_id]
        self.overdue(segment)
        space = self.spaces[segment.namespace]
        space.footprint_bytes -= segment.size_bytes
        self.footprint_bytes -= segment.size_bytes
        if not space.footprint_bytes:
            del self.spaces[segment.namespace]

    def _room_comes(self, namespace: str, own_bytes: int, tier_bytes: int) -> bool:
        """True when what is expected makes up for what the namespace, and the tier, lack."""
        coming = self._expected.values()
        return bool(coming) and (
            sum(s.size_bytes for s in coming if s.namespace == namespace) >= own_bytes
            and sum(s.size_bytes for s in coming) >= tier_bytes
        )

    def _class_of(self, segment: SlabSegment) -> SizeClass:
        return self.spaces[segment.namespace].classes[segment.slot_bytes]

    def _wanted_slots(self, space: Space, slot_bytes: int, demand_bytes: int, cap: int) -> int:
        largest = min(MAX_SEGMENT_BYTES, cap // _CAP_FRACTION)
        size_class = space.classes.get(slot_bytes)
        held_bytes = size_class.size_bytes if size_class else 0
        size_bytes = max(held_bytes // _CLASS_FRACTION, demand_bytes, largest // _LEAST_FRACTION)
        return min(MAX_SLOTS, max(1, min(size_bytes, largest) // slot_bytes))


def _piece_stride(slot_bytes: int) -> int:
    pieces = piece_count(slot_bytes)
    return pieces * PIECE_CHECKSUM_BYTES if pieces > 1 else 0


def _cheapest(spaces: Iterable[Space], skip: Container[int]) -> SlabSegment | None:
    """The segment that costs least to empty: fewest bytes to move per byte given back."""
    best: SlabSegment | None = None
    best_cost = (2.0, 0)
    for space in spaces:
        for size_class in space.classes.values():
            if size_class.free_slots < size_class.smallest_slots:
                continue  # no segment's objects fit in the others
            for segment in size_class.segments.values():
                if segment.pinned or segment.draining or not _has_slack(size_class, segment):
                    continue
                cost = (segment.used / segment.slots, -segment.size_bytes)
                if cost < best_cost and segment.segment_id not in skip:
                    best, best_cost = segment, cost
    return best


def _hopeless(
    space: Space, slot_bytes: int, spaces: Iterable[Space], stuck: Set[int]
) -> NoRoom | None:
    """Where eviction would empty segments that do not come back: evict in the own class, whose
    slots are of use as they are, or nothing. None: eviction may help as ever.
    """
    own = space.classes.get(slot_bytes)
    for each in spaces:
        for size_class in each.classes.values():
            if size_class is not own and any(s not in stuck for s in size_class.segments):
                return None
    if own is not None and any(segment.used for segment in own.segments.values()):
        return NoRoom.NAMESPACE
    return NoRoom.PENDING


def _has_slack(size_class: SizeClass, segment: SlabSegment) -> bool:
    """True when a class can spare a segment. Emptying one takes free slots for all of its own, and
    half as many again must be left: without them the class would want a segment back at its next
    object, and two classes would push one to and fro.
    """
    spare = segment.slots // 2 if segment.used else 0
    return size_class.free_slots >= segment.slots + spare
