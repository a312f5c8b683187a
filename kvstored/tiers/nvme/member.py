"""One volume as a member of the tier: open or away, trusted or not; calls that never hang.

The volume itself, a VolumeTier, may wait for its device for ever. Here every call that changes
something is given up when the device does not answer; what it then still does is taken note of. All
of it belongs to the verbs' loop. See docs/nvme-tier.md for the states.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvstored.errors import DataDirectoryError
from kvstored.io.base import Files
from kvstored.tiers.base import Recovered
from kvstored.tiers.nvme import probe, speed
from kvstored.tiers.nvme.breaker import Breaker, Patience
from kvstored.tiers.nvme.changes import IO_ERRORS
from kvstored.tiers.nvme.device import DataFile
from kvstored.tiers.nvme.failures import VolumeAway
from kvstored.tiers.nvme.status import VolumeState, VolumeStatus
from kvstored.tiers.nvme.volume_tier import VolumeTier
from kvstored.tiers.nvme.watch import WatchedFiles

_log = logging.getLogger(__name__)

MOST_CALLS = 64
"""Changes of one volume under way at a time; others wait their turn."""
MOST_WAITING = 1024
"""Changes that wait or run; more are refused."""
_MOST_CRASHES, _CRASHES_WITHIN_S = 3, 3600.0
"""So many crashes at one environment, each that soon after the last, and it is made anew."""
_RATE_BYTES, _RATE_S = 8 << 20, 0.1

R = TypeVar("R")
Measure = Callable[[DataFile, int], tuple[float, float]]
"""See probe.measure."""


@dataclass(frozen=True, slots=True)
class VolumeSpec:
    """A volume as it is configured.

    `guarded`: its directory is where a device is mounted: it is never made, and once the volume was
    seen in it, an empty one means that it is away, and is never made into a new volume.
    """

    name: str
    directory: Path
    cap_bytes: int
    drain: bool = False
    guarded: bool = True


class Member:
    """One volume. `state`, `detail` and the sets are for the tier to change."""

    def __init__(
        self,
        number: int,
        spec: VolumeSpec,
        files: Files,
        patience: Patience,
        make: Callable[[VolumeSpec, Files], VolumeTier],
        measure: Measure,
    ) -> None:
        self.number = number
        self.spec = spec
        self.files = WatchedFiles(files)
        self.tier: VolumeTier | None = None
        self.uuid = ""
        """By which the registry knows it; that of the last time while it is away."""
        self.state = VolumeState.LOST
        self.detail = "not opened yet"
        self.life = 0
        """Grows each time it is taken out: places of another life mean nothing."""
        self.full = False
        """It refused something, and nothing has been freed since."""
        self.owed: set[int] = set()
        """Places of this volume to delete once it is trusted again."""
        self.reserved: set[int] = set()
        self.families: set[tuple[str, bytes]] = set()
        """Those that the volume knows: namespace and fingerprint."""
        self.entering: set[asyncio.Future[None]] = set()
        """Reads that are on their way to the volume, and not known to it yet."""
        self.read_bytes_per_s = self.write_bytes_per_s = 0.0
        self.running: set[asyncio.Future[Any]] = set()
        self.recording: asyncio.Task[None] | None = None
        self.probing = False
        self._distrusted = False
        """What is in LMDB is to be read in full before the volume is used again."""
        self._crashes: Counter[str] = Counter()
        self._crashed_at = 0.0
        self._errors: Counter[str] = Counter()  # of earlier lives
        self._check_at = 0.0
        self._checking = False
        self._make = make
        self._measure = measure
        self._patience = patience
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="nvme-probe")
        self._turns = asyncio.Semaphore(MOST_CALLS)
        self._rated = (0, 0.0)
        self.reads = Breaker(patience, "read")
        self.changes = Breaker(patience, "write")
        self._stalled: asyncio.Future[None] | None = None  # done: calls are given up

    # ---- what it is good for ------------------------------------------------------------------

    @property
    def readable(self) -> bool:
        """Whether reads may be tried."""
        return self.tier is not None and self.reads.closed

    @property
    def placeable(self) -> bool:
        """Whether new objects may go there."""
        return self.tier is not None and self.state is VolumeState.OK

    @property
    def present(self) -> bool:
        """Whether what it holds is served, or will be in a moment."""
        return self.state in (VolumeState.OK, VolumeState.SUSPECT)

    @property
    def drained(self) -> bool:
        """Whether it was given up, and is not to be opened."""
        return self.state is VolumeState.DRAINED

    def status(self) -> VolumeStatus:
        """See VolumeStatus."""
        tier = self.tier
        errors = self._all_errors()
        if tier is None:
            return VolumeStatus(
                self.number, self.spec.name, self.spec.directory, self.state, self.detail, "closed",
                self.spec.cap_bytes, 0, 0, 0, self.read_bytes_per_s, self.write_bytes_per_s, errors,
            )  # fmt: skip
        usage = tier.usage()
        total, free, abandoned = tier.regions
        return VolumeStatus(
            number=self.number,
            name=self.spec.name,
            directory=self.spec.directory,
            state=self.state,
            detail=self.detail or "; ".join(tier.problems),
            mode=tier.mode,
            cap_bytes=usage.cap_bytes,
            footprint_bytes=usage.footprint_bytes,
            charged_bytes=usage.charged_bytes,
            objects=usage.objects,
            read_bytes_per_s=self.read_bytes_per_s,
            write_bytes_per_s=self.write_bytes_per_s,
            errors=errors,
            read_bytes=tier.verified_bytes,
            written_bytes=tier.written_bytes,
            accepted_bytes=tier.accepted_bytes,
            regions_total=total,
            regions_free=free,
            regions_abandoned=abandoned,
        )

    def _all_errors(self) -> dict[str, int]:
        """Failures by stage, since the start: of file operations, and of what the volume makes of
        them, such as reads of LMDB that no file operation shows. What both count, counts once.
        """
        of_volume = self._errors.copy()
        if self.tier is not None:
            of_volume += Counter(dict(self.tier.errors))  # threads add to it: copied at one go
        return dict(Counter(dict(self.files.errors)) | of_volume)

    # ---- life ---------------------------------------------------------------------------------

    async def open(self, expected: bool) -> Recovered:
        """Open the volume. `expected`: it was seen in its directory before.

        Raises DataDirectoryError. It may take for ever, and is not to be cancelled.
        """
        # Files that vanished in this run were not given up by whoever has the directory made anew.
        kept = self.spec.guarded or bool(self.uuid)
        if expected and kept and not await self._is_there():
            raise VolumeAway(
                f"volume {self.spec.name} is not in {self.spec.directory}",
                "mount its device; or drain it, which gives up what it held",
            )
        tier = self._make(self.spec, self.files)
        given_up = self._given_up()
        if self._distrusted:
            tier.distrust_index(given_up)
        try:
            found = await tier.open()
        except BaseException:
            self._distrusted |= bool(tier.index_died)
            raise
        self._distrusted = False
        del self._crashes[given_up]
        self.files.fresh()
        self.tier = tier
        self.families = set(found.family_specs)
        self.reads = Breaker(self._patience, "read")
        self.changes = Breaker(self._patience, "write")
        self.answers_again()
        self._rated = (0, 0.0)
        return found

    def _crashed(self, now: float, suspects: frozenset[str]) -> None:
        """Take note of the end of an index child, and of what it was at."""
        self.files.errors["index"] += 1
        if now > self._crashed_at + _CRASHES_WITHIN_S:
            self._crashes.clear()
        self._crashed_at = now
        self._crashes.update(suspects)

    def _given_up(self) -> str:
        """The environment that killed one child after the other, though it could be walked. The
        index first: it is made again from the headers.
        """
        many = (name for name in sorted(self._crashes) if self._crashes[name] >= _MOST_CRASHES)
        return next(many, "")

    async def _is_there(self) -> bool:
        try:
            return await self.threaded(probe.is_there, self.files, self.spec.directory)
        except OSError as error:
            raise DataDirectoryError(
                f"volume {self.spec.name}, {self.spec.directory}: {error.strerror or error}",
                "look at its device",
            ) from error

    async def threaded(self, call: Callable[..., R], *arguments: object) -> R:
        """Run something that asks the device, in the thread that does nothing else."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)

    async def measure(self) -> None:
        """Find out how fast it is, unless that is known or there is no room to."""
        spare = self.tier.spare() if self.tier is not None else None
        if self.read_bytes_per_s or spare is None:
            return
        try:
            rates = await self.threaded(self._measure, *spare)
        except OSError as error:
            _log.warning("volume %s: speed not measured: %s", self.spec.name, error)
            return
        self.read_bytes_per_s, self.write_bytes_per_s = rates

    def rate(self) -> None:
        """Take in how fast it was while it was busy."""
        if self.tier is None:
            return
        rate = self.tier.read_rate
        nbytes, seconds = rate.nbytes - self._rated[0], rate.seconds - self._rated[1]
        if nbytes < _RATE_BYTES or seconds < _RATE_S:
            return
        self._rated = (rate.nbytes, rate.seconds)
        self.read_bytes_per_s = speed.followed(self.read_bytes_per_s, nbytes, seconds)

    def take_out(self) -> VolumeTier | None:
        """End this life of the volume: nothing is asked of it any more. The caller closes what
        comes back.
        """
        if self.tier is not None:
            self._errors += Counter(dict(self.tier.errors))
        tier, self.tier = self.tier, None
        self.life += 1
        self.owed.clear()
        self.reserved.clear()
        self._give_up()
        if tier is not None:
            tier.give_up_reads()
        return tier

    @property
    def stalled(self) -> bool:
        """Whether calls are given up because the device does not answer."""
        return self._stalled is None or self._stalled.done()

    def _give_up(self) -> None:
        if self._stalled is not None and not self._stalled.done():
            self._stalled.set_result(None)

    def answers_again(self) -> None:
        """From now on calls are waited for again."""
        if self.stalled:
            self._stalled = asyncio.get_running_loop().create_future()

    def close_pool(self) -> None:
        """Take no more probes; one under way is not waited for."""
        self._pool.shutdown(wait=False)

    # ---- trust --------------------------------------------------------------------------------

    def look(self) -> None:
        """Have the breakers see what there is to see; gives calls up that are not answered."""
        now = time.monotonic()
        reads, changes = self.files.seen("read", now), self.files.seen("change", now)
        died = self.tier.index_died if self.tier is not None else ""
        if self.tier is not None and died:
            if not self._distrusted:
                self._crashed(now, self.tier.index_suspects)
            self._distrusted = True
            reads, changes = (
                replace(seen, failures=max(1, seen.failures), gone=True, error=died)
                for seen in (reads, changes)
            )
        self.reads.look(now, reads)
        self.changes.look(now, changes)
        if self.tier is not None and self.tier.vanished:
            for breaker in (self.reads, self.changes):
                if not breaker.gone:
                    breaker.vanished(now, self.tier.vanished)
        if self.reads.stuck or self.changes.stuck:
            self._give_up()
        if not self.reads.closed and self.tier is not None:
            self.tier.give_up_reads()

    async def probe(self) -> None:
        """Ask the device whether it does again what it did not; one at a time."""
        now = time.monotonic()
        reads, changes = self.reads.probe_due(now), self.changes.probe_due(now)
        tier = self.tier
        if self.probing or tier is None or not (reads or changes):
            return
        self.probing = True
        try:
            directory = self.spec.directory
            if reads:
                error = await self._asked(probe.check_reads, directory, tier.uuid)
                now = time.monotonic()
                self.reads.probed(now, self.files.seen("read", now), error)
            if changes:
                error = await self._asked(probe.check_writes, directory)
                now = time.monotonic()
                self.changes.probed(now, self.files.seen("change", now), error)
        finally:
            self.probing = False

    def check_due(self) -> bool:
        """Whether it is time to check the volume's files by name; one check at a time."""
        return not self._checking and time.monotonic() >= self._check_at

    async def check(self) -> None:
        """See that what lies in the directory is what is open; else it is no device any more.

        A device that does not answer is left to the breakers, which see this call as well.
        """
        tier = self.tier
        if tier is None or self._checking:
            return
        self._checking = True
        try:
            await self.threaded(tier.check)  # what it finds, `look` sees
        except OSError:
            return
        finally:
            self._checking = False
            self._check_at = time.monotonic() + self._patience.check_every_s

    async def _asked(self, question: Callable[..., None], *arguments: object) -> str:
        """What the device had to say against it; nothing if it answered."""
        try:
            await self.threaded(question, self.files, *arguments)
        except probe.AnotherVolumeError as error:
            self.reads.gone = True
            return str(error)
        except IO_ERRORS as error:
            return str(error) or type(error).__name__
        return ""

    # ---- calls --------------------------------------------------------------------------------

    def begin(
        self,
        work: Callable[[VolumeTier], Coroutine[object, object, R]],
        late: Callable[[VolumeTier, R], None],
        *,
        undo_cancelled: bool = False,
    ) -> Call[R] | None:
        """Ask something of the volume; None where it does not answer, or has too much to do.

        `late` gets an answer that came after it was given up; with `undo_cancelled` also one whose
        caller was cancelled.
        """
        tier, stalled = self.tier, self._stalled
        if tier is None or stalled is None or stalled.done() or len(self.running) >= MOST_WAITING:
            return None

        async def run() -> R | None:
            async with self._turns:
                return None if stalled.done() else await work(tier)

        task = asyncio.get_running_loop().create_task(run())
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return Call(task, stalled, partial(_late, tier, late), undo_cancelled)


class Call(Generic[R]):
    """A change that a volume was asked for. It goes on whatever becomes of the caller."""

    def __init__(
        self,
        task: asyncio.Task[R | None],
        stalled: asyncio.Future[None],
        late: Callable[[asyncio.Task[R | None]], None],
        undo_cancelled: bool,
    ) -> None:
        self._task = task
        self._stalled = stalled
        self._late = late
        self._undo_cancelled = undo_cancelled

    @property
    def ended(self) -> asyncio.Future[Any]:
        """Done once the volume is through with it, given up or not. Its outcome means nothing."""
        return self._task

    async def answer(self) -> R | None:
        """What the volume answers, or None once it is given up. Await it in any case; cancelling
        does not cut short what was begun.
        """
        either: list[asyncio.Future[Any]] = [self._task, self._stalled]
        cancelled = False
        while not self._task.done() and not self._stalled.done():
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                cancelled = True
        if not self._task.done() or (cancelled and self._undo_cancelled):
            self._task.add_done_callback(self._late)
        if cancelled:
            raise asyncio.CancelledError
        return self._task.result() if self._task.done() else None


async def answers(calls: Sequence[Call[R] | None]) -> list[R | None]:
    """The answers of calls that run at the same time; an exception only once all have ended."""
    found: list[R | None] = []
    failure: BaseException | None = None
    for call in calls:
        try:
            found.append(None if call is None else await call.answer())
        except (Exception, asyncio.CancelledError) as error:
            failure = failure or error
            found.append(None)
    if failure is not None:
        raise failure
    return found


def _late(
    tier: VolumeTier, late: Callable[[VolumeTier, R], None], task: asyncio.Task[R | None]
) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if error is not None:
        _log.warning("given up, and then failed: %s", error)
        return
    answer = task.result()
    if answer is not None:
        late(tier, answer)
