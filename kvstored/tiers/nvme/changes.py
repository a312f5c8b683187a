"""How objects get onto a volume and off it again.

Write: slot -> fdatasync -> index commit -> OK. Delete: readers gone -> header voided -> fdatasync
-> index commit -> slot free. Syncs and commits are shared by all that wait for one. A slot is
written only once the index says, durably, that it is open; docs/nvme-format.md says why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import lmdb
import numpy as np

from kvstored.tiers.base import ObjectWrite, WriteOutcome, padded_bytes
from kvstored.tiers.nvme import header, layout
from kvstored.tiers.nvme.committer import Change, Committer, Kind, Outcome
from kvstored.tiers.nvme.device import DataFile
from kvstored.tiers.nvme.format import RegionEntry, RegionState, is_small, region_of, slot_of
from kvstored.tiers.nvme.header import Where
from kvstored.tiers.nvme.index import Entry, Environment
from kvstored.tiers.nvme.slots import PlaceState
from kvstored.tiers.nvme.space import Space

_log = logging.getLogger(__name__)

OPENED_AHEAD = 64
"""Slots of a region kept open for writing; the next commit tops them up on its way."""

_RUN_BYTES = 8 << 20  # what one thread writes before others get their turn

T = TypeVar("T")
R = TypeVar("R")
IO_ERRORS = (OSError, lmdb.Error)


@dataclass(slots=True)
class Parts:
    """What a tier lends to its pipelines."""

    data: DataFile
    index: Environment
    small: Environment
    space: Space
    io: Executor
    syncs: Executor
    note: Callable[[str, Exception | None], None]  # what went wrong at a stage, or that it works


def runs(items: Sequence[T], weight: Callable[[T], int], most_bytes: int) -> list[list[T]]:
    """Cut a sequence into runs of at most that weight, at least one item each."""
    found: list[list[T]] = []
    left = 0
    for item in items:
        if left <= 0:
            found.append([])
            left = most_bytes
        found[-1].append(item)
        left -= weight(item)
    return found


class Changes:
    """The write and delete pipelines of one volume. Used on the verbs' loop."""

    def __init__(self, parts: Parts, plan: layout.Plan, sequence: int, table_sequence: int) -> None:
        self._parts = parts
        self._space = parts.space
        self._sequence = sequence
        self._table_sequence = table_sequence
        self._table_lock = asyncio.Lock()
        self._owed: dict[bool, set[int]] = {True: set(), False: set()}  # removals, by smallness
        self._slots = Committer(
            self._apply_slots, layout.COMMIT_RECORDS, 1 << 62, "nvme-index-commit"
        )
        self._small = Committer(
            self._apply_small, layout.COMMIT_RECORDS, plan.small_commit_bytes, "nvme-small-commit"
        )

    @property
    def last_sequence(self) -> int:
        """The highest given to an object so far."""
        return self._sequence

    @property
    def owed_deletes(self) -> int:
        """Deletes that are not durable yet."""
        return sum(map(len, self._owed.values()))

    async def close(self) -> None:
        """Commit what is queued."""
        await self._slots.close()
        await self._small.close()

    async def _threaded(self, call: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._parts.io, call)

    async def _synced(self, call: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._parts.syncs, call)

    # ---- regions ------------------------------------------------------------------------------

    async def dedicate(self, region: int, slot_bytes: int, dedication: int) -> bool:
        """Give a spare region a slot size, durably. False: the device would not."""
        slots = self._space.slots
        slots.claim(region)
        entry = RegionEntry(
            region, RegionState.DEDICATED, slot_bytes, dedication, self._next_table_sequence()
        )
        if not await self._write_entry(entry):
            slots.unclaim(region)
            return False
        slots.dedicated(entry)
        return True

    async def _abandon(self, regions: set[int]) -> None:
        """Stop using regions whose bytes may not be what was written (a sync of them failed)."""
        for region in sorted(regions):
            old = self._space.slots.regions[region].entry
            if old.state is not RegionState.DEDICATED:
                continue
            entry = replace(old, state=RegionState.ABANDONED, sequence=self._next_table_sequence())
            self._space.slots.abandon(entry)
            _log.error("region %d is abandoned: it could not be synced", region)
            await self._write_entry(entry)

    async def _write_entry(self, entry: RegionEntry) -> bool:
        async with self._table_lock:
            table = [region.entry for region in self._space.slots.regions]
            try:
                await self._synced(lambda: self._parts.data.write_entries(entry, table))
            except OSError as error:
                self._parts.note("region table", error)
                return False
            self._parts.note("region table", None)
            return True

    def _next_table_sequence(self) -> int:
        self._table_sequence += 1
        return self._table_sequence

    # ---- write --------------------------------------------------------------------------------

    async def write(self, items: Sequence[ObjectWrite]) -> list[WriteOutcome]:
        """Write to reserved places; those that fail are free again."""
        for item in items:
            if self._space.state(item.place) is not PlaceState.RESERVED:
                raise ValueError(f"place {item.place:#x} is not reserved")
            self._space.set_state(item.place, PlaceState.WRITING)
        small = [item for item in items if is_small(item.place)]
        slots = [item for item in items if not is_small(item.place)]
        done: dict[int, bool] = {}
        for answers in await asyncio.gather(self._write_small(small), self._write_slots(slots)):
            done |= answers
        await self._take_back([place for place, ok in done.items() if not ok])
        return [WriteOutcome.OK if done[item.place] else WriteOutcome.FAILED for item in items]

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    async def _write_small(self, items: Sequence[ObjectWrite]) -> dict[int, bool]:
        futures = {}
        for item in items:
            sequence = self._next_sequence()
            where = Where(self._parts.data.superblock.volume_id, 0, item.place, 0)
            block = header.encode(where, item.meta, sequence, _now_ms())
            body = item.payload[: item.meta.length_bytes]
            stored = (block[: layout.SMALL_HEADER_BYTES], body)
            entry = Entry(item.place, item.meta, sequence, body=stored)
            weight = layout.charge_bytes(item.meta.length_bytes)
            futures[item.place] = self._small.submit(
                Kind.PUBLISH, item.place, entry, weight_bytes=weight
            )
        return {place: await future is Outcome.OK for place, future in futures.items()}

    async def _write_slots(self, items: Sequence[ObjectWrite]) -> dict[int, bool]:
        done = {item.place: True for item in items}
        for place in await self._not_opened([item.place for item in items]):
            done[place] = False
        jobs = [
            (item, self._space.slots.entry(item.place), self._next_sequence())
            for item in items
            if done[item.place]
        ]
        parts = runs(jobs, lambda job: job[0].meta.length_bytes, _RUN_BYTES)
        for answers in await asyncio.gather(*(self._write_run(part) for part in parts)):
            done |= answers
        futures = {
            item.place: self._slots.submit(
                Kind.PUBLISH,
                item.place,
                Entry(item.place, item.meta, sequence, entry.dedication),
            )
            for item, entry, sequence in jobs
            if done[item.place]
        }
        for place, future in futures.items():
            done[place] = await future is Outcome.OK
        return done

    async def _not_opened(self, places: Sequence[int]) -> list[int]:
        """Open those places that are not open yet; gives those for which that failed."""
        closed = [
            place
            for place in places
            if not self._space.slots.regions[region_of(place)].opened[slot_of(place)]
        ]
        futures = [(place, self._slots.submit(Kind.OPEN, place)) for place in closed]
        return [place for place, future in futures if await future is not Outcome.OK]

    async def _write_run(
        self, jobs: Sequence[tuple[ObjectWrite, RegionEntry, int]]
    ) -> dict[int, bool]:
        def work() -> list[Exception | None]:
            return [self._write_one(item, entry, sequence) for item, entry, sequence in jobs]

        errors = await self._threaded(work)
        for error in errors:
            self._parts.note("write", error)
        return {job[0].place: error is None for job, error in zip(jobs, errors, strict=True)}

    def _write_one(self, item: ObjectWrite, entry: RegionEntry, sequence: int) -> Exception | None:
        data = self._parts.data
        try:
            where = data.where(entry, item.place)
            block = header.encode(where, item.meta, sequence, _now_ms())
            payload = item.payload[: padded_bytes(item.meta.length_bytes)]
            data.write_slot(entry, item.place, block, payload)
        except OSError as error:
            return error
        return None

    async def _take_back(self, places: Sequence[int]) -> None:
        """Free places whose write failed; a slot only when its header cannot come back."""
        slots = [place for place in places if not is_small(place)]
        if slots and not await self._void(slots):
            await self._abandon({region_of(place) for place in slots})
        for place in places:
            self._space.release(place)

    # ---- delete -------------------------------------------------------------------------------

    async def delete(self, places: Sequence[int]) -> list[int]:
        """Drop objects that are LEAVING and have no readers. Gives those whose delete could not be
        made durable; they stay LEAVING, and every later commit tries again.
        """
        slots = [place for place in places if not is_small(place)]
        voided = not slots or await self._write_voids(slots)
        if not voided:
            await self._abandon({region_of(place) for place in slots})
        futures = [(place, self._submit_removal(place, voided)) for place in places]
        return [place for place, future in futures if await future is not Outcome.OK]

    def _submit_removal(self, place: int, voided: bool) -> asyncio.Future[Outcome]:
        if not is_small(place):
            return self._slots.submit(Kind.REMOVE, place, voided=voided)
        charge = self._space.small.charge_bytes(slot_of(place))
        return self._small.submit(Kind.REMOVE, place, weight_bytes=charge)

    async def _write_voids(self, places: Sequence[int]) -> bool:
        """Overwrite headers, without a sync. False if one could not be."""

        def work(part: Sequence[int]) -> Exception | None:
            data, slots = self._parts.data, self._space.slots
            try:
                for place in part:
                    entry = slots.entry(place)
                    block = header.encode_void(data.where(entry, place), 0)
                    data.write_header(entry, place, block)
            except OSError as error:
                return error
            return None

        parts = runs(places, lambda _: header.HEADER_BYTES, 64 * header.HEADER_BYTES)
        errors = await asyncio.gather(*(self._threaded(partial(work, part)) for part in parts))
        for error in errors:
            self._parts.note("void", error)
        return all(error is None for error in errors)

    async def _void(self, places: Sequence[int]) -> bool:
        """Overwrite headers and sync."""
        if not await self._write_voids(places):
            return False
        return await self._sync() is None

    async def _sync(self) -> Exception | None:
        def work() -> Exception | None:
            try:
                self._parts.data.sync()
            except OSError as error:
                return error
            return None

        error = await self._synced(work)
        self._parts.note("sync", error)
        return error

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
            error = await self._synced(partial(work, env))
            self._parts.note(f"{env.path.name} commit", error)

    # ---- commits ------------------------------------------------------------------------------

    async def _apply_slots(self, batch: list[Change]) -> None:
        """Sync the data file, then commit one batch to the index."""
        by_kind = {kind: [c for c in batch if c.kind is kind] for kind in Kind}
        publish, remove = by_kind[Kind.PUBLISH], by_kind[Kind.REMOVE]
        synced = None
        if publish or remove:
            synced = await self._sync()
        if synced is not None:
            await self._abandon({region_of(c.place) for c in publish + remove})
            publish = []
        opened = self._opened_after(publish, by_kind[Kind.OPEN])
        removed = self._removals(remove, small=False)
        error = await self._commit(self._parts.index, publish, removed, opened)
        if error is None:
            self._settle(publish, removed, opened)
        for change in publish + by_kind[Kind.OPEN]:
            change.done.set_result(Outcome.OK if error is None else Outcome.FAILED)
        for change in remove:
            # A void header that is synced, or a commit: either one keeps the object from coming
            # back, since an abandoned region is not scanned.
            held = error is None or (change.voided and synced is None)
            self._finish_removal(change, held)

    async def _apply_small(self, batch: list[Change]) -> None:
        publish = [c for c in batch if c.kind is Kind.PUBLISH]
        remove = [c for c in batch if c.kind is Kind.REMOVE]
        removed = self._removals(remove, small=True)
        error = await self._commit(self._parts.small, publish, removed, {})
        if error is None:
            self._settle(publish, removed, {})
        for change in publish:
            change.done.set_result(Outcome.OK if error is None else Outcome.FAILED)
        for change in remove:
            self._finish_removal(change, error is None)

    def _removals(self, remove: Sequence[Change], small: bool) -> list[int]:
        return [*(c.place for c in remove), *self._owed[small]]

    def _finish_removal(self, change: Change, held: bool) -> None:
        if held and self._space.state(change.place) is PlaceState.LEAVING:
            self._space.release(change.place)
        if not held:
            self._owed[is_small(change.place)].add(change.place)
        change.done.set_result(Outcome.OK if held else Outcome.FAILED)

    async def _commit(
        self,
        env: Environment,
        publish: Sequence[Change],
        removed: Sequence[int],
        opened: Mapping[int, bytes],
    ) -> Exception | None:
        entries = [c.entry for c in publish if c.entry is not None]
        if not entries and not removed and not opened:
            return None

        def work() -> Exception | None:
            try:
                env.commit(entries, removed, opened)
            except IO_ERRORS as error:
                return error
            return None

        error = await self._synced(work)
        self._parts.note(f"{env.path.name} commit", error)
        return error

    def _settle(
        self, publish: Sequence[Change], removed: Sequence[int], opened: Mapping[int, bytes]
    ) -> None:
        """Take over what a commit has made true."""
        for region_number, bitmap in opened.items():
            region = self._space.slots.regions[region_number]
            bits = np.frombuffer(bitmap.ljust(-(-region.slots // 8), b"\0"), np.uint8)
            region.opened[:] = np.unpackbits(bits, bitorder="little")[: region.slots] > 0
        for change in publish:
            self._space.set_state(change.place, PlaceState.LIVE)
        for place in removed:
            owed = self._owed[is_small(place)]
            if place in owed:
                owed.discard(place)
                self._space.release(place)

    def _opened_after(
        self, publish: Sequence[Change], opening: Sequence[Change]
    ) -> dict[int, bytes]:
        """Bitmaps of open slots as they are to be after a batch, for the regions it changes.

        Written slots are open no longer; a region that has few open free slots left gets more, so
        that the next writes need no commit of their own.
        """
        found = {}
        for number in {region_of(change.place) for change in [*publish, *opening]}:
            region = self._space.slots.regions[number]
            opened = region.opened.copy()
            free = region.states == PlaceState.FREE
            if int((opened & free).sum()) < OPENED_AHEAD // 2:
                opened[np.flatnonzero(free & ~opened)[:OPENED_AHEAD]] = True
            for change in opening:
                if region_of(change.place) == number:
                    opened[slot_of(change.place)] = True
            for change in publish:
                if region_of(change.place) == number:
                    opened[slot_of(change.place)] = False
            packed = np.packbits(opened, bitorder="little").tobytes().rstrip(b"\0")
            found[number] = packed
        return found


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
