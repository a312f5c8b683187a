"""How objects get onto a volume and off it again.

Write: slot -> fdatasync -> index commit -> OK. Delete: readers gone -> header voided -> fdatasync
-> index commit -> slot free. Syncs and commits are shared by all that wait for one. A slot is
written only once the index says, durably, that it is open; docs/nvme-format.md says why.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvstored.tiers.base import ObjectWrite, WriteOutcome, padded_bytes
from kvstored.tiers.nvme import header, layout
from kvstored.tiers.nvme.commits import Commits
from kvstored.tiers.nvme.device import aligned_block
from kvstored.tiers.nvme.extents import Extent, SlotImage, plan, transfer_bytes
from kvstored.tiers.nvme.format import is_small, region_of, slot_of
from kvstored.tiers.nvme.header import HEADER_BYTES, Where
from kvstored.tiers.nvme.index import Entry, Environment
from kvstored.tiers.nvme.regions import IO_ERRORS, Parts, Regions
from kvstored.tiers.nvme.slots import PlaceState

__all__ = ["IO_ERRORS", "Changes", "Parts", "runs"]

_VOIDS_AT_ONCE = 16  # headers that one thread overwrites before others get their turn
_WRITES_AT_ONCE = 4  # transfers that devices want to have waiting

T = TypeVar("T")


def runs(
    items: Sequence[T], weight: Callable[[T], int], most_bytes: int, most: int = 1 << 30
) -> list[list[T]]:
    """Cut a sequence into runs of at most that weight and number, at least one item each."""
    found: list[list[T]] = []
    left = 0
    for item in items:
        cost = weight(item)
        if not found or cost > left or len(found[-1]) >= most:
            found.append([])
            left = most_bytes
        found[-1].append(item)
        left -= cost
    return found


class Changes:
    """The write and delete pipelines of one volume. Used on the verbs' loop."""

    def __init__(
        self, parts: Parts, layout_plan: layout.Plan, sequence: int, table_sequence: int
    ) -> None:
        """`sequence`, `table_sequence`: the highest that objects and the region table have."""
        self._parts = parts
        self._space = parts.space
        self._sequence = sequence
        self._small_commit_bytes = layout_plan.small_commit_bytes
        self._regions = Regions(parts, table_sequence)
        self._commits = Commits(parts, layout_plan, self._regions)
        self.accepted_bytes = 0
        """Payload of the objects that were written."""

    @property
    def last_sequence(self) -> int:
        """The highest given to an object so far."""
        return self._sequence

    @property
    def owed_deletes(self) -> int:
        """Deletes that are not durable yet."""
        return self._commits.owed

    async def close(self) -> None:
        """Commit what is queued."""
        await self._commits.close()

    async def dedicate(self, regions: Sequence[int], slot_bytes: int, opened: bool = False) -> bool:
        """Give spare regions a slot size, durably; `opened`: and let their first slots be written.
        False: the device would not.
        """
        slots = self._space.slots
        if opened:  # the commit that opens them is not to find them given to another size
            slots.keep(regions, True)
        try:
            if not await self._regions.dedicate(regions, slot_bytes):
                return False
            if opened:
                await self._commits.open_ahead(regions)
            return True
        finally:
            slots.keep(regions, False)

    # ---- write --------------------------------------------------------------------------------

    async def write(self, items: Sequence[ObjectWrite]) -> list[WriteOutcome]:
        """Write to reserved places; those that fail are free again."""
        places = [item.place for item in items]
        for place in places:
            if self._space.state(place) is not PlaceState.RESERVED:
                raise ValueError(f"place {place:#x} is not reserved")
        self._space.set_states(places, PlaceState.WRITING)
        small = [item for item in items if is_small(item.place)]
        slots = [item for item in items if not is_small(item.place)]
        failed: set[int] = set()
        for answers in await asyncio.gather(self._write_small(small), self._write_slots(slots)):
            failed |= answers
        await self._take_back(sorted(failed))
        self.accepted_bytes += sum(i.meta.length_bytes for i in items if i.place not in failed)
        return [WriteOutcome.FAILED if p in failed else WriteOutcome.OK for p in places]

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    async def _write_small(self, items: Sequence[ObjectWrite]) -> set[int]:
        """Write to the small-object environment; gives the places for which that failed."""
        entries = []
        for item in items:
            sequence = self._next_sequence()
            where = Where(self._parts.data.superblock.volume_id, 0, item.place, 0)
            block = header.encode(where, item.meta, sequence, _now_ms())
            body = item.payload[: item.meta.length_bytes]
            stored = (block[: layout.SMALL_HEADER_BYTES], body)
            entries.append(Entry(item.place, item.meta, sequence, body=stored))

        def charge(entry: Entry) -> int:
            return layout.charge_bytes(entry.meta.length_bytes)

        parts = runs(entries, charge, self._small_commit_bytes, layout.COMMIT_RECORDS)
        return await self._published(parts, [sum(map(charge, part)) for part in parts])

    async def _published(
        self, parts: Sequence[Sequence[Entry]], weights_bytes: Sequence[int]
    ) -> set[int]:
        """Enter objects, some at a time; gives the places for which that failed."""
        futures = [
            (part, self._commits.publish(part, weight))
            for part, weight in zip(parts, weights_bytes, strict=True)
        ]
        failed: set[int] = set()
        for part, future in futures:
            if not await future:
                failed.update(entry.place for entry in part)
        return failed

    async def _write_slots(self, items: Sequence[ObjectWrite]) -> set[int]:
        """Write to slots; gives the places for which that failed."""
        if not items:
            return set()
        failed = set(await self._commits.open([item.place for item in items]))
        items = [item for item in items if item.place not in failed]
        entries = []
        for item in items:
            dedication = self._space.slots.entry(item.place).dedication
            entries.append(Entry(item.place, item.meta, self._next_sequence(), dedication))
        lost = await self._write_images(items, entries)
        failed |= lost
        written = [entry for entry in entries if entry.place not in lost]
        if not written:
            self._commits.written()
        parts = runs(written, lambda _: 0, 1, layout.COMMIT_RECORDS)
        return failed | await self._published(parts, [0] * len(parts))

    async def _write_images(
        self, items: Sequence[ObjectWrite], entries: Sequence[Entry]
    ) -> set[int]:
        """Bring headers and payloads to the device; gives the places for which that failed."""
        data, slots = self._parts.data, self._space.slots
        blocks = aligned_block(max(1, len(items)) * HEADER_BYTES)
        images = [
            SlotImage(
                data.offset(slots.entry(item.place), item.place),
                blocks[i * HEADER_BYTES : (i + 1) * HEADER_BYTES],
                item.payload[: padded_bytes(item.meta.length_bytes)],
            )
            for i, item in enumerate(items)
        ]
        wheres = [data.where(slots.entry(item.place), item.place) for item in items]
        written_ms = _now_ms()

        def work(extent: Extent) -> OSError | None:
            try:
                for i in extent.headers:
                    header.encode_into(
                        images[i].header, wheres[i], items[i].meta, entries[i].sequence, written_ms
                    )
                data.write_at(extent.offset_bytes, extent.buffers)
            except OSError as error:
                return error
            return None

        total = sum(len(image.payload) for image in images)
        extents = plan(images, transfer_bytes(total, _WRITES_AT_ONCE))
        regions = {region_of(item.place) for item in items}
        self._regions.begin_write(regions)
        try:
            errors = await asyncio.gather(
                *(self._parts.threaded(partial(work, extent)) for extent in extents)
            )
        finally:
            self._regions.end_write(regions)
        failed: set[int] = set()
        for extent, error in zip(extents, errors, strict=True):
            self._parts.note("write", error)
            if error is not None:
                failed.update(items[i].place for i in extent.members)
        return failed

    async def _take_back(self, places: Sequence[int]) -> None:
        """Free places whose write failed; a slot only when its header cannot come back."""
        slots = [place for place in places if not is_small(place)]
        if slots and not (await self._write_voids(slots) and await self._regions.sync()):
            await self._regions.abandon({region_of(place) for place in slots})
        self._space.release(places)

    # ---- delete -------------------------------------------------------------------------------

    async def delete(self, places: Sequence[int]) -> list[int]:
        """Drop objects that are LEAVING and have no readers. Gives those whose delete could not be
        made durable; they stay LEAVING, and every later commit tries again.
        """
        slots = [place for place in places if not is_small(place)]
        voided = not slots or await self._write_voids(slots)
        if not voided:
            await self._regions.abandon({region_of(place) for place in slots})
        futures = [
            (part, self._commits.remove(part, voided=voided))
            for part in runs(slots, lambda _: 0, 1, layout.COMMIT_RECORDS)
        ]

        def charge(place: int) -> int:
            return self._space.small.charge_bytes(slot_of(place))

        small = [place for place in places if is_small(place)]
        futures += [
            (part, self._commits.remove(part, weight_bytes=sum(map(charge, part))))
            for part in runs(small, charge, self._small_commit_bytes, layout.COMMIT_RECORDS)
        ]
        left: list[int] = []
        for part, future in futures:
            if not await future:
                left += part
        return left

    async def _write_voids(self, places: Sequence[int]) -> bool:
        """Overwrite headers, without a sync. False if one could not be."""

        def work(part: Sequence[int]) -> OSError | None:
            data, slots = self._parts.data, self._space.slots
            try:
                for place in part:
                    entry = slots.entry(place)
                    block = header.encode_void(data.where(entry, place), 0)
                    data.write_header(entry, place, block)
            except OSError as error:
                return error
            return None

        parts = runs(places, lambda _: 1, _VOIDS_AT_ONCE)
        regions = {region_of(place) for place in places}
        self._regions.begin_write(regions)
        try:
            errors = await asyncio.gather(
                *(self._parts.threaded(partial(work, part)) for part in parts)
            )
        finally:
            self._regions.end_write(regions)
        for error in errors:
            self._parts.note("void", error)
        return all(error is None for error in errors)

    # ---- families -----------------------------------------------------------------------------

    async def remember_family(self, namespace: str, fingerprint: bytes, spec: bytes) -> None:
        """Keep a family's specification in both environments."""
        families = {(namespace, fingerprint): spec}

        def work(env: Environment) -> Exception | None:
            try:
                env.commit(families=families)
            except IO_ERRORS as error:
                return error
            return None

        for env in (self._parts.index, self._parts.small):
            error = await self._parts.synced(partial(work, env))
            self._parts.note(f"{env.path.name} commit", error)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
