"""One Get: leases what is in RAM, loads what is below, hands it out in order, counts it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstored.store.api import Grant, Run
from kvstored.store.index import NONE
from kvstored.store.loader import Loaded, Loader
from kvstored.store.lookup import FIRST_MISS, needed_chunks
from kvstored.store.namespace import Namespace
from kvstored.store.residency import Residency, now_ms
from kvstored.tiers.base import TierKind
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.proto import kvstore_pb2 as pb

WINDOW_BYTES = 64 << 20
"""Payload that one Get keeps leased or loading ahead of what was delivered."""

BATCH_BYTES = 16 << 20
"""Payload that `next` hands out at once."""

CountOutcome = Callable[["GetStream"], None]


@dataclass(slots=True, eq=False)
class _Item:
    """One object of the plan: where it stands between index and transport."""

    index: int  # object index of the request
    chunk: int  # chunk index within the run
    part: int
    length_bytes: int
    tier: TierKind = TierKind.RAM
    place: int = NONE  # leased RAM place
    load: asyncio.Future[Loaded] | None = None


class GetStream:
    """The objects of one Get, in order. Belongs to the verbs' loop; ended by `close`."""

    def __init__(
        self,
        ns: Namespace,
        run: Run,
        deadline: float,
        ram: RamTier,
        loader: Loader | None,
        residency: Residency,
        released: Callable[[], None],
        count: CountOutcome,
    ) -> None:
        """`deadline`: time.monotonic(). `released()` is called whenever leases ended, for those
        who wait for room; `count(stream)` once, at the end.
        """
        self._ns = ns
        self.run = run
        self._deadline = deadline
        self._ram = ram
        self._loader = loader
        self._residency = residency
        self._released = released
        self._count = count
        self._states = bytearray(len(run.keys))
        self._undelivered = [0] * len(run.keys)  # objects of each chunk still to deliver
        self.chunk_bytes: dict[int, int] = {}
        self._plan: deque[_Item] = deque(self._make_plan())
        self._ahead: deque[_Item] = deque()  # leased or loading
        self._ahead_bytes = 0
        self._granted: dict[int, _Item] = {}
        self._closed = False
        self._began = self._ended = time.monotonic()

    # -- planning ------------------------------------------------------------------------------

    def _make_plan(self) -> list[_Item]:
        run, index = self.run, self._ns.index
        needed = needed_chunks(run, len(run.keys))
        at_ms = now_ms()
        plan: list[_Item] = []
        held: list[int] = []
        for i, key in enumerate(run.keys):
            parts = [
                (j, p) for j, p in enumerate(run.parts) if i in needed[run.family.parts[p].group]
            ]
            if not parts:
                self._states[i] = pb.NOT_NEEDED
                continue
            chunk = self._ns.find(key, at_ms)
            if chunk == NONE:
                expired = key in index.rows
                self._states[i] = pb.MISS_EXPIRED if expired else self._ns.ghosts.reason(key)
                continue
            rows = [(j, p, index.find_object(chunk, p)) for j, p in parts]
            if any(row == NONE for _, _, row in rows):
                self._states[i] = pb.MISS_NEVER_STORED
                continue
            held.append(chunk)
            self._undelivered[i] = len(rows)
            plan.extend(
                _Item(i * len(run.parts) + j, i, p, index.object_length[row]) for j, p, row in rows
            )
        self._residency.touch(self._ns, held)
        return plan

    # -- handing out ---------------------------------------------------------------------------

    async def next(self) -> list[Grant] | None:
        """What is ready next, in order, leased until `delivered`; None at the end.

        After the deadline, or when an object cannot be had, its chunk is a miss and the rest goes
        on.
        """
        grants: list[Grant] = []
        nbytes = 0
        while nbytes < BATCH_BYTES:
            self._look_ahead()
            if not self._ahead:
                break
            item = self._ahead[0]
            if item.load is not None and not item.load.done():
                if grants:
                    break
                await self._wait(item)
            self._ahead.popleft()
            grant = self._grant(item)
            if grant is not None:
                grants.append(grant)
                nbytes += grant.length_bytes
        return grants or None

    def _look_ahead(self) -> None:
        """Lease or start loading the plan's next objects, up to the window."""
        loading: list[tuple[_Item, int]] = []
        while self._plan and (self._ahead_bytes < WINDOW_BYTES or not self._ahead):
            item = self._plan.popleft()
            if self._states[item.chunk] >= FIRST_MISS:
                continue
            row = self._row(item)
            if row == NONE:
                self._miss(item, pb.MISS_EVICTED)
                continue
            place = self._ns.index.place[TierKind.RAM][row]
            if place != NONE:
                self._ram.lease(place)
                item.place = place
            elif self._loader is not None:
                item.tier = TierKind.NVME
                loading.append((item, row))
            else:
                self._miss(item, pb.MISS_EVICTED)
                continue
            self._ahead.append(item)
            self._ahead_bytes += item.length_bytes
        if loading and self._loader is not None:
            futures = self._loader.want(self._ns, [row for _, row in loading])
            for (item, _), future in zip(loading, futures, strict=True):
                item.load = future

    def _row(self, item: _Item) -> int:
        chunk = self._ns.index.find(self.run.keys[item.chunk])
        return NONE if chunk == NONE else self._ns.index.find_object(chunk, item.part)

    async def _wait(self, item: _Item) -> None:
        assert item.load is not None
        left = self._deadline - time.monotonic()
        if left > 0:
            await asyncio.wait([item.load], timeout=left)

    def _grant(self, item: _Item) -> Grant | None:
        """Turn the next item into a grant; None (and a miss) if it cannot be had."""
        if item.load is not None:
            if not item.load.done():
                item.load.cancel()  # the load itself goes on and lands in RAM
                self._give_up(item, pb.MISS_DEADLINE)
                return None
            loaded = item.load.result()
            if loaded.place == NONE:
                self._give_up(item, loaded.state)
                return None
            item.place = loaded.place
        if self._states[item.chunk] >= FIRST_MISS or time.monotonic() > self._deadline:
            self._give_up(item, pb.MISS_DEADLINE)
            return None
        self._granted[item.index] = item
        checksum, pieces = self._ram.checksums(item.place)
        view = self._ram.view(item.place).toreadonly()
        return Grant(item.index, item.length_bytes, checksum, item.tier, view, pieces)

    def _give_up(self, item: _Item, state: int) -> None:
        self._ahead_bytes -= item.length_bytes
        if item.place != NONE:
            self._ram.release(item.place)
            item.place = NONE
        self._miss(item, state)

    def _miss(self, item: _Item, state: int) -> None:
        if self._states[item.chunk] < FIRST_MISS:
            self._states[item.chunk] = state

    def delivered(self, grants: Sequence[Grant]) -> None:
        """The transport took these grants' bytes in full: they count, and their leases end."""
        self._ended = time.monotonic()
        for grant in grants:
            item = self._granted.pop(grant.index)
            self._ram.release(item.place)
            self._ahead_bytes -= item.length_bytes
            i = item.chunk
            self._undelivered[i] -= 1
            self.chunk_bytes[i] = self.chunk_bytes.get(i, 0) + item.length_bytes
            if self._states[i] < FIRST_MISS:
                self._states[i] = max(self._states[i], int(item.tier))
        self._released()

    @property
    def observed(self) -> tuple[TierKind, int, float]:
        """Slowest tier, payload bytes and seconds of what was delivered, for rates."""
        held = [s for s in self._states if s in (TierKind.RAM, TierKind.NVME)]
        tier = TierKind(max(held, default=TierKind.RAM))
        return tier, sum(self.chunk_bytes.values()), self._ended - self._began

    @property
    def states(self) -> bytes:
        """One ChunkState per key; final once `next` gave None."""
        return bytes(
            state if state >= FIRST_MISS or not left else int(pb.MISS_DEADLINE)
            for state, left in zip(self._states, self._undelivered, strict=True)
        )

    async def close(self) -> None:
        """End every lease and count hits and misses. What was not delivered counts as a miss."""
        if self._closed:
            return
        self._closed = True
        for item in (*self._ahead, *self._granted.values()):
            if item.load is not None and item.place == NONE:
                if not item.load.done():
                    item.load.cancel()
                elif not item.load.cancelled():
                    item.place = item.load.result().place
            if item.place != NONE:
                self._ram.release(item.place)
                item.place = NONE
        self._ahead.clear()
        self._granted.clear()
        self._released()
        self._count(self)
