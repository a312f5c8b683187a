"""The objects of one volume, as a tier of their own.

See docs/nvme-format.md for what lies on the device and docs/architecture.md for the threads. All
waiting for the device happens in `nvme-*` threads.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from kvstored.errors import DataDirectoryError, KvstoredError
from kvstored.io.base import Files, RealFiles
from kvstored.tiers.base import (
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
from kvstored.tiers.nvme import header, intact, layout
from kvstored.tiers.nvme.changes import IO_ERRORS, Changes, Parts
from kvstored.tiers.nvme.columns import columns
from kvstored.tiers.nvme.contents import Listed, list_after
from kvstored.tiers.nvme.device import DataFile
from kvstored.tiers.nvme.finishing import Finishing
from kvstored.tiers.nvme.footprint import Footprint
from kvstored.tiers.nvme.format import SMALL_BIT, is_small
from kvstored.tiers.nvme.readers import Readers
from kvstored.tiers.nvme.reads import Job, ReadRate, Reads
from kvstored.tiers.nvme.recovery import Recovery, recover
from kvstored.tiers.nvme.reserving import AHEAD_BYTES, Reserving
from kvstored.tiers.nvme.slots import PlaceState
from kvstored.tiers.nvme.space import Space
from kvstored.tiers.nvme.volume import Settings, Volume, open_volume
from kvstored.trouble import Trouble

_log = logging.getLogger(__name__)

_DELETES_AT_ONCE = 256


class DeleteNotDurable(KvstoredError):
    """A delete took effect in memory, but the device did not make it durable."""


class VolumeTier(Tier):
    """Objects in slots of one preallocated file, and small ones in LMDB. See `Tier`.

    `cap_bytes` covers everything in `directory`. `namespace_cap(name)` gives a namespace's cap in
    bytes. `region_bytes` and `small_bytes` (what objects up to 64 KiB share) are fixed when the
    directory is first used; None derives them from the cap. `threads` bounds
    the writes under way at a time, `read_threads` the transfers of reads. `make_directory` False:
    a directory that is missing is not made, and the volume is away.
    """

    kind = TierKind.NVME

    def __init__(
        self,
        directory: Path,
        cap_bytes: int,
        namespace_cap: Callable[[str], int] | None = None,
        *,
        files: Files | None = None,
        region_bytes: int | None = None,
        small_bytes: int | None = None,
        threads: int = 4,
        read_threads: int = 8,
        ahead_bytes: int = AHEAD_BYTES,
        walk_timeout_s: float = 60.0,
        make_directory: bool = True,
    ) -> None:
        self._settings = Settings(
            Path(directory),
            cap_bytes,
            region_bytes or 0,
            small_bytes or 0,
            walk_timeout_s,
            threads + read_threads,
            make_directory,
        )
        self._threads = threads
        self._read_threads = read_threads
        self._ahead_bytes = ahead_bytes
        self._files = files or RealFiles()
        self._namespace_cap = namespace_cap
        self._troubles: dict[str, str] = {}
        self._troubles_lock = threading.Lock()
        self._saying = threading.Lock()
        self._said: dict[str, Trouble] = {}
        self._readers = Readers()
        self._works = Finishing()
        self._down = True
        self._opened = False
        self._died = ""
        self.vanished = ""
        """What of the volume's files is not what was opened, once that was seen, in words: the
        volume takes nothing more. "" while all is well.
        """
        self.on_vanished: Callable[[], None] | None = None
        """Called on the loop, once, when a commit has found that out."""
        self.errors: Counter[str] = Counter()
        """Failures of the device since the start, by stage."""

    # ---- what it is ---------------------------------------------------------------------------

    @property
    def persistent(self) -> bool:
        """See Tier."""
        return True

    @property
    def mode(self) -> str:
        """See Tier: "o_direct", "buffered", or "closed" before it is opened."""
        return self._volume.data.mode if self._opened else "closed"

    @property
    def health(self) -> str:
        """See Tier: "ok", or the stages that last failed and why."""
        with self._troubles_lock:
            return "; ".join(f"{k}: {v}" for k, v in sorted(self._troubles.items())) or "ok"

    @property
    def problems(self) -> tuple[str, ...]:
        """What was found damaged, and mended or given up, when the volume was opened; and since."""
        if not self._opened:
            return ()
        abandoned = self._space.slots.abandoned
        more = [f"{abandoned} regions are abandoned: a sync of them failed"] if abandoned else []
        return (*self._volume.problems, *more)

    @property
    def index_died(self) -> str:
        """How the index child came to its end, "" while it lives: then all that is left to do with
        the volume is to open it anew.
        """
        return self._volume.process.died if self._opened else self._died

    @property
    def index_suspects(self) -> frozenset[str]:
        """Environments that the index child was at when it crashed."""
        return self._volume.process.suspects if self._opened else frozenset()

    def distrust_index(self, given_up: str = "") -> None:
        """Before it is opened: have all that is in LMDB read first, by a process that may die of
        it; and one environment, if it is named, made anew.
        """
        self._settings = replace(self._settings, read_payload=True, given_up=given_up)

    @property
    def uuid(self) -> bytes:
        """What the volume is known by, wherever it is mounted: 16 bytes. Only when open."""
        return self._volume.superblock.volume

    @property
    def sequence(self) -> int:
        """The highest that any object here has. Only when open."""
        return self._changes.last_sequence

    @property
    def owed_deletes(self) -> int:
        """Deletes that the device has not made durable yet; every commit tries again."""
        return self._changes.owed_deletes if self._opened else 0

    @property
    def regions(self) -> tuple[int, int, int]:
        """How many there are, how many of them hold nothing, how many are abandoned."""
        if not self._opened:
            return (0, 0, 0)
        slots = self._space.slots
        return (len(slots.regions), sum(r.empty for r in slots.regions), slots.abandoned)

    @property
    def making_ready(self) -> bool:
        """Whether regions are being given a slot size before they are needed."""
        return self._opened and self._reserving.making_ready

    def namespace_charged_bytes(self, namespace: str) -> int:
        """What a namespace's objects and reservations are charged on this volume."""
        return self._space.namespace_charged_bytes(namespace) if self._opened else 0

    def spare(self) -> tuple[DataFile, int] | None:
        """The data file and a region of it that nothing is in, if there is one."""
        region = self._space.slots.spare_region()
        return None if region is None else (self._volume.data, region)

    def usage(self) -> TierUsage:
        """See Tier."""
        if not self._opened:
            return TierUsage(self._settings.cap_bytes, 0, 0, 0)
        space = self._space
        return TierUsage(
            self._volume.cap_bytes, self._footprint.held_bytes, space.charged_bytes, space.objects
        )

    def charge_bytes(self, length_bytes: int) -> int:
        """See Tier."""
        return layout.charge_bytes(length_bytes)

    charge_mask = SMALL_BIT

    def charge_at(self, place: int, length_bytes: int) -> int:
        """See Tier."""
        return layout.charge_at(place, length_bytes)

    @property
    def accepted_bytes(self) -> int:
        """Payload of the objects that were written since the start."""
        return self._changes.accepted_bytes if self._opened else 0

    @property
    def written_bytes(self) -> int:
        """What was written to the device since the start: payload, headers, tables and index."""
        if not self._opened:
            return 0
        return (
            self._volume.data.written_bytes + self._index.written_bytes + self._small.written_bytes
        )

    def _note(self, stage: str, error: Exception | None) -> None:
        """Remember how a stage last went, and say it: each kind of trouble once a minute at most,
        as every transfer of a device that is gone has the same to tell.
        """
        with self._troubles_lock:
            if error is None:
                self._troubles.pop(stage, None)
                return
            self.errors[stage] += 1
            self._troubles[stage] = str(error)
        with self._saying:
            said = self._said.setdefault(stage, Trouble(_log, f"nvme {stage}: %s"))
            said.came(error, time.monotonic())

    # ---- opening and closing ------------------------------------------------------------------

    async def open(self) -> Recovered:
        """See Tier. Waits for a child process that reads the index, or for a scan of headers."""
        self._io = ThreadPoolExecutor(self._threads, thread_name_prefix="nvme-io")
        self._syncs = ThreadPoolExecutor(3, thread_name_prefix="nvme-sync")
        loop = asyncio.get_running_loop()
        try:
            self._volume, found, self._inventory = await loop.run_in_executor(
                self._syncs, self._open
            )
        except BaseException:
            self._io.shutdown(wait=False)
            self._syncs.shutdown(wait=False)
            raise
        self._space = Space(found.table, self._volume.plan, self._namespace_cap)
        self._space.load(found.index, found.small)
        self._index, self._small = found.index_env, found.small_env
        self._footprint = Footprint(
            self._volume.footprint_bytes, self._syncs, self._note, self._works
        )
        parts = Parts(
            self._volume.data,
            self._index,
            self._small,
            self._space,
            self._io,
            self._syncs,
            self._note,
            self._see_vanished,
            self._tell_vanished,
        )
        self._changes = Changes(parts, self._volume.plan, found.sequence, found.table_sequence)
        self._reads = Reads(self._volume.data, self._small, self._note, self._read_threads)
        self._reserving = Reserving(
            self._space, self._changes, self._works, self._takes_nothing, self._ahead_bytes
        )
        self._down = False
        self._opened = True
        return columns(found.index, found.small, dict(found.dropped))

    def _open(self) -> tuple[Volume, Recovery, intact.Inventory]:
        volume = open_volume(self._files, self._settings)
        try:
            found = recover(volume)
            return volume, found, intact.take(self._files, volume.directory)
        except IO_ERRORS as error:
            self._died = volume.process.died
            volume.close()
            raise DataDirectoryError(
                f"data directory {volume.directory}: {error}",
                "check the device and the room on its file system",
            ) from error
        except BaseException:
            volume.close()
            raise

    def check(self) -> None:
        """See whether the volume's files are what was opened (`vanished`). Blocks. Raises OSError
        where that cannot be told.
        """
        fault = intact.fault(self._files, self._volume.directory, self._inventory)
        self.vanished = self.vanished or fault

    def _see_vanished(self) -> str:
        """`check`, after a commit and in its thread; gives what it found."""
        directory, fd = self._volume.directory, self._volume.data.fd
        gone = intact.vanished(self._files, directory, self._inventory, fd)
        self.vanished = self.vanished or gone
        return self.vanished

    def _tell_vanished(self) -> None:
        tell, self.on_vanished = self.on_vanished, None
        if tell is not None:
            tell()

    async def close(self) -> None:
        """See Tier."""
        if self._down:
            return
        self._down = True
        await self._works.ended()
        await self._reads.close()
        await self._changes.close()
        self._io.shutdown(wait=True)
        await asyncio.get_running_loop().run_in_executor(self._syncs, self._shut)
        self._syncs.shutdown(wait=True)

    def _shut(self) -> None:
        """Close the files, in a thread: the index child is waited for."""
        try:
            self._index.close()
            self._small.close()
        finally:
            self._volume.close()

    # ---- reserve ------------------------------------------------------------------------------

    async def reserve(self, namespace: str, lengths_bytes: Sequence[int]) -> list[int | NoRoom]:
        """See Tier."""
        if self._takes_nothing():
            return [NoRoom.DOWN] * len(lengths_bytes)
        return await self._reserving.reserve(namespace, lengths_bytes)

    def _takes_nothing(self) -> bool:
        return self._down or bool(self.vanished)

    def crowded(self, length_bytes: int) -> list[range]:
        """See Tier."""
        return [] if self._down else self._space.crowded(length_bytes)

    def cancel(self, places: Sequence[int]) -> None:
        """See Tier."""
        self._reserving.cancel(places)

    # ---- write and delete ---------------------------------------------------------------------

    async def write(self, items: Sequence[ObjectWrite]) -> list[WriteOutcome]:
        """See Tier. Raises ValueError for a place that is not reserved, or a payload or meta that
        cannot be written; nothing is written then.
        """
        for item in items:
            _check(item)
        if self._down:
            return [WriteOutcome.DOWN] * len(items)
        outcomes = await self._works.finish(self._changes.write(items))
        if not self._down:
            self._footprint.measure()
        return outcomes

    async def delete(self, places: Sequence[int]) -> None:
        """See Tier. Raises DeleteNotDurable where the device cannot be told; the objects are
        unreadable in this run all the same, and every later commit tries again.
        """
        for place in places:
            if self._space.state(place) is not PlaceState.LIVE:
                raise ValueError(f"place {place:#x} holds no object")
        self._space.set_states(places, PlaceState.LEAVING)
        left = await self._works.finish(self._delete(list(places)))
        if left:
            raise DeleteNotDurable(
                f"{len(left)} deletes could not be made durable: {self.health}",
                "look at the device; deletes are tried again with the next write",
            )

    async def _delete(self, places: list[int]) -> list[int]:
        left: list[int] = []
        for at in range(0, len(places), _DELETES_AT_ONCE):
            some = places[at : at + _DELETES_AT_ONCE]
            for place in some:
                await self._readers.none(place)
            left += await self._changes.delete(some)
        return left

    # ---- read ---------------------------------------------------------------------------------

    async def read(
        self, items: Sequence[ObjectRead], arrived: Arrived | None = None
    ) -> list[ReadOutcome]:
        """See Tier. The tier knows of the readers before this first waits."""
        outcomes = [ReadOutcome.DOWN] * len(items)

        def settle(i: int, outcome: ReadOutcome, pieces: bytes) -> None:
            outcomes[i] = outcome
            if arrived is not None:
                arrived(i, outcome, pieces)

        def settle_read(i: int, outcome: ReadOutcome, pieces: bytes) -> None:
            self._readers.went(items[i].place)
            settle(i, outcome, pieces)

        jobs: list[Job] = []
        elsewhere: list[int] = []
        for i, item in enumerate(items):
            if not self._down and self._readable(item):
                namespace = self._space.namespace(item.place)
                jobs.append(Job(i, item, namespace, self._space.entry(item.place)))
            else:
                elsewhere.append(i)
        for job in jobs:
            self._readers.came(job.item.place)
        for i in elsewhere:
            settle(i, ReadOutcome.DOWN if self._down else ReadOutcome.CORRUPT, b"")
        await self._reads.read(jobs, settle_read)
        return outcomes

    # ---- for scrubs ---------------------------------------------------------------------------

    async def list_after(self, place: int, most: int) -> list[Listed]:
        """The next objects behind a place, as the index has them; see contents.list_after.

        Raises lmdb.Error or OSError, also when the volume is closed.
        """
        if self._down:
            raise OSError(errno.ESHUTDOWN, "the volume is closed", str(self._settings.directory))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._syncs, list_after, self._index, self._small, place, most
        )

    def is_live(self, place: int) -> bool:
        """Whether a place holds an object that can be read."""
        return not self._down and self._space.state(place) is PlaceState.LIVE

    @property
    def region_count(self) -> int:
        """Regions that exist, used or not."""
        return self._volume.regions if self._opened else 0

    def give_up_reads(self) -> None:
        """Answer DOWN for all that waits for its turn; what the device has is waited for."""
        self._reads.give_up()

    @property
    def verified_bytes(self) -> int:
        """Payload of the objects that were read and verified since the start."""
        return self._reads.verified_bytes if self._opened else 0

    @property
    def read_rate(self) -> ReadRate:
        """What the device gave while it was kept busy, since the start."""
        return self._reads.rate if self._opened else ReadRate()

    def _readable(self, item: ObjectRead) -> bool:
        """Whether there is an object that may be of that length."""
        if self._space.state(item.place) is not PlaceState.LIVE or item.length_bytes <= 0:
            return False
        if is_small(item.place) and item.length_bytes > layout.SMALL_MAX_BYTES:
            return False
        if len(item.into) < padded_bytes(item.length_bytes):
            raise ValueError(f"{len(item.into)} B of memory for {item.length_bytes} B of object")
        entry = self._space.entry(item.place)
        return entry is None or layout.slot_bytes(item.length_bytes) <= entry.slot_bytes

    # ---- families -----------------------------------------------------------------------------

    async def remember_family(self, namespace: str, fingerprint: bytes, spec: bytes) -> None:
        """See Tier. Kept in both environments, so that losing one does not lose it."""
        if self._down:
            return
        await self._works.finish(self._changes.remember_family(namespace, fingerprint, spec))


def _check(item: ObjectWrite) -> None:
    """Raise ValueError for what can never be written."""
    header.validate(item.meta)
    length = item.meta.length_bytes
    if len(item.payload) < padded_bytes(length):
        raise ValueError(f"payload of {len(item.payload)} B for an object of {length} B")
