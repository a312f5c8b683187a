"""The volumes' lives: opened, distrusted, lost, found again, drained. Belongs to the verbs' loop.

Every volume goes through `_come_up` before anything of it is used: what was deleted while it was
away is deleted on it first. docs/nvme-tier.md has the states and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from kvstored.io.base import Files
from kvstored.tiers.base import Recovered, Tier
from kvstored.tiers.nvme import merging
from kvstored.tiers.nvme.arrivals import PURGE_AT_ONCE, Arrivals
from kvstored.tiers.nvme.away import Away
from kvstored.tiers.nvme.breaker import Patience
from kvstored.tiers.nvme.deletes import Deletes
from kvstored.tiers.nvme.drains import Drains
from kvstored.tiers.nvme.failures import FAILURES, VolumeAway, may_mend
from kvstored.tiers.nvme.families import Families
from kvstored.tiers.nvme.member import Member
from kvstored.tiers.nvme.status import VolumeState
from kvstored.tiers.nvme.volume_tier import DeleteNotDurable, VolumeTier

_log = logging.getLogger(__name__)


class Volumes:
    """Keeps each volume in the state that it deserves."""

    def __init__(
        self,
        owner: Tier,
        members: Sequence[Member],
        files: Files,
        registry: Path,
        patience: Patience,
    ) -> None:
        """`owner` has the callbacks `on_lost` and `on_found`."""
        self._owner = owner
        self._members = members
        self._patience = patience
        self.away = Away(files, registry, patience.note_s)
        self.families = Families(members)
        self.deletes = Deletes(self.away, members)
        self.drains = Drains(
            owner, members, self.away, self._start, self._store_is_ready, self._lose
        )
        self._arrivals = Arrivals(self.away)
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening = True
        self._ready = asyncio.Event()
        self._closing = False

    @property
    def problems(self) -> tuple[str, ...]:
        """What was found damaged of the registry."""
        return self.away.problems

    # ---- start and stop -----------------------------------------------------------------------

    async def open(self) -> Recovered:
        """Open what can be opened in time; see NvmeTier.open."""
        await self.away.load()
        await self._take_back()
        loop = asyncio.get_running_loop()
        first: dict[Member, asyncio.Task[Recovered]] = {}
        for member in self._members:
            known = self.away.expected(member.spec.directory)
            if known is not None and known.drained:
                member.state, member.detail, member.uuid = VolumeState.DRAINED, "", known.uuid
            else:
                first[member] = loop.create_task(self._come_up(member))
        if first:
            await asyncio.wait(first.values(), timeout=self._patience.open_timeout_s)
        self._opening = False  # what is ready from now on is handed to the store by itself
        found = [task.result() for task in first.values() if _went_well(task)]
        late = {m: task for m, task in first.items() if not task.done()}
        failed = {m: e for m, task in first.items() if (e := _failure(task)) is not None}
        for member in late:
            member.detail = "it is still being opened"
        for member, error in failed.items():
            member.detail = str(error)
            _log.error("volume %s is lost: %s", member.spec.name, error)
        if failed and not found and not late and not any(map(may_mend, failed.values())):
            await self.close()
            raise next(iter(failed.values()))
        for member in first:
            if member in late or member in failed:
                member.uuid = await self.away.expect(member.spec.directory, member.spec.name)
                self._start(self._revive(member, late.get(member)))
        self._start(self._watch())
        whole = merging.merged(found)
        await self.families.share(whole.family_specs)
        return whole

    async def _take_back(self) -> None:
        """A volume that was to be drained and is configured no longer is free for anything, and so
        is the directory that it was in.
        """
        used = {str(member.spec.directory) for member in self._members}
        for known in self.away.all_known():
            if (known.drained or known.draining) and known.directory not in used:
                fresh = replace(known, drained=False, draining=False, directory="")
                await self.away.remember(fresh)

    async def _store_is_ready(self) -> None:
        """Wait until the store has what the tier was opened with, and takes more."""
        await self._ready.wait()

    async def close(self) -> None:
        """Close what answers; the rest is left alone."""
        self._closing = True
        ending = list(self._tasks)
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending, timeout=self._patience.stuck_after_s)
        waiting = []
        loop = asyncio.get_running_loop()
        for member in self._members:
            member.close_pool()
            if member.tier is not None and not member.stalled:
                waiting.append(loop.create_task(self._close_one(member)))
        if waiting:
            await asyncio.wait(waiting)
        self.away.close()

    async def _close_one(self, member: Member) -> None:
        """Close a volume, or see that it does not answer; then it is on its own."""
        if len(self._members) > 1:
            with contextlib.suppress(OSError):  # also when the registry's disk takes too long
                async with asyncio.timeout(self._patience.note_s):
                    await self._arrivals.note_speed(member)
        call = member.begin(_close, _closed)
        if call is None:
            return
        answer = asyncio.ensure_future(call.answer())
        while not answer.done():
            await asyncio.wait({answer}, timeout=self._patience.look_every_s)
            member.look()
        if answer.result() is None:
            _log.error("volume %s does not answer, and is not closed", member.spec.name)

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task of the volumes failed", exc_info=error)

    # ---- coming up ----------------------------------------------------------------------------

    async def _come_up(self, member: Member) -> Recovered:
        """Open a volume, tell it what was deleted meanwhile, and from then on use it.

        But for the start, whose caller gets all volumes' objects together, the store is handed what
        it holds before anything else can happen. Raises one of FAILURES; the volume is closed then.
        """
        expected = self.away.at(member.spec.directory)
        found = await member.open(expected is not None)
        assert member.tier is not None
        tier = member.tier
        tier.on_vanished = partial(self.look, member)
        try:
            uuid = await self._arrivals.recognise(member, tier)
            if len(self._members) > 1:
                await member.measure()
                await self._arrivals.note_speed(member)
            if not self._opening:
                await self._store_is_ready()
            found = await self._arrivals.purged(member, tier, uuid, found)
            if member.drained:
                raise VolumeAway(f"volume {member.spec.name} was given up meanwhile")
        except BaseException:
            member.take_out()
            await tier.close()
            raise
        numbered = merging.numbered(found, member.number)
        member.full = False
        if why := self.drains.why(member):
            member.state, member.detail = VolumeState.DRAINING, why
            self._start(self.drains.out(member, tier, numbered))
            return merging.rows(numbered, np.zeros(0, np.int64))
        member.state, member.detail = VolumeState.OK, ""
        if not self._opening and self._owner.on_found is not None:
            await self._owner.on_found(numbered)
        return numbered

    async def _revive(self, member: Member, first: asyncio.Task[Recovered] | None = None) -> None:
        """Try to open a lost volume until it is there."""
        pause_s = self._patience.reopen_first_s
        while not self._closing and not member.drained:
            try:
                if first is None:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, self._patience.reopen_longest_s)
                await (first or self._come_up(member))
            except FAILURES as error:
                first = None
                if not member.drained:
                    member.detail = str(error)
                continue
            _log.warning("volume %s is back", member.spec.name)
            await self.families.share()
            return

    # ---- trouble ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look at every volume, again and again."""
        while True:
            await asyncio.sleep(self._patience.look_every_s)  # a period, not a wait for something
            if self._owner.on_found is not None:
                self._ready.set()
            for member in self._members:
                try:
                    self.look(member)
                except Exception:
                    _log.exception("looking at volume %s", member.spec.name)

    def look(self, member: Member) -> None:
        """See whether a volume is still in the state that it deserves."""
        tier = member.tier
        if tier is None or member.state not in (VolumeState.OK, VolumeState.SUSPECT):
            return
        member.look()
        member.rate()
        trusted = member.reads.closed and member.changes.closed
        if member.state is VolumeState.OK:
            if not trusted:
                self._suspect(member)
                return
            if member.check_due():
                self._start(member.check())
            if self.away.pending(member.uuid) and not (tier.owed_deletes or member.probing):
                self._start(self._tell(member, tier))
        elif trusted:
            if not member.running and not member.probing:
                self._start(self._trust(member, tier))
        else:
            self._doubt(member)

    def _suspect(self, member: Member) -> None:
        """Place nothing more there, and note the deletes of a moment ago: it may not have them."""
        broken = member.changes if member.reads.closed else member.reads
        member.state, member.detail = VolumeState.SUSPECT, broken.detail
        _log.error("volume %s is suspect: %s", member.spec.name, broken.detail)
        member.recording = asyncio.get_running_loop().create_task(self.deletes.record(member))
        member.recording.add_done_callback(_tell_failure)

    async def recorded(self, member: Member) -> None:
        """Wait until the deletes that came before a volume's trouble are noted.

        Raises DeleteNotDurable.
        """
        if member.recording is not None:
            await asyncio.shield(member.recording)

    def _doubt(self, member: Member) -> None:
        """A volume that is not trusted: ask it, or give it up for now."""
        broken = member.changes if member.reads.closed else member.reads
        member.detail = broken.detail
        if member.reads.closed:
            member.detail += "; what it holds is read all the same"
        for_s = time.monotonic() - member.reads.opened_at
        unread = not member.reads.closed and for_s >= self._patience.lost_after_s
        if unread or member.reads.gone or member.changes.gone:
            self._lose(member)
        else:
            self._start(member.probe())

    async def _trust(self, member: Member, tier: VolumeTier) -> None:
        """A volume that answers again: do what was put off, then use it."""
        if member.probing or member.tier is not tier:
            return
        member.probing = True
        try:
            member.answers_again()
            while member.owed and member.tier is tier and member.changes.closed:
                some = [member.owed.pop() for _ in range(min(len(member.owed), PURGE_AT_ONCE))]
                call = member.begin(partial(_delete_owed, places=some), _closed)
                if call is None or await call.answer() is None:
                    member.owed.update(some)
                    return
                member.look()
            if member.tier is tier and member.changes.closed and member.reads.closed:
                member.state, member.detail, member.full = VolumeState.OK, "", False
                member.recording = None
                _log.warning("volume %s is trusted again", member.spec.name)
        finally:
            member.probing = False

    async def _tell(self, member: Member, tier: VolumeTier) -> None:
        """Note that a volume has, durably, every delete that was noted for it."""
        member.probing = True
        try:
            noted = len(self.away.pending(member.uuid))
            if member.tier is tier and not tier.owed_deletes and not member.owed:
                await self.away.told(member.uuid, noted)
        except OSError as error:
            _log.warning("volume %s: %s", member.spec.name, error)
        finally:
            member.probing = False

    def _lose(self, member: Member) -> None:
        """Tell the store that what a volume holds is gone for now, and try to open it anew."""
        tier = member.take_out()
        member.state = VolumeState.LOST
        _log.error("volume %s is lost: %s", member.spec.name, member.detail)
        if self._owner.on_lost is not None:
            self._owner.on_lost(member.number)
        self._start(self._reopen(member, tier))

    async def _reopen(self, member: Member, tier: VolumeTier | None) -> None:
        """Close what is left of a volume, however long its device takes, and open it anew."""
        if tier is not None:
            try:
                await tier.close()
            except FAILURES as error:
                _log.warning("volume %s: %s", member.spec.name, error)
        await self._revive(member)


def _went_well(task: asyncio.Task[Recovered]) -> bool:
    return task.done() and task.exception() is None


def _failure(task: asyncio.Task[Recovered]) -> BaseException | None:
    """What kept a volume from opening; what is a bug is raised."""
    error = task.exception() if task.done() else None
    if error is not None and not isinstance(error, FAILURES):
        raise error
    return error


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("deletes of a moment ago are not noted: %s", error)


async def _close(tier: VolumeTier) -> bool:
    await tier.close()
    return True


def _closed(tier: VolumeTier, answer: bool) -> None:
    del tier, answer


async def _delete_owed(tier: VolumeTier, places: Sequence[int]) -> bool:
    """What cannot be made durable now, the volume itself tries again with its next commit."""
    with contextlib.suppress(DeleteNotDurable):
        try:
            await tier.delete(places)
        except ValueError:  # some were deleted meanwhile, by a call that had been given up
            for place in places:
                with contextlib.suppress(ValueError, DeleteNotDurable):
                    await tier.delete([place])
    return True
