"""The NVMe tier: objects over any number of volumes, each of which may go away and come back.

An object lives on one volume; its place has the volume's number on top. This module hands calls to
the volumes and their answers back; `volumes.py` decides what a volume's trouble means. See
docs/nvme-tier.md.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvstored.io.base import Files, RealFiles
from kvstored.tiers.base import (
    VOLUME_SHIFT,
    Arrived,
    NoRoom,
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
from kvstored.tiers.nvme import header, layout, probe
from kvstored.tiers.nvme.breaker import Patience
from kvstored.tiers.nvme.format import SMALL_BIT
from kvstored.tiers.nvme.member import Call, Measure, Member, VolumeSpec, answers
from kvstored.tiers.nvme.placing import Placing
from kvstored.tiers.nvme.spread_read import PLACE_MASK, SpreadRead
from kvstored.tiers.nvme.status import VolumeState, VolumeStatus
from kvstored.tiers.nvme.volume_tier import DeleteNotDurable, VolumeTier
from kvstored.tiers.nvme.volumes import Volumes

MOST_VOLUMES = 64


class NvmeTier(Tier):
    """Objects over volumes. See `Tier`.

    `registry` is a directory on a disk of its own life (the data directory's) for what must be
    known of volumes that are away. `namespace_cap(name)` gives a namespace's cap in bytes, over all
    volumes together. `make` makes a VolumeTier from a spec and files, not opened. `measure` is
    asked for the speed of a volume that has not been seen before.
    """

    kind = TierKind.NVME

    def __init__(
        self,
        volumes: Sequence[VolumeSpec],
        registry: Path,
        namespace_cap: Callable[[str], int] | None = None,
        *,
        files: Files | None = None,
        patience: Patience | None = None,
        make: Callable[[VolumeSpec, Files], VolumeTier] | None = None,
        measure: Measure = probe.measure,
    ) -> None:
        if not 0 < len(volumes) <= MOST_VOLUMES:
            raise ValueError(f"{len(volumes)} volumes; 1 to {MOST_VOLUMES} are possible")
        self._patience = patience or Patience()
        files = files or RealFiles()
        self._members = [
            Member(number, spec, files, self._patience, make or _make, measure)
            for number, spec in enumerate(volumes)
        ]
        self._volumes = Volumes(self, self._members, files, registry, self._patience)
        self._placing = Placing(self._members, namespace_cap)
        self._stuck: dict[int, asyncio.Future[Any]] = {}  # by place: writes that were given up
        self._down = True

    # ---- what it is ---------------------------------------------------------------------------

    @property
    def persistent(self) -> bool:
        """See Tier."""
        return True

    @property
    def mode(self) -> str:
        """See Tier: that of all volumes, or those there are, with commas."""
        modes = {m.tier.mode for m in self._members if m.tier is not None}
        return ",".join(sorted(modes)) or "closed"

    @property
    def health(self) -> str:
        """See Tier: "ok", or what is wrong with which volume."""
        said = []
        for m in self._members:
            inner = m.tier.health if m.tier is not None else "ok"
            if m.state not in (VolumeState.OK, VolumeState.DRAINED):
                said.append(f"{m.spec.name} is {m.state.value}: {m.detail}")
            elif inner != "ok":
                said.append(f"{m.spec.name}: {inner}" if len(self._members) > 1 else inner)
        return "; ".join(said) or "ok"

    @property
    def problems(self) -> tuple[str, ...]:
        """What was found damaged, and mended or given up, on volumes that are there."""
        found = list(self._volumes.problems)
        for m in self._members:
            found += m.tier.problems if m.tier is not None else ()
        return tuple(found)

    def usage(self) -> TierUsage:
        """See Tier: sums over the volumes that are there. One that is away is a smaller cap."""
        total = [m.tier.usage() for m in self._members if m.tier is not None]
        return TierUsage(
            sum(u.cap_bytes for u in total),
            sum(u.footprint_bytes for u in total),
            sum(u.charged_bytes for u in total),
            sum(u.objects for u in total),
        )

    def charge_bytes(self, length_bytes: int) -> int:
        """See Tier."""
        return layout.charge_bytes(length_bytes)

    charge_mask = SMALL_BIT

    def charge_at(self, place: int, length_bytes: int) -> int:
        """See Tier."""
        return layout.charge_at(place, length_bytes)

    def volumes(self) -> list[VolumeStatus]:
        """Each volume as it is now, by number."""
        return [m.status() for m in self._members]

    def volume(self, number: int) -> VolumeTier | None:
        """The objects of one volume; None while it is away. Its next life has another."""
        return self._members[number].tier

    # ---- life ---------------------------------------------------------------------------------

    async def open(self) -> Recovered:
        """See Tier. A volume that cannot be opened, or not in time, is lost, and tried again in the
        background. Raises DataDirectoryError where none can be opened, for a reason that waiting
        does not mend.
        """
        found = await self._volumes.open()
        self._down = False
        return found

    async def close(self) -> None:
        """See Tier. Volumes that do not answer are not waited for."""
        if self._down:
            return
        self._down = True
        await self._volumes.close()

    async def drain(self, name: str) -> None:
        """Place nothing more on a volume and move what it holds to the others, in the background;
        what finds no room there is dropped. Then it is `drained`, also after a restart. A volume
        that is lost is given up by it.

        Raises UnknownVolume, LastVolume, or DataDirectoryError where that cannot be noted.
        """
        await self._volumes.drains.drain(name)

    # ---- reserve ------------------------------------------------------------------------------

    async def reserve(self, namespace: str, lengths_bytes: Sequence[int]) -> list[int | NoRoom]:
        """See Tier."""
        if self._down:
            return [NoRoom.DOWN] * len(lengths_bytes)
        return await self._placing.reserve(namespace, lengths_bytes)

    def crowded(self, length_bytes: int) -> list[range]:
        """See Tier: of the volumes that take objects, one region of each in turn."""
        found = [
            (turn, member.number << VOLUME_SHIFT, places)
            for member in self._members
            if member.tier is not None and member.placeable
            for turn, places in enumerate(member.tier.crowded(length_bytes))
        ]
        found.sort(key=lambda choice: choice[:2])
        return [range(base | p.start, base | p.stop) for _, base, p in found]

    def cancel(self, places: Sequence[int]) -> None:
        """See Tier."""
        for number, indices in _by_volume(places).items():
            self._placing.cancel(self._member(number), [places[i] & PLACE_MASK for i in indices])

    # ---- write --------------------------------------------------------------------------------

    async def write(self, items: Sequence[ObjectWrite]) -> list[WriteOutcome]:
        """See Tier; raises ValueError as VolumeTier.write does.

        An object whose device does not answer is STUCK: what the device makes of it in the end is
        deleted again, and is not readable in between.
        """
        if self._down:
            return [WriteOutcome.DOWN] * len(items)
        groups = _by_volume([item.place for item in items])
        outcomes = [WriteOutcome.DOWN] * len(items)
        if len(groups) > 1:
            for item in items:
                _check(item)
        begun = [
            (indices, self._begin_write(self._member(number), [items[i] for i in indices]))
            for number, indices in groups.items()
        ]
        found = await answers([write.call for _, write in begun])
        for (indices, write), answer in zip(begun, found, strict=True):
            for i, outcome in zip(indices, write.outcomes(answer), strict=True):
                outcomes[i] = outcome
                if outcome is WriteOutcome.STUCK and write.call is not None:
                    self._stuck[items[i].place] = write.call.ended
        return outcomes

    async def released(self, place: int) -> None:
        """See Tier."""
        ended = self._stuck.get(place)
        if ended is not None:
            await asyncio.wait([ended])
            if self._stuck.get(place) is ended:
                del self._stuck[place]

    def _begin_write(self, member: Member, items: Sequence[ObjectWrite]) -> _Write:
        inner = [replace(item, place=item.place & PLACE_MASK) for item in items]
        of_now = not member.life or all(item.place in member.reserved for item in inner)
        if not member.placeable or not of_now:
            self._placing.cancel(member, [item.place for item in inner])
            return _Write(member, len(items), None)
        member.reserved.difference_update(item.place for item in inner)
        late = partial(self._written_late, member, inner)
        return _Write(member, len(items), member.begin(lambda tier: tier.write(inner), late))

    def _written_late(
        self,
        member: Member,
        items: Sequence[ObjectWrite],
        tier: VolumeTier,
        outcomes: Sequence[WriteOutcome],
    ) -> None:
        """The store was told that these failed: they go again."""
        if member.tier is tier:
            done = zip(items, outcomes, strict=True)
            member.owed.update(i.place for i, outcome in done if outcome is WriteOutcome.OK)

    # ---- read ---------------------------------------------------------------------------------

    async def read(
        self, items: Sequence[ObjectRead], arrived: Arrived | None = None
    ) -> list[ReadOutcome]:
        """See Tier. All volumes are read at once."""
        spread = SpreadRead(items, arrived)
        groups = {} if self._down else _by_volume([item.place for item in items])
        works: list[tuple[Member, list[int]]] = []
        for number, indices in groups.items():
            if number >= len(self._members):
                spread.settle(indices, ReadOutcome.CORRUPT)
            elif self._members[number].readable:
                works.append((self._members[number], indices))
        await spread.run(works)
        return spread.outcomes

    # ---- delete -------------------------------------------------------------------------------

    async def delete(self, places: Sequence[int]) -> None:
        """See Tier. What is on a volume that does not take changes just now is deleted as soon as
        it does; whoever needs that to outlive the process calls `forget` before.

        Raises DeleteNotDurable as VolumeTier.delete does.
        """
        groups = _by_volume(places)
        answers = await asyncio.gather(
            *(
                self._delete_some(self._member(number), [places[i] & PLACE_MASK for i in indices])
                for number, indices in groups.items()
            ),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def _delete_some(self, member: Member, places: list[int]) -> None:
        life = member.life
        if member.entering:
            await asyncio.wait(set(member.entering))  # reads that came before
        if member.tier is None or member.life != life:
            return  # what it had has left the store; `forget` keeps it from coming back
        if member.state is not VolumeState.OK:
            member.owed.update(places)
            await self._volumes.recorded(member)
            return
        call = member.begin(partial(_delete, places=places, strict=not life), _ignore)
        tier = member.tier
        try:
            answer = None if call is None else await call.answer()
        except DeleteNotDurable:
            if not tier.vanished:
                raise
            answer = True
            await self._volumes.recorded(member)  # begun when its files were seen to be gone
        member.full = False
        if answer is None and member.life == life:
            if not member.stalled:
                raise DeleteNotDurable(
                    f"volume {member.spec.name} has too many changes waiting: "
                    f"{len(places)} deletes were not begun",
                    "delete again later",
                )
            # The volume is at it, for as long as its device takes.
            await self._volumes.recorded(member)

    async def forget(self, namespace: str, family: bytes, keys: Sequence[bytes]) -> None:
        """See Tier. Raises DeleteNotDurable where it cannot be noted."""
        if not self._down:
            await self._volumes.deletes.forget(namespace, family, keys)

    async def remember_family(self, namespace: str, fingerprint: bytes, spec: bytes) -> None:
        """See Tier. Every volume keeps it; one that is away, when it is back."""
        if not self._down:
            await self._volumes.families.remember(namespace, fingerprint, spec)

    def _member(self, number: int) -> Member:
        if number >= len(self._members):
            raise ValueError(f"there is no volume {number}: not reserved, and holds no object")
        return self._members[number]


class _Write:
    """What one volume was asked to write; `call` None: it takes nothing."""

    def __init__(self, member: Member, count: int, call: Call[list[WriteOutcome]] | None) -> None:
        self.call = call
        self._member = member
        self._life = member.life
        self._count = count

    def outcomes(self, answer: list[WriteOutcome] | None) -> list[WriteOutcome]:
        """What became of each object."""
        if self.call is None:
            return [WriteOutcome.DOWN] * self._count
        if answer is None:
            return [WriteOutcome.STUCK] * self._count
        return answer if self._member.life == self._life else [WriteOutcome.DOWN] * self._count


def _make(spec: VolumeSpec, files: Files) -> VolumeTier:
    return VolumeTier(spec.directory, spec.cap_bytes, files=files, make_directory=not spec.guarded)


def _by_volume(places: Sequence[int]) -> dict[int, list[int]]:
    """Indices of the places of each volume, by its number."""
    groups: dict[int, list[int]] = defaultdict(list)
    for i, place in enumerate(places):
        groups[place >> VOLUME_SHIFT].append(i)
    return groups


def _check(item: ObjectWrite) -> None:
    """Raise ValueError for what can never be written, before any volume begins."""
    header.validate(item.meta)
    if len(item.payload) < padded_bytes(item.meta.length_bytes):
        raise ValueError(
            f"payload of {len(item.payload)} B for an object of {item.meta.length_bytes} B"
        )


async def _delete(tier: VolumeTier, places: list[int], strict: bool) -> bool:
    """Delete from a volume. Not `strict`: places of another life of it may be among them."""
    try:
        await tier.delete(places)
    except ValueError:
        if strict:
            raise
        for place in places:
            with contextlib.suppress(ValueError):
                await tier.delete([place])
    return True


def _ignore(tier: VolumeTier, answer: bool) -> None:
    del tier, answer
