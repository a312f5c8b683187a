"""The RAM tier: objects in sealed shared memory. See docs/ram-tier.md."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored.errors import DataDirectoryError
from kvstored.tiers.base import (
    Arrived,
    NoRoom,
    ObjectMeta,
    ObjectRead,
    ObjectWrite,
    ReadOutcome,
    Recovered,
    Tier,
    TierKind,
    TierUsage,
    WriteOutcome,
    padded_bytes,
)
from kvstored.tiers.ram.copying import CopyJob, copy_in, copy_out
from kvstored.tiers.ram.growth import Growth
from kvstored.tiers.ram.places import Location, Locations, Places
from kvstored.tiers.ram.probe import probe
from kvstored.tiers.ram.reserving import Reserving
from kvstored.tiers.ram.retirement import Retirement
from kvstored.tiers.ram.running import Running
from kvstored.tiers.ram.slabs import Slabs, Space

_THREADS = 4
_FLOORS = 8  # the floors of all namespaces together are this part of the cap

_T = TypeVar("_T")


class RamTier(Tier):
    """Objects in memfd segments that this process alone can write.

    `cap_bytes`: hard cap over all segments. `namespace_cap(name)` gives a namespace's own in
    bytes; None: the tier's. `hugepages` False: small pages even where huge ones can be had.
    `threads`: size of the pool that touches memory. `namespaces`: those that are sure of a floor,
    all of them together of an eighth of the cap, whoever holds the rest and does not give back.

    All methods belong to one event loop, except `usage` and `namespace_usage`. A place used
    against its life raises PlaceError.
    """

    kind = TierKind.RAM

    def __init__(
        self,
        cap_bytes: int,
        namespace_cap: Callable[[str], int] | None = None,
        *,
        hugepages: bool = True,
        threads: int = _THREADS,
        namespaces: Sequence[str] = (),
    ) -> None:
        floor = cap_bytes // _FLOORS // max(1, len(namespaces))
        caps = namespace_cap or (lambda name: cap_bytes)
        floors = {name: min(floor, caps(name)) for name in namespaces}
        self._slabs = Slabs(cap_bytes, namespace_cap, floors)
        self._places = Places(self._slabs)
        self._want_hugepages = hugepages
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ram-pool")
        self.retiring: Callable[[int], asyncio.Future[None] | None] | None = None
        """Asked on the loop, with the id of an empty segment, when no new place can lie in it: have
        the clients unmap it. None when none maps it; else a future that is done when none does.
        """
        self.stuck: Callable[[], frozenset[int]] | None = None
        """Asked on the loop: ids of the segments that somebody maps who does not answer, so that
        emptying them would give no memory back.
        """
        self.on_freed: Callable[[], None] | None = None
        """Called on the loop when memory came back late: who waits for room looks again."""
        self._retirement = Retirement(
            self._slabs, self._pool, self._ask_clients, self._tell_of_room, self._ask_stuck
        )
        self._running = Running()
        self._growth, self._reserving = self._growing(hugepages=False)
        self._mode = "closed"

    @property
    def persistent(self) -> bool:
        """False: nothing outlives the process."""
        return False

    @property
    def mode(self) -> str:
        """How the memory was had: "memfd", "memfd_huge" (huge pages), or "closed" before `open`."""
        return self._mode

    @property
    def health(self) -> str:
        """Either "ok", or why the kernel gives no memory at present."""
        return self._growth.down or "ok"

    @property
    def huge_bytes(self) -> int:
        """Memory known to lie in huge pages."""
        return self._growth.huge_bytes

    @property
    def segments(self) -> int:
        """Segments counted in the footprint, also those that only clients still map."""
        return len(self._slabs.segments)

    @property
    def leased_bytes(self) -> int:
        """Padded bytes of all leased places, each once."""
        return self._places.leased_bytes

    def usage(self) -> TierUsage:
        """Exact figures. The footprint is the sum of all segments, those being made or given back
        included; `objects` are published places that are not free.
        """
        return TierUsage(
            self._slabs.cap_bytes,
            self._slabs.footprint_bytes,
            self._places.charged_bytes,
            self._places.objects,
        )

    def namespace_usage(self, namespace: str) -> TierUsage:
        """The same for one namespace, under its own cap."""
        space = self._slabs.spaces.get(namespace) or Space()
        return TierUsage(
            self._slabs.cap_of(namespace),
            space.footprint_bytes,
            space.charged_bytes,
            space.objects,
        )

    def most_bytes(self, namespace: str) -> int:
        """Most bytes that the namespace can ever have here: its cap, less the floors of others."""
        return self._slabs.most_of(namespace)

    def charge_bytes(self, length_bytes: int) -> int:
        """The padded length."""
        return padded_bytes(length_bytes)

    async def open(self) -> Recovered:
        """Prove that the kernel seals what it should, and see whether huge pages can be had.

        Raises DataDirectoryError when memory cannot be kept from being written by others.
        """
        loop = asyncio.get_running_loop()
        try:
            huge = await loop.run_in_executor(self._pool, probe, self._want_hugepages)
        except OSError as error:
            raise DataDirectoryError(
                f"the RAM tier cannot make sealed shared memory: {error}",
                "it needs memfd with F_SEAL_FUTURE_WRITE: Linux 5.1 or later, not filtered away",
            ) from error
        self._growth, self._reserving = self._growing(huge)
        self._mode = "memfd_huge" if huge else "memfd"
        return Recovered()

    async def close(self) -> None:
        """Finish what runs and give all memory back, without waiting for clients that map it."""
        await self._running.settle()
        await self._growth.close()
        self._mode = "closed"
        self._pool.shutdown(wait=False)

    async def reserve(self, namespace: str, lengths_bytes: Sequence[int]) -> list[int | NoRoom]:
        """See Tier. Waits only where a segment must be made or given back first; a cancelled
        call keeps nothing. Raises ValueError for a length outside 1 to MAX_OBJECT_BYTES that the
        cap would hold.
        """
        return await self._reserving.reserve(namespace, lengths_bytes)

    def cancel(self, places: Sequence[int]) -> None:
        """See Tier."""
        for place in places:
            self._places.cancel(place)

    def publish(self, place: int, meta: ObjectMeta) -> None:
        """The bytes in a reserved place's extent are the object: it is readable from now on.

        The caller answers for the checksums of `meta` being those of the bytes. Raises PlaceError
        when the place is not reserved, or for another length.
        """
        self._places.publish(
            place,
            meta.length_bytes,
            _tag(meta.key, meta.part),
            meta.checksum,
            meta.piece_checksums,
        )

    def publish_many(
        self,
        places: Sequence[int],
        keys: Sequence[bytes],
        part: str,
        checksums: bytes,
        pieces: list[bytes],
    ) -> None:
        """`publish` for objects of one part, in order; `checksums` back to back, `pieces` one by
        one. Each place holds an object of the length that it was reserved for.
        """
        tags = [_tag(key, part) for key in keys]
        self._places.publish_many(np.array(places, np.int64), tags, checksums, pieces)

    async def write(self, items: Sequence[ObjectWrite]) -> list[WriteOutcome]:
        """See Tier: copies each payload into its place and publishes it."""
        return await self._running.finish(self._write(items))

    async def read(
        self, items: Sequence[ObjectRead], arrived: Arrived | None = None
    ) -> list[ReadOutcome]:
        """See Tier: copies out, and verifies what was copied piece by piece."""
        outcomes = [self._expected(item) for item in items]
        checksums = {
            i: self.checksums(items[i].place)[1]
            for i, outcome in enumerate(outcomes)
            if outcome is ReadOutcome.OK
        }
        loop = asyncio.get_running_loop()
        stop = threading.Event()

        def settle(i: int, outcome: ReadOutcome) -> None:
            outcomes[i] = outcome
            if i in checksums:
                self.release(items[i].place)
            if arrived is not None:
                arrived(i, outcome, checksums[i] if outcome is ReadOutcome.OK else b"")

        for i, outcome in enumerate(outcomes):
            if i in checksums:
                self.lease(items[i].place)
            else:
                settle(i, outcome)
        jobs = {i: self._copy_job(items[i]) for i in checksums}

        def work() -> None:
            while jobs:
                i, job = jobs.popitem()
                outcome = copy_out(job, stop)
                del job  # no view of the extent is left when its lease ends
                loop.call_soon_threadsafe(settle, i, outcome)

        await self._running.finish(self._in_pool(work), stop)
        return outcomes

    async def delete(self, places: Sequence[int]) -> None:
        """See Tier. A leased place is unreadable at once and freed by its last `release`."""
        for place in places:
            self._places.delete(place)

    def view(self, place: int, padded: bool = False) -> memoryview:
        """Writable view of a reserved or leased place: exactly the object's length, or the padded
        extent, page-aligned, whose padding is zero.

        Valid until the place is cancelled or the lease released; drop it before. Raises PlaceError
        for a place neither reserved nor leased.
        """
        where = self._places.locate(place)
        size_bytes = padded_bytes(where.length_bytes) if padded else where.length_bytes
        memory = self._growth.memory[where.segment_id].memory
        return memory[where.offset : where.offset + size_bytes]

    def locate(self, place: int) -> Location:
        """Segment and range of a reserved or leased place; valid as long as a view would be."""
        return self._places.locate(place)

    def segment_fd(self, segment_id: int) -> int:
        """Descriptor of a segment, sealed, to be sent to a client of its namespace. It stays the
        tier's: do not close it. Raises KeyError for a segment that is not in use.
        """
        return self._growth.memory[segment_id].fd

    def segment_bytes(self, segment_id: int) -> int:
        """Size of a segment in bytes. Raises KeyError for one that is not in use."""
        return self._growth.memory[segment_id].size_bytes

    def lease(self, place: int) -> None:
        """One more reader: the bytes stay where and what they are until `release`.

        Raises PlaceError when the place is not readable.
        """
        self._places.lease(place)

    def release(self, place: int) -> None:
        """One reader less. Raises PlaceError when there is none."""
        self._places.release(place)

    def lease_many(self, places: NDArray[np.int64]) -> None:
        """`lease` of each, in one go; a place may occur several times.

        Raises PlaceError, and nothing is leased, when one is not readable.
        """
        self._places.lease_many(places)

    def lease_located(self, places: NDArray[np.int64]) -> Locations:
        """`lease_many`, and `locate_many` of the same: one look at each. Raises as those do."""
        return self._places.lease_located(places)

    def release_many(self, places: NDArray[np.int64]) -> None:
        """`release` of each, in one go; a place may occur as often as it was leased.

        Raises PlaceError, and nothing is released, when one has fewer readers.
        """
        self._places.release_many(places)

    def locate_many(self, places: NDArray[np.int64]) -> Locations:
        """Segments, ranges and checksums of leased places; valid as long as views would be.

        Raises PlaceError when one is not leased.
        """
        return self._places.locate_many(places)

    def leased(self, place: int) -> bool:
        """True when the place has readers. Raises PlaceError when it was freed."""
        return self._places.is_leased(place)

    def checksums(self, place: int) -> tuple[bytes, bytes]:
        """XXH3-128 of the object (16 bytes) and XXH3-64 of its pieces (8 bytes each), as
        published.
        """
        return self._places.checksums(place)

    def _growing(self, hugepages: bool) -> tuple[Growth, Reserving]:
        growth = Growth(self._slabs, self._places, self._pool, self._retirement, hugepages)
        return growth, Reserving(self._slabs, self._places, growth, self._running)

    def _ask_clients(self, segment_id: int) -> asyncio.Future[None] | None:
        return self.retiring(segment_id) if self.retiring is not None else None

    def _ask_stuck(self) -> frozenset[int]:
        return self.stuck() if self.stuck is not None else frozenset()

    def _tell_of_room(self) -> None:
        if self.on_freed is not None:
            self.on_freed()

    async def _write(self, items: Sequence[ObjectWrite]) -> list[WriteOutcome]:
        jobs = [(self.view(item.place, padded=True), item.payload) for item in items]
        await self._in_pool(copy_in, jobs)
        jobs.clear()
        for item in items:
            self.publish(item.place, item.meta)
        return [WriteOutcome.OK] * len(items)

    def _expected(self, item: ObjectRead) -> ReadOutcome:
        """OK when the place holds what the reader expects there, as far as the table knows."""
        places = self._places
        if not places.is_readable(item.place):
            return ReadOutcome.FAILED
        same = (
            places.length_bytes(item.place) == item.length_bytes
            and places.tag(item.place) == _tag(item.key, item.part)
            and places.checksums(item.place)[0] == item.checksum
        )
        return ReadOutcome.OK if same else ReadOutcome.CORRUPT

    def _copy_job(self, item: ObjectRead) -> CopyJob:
        source = self.view(item.place, padded=True)
        return source, item.into, item.length_bytes, self.checksums(item.place)[1]

    async def _in_pool(self, job: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, job, *args)


def _tag(key: bytes, part: str) -> int:
    return xxhash.xxh3_64_intdigest(key + part.encode()) & 0xFFFF_FFFF
