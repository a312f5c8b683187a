"""Memory that clients write for the daemon to copy from: rings, and areas for Reserve.

A client has it mapped writable and may do to it whatever its seals let it: every byte may change at
any time, a hole may be punched (it reads as zeros then), but it never shrinks, so that reading it
cannot kill the daemon. Belongs to the verbs' loop; what takes time with pages runs in a pool.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import mmap
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvstored.errors import ResourceExhausted, TooLarge
from kvstored.server.limits import LocalLimits
from kvstored.tiers.ram import pages
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import Kind

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Without SHRINK a client could truncate what the daemon reads, and SIGBUS would end the daemon."""

KEPT_BYTES = 64 << 20
"""Of areas that a session keeps for its next Reserve."""

LEAST_RING_BYTES = 256 << 10
"""A put through a smaller ring would be copied in pieces too small to be fast."""

RETRY_MS = 100
_LATE_RINGS = 64  # how many fit into what is left, at least, once that is little
_RETIRE_WAIT_S = 1.0  # for a client to unmap areas that are in the way of a larger one
_MIN_AREA_BYTES = 1 << 20
_MADV_REMOVE = 9


class Memory:
    """One sealed memfd, all of its pages present, mapped by the daemon. Blocks; for the pool.

    `descriptor` is for sending; close it by `forget_descriptor` when that is done. Raises OSError
    when the kernel refuses.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.descriptor = pages.sealable("kvstored-staging", size_bytes)
        try:
            # As with segments: Python's own mmap of a descriptor would keep a second one.
            self._owner = mmap.mmap(
                -1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | pages.MAP_NORESERVE
            )
            self.address = pages.address_of(self._owner)
            pages.map_over(self.address, size_bytes, self.descriptor)
            pages.advise(self.address, size_bytes, pages.MADV_DONTDUMP)
            pages.populate(self.address, size_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        except OSError:
            self.close()
            raise

    def forget_descriptor(self) -> None:
        """Close the descriptor; the mapping stays. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def close(self) -> None:
        """Give the pages back, also where a client still maps them, and unmap. Idempotent."""
        self.forget_descriptor()
        owner: mmap.mmap | None = getattr(self, "_owner", None)
        if owner is not None and not owner.closed:
            # With the GIL released, so that unmapping has little left to do.
            pages.advise(self.address, self.size_bytes, _MADV_REMOVE)
            owner.close()


def most_area_bytes(limits: LocalLimits) -> int:
    """What the areas of one session may take: they leave its namespace room for a ring."""
    half = limits.max_total_staging_bytes // 2
    beside_ring = half - _ring_bytes(limits, half, 0)
    return max(0, min(limits.max_staging_bytes, beside_ring)) & -pages.PAGE_BYTES


def _ring_bytes(limits: LocalLimits, most_bytes: int, taken_bytes: int) -> int:
    """The size of the next ring where so much of so much is taken."""
    full = limits.ring_bytes & -pages.PAGE_BYTES
    left = most_bytes - taken_bytes
    if left - full >= most_bytes // 4:
        return full
    return min(full, max(LEAST_RING_BYTES, left // _LATE_RINGS & -pages.PAGE_BYTES))


class Staging:
    """What all sessions have of such memory, and its bounds.

    A namespace takes at most half of the total, so that none keeps every other out. A ring stays
    with its session, also an idle one; so once less than a quarter of what may be taken would be
    left, new rings are smaller, down to LEAST_RING_BYTES, and many more sessions can put.
    """

    def __init__(self, limits: LocalLimits) -> None:
        self.limits = limits
        self._footprint_bytes = 0
        self._namespace_bytes: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(1, "kvstored-staging")
        self._freeing: set[asyncio.Future[None]] = set()
        self._ids = itertools.count(1)

    @property
    def footprint_bytes(self) -> int:
        """Bytes of rings and areas that exist or are being made, until their pages are back."""
        return self._footprint_bytes

    def next_id(self) -> int:
        """An id for an area, never given before."""
        return next(self._ids)

    async def make_ring(self, namespace: str) -> Memory:
        """A ring of a namespace's session, as large as it may be. Raises ResourceExhausted."""
        total = self.limits.max_total_staging_bytes
        return await self._make_within(
            namespace,
            min(
                _ring_bytes(self.limits, total // 2, self._namespace_bytes[namespace]),
                _ring_bytes(self.limits, total, self._footprint_bytes),
            ),
        )

    async def make_area(self, namespace: str, nbytes: int) -> Memory:
        """An area of a namespace's session. Raises ResourceExhausted."""
        return await self._make_within(namespace, nbytes)

    async def _make_within(self, namespace: str, nbytes: int) -> Memory:
        total = self.limits.max_total_staging_bytes
        if self._namespace_bytes[namespace] + nbytes > total // 2:
            raise _full(f"rings and areas of namespace {namespace!r}, which may have half,", total)
        if self._footprint_bytes + nbytes > total:
            raise _full("rings and areas of all sessions", total)
        self._namespace_bytes[namespace] += nbytes
        try:
            return await self._make(nbytes)
        except BaseException:
            self._namespace_bytes[namespace] -= nbytes
            raise

    async def _make(self, nbytes: int) -> Memory:
        self._footprint_bytes += nbytes
        making = asyncio.get_running_loop().run_in_executor(self._pool, Memory, nbytes)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(lambda made: self._unwanted(made, nbytes))
            raise
        except OSError as error:
            self._footprint_bytes -= nbytes
            raise ResourceExhausted(
                f"no memory for staging: {os.strerror(error.errno or 0)}",
                "put less at a time, or give the node more memory",
                retry_after_ms=RETRY_MS,
            ) from None

    def _unwanted(self, made: asyncio.Future[Memory], nbytes: int) -> None:
        if made.cancelled() or made.exception() is not None:
            self._footprint_bytes -= nbytes
        else:
            self._free(made.result())

    def free(self, namespace: str, memory: Memory) -> None:
        """Give a ring or an area back; nobody in the daemon reads it any more."""
        self._namespace_bytes[namespace] -= memory.size_bytes
        self._free(memory)

    def _free(self, memory: Memory) -> None:
        future = asyncio.get_running_loop().run_in_executor(self._pool, memory.close)
        self._freeing.add(future)
        future.add_done_callback(lambda done: self._freed(done, memory.size_bytes))

    def _freed(self, future: asyncio.Future[None], nbytes: int) -> None:
        self._freeing.discard(future)
        self._footprint_bytes -= nbytes

    async def settled(self) -> None:
        """Return when everything given back so far is unmapped and its pages are free."""
        while self._freeing:
            await asyncio.wait(list(self._freeing))

    async def close(self) -> None:
        """`settled`, and end the pool. All sessions must be over."""
        await self.settled()
        self._pool.shutdown(wait=False)


class Area:
    """One area. `address` is the daemon's own."""

    def __init__(self, area_id: int, memory: Memory) -> None:
        self.area_id = area_id
        self.memory = memory

    @property
    def size_bytes(self) -> int:
        """How much can be written there."""
        return self.memory.size_bytes

    @property
    def address(self) -> int:
        """Where the daemon has it."""
        return self.memory.address


class AreasPort(Protocol):
    """What areas need of their session."""

    @property
    def namespace(self) -> str:
        """The session's one namespace."""

    def notice(self, kind: Kind, body: bytes, fds: Sequence[int] = ()) -> None:
        """Tell the client on the session's socket."""

    def retire_areas(self, area_ids: list[int]) -> None:
        """Ask the client to unmap these."""


class Areas:
    """The areas of one session: in use by a reservation, kept for the next, or retiring."""

    def __init__(self, staging: Staging, session: AreasPort) -> None:
        self._staging = staging
        self._session = session
        self._most_bytes = most_area_bytes(staging.limits)
        self._bytes = 0  # of all of them, those being made too
        self._used: set[Area] = set()
        self._kept: dict[Area, None] = {}  # least recently used first
        self._retiring: dict[int, Area] = {}
        self._shrunk = asyncio.Event()
        self._quiet = False

    async def take(self, nbytes: int) -> Area:
        """An area of at least that size, of which the client knows, until `give`.

        Raises TooLarge, or ResourceExhausted where others are in the way.
        """
        if nbytes > self._most_bytes:
            raise TooLarge(
                f"a reservation of {nbytes} bytes", f"reserve at most {self._most_bytes} at a time"
            )
        fitting = [area for area in self._kept if area.size_bytes >= nbytes]
        if fitting:
            area = min(fitting, key=lambda area: area.size_bytes)
            del self._kept[area]
        else:
            area = await self._new(min(_rounded(nbytes), self._most_bytes))
        self._used.add(area)
        return area

    async def _new(self, size_bytes: int) -> Area:
        if self._bytes + size_bytes > self._most_bytes:
            await self._shrink(self._most_bytes - size_bytes)
        self._bytes += size_bytes
        try:
            memory = await self._staging.make_area(self._session.namespace, size_bytes)
        except BaseException:
            self._bytes -= size_bytes
            raise
        area = Area(self._staging.next_id(), memory)
        announced = pb.LocalArea(area_id=area.area_id, size_bytes=size_bytes)
        try:
            self._session.notice(Kind.AREA, announced.SerializeToString(), [memory.descriptor])
        except BaseException:
            self._free(area)
            raise
        memory.forget_descriptor()
        return area

    async def _shrink(self, target_bytes: int) -> None:
        """Retire what is kept and wait a moment for the client, until no more than so much is
        left. Raises ResourceExhausted.
        """
        self._retire(list(self._kept))
        try:
            async with asyncio.timeout(_RETIRE_WAIT_S if self._retiring else 0):
                while self._bytes > target_bytes:
                    self._shrunk.clear()
                    await self._shrunk.wait()
        except TimeoutError:
            raise _full("areas of this session", self._most_bytes) from None

    def give(self, area: Area) -> None:
        """The reservation is over and nothing reads the area: keep it or retire it."""
        self._used.discard(area)
        self._kept[area] = None
        if self._quiet:
            return
        excess = sum(kept.size_bytes for kept in self._kept) - KEPT_BYTES
        beyond = []
        for kept in self._kept:
            if excess <= 0:
                break
            beyond.append(kept)
            excess -= kept.size_bytes
        self._retire(beyond)

    def _retire(self, areas: list[Area]) -> None:
        for area in areas:
            del self._kept[area]
            self._retiring[area.area_id] = area
        if areas:
            self._session.retire_areas([area.area_id for area in areas])

    def retired(self, area_id: int) -> None:
        """The client has unmapped it. Ids that were not asked for are passed over."""
        area = self._retiring.pop(area_id, None)
        if area is not None:
            self._free(area)
            self._shrunk.set()

    def _free(self, area: Area) -> None:
        self._bytes -= area.size_bytes
        self._staging.free(self._session.namespace, area.memory)

    def stop(self) -> None:
        """Ask the client for nothing any more."""
        self._quiet = True

    def close(self) -> None:
        """Give all of them back; the session is over, and nothing reads any."""
        for area in [*self._used, *self._kept, *self._retiring.values()]:
            self._free(area)
        self._used.clear()
        self._kept.clear()
        self._retiring.clear()


def _rounded(nbytes: int) -> int:
    """A size that later reservations are likely to fit: at most a quarter is wasted."""
    step = max(_MIN_AREA_BYTES, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


def _full(what: str, most_bytes: int) -> ResourceExhausted:
    return ResourceExhausted(
        f"{what} would take more than the {most_bytes} bytes allowed for staging",
        "commit or release what is reserved, close sessions that put no more, or allow more "
        "(local.max_total_staging_bytes)",
        retry_after_ms=RETRY_MS,
    )
