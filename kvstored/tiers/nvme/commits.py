"""The two queues of changes to the index, and how a batch of them is made to hold.

Of a batch, the data file is synced first and the index is committed then; what it makes true is
entered in memory last. See docs/nvme-format.md for why a slot is opened before it is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable, Sequence

import numpy as np

from kvstored.tiers.nvme import layout
from kvstored.tiers.nvme.committer import Change, Committer, Kind
from kvstored.tiers.nvme.format import is_small, place_of, region_of, slot_of
from kvstored.tiers.nvme.index import Entry, Environment
from kvstored.tiers.nvme.regions import IO_ERRORS, Parts, Regions
from kvstored.tiers.nvme.slots import PlaceState, by_region

OPENED_AHEAD = 256
"""Slots of a region kept open for writing; the next commit tops them up on its way."""

OPENED_LEAST = 128
"""With fewer free slots open than this, a region gets more."""


class _Batch:
    """Changes that are committed together, and what is decided about them."""

    def __init__(self, batch: Sequence[Change]) -> None:
        self.publish = [c for c in batch if c.kind is Kind.PUBLISH]
        self.remove = [c for c in batch if c.kind is Kind.REMOVE]
        self.opening = [c for c in batch if c.kind is Kind.OPEN]
        self.doubtful: set[Change] = set()
        self.entered: list[Change] = []
        self.removed: list[int] = []
        self.opened: dict[int, bytes] = {}
        self.tried = False
        self.error: Exception | None = None
        self.vanished = False
        """Files of the volume are gone: neither sync nor commit means anything."""


class Commits:
    """Commits of one volume. Used on the verbs' loop."""

    def __init__(self, parts: Parts, plan: layout.Plan, regions: Regions) -> None:
        self._parts = parts
        self._space = parts.space
        self._regions = regions
        self._owed: dict[bool, set[int]] = {True: set(), False: set()}  # removals, by smallness
        self._slots = Committer(
            self._apply_slots,
            layout.COMMIT_RECORDS,
            1 << 62,
            "nvme-index-commit",
            lambda: regions.writing,
        )
        self._small = Committer(
            self._apply_small, layout.COMMIT_RECORDS, plan.small_commit_bytes, "nvme-small-commit"
        )

    @property
    def owed(self) -> int:
        """Removals that do not hold yet."""
        return sum(map(len, self._owed.values()))

    def written(self) -> None:
        """A write has ended, whether or not something of it is published."""
        self._slots.look()

    async def close(self) -> None:
        """Commit what is queued."""
        await self._slots.close()
        await self._small.close()

    # ---- what is asked for --------------------------------------------------------------------

    def publish(self, entries: Sequence[Entry], weight_bytes: int = 0) -> asyncio.Future[bool]:
        """Enter objects that are all small, or all in slots and written. At most COMMIT_RECORDS."""
        places = [entry.place for entry in entries]
        queue = self._small if is_small(places[0]) else self._slots
        return queue.submit(Kind.PUBLISH, places, entries, weight_bytes=weight_bytes)

    def remove(
        self, places: Sequence[int], *, weight_bytes: int = 0, voided: bool = False
    ) -> asyncio.Future[bool]:
        """Remove objects that are all small, or all in slots. At most COMMIT_RECORDS. Places are
        free again once it holds; where it does not, every later commit tries again.
        """
        queue = self._small if is_small(places[0]) else self._slots
        return queue.submit(Kind.REMOVE, places, weight_bytes=weight_bytes, voided=voided)

    async def open(self, places: Sequence[int]) -> list[int]:
        """Open those slots that are not open yet; gives those for which that failed."""
        regions = self._space.slots.regions
        closed = [p for p in places if not regions[region_of(p)].opened[slot_of(p)]]
        failed: list[int] = []
        some = [
            closed[at : at + layout.COMMIT_RECORDS]
            for at in range(0, len(closed), layout.COMMIT_RECORDS)
        ]
        futures = [(part, self._slots.submit(Kind.OPEN, part)) for part in some]
        for part, future in futures:
            if not await future:
                failed += part
        return failed

    async def open_ahead(self, regions: Sequence[int]) -> None:
        """Open the first free slots of regions; where that fails, who writes there will try."""
        places = []
        for region in regions:
            free = self._space.slots.regions[region].states == PlaceState.FREE
            slots = np.flatnonzero(free)[:OPENED_AHEAD].tolist()
            places += [place_of(region, slot) for slot in slots]
        await self.open(places)

    # ---- batches ------------------------------------------------------------------------------

    async def _apply_slots(self, batch: list[Change]) -> None:
        """Sync the data file, then commit one batch to the index."""
        plan = _Batch(batch)
        if plan.publish or plan.remove:
            done = await self._regions.sync(lambda: self._prepared(plan))
            if not done:  # what was written is in doubt; what was removed need not come back
                self._prepare(plan)
        else:
            self._prepare(plan)
        if not plan.tried:
            await self._parts.synced(lambda: self._commit(self._parts.index, plan))
        self._conclude(self._parts.index, plan)

    def _prepared(self, plan: _Batch) -> Callable[[], None]:
        self._prepare(plan)
        return lambda: self._commit(self._parts.index, plan)

    def _prepare(self, plan: _Batch) -> None:
        """Decide what is committed. What was written to a region before it was given up may not
        be there, so that it is not published.
        """
        plan.doubtful = {c for c in plan.publish + plan.remove if self._given_up(c.places)}
        plan.entered = [c for c in plan.publish if c not in plan.doubtful]
        plan.opened = self._opened_after(plan.entered, plan.opening, plan.remove)
        plan.removed = self._removals(plan.remove, small=False)

    def _given_up(self, places: Sequence[int]) -> bool:
        return any(self._regions.abandoned(number) for number, _, _ in by_region(places))

    async def _apply_small(self, batch: list[Change]) -> None:
        plan = _Batch(batch)
        plan.entered = plan.publish
        plan.removed = self._removals(plan.remove, small=True)
        await self._parts.synced(lambda: self._commit(self._parts.small, plan))
        self._conclude(self._parts.small, plan)

    def _commit(self, env: Environment, plan: _Batch) -> None:
        """Commit, in a thread."""
        plan.tried = True
        entries = [entry for c in plan.entered for entry in c.entries]
        if not entries and not plan.removed and not plan.opened:
            return
        try:
            env.commit(entries, plan.removed, plan.opened)
        except IO_ERRORS as error:
            plan.error = error
        if gone := self._parts.vanished():
            plan.error, plan.vanished = OSError(errno.ENODEV, gone), True
            with contextlib.suppress(*IO_ERRORS):  # this file may still be there, or be put back
                env.commit(removed=[entry.place for entry in entries])

    def _conclude(self, env: Environment, plan: _Batch) -> None:
        """Take over what a commit has made true, and tell those who wait."""
        self._parts.note(f"{env.path.name} commit", plan.error)
        if plan.vanished:
            self._parts.on_vanished()
        held = plan.error is None
        if held:
            self._settle(plan)
        for change in plan.publish + plan.opening:
            change.done.set_result(held and change not in plan.doubtful)
        for change in plan.remove:
            # A void header that is synced, or a commit: either one keeps the object from coming
            # back, since an abandoned region is not scanned. Files that are gone hold neither.
            synced = change.voided and change not in plan.doubtful and not plan.vanished
            self._finish_removal(change, held, synced)

    def _removals(self, remove: Sequence[Change], small: bool) -> list[int]:
        return [*(place for c in remove for place in c.places), *self._owed[small]]

    def _finish_removal(self, change: Change, committed: bool, synced: bool) -> None:
        if committed:
            leaving = [
                p for p in change.places if self._space.state(p) is PlaceState.LEAVING
            ]  # the commit has freed those that were owed
            self._space.release(leaving)
        else:  # a place that the index has for one object must not get another's header
            self._owed[is_small(change.places[0])].update(change.places)
        change.done.set_result(committed or synced)

    def _settle(self, plan: _Batch) -> None:
        for number, bitmap in plan.opened.items():
            region = self._space.slots.regions[number]
            bits = np.frombuffer(bitmap.ljust(-(-region.slots // 8), b"\0"), np.uint8)
            region.opened[:] = np.unpackbits(bits, bitorder="little")[: region.slots] > 0
        for change in plan.entered:
            self._space.set_states(change.places, PlaceState.LIVE)
        for owed in self._owed.values():
            paid = owed.intersection(plan.removed)
            owed -= paid
            self._space.release(list(paid))

    def _opened_after(
        self, publish: Sequence[Change], opening: Sequence[Change], remove: Sequence[Change]
    ) -> dict[int, bytes]:
        """Bitmaps of open slots as they are to be after a batch, for the regions it changes.

        Written slots are open no longer; a region that has few open free slots left gets more, and
        keeps some of those that are removed open, so that the next writes need no commit of their
        own.
        """
        bitmaps = {}
        written, wanted, removed = (
            by_region([place for c in changes for place in c.places])
            for changes in (publish, opening, remove)
        )
        for number in {number for number, _, _ in [*written, *wanted]}:
            region = self._space.slots.regions[number]
            opened = region.opened.copy()
            free = region.states == PlaceState.FREE
            if int((opened & free).sum()) < OPENED_LEAST:
                opened[np.flatnonzero(free & ~opened)[:OPENED_AHEAD]] = True
            bitmaps[number] = opened
        for number, _, slots in removed:
            if self._regions.abandoned(number):
                continue
            opened = bitmaps.setdefault(number, self._space.slots.regions[number].opened.copy())
            room = max(0, OPENED_AHEAD - int(opened.sum()))
            opened[slots[:room]] = True
        for number, _, slots in wanted:
            bitmaps[number][slots] = True
        for number, _, slots in written:
            bitmaps[number][slots] = False
        return {
            number: np.packbits(opened, bitorder="little").tobytes().rstrip(b"\0")
            for number, opened in bitmaps.items()
        }
