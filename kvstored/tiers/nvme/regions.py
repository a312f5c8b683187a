"""The region table at run time, syncs of the data file, and what a failed sync means.

A sync that fails may have lost any write that was not yet synced, and the next one says nothing of
it. So every region that has been written since the last good sync is abandoned.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import lmdb

from kvstored.tiers.nvme.device import DataFile
from kvstored.tiers.nvme.format import RegionEntry, RegionState
from kvstored.tiers.nvme.index import Environment
from kvstored.tiers.nvme.space import Space

_log = logging.getLogger(__name__)

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
    vanished: Callable[[], str]  # asked in a thread: what of the files is gone, "" if nothing
    on_vanished: Callable[[], None]  # told on the loop that something is

    async def threaded(self, call: Callable[[], R]) -> R:
        """Run a transfer in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.io, call)

    async def synced(self, call: Callable[[], R]) -> R:
        """Run a sync or a commit in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.syncs, call)


class Regions:
    """Dedicates, syncs and abandons the regions of one volume. Used on the verbs' loop."""

    def __init__(self, parts: Parts, table_sequence: int) -> None:
        """`table_sequence`: the highest in the region table so far."""
        self._parts = parts
        self._slots = parts.space.slots
        self._sequence = table_sequence
        self._syncing = asyncio.Lock()
        self._writing: Counter[int] = Counter()  # writes under way, by region
        self._unsynced: dict[int, int] = {}  # region -> stamp of its last finished write
        self._stamp = 0

    # ---- the table ----------------------------------------------------------------------------

    async def dedicate(self, regions: Sequence[int], slot_bytes: int) -> bool:
        """Give spare regions a slot size, durably. False: the device would not."""
        entries = []
        for region in regions:
            self._slots.claim(region)
            dedication = secrets.randbits(64) | 1
            entries.append(
                RegionEntry(
                    region, RegionState.DEDICATED, slot_bytes, dedication, self._next_sequence()
                )
            )
        held = await self._write_entries(entries)
        for entry in entries:
            if held:
                self._slots.dedicated(entry)
            else:
                self._slots.unclaim(entry.region)
        return held

    async def abandon(self, regions: Iterable[int]) -> None:
        """Write no more to regions whose bytes may not be what was written."""
        await self._write_entries(self._give_up(regions))

    def _give_up(self, regions: Iterable[int]) -> list[RegionEntry]:
        """`abandon` in memory; gives the entries that are to be written."""
        entries = []
        for region in sorted(regions):
            old = self._slots.regions[region].entry
            if old.state is RegionState.DEDICATED:
                sequence = self._next_sequence()
                entry = replace(old, state=RegionState.ABANDONED, sequence=sequence)
                self._slots.abandon(entry)
                _log.error("region %d is abandoned: it could not be synced", region)
                entries.append(entry)
        return entries

    def abandoned(self, region: int) -> bool:
        """Whether a region was given up: what was written to it lately may not be there."""
        return self._slots.regions[region].entry.state is RegionState.ABANDONED

    async def _write_entries(self, entries: Sequence[RegionEntry]) -> bool:
        """Write some of the table. False: the device would not."""
        if not entries:
            return True
        data = self._parts.data
        lost: list[RegionEntry] = []
        async with self._syncing:
            table = [region.entry for region in self._slots.regions]
            failed = data.failed_syncs
            try:
                await self._parts.synced(lambda: data.write_entries(entries, table))
            except OSError as error:
                self._parts.note("region table", error)
                if data.failed_syncs != failed:
                    lost = self._give_up({*self._unsynced, *self._writing})
            else:
                self._parts.note("region table", None)
                return True
        await self._write_entries(lost)
        return False

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    @property
    def writing(self) -> bool:
        """Whether something is being written."""
        return bool(self._writing)

    # ---- writes and syncs ---------------------------------------------------------------------

    def begin_write(self, regions: Iterable[int]) -> None:
        """Something is about to be written to regions; `end_write` must follow."""
        self._writing.update(regions)

    def end_write(self, regions: Iterable[int]) -> None:
        """The write came back, well or not: the next sync covers it."""
        self._stamp += 1
        for region in regions:
            self._unsynced[region] = self._stamp
            self._writing[region] -= 1
            if not self._writing[region]:
                del self._writing[region]

    async def sync(self, prepare: Callable[[], Callable[[], None]] | None = None) -> bool:
        """Make every finished write survive a power loss. False: regions were abandoned.

        `prepare` is called on the loop when it is this sync's turn, when no other is under way and
        all that failed have had their effect; what it gives is called right after the sync, in the
        same thread, if that went well.
        """
        lost: list[RegionEntry] = []
        async with self._syncing:
            covered = self._stamp
            then = prepare() if prepare is not None else None
            error = await self._parts.synced(partial(self._sync_and, then))
            self._parts.note("sync", error)
            if error is None:
                for region in [n for n, stamp in self._unsynced.items() if stamp <= covered]:
                    del self._unsynced[region]
                return True
            lost = self._give_up({*self._unsynced, *self._writing})
        await self._write_entries(lost)
        return False

    def _sync_and(self, then: Callable[[], None] | None) -> OSError | None:
        try:
            self._parts.data.sync()
        except OSError as error:
            return error
        if then is not None:
            then()
        return None
