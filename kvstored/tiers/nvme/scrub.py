"""Reads and verifies all that a volume holds, again and again, and has what is rotten dropped.

In the background a pass is slow, begins at a random region (so that restarts do not leave the end
of a volume unread for ever) and is followed by a pause; on demand one begins at once, as fast as it
is told. Reads are the tier's own: a scrub finds what a reader would, and nothing else.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvstored.tiers.base import ObjectRead, ReadOutcome, padded_bytes
from kvstored.tiers.nvme.changes import IO_ERRORS
from kvstored.tiers.nvme.contents import Listed
from kvstored.tiers.nvme.device import aligned_block

_log = logging.getLogger(__name__)

Rotten = Callable[[int, bool], None]
"""Told the place, of the volume, of an object whose bytes are not its own; and whether that is so
because it was deleted, before the start, which is no damage. Called on the loop.
"""

RATE_BYTES_PER_S = 8 << 20
"""Of the background: some 700 GB a day."""
PAUSE_S = 24 * 3600.0
"""From the end of a background pass to the beginning of the next."""
START_S = 600.0
"""Within which the first one begins, at random: volumes opened together take turns."""
RETRY_S = 30.0
"""Until a volume that did not answer is asked again."""
MAX_BATCH_BYTES = 16 << 20
_MIN_BATCH_BYTES = 1 << 20
_LISTED_AT_ONCE = 256


class Scrubbed(Protocol):
    """What a scrub needs of a volume. VolumeTier is one."""

    async def read(self, items: Sequence[ObjectRead]) -> list[ReadOutcome]:
        """See Tier."""

    async def list_after(self, place: int, most: int) -> list[Listed]:
        """See contents.list_after. Raises IO_ERRORS."""

    def is_live(self, place: int) -> bool:
        """Whether a place holds an object that can be read."""

    @property
    def region_count(self) -> int:
        """Regions of the volume."""


class PassEnd(enum.Enum):
    """How the last pass ended."""

    NONE = "none"  # there was none yet
    DONE = "done"  # everything was read
    CUT_SHORT = "cut short"  # for one on demand, or for the end of the volume's life
    DOWN = "down"  # the volume did not answer


@dataclass(frozen=True, slots=True)
class ScrubStatus:
    """Where a scrub stands. All but the `pass_` figures grow from the volume's opening on."""

    running: bool = False
    on_demand: bool = False  # the pass that runs, or ran last
    last_end: PassEnd = PassEnd.NONE
    last_done_ms: int = 0  # Unix time of the last pass that read everything; 0: none
    passes_done: int = 0
    pass_objects: int = 0  # scrubbed in the pass that runs, or ran last
    pass_bytes: int = 0
    scrubbed_objects: int = 0  # read, rotten or not
    scrubbed_bytes: int = 0  # payload
    dropped_objects: int = 0  # rotten
    dropped_bytes: int = 0
    unreadable_objects: int = 0  # the device did not give them; they stay


class Pace:
    """When the next bytes may be read at a rate. Pure; a rate of 0 is no limit."""

    def __init__(self, rate_bytes_per_s: int, now: float) -> None:
        self._rate = rate_bytes_per_s
        self._free_at = now

    def delay_s(self, nbytes: int, began: float, now: float) -> float:
        """Take note of bytes read from `began` till now; how long to wait before the next."""
        if not self._rate:
            return 0.0
        self._free_at = max(self._free_at, began) + nbytes / self._rate
        return max(0.0, self._free_at - now)

    @property
    def batch_bytes(self) -> int:
        """How much to read in one go: a quarter of a second's worth, within bounds."""
        if not self._rate:
            return MAX_BATCH_BYTES
        return min(MAX_BATCH_BYTES, max(_MIN_BATCH_BYTES, self._rate // 4))


class _Memory:
    """Aligned memory for a batch; larger only for an object that is larger than a batch."""

    def __init__(self) -> None:
        self._block = memoryview(b"")

    def of(self, sizes: Sequence[int]) -> list[memoryview]:
        """A piece for each padded size."""
        total = sum(sizes)
        if total > len(self._block):
            self._block = aligned_block(total)
        pieces = []
        at = 0
        for size in sizes:
            pieces.append(self._block[at : at + size])
            at += size
        return pieces

    def give_back(self) -> None:
        """Free it."""
        self._block = memoryview(b"")


class Scrubber:
    """The scrub of one volume. Used on the verbs' loop."""

    def __init__(
        self,
        volume: Scrubbed,
        rotten: Rotten,
        *,
        rate_bytes_per_s: int = RATE_BYTES_PER_S,
        pause_s: float = PAUSE_S,
        rng: random.Random | None = None,
    ) -> None:
        """`rate_bytes_per_s` and `pause_s` are those of the background; 0: none but on demand."""
        self._volume = volume
        self._rotten = rotten
        self._rate = rate_bytes_per_s
        self._pause_s = pause_s
        self._rng = rng or random.Random()  # noqa: S311  where to begin is no secret
        self._memory = _Memory()
        self._status = ScrubStatus()
        self._wake = asyncio.Event()
        self._demand: int | None = None  # rate of a pass that is asked for
        self._waiting: list[asyncio.Future[ScrubStatus]] = []
        self._closing = False
        self._resume = -1  # region to begin at; -1: any
        self._task = asyncio.get_running_loop().create_task(self._run(), name="nvme-scrub")

    @property
    def status(self) -> ScrubStatus:
        """Where it stands."""
        return self._status

    def demand(self, rate_bytes_per_s: int = 0) -> asyncio.Future[ScrubStatus]:
        """Begin a pass over everything now, at a rate (0: as fast as it goes).

        What comes back is done when that pass has ended; cancelling it does not end the pass. One
        that is under way on demand ends, and its waiters get the status of the new one.
        """
        future: asyncio.Future[ScrubStatus] = asyncio.get_running_loop().create_future()
        if self._closing:
            future.set_result(self._status)
            return future
        self._waiting.append(future)
        self._demand = max(0, rate_bytes_per_s)
        self._wake.set()
        return future

    async def close(self) -> None:
        """End what runs, and wait for its last read."""
        self._closing = True
        self._wake.set()
        await self._task

    # ---- passes -------------------------------------------------------------------------------

    async def _run(self) -> None:
        delay_s = min(START_S, self._pause_s) * self._rng.random()
        while True:
            await self._sleep(delay_s if self._rate else None)
            if self._closing:
                break
            self._wake.clear()
            rate, self._demand = self._demand, None
            waiting, self._waiting = self._waiting, []
            end = await self._one_pass(self._rate if rate is None else rate, rate is not None)
            if end is PassEnd.CUT_SHORT:
                self._waiting = waiting + self._waiting
            else:
                self._tell(waiting)
            delay_s = RETRY_S if end is PassEnd.DOWN else self._pause_s
        self._tell(self._waiting)

    def _tell(self, waiting: Sequence[asyncio.Future[ScrubStatus]]) -> None:
        for future in waiting:
            if not future.done():
                future.set_result(self._status)

    async def _sleep(self, seconds: float | None) -> None:
        """Wait until something is wanted, or the time is over."""
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except TimeoutError:
            return

    async def _one_pass(self, rate: int, on_demand: bool) -> PassEnd:
        self._status = replace(
            self._status, running=True, on_demand=on_demand, pass_objects=0, pass_bytes=0
        )
        try:
            end = await self._read_everything(rate, on_demand)
        except IO_ERRORS as error:
            _log.warning("scrub: the index cannot be read: %s", error)
            end = PassEnd.DOWN
        except Exception:
            # A bug must not end the task that every later pass needs.
            _log.exception("scrub")
            end = PassEnd.DOWN
        self._memory.give_back()
        done = end is PassEnd.DONE
        self._status = replace(
            self._status,
            running=False,
            last_end=end,
            passes_done=self._status.passes_done + done,
            last_done_ms=time.time_ns() // 1_000_000 if done else self._status.last_done_ms,
        )
        return end

    async def _read_everything(self, rate: int, on_demand: bool) -> PassEnd:
        """One pass: from the region it begins at to the end, and then what lies before."""
        regions = max(1, self._volume.region_count)
        first = 0 if on_demand else self._resume
        first = first if 0 <= first < regions else self._rng.randrange(regions)
        begin = first << 32
        pace = Pace(rate, time.monotonic())
        end = await self._read_span(begin - 1, 1 << 62, pace, on_demand)
        if end is PassEnd.DONE and begin:
            end = await self._read_span(-1, begin, pace, on_demand)
        if end is PassEnd.DONE:
            self._resume = -1
        return end

    async def _read_span(self, place: int, stop: int, pace: Pace, on_demand: bool) -> PassEnd:
        """Everything behind `place` and before `stop`."""
        while listed := await self._volume.list_after(place, _LISTED_AT_ONCE):
            for batch in _batches([one for one in listed if one.place < stop], pace.batch_bytes):
                if self._wake.is_set():
                    return PassEnd.CUT_SHORT
                began = time.monotonic()
                if not await self._read_batch(batch):
                    return PassEnd.DOWN
                if not on_demand:
                    self._resume = batch[-1].place >> 32
                nbytes = sum(one.length_bytes for one in batch)
                delay_s = pace.delay_s(nbytes, began, time.monotonic())
                if delay_s > 0:
                    await self._sleep(delay_s)
            place = listed[-1].place
            if place >= stop:
                break
        return PassEnd.CUT_SHORT if self._wake.is_set() else PassEnd.DONE

    async def _read_batch(self, batch: Sequence[Listed]) -> bool:
        """Read some objects, and drop what is rotten. False: the volume does not answer."""
        held = [one for one in batch if self._volume.is_live(one.place)]
        outcomes = await self._volume.read(self._wanted(held))
        for one, outcome in zip(held, outcomes, strict=True):
            if outcome is ReadOutcome.DOWN:
                return False
            if outcome is ReadOutcome.FAILED:
                self._count(unreadable_objects=1)
                continue
            if outcome is not ReadOutcome.OK and not await self._is_still(one, outcome):
                continue
            if outcome is ReadOutcome.GONE:
                self._drop(one, gone=True)
                continue
            nbytes = one.length_bytes
            self._count(pass_objects=1, pass_bytes=nbytes)
            self._count(scrubbed_objects=1, scrubbed_bytes=nbytes)
            if outcome is ReadOutcome.CORRUPT:
                self._drop(one)
        return True

    def _wanted(self, listed: Sequence[Listed]) -> list[ObjectRead]:
        memory = self._memory.of([padded_bytes(one.length_bytes) for one in listed])
        return [
            ObjectRead(one.place, one.key, one.part, one.length_bytes, one.checksum, into)
            for one, into in zip(listed, memory, strict=True)
        ]

    async def _is_still(self, one: Listed, outcome: ReadOutcome) -> bool:
        """Whether an object that read badly still does, and is still the one that is there.

        It may have been deleted since it was listed, and its place given to another. A sequence
        belongs to one object: where the record is still the same after the read, and the place can
        be read, it was that object all the time. Once the scrub is being closed nothing is: the
        volume's next life may have begun, and its places are other objects'.
        """
        if await self._volume.read(self._wanted([one])) != [outcome]:
            return False
        again = await self._volume.list_after(one.place - 1, 1)
        return not self._closing and again == [one] and self._volume.is_live(one.place)

    def _drop(self, one: Listed, gone: bool = False) -> None:
        if not gone:
            _log.error("scrub: the object at place %#x is rotten; it is dropped", one.place)
            self._count(dropped_objects=1, dropped_bytes=one.length_bytes)
        try:
            self._rotten(one.place, gone)
        except Exception:
            _log.exception("scrub: place %#x could not be dropped", one.place)

    def _count(self, **more: int) -> None:
        status = self._status
        self._status = replace(status, **{k: getattr(status, k) + n for k, n in more.items()})


def _batches(listed: Sequence[Listed], most_bytes: int) -> list[list[Listed]]:
    """Runs of objects of at most so many bytes of memory, one object at least."""
    found: list[list[Listed]] = []
    left = 0
    for one in listed:
        size = padded_bytes(one.length_bytes)
        if not found or size > left:
            found.append([])
            left = most_bytes
        found[-1].append(one)
        left -= size
    return found
