"""How objects are read from one volume: many transfers at once, each verified as it returns.

Transfers wait in one queue, those of one read in the order of their offsets, those of an earlier
read first. `threads` of them are at the device at a time, about TRANSFER_BYTES each: that is what
is in flight at most. A thread hashes what its transfer brought before it takes the next one; an
object is settled when the last of its transfers is.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvstored.tiers.base import Arrived, ObjectRead, ReadOutcome, padded_bytes, piece_count
from kvstored.tiers.nvme import header, layout, verify
from kvstored.tiers.nvme.changes import IO_ERRORS
from kvstored.tiers.nvme.device import DataFile, aligned_block
from kvstored.tiers.nvme.format import DamagedError, RegionEntry
from kvstored.tiers.nvme.header import HEADER_BYTES, Where
from kvstored.tiers.nvme.index import Environment
from kvstored.tiers.nvme.read_plan import GAP_BYTES, MAX_SPANS, Slot, Transfer, plan, transfer_bytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """An object to read: `index` is what the reader calls it, `entry` None for a small one."""

    index: int
    item: ObjectRead
    namespace: str
    entry: RegionEntry | None


@dataclass(slots=True, eq=False)
class _Batch:
    """One call of `read`. Belongs to the loop."""

    settle: Arrived
    left: int
    done: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Object:
    """One object under way."""

    job: Job
    batch: _Batch
    left: int  # transfers; under the lock
    digests: bytearray  # of pieces, as far as they were hashed
    expected: bytes = b""  # what the header says these should be
    outcome: ReadOutcome | None = None  # as soon as it can only be that


@dataclass(slots=True, eq=False)
class _Work:
    """What one thread does in one go: a transfer, or small objects one after the other."""

    objects: list[_Object]
    transfer: Transfer | None


@dataclass(slots=True)
class ReadRate:
    """What a device gave while it was kept busy: at least half of the transfers that may be."""

    nbytes: int = 0
    seconds: float = 0.0


class _Scratch(threading.local):
    """Memory of each thread for headers, and for what lies between objects."""

    def __init__(self) -> None:
        self.headers = aligned_block(MAX_SPANS * HEADER_BYTES)
        self.gap = aligned_block(GAP_BYTES)


@dataclass(slots=True)
class _Flying:
    """Transfers at the device, and what they add up to. Under the lock."""

    busy: int  # from how many on the device counts as busy
    count: int = 0
    since: float = 0.0
    rate: ReadRate = field(default_factory=ReadRate)

    def change(self, by: int, nbytes: int = 0) -> None:
        now = time.monotonic()
        if self.count >= self.busy:
            self.rate.seconds += now - self.since
            self.rate.nbytes += nbytes
        self.since = now
        self.count += by


class Reads:
    """The reads of one volume. `read`, `give_up` and `close` are called on the loop."""

    def __init__(
        self,
        data: DataFile,
        small: Environment,
        note: Callable[[str, Exception | None], None],
        threads: int,
    ) -> None:
        """`note("read", error)` is told, in any thread, how each transfer went."""
        self._data = data
        self._small = small
        self._note = note
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="nvme-read")
        self._loop = asyncio.get_running_loop()
        self._scratch = _Scratch()
        self._lock = threading.Lock()
        self._queue: deque[_Work] = deque()
        self._working = 0  # threads that take from the queue
        self._ended: list[_Object] = []
        self._told = False
        self._flying = _Flying(busy=max(1, threads // 2))
        self._batches: set[_Batch] = set()
        self.verified_bytes = 0
        """Payload of the objects that were read and verified."""

    @property
    def rate(self) -> ReadRate:
        """Bytes and seconds since the start; differences of it give a current rate."""
        with self._lock:
            return ReadRate(self._flying.rate.nbytes, self._flying.rate.seconds)

    # ---- on the loop --------------------------------------------------------------------------

    async def read(self, jobs: Sequence[Job], settle: Arrived) -> None:
        """Read objects; `settle` is called for each exactly once, as in Tier.read.

        Cancelled, it waits for what is at the device; the rest is settled as FAILED.
        """
        if not jobs:
            return
        batch = _Batch(settle, len(jobs), self._loop.create_future())
        self._batches.add(batch)
        self._enqueue(self._works(jobs, batch))
        try:
            await asyncio.shield(batch.done)
        except asyncio.CancelledError:
            self._withdraw(lambda obj: obj.batch is batch, ReadOutcome.FAILED)
            while not batch.done.done():
                try:
                    await asyncio.wait([batch.done])
                except asyncio.CancelledError:
                    continue  # the buffers are still in use, however often we are asked
            raise
        finally:
            self._batches.discard(batch)

    def give_up(self) -> None:
        """Settle everything that is not at the device yet as DOWN."""
        self._withdraw(lambda _: True, ReadOutcome.DOWN)

    async def close(self) -> None:
        """Finish what was begun."""
        while self._batches:
            await asyncio.wait([batch.done for batch in self._batches])
            await asyncio.sleep(0)
        self._pool.shutdown(wait=True)

    def _works(self, jobs: Sequence[Job], batch: _Batch) -> list[_Work]:
        objects: dict[int, _Object] = {}
        slots: list[Slot] = []
        small: list[_Object] = []
        for job in jobs:
            length = job.item.length_bytes
            digests = bytearray(verify.DIGEST_BYTES * piece_count(length))
            obj = _Object(job, batch, 0, digests)
            if job.entry is None:
                small.append(obj)
                continue
            objects[job.index] = obj
            offset = self._data.offset(job.entry, job.item.place)
            slots.append(Slot(job.index, offset, padded_bytes(length)))
        total = sum(slot.padded_bytes for slot in slots)
        works = [
            _Work([objects[span.index] for span in transfer.spans], transfer)
            for transfer in plan(slots, transfer_bytes(total, self._threads))
        ]
        works += [_Work(small[i : i + MAX_SPANS], None) for i in range(0, len(small), MAX_SPANS)]
        for work in works:
            for obj in work.objects:
                obj.left += 1
        return works

    def _enqueue(self, works: Sequence[_Work]) -> None:
        with self._lock:
            self._queue.extend(works)
            more = min(len(works), self._threads - self._working)
            self._working += more
        for _ in range(more):
            self._pool.submit(self._take_turns)

    def _withdraw(self, which: Callable[[_Object], bool], outcome: ReadOutcome) -> None:
        """Settle objects of which nothing is at the device, and read no more of the others."""
        ended: list[_Object] = []
        with self._lock:
            kept: list[_Work] = []
            for work in self._queue:
                if not which(work.objects[0]):  # all of one batch
                    kept.append(work)
                    continue
                for obj in work.objects:
                    obj.outcome = outcome
                    obj.left -= 1
                    if not obj.left:
                        ended.append(obj)
            self._queue = deque(kept)
        for obj in ended:
            self._settle(obj)

    def _settle_ended(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
            self._told = False
        for obj in ended:
            self._settle(obj)

    def _settle(self, obj: _Object) -> None:
        batch, outcome = obj.batch, obj.outcome
        assert outcome is not None
        is_ok = outcome is ReadOutcome.OK
        self.verified_bytes += obj.job.item.length_bytes if is_ok else 0
        batch.left -= 1
        try:
            batch.settle(obj.job.index, outcome, obj.expected if is_ok else b"")
        except Exception:  # a reader's bug must not keep other readers waiting
            _log.exception("a reader could not take an object")
        if not batch.left:
            batch.done.set_result(None)

    # ---- in threads ---------------------------------------------------------------------------

    def _take_turns(self) -> None:
        """Do what is queued until nothing is."""
        while True:
            with self._lock:
                if not self._queue:
                    self._working -= 1
                    return
                work = self._queue.popleft()
            try:
                self._do(work)
            except Exception:  # a bug here must not leave readers waiting for ever
                _log.exception("a read failed")
                self._fail(work.objects)
            self._tell(work)

    def _do(self, work: _Work) -> None:
        if work.transfer is not None:
            self._bring(work.transfer, work.objects)
            return
        for obj in work.objects:
            self._read_small(obj)

    def _tell(self, work: _Work) -> None:
        """Judge the objects that are complete, and have the loop settle them."""
        with self._lock:
            for obj in work.objects:
                obj.left -= 1
            complete = [obj for obj in work.objects if not obj.left]
        if not complete:
            return
        for obj in complete:
            self._judge(obj)
        with self._lock:
            self._ended += complete
            told, self._told = self._told, True
        if not told:
            try:
                self._loop.call_soon_threadsafe(self._settle_ended)
            except RuntimeError:  # the daemon has ended without us: nobody waits any more
                _log.warning("a read came back after the end")

    def _judge(self, obj: _Object) -> None:
        if obj.outcome is not None:
            return
        if obj.digests == obj.expected:
            item = obj.job.item
            verify.clear_padding(item.into, item.length_bytes)
            obj.outcome = ReadOutcome.OK
        else:
            obj.outcome = ReadOutcome.CORRUPT

    def _fail(self, objects: Sequence[_Object]) -> None:
        for obj in objects:
            obj.outcome = obj.outcome or ReadOutcome.FAILED

    def _bring(self, transfer: Transfer, objects: Sequence[_Object]) -> None:
        """One transfer, from the device to checksums of pieces."""
        try:
            self._transfer(transfer, objects)
        except OSError as error:
            self._note("read", error)
            if len(objects) == 1:
                self._fail(objects)
                return
            for alone, obj in zip(transfer.singly(), objects, strict=True):
                self._bring(alone, [obj])
            return
        self._note("read", None)
        for i, (span, obj) in enumerate(zip(transfer.spans, objects, strict=True)):
            if span.header_bytes:
                self._take_header(obj, self._header(i))
            item = obj.job.item
            if obj.outcome is None:
                verify.hash_pieces(
                    item.into, item.length_bytes, span.start_bytes, span.stop_bytes, obj.digests
                )

    def _transfer(self, transfer: Transfer, objects: Sequence[_Object]) -> None:
        """Have the device fill the objects' memory, and this thread's header blocks."""
        buffers: list[memoryview] = []
        for i, (span, obj) in enumerate(zip(transfer.spans, objects, strict=True)):
            if span.gap_bytes:
                buffers.append(self._scratch.gap[: span.gap_bytes])
            if span.header_bytes:
                buffers.append(self._header(i))
            buffers.append(obj.job.item.into[span.start_bytes : span.stop_bytes])
        with self._lock:
            self._flying.change(1)
        nbytes = 0
        try:
            self._data.read(buffers, transfer.offset_bytes)
            nbytes = sum(map(len, buffers))
        finally:
            with self._lock:
                self._flying.change(-1, nbytes)

    def _header(self, i: int) -> memoryview:
        return self._scratch.headers[i * HEADER_BYTES : (i + 1) * HEADER_BYTES]

    def _take_header(self, obj: _Object, block: memoryview | bytearray) -> None:
        """Learn what the pieces' checksums should be, if it is the header that is expected."""
        job = obj.job
        if job.entry is None:
            where = Where(self._data.superblock.volume_id, 0, job.item.place, 0)
        else:
            where = self._data.where(job.entry, job.item.place)
        try:
            found = header.decode(block, where)
        except DamagedError:
            obj.outcome = obj.outcome or ReadOutcome.CORRUPT
            return
        if found is None:  # void, of exactly this place: a delete whose commit did not come
            obj.outcome = obj.outcome or ReadOutcome.GONE
        elif not verify.is_expected(found.meta, job.namespace, job.item):
            obj.outcome = obj.outcome or ReadOutcome.CORRUPT
        else:
            obj.expected = found.meta.piece_checksums

    def _read_small(self, obj: _Object) -> None:
        item = obj.job.item
        block = bytearray(HEADER_BYTES)
        kept = memoryview(block)[: layout.SMALL_HEADER_BYTES]
        into = item.into[: item.length_bytes]
        try:
            stored = self._small.read_body(item.place, kept, into)
        except IO_ERRORS as error:
            self._note("read", error)
            self._fail([obj])
            return
        self._note("read", None)
        if stored != len(kept) + len(into):
            obj.outcome = ReadOutcome.CORRUPT  # not this object's body
            return
        self._take_header(obj, block)
        verify.hash_pieces(into, item.length_bytes, 0, item.length_bytes, obj.digests)
