"""One Get: leases what is in RAM, loads what is below, hands it out in order, counts it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvstored.store.api import Grant, Run, let_go
from kvstored.store.bypass import SCRATCH_BYTES, Copied, Copy
from kvstored.store.index import NONE
from kvstored.store.loader import Loaded, Loader
from kvstored.store.lookup import FIRST_MISS, needed_chunks
from kvstored.store.namespace import Namespace
from kvstored.store.pool_loads import PoolLoads, Wanted
from kvstored.store.residency import Residency, now_ms
from kvstored.tiers.base import TierKind
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.proto import kvstore_pb2 as pb

WINDOW_BYTES = 64 << 20
"""Payload that one Get loads ahead of what it hands out, at most; a quarter of a small cap."""

POOL_WINDOW_BYTES = 256 << 20
"""The same where some of it comes from a bucket, which is far away: many requests are under way."""

BATCH_BYTES = 32 << 20
"""Payload that `next` hands out at once, at most; a sixteenth of a small cap."""

USUAL_BYTES = 8 << 20
"""What an object counts for in the window as long as its length is not known."""

_ELSEWHERE = frozenset(map(int, (pb.MISS_CORRUPT, pb.MISS_TIER_DOWN, pb.MISS_EVICTED)))
"""Ways of an object to be lost on this node that leave the bucket's copy as it is."""

CountOutcome = Callable[["GetStream"], None]


@dataclass(slots=True, eq=False)
class _Item:
    """One object of the plan: where it stands between index and transport."""

    index: int  # object index of the request
    chunk: int  # index within the run
    row: int  # of the index, as long as it is of this generation; NONE: no local tier has it
    generation: int
    length_bytes: int  # a guess as long as `row` is NONE
    window_bytes: int  # what it counts for ahead of its turn
    tier: TierKind = TierKind.RAM
    place: int = NONE  # leased RAM place
    load: asyncio.Future[Loaded] | asyncio.Future[Copied] | None = None
    copy: Copy | None = None  # instead of a place, for who reads past RAM
    view: memoryview | None = None


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
        bypass: bool = False,
        pool: PoolLoads | None = None,
    ) -> None:
        """`deadline`: time.monotonic(). `released()` is called whenever leases ended, for those
        who wait for room; `count(stream)` once, at the end. `bypass`: what is not in RAM is read
        past it, as far as there is memory for that. `pool`: where what no local tier has may be.
        """
        self._ns = ns
        self.run = run
        self._deadline = deadline
        self._ram = ram
        self._loader = loader
        self._pool = pool
        self._gap = False  # what is behind it is not asked of the bucket
        self._bypass = bypass
        self._residency = residency
        self._released = released
        self._count = count
        self._states = bytearray(len(run))
        self._undelivered = [0] * len(run)  # objects of each chunk still to deliver
        self.chunk_bytes: dict[int, int] = {}
        self._plan: deque[_Item] = deque(self._make_plan())
        self._looked = 0  # leading items of the plan that were looked at, and their bytes
        self._looked_bytes = 0
        cap_bytes = ram.namespace_usage(ns.name).cap_bytes
        far = any(item.row == NONE for item in self._plan)
        most_bytes = SCRATCH_BYTES // 2 if bypass else POOL_WINDOW_BYTES if far else WINDOW_BYTES
        self._window_bytes = min(most_bytes, cap_bytes // 4)
        self._batch_bytes = min(BATCH_BYTES, cap_bytes // 16)
        self._granted: dict[int, _Item] = {}
        self._closed = False
        self._began = self._ended = time.monotonic()

    # -- planning ------------------------------------------------------------------------------

    def _make_plan(self) -> list[_Item]:
        run, index = self.run, self._ns.index
        needed = needed_chunks(run, len(run))
        at_ms = now_ms()
        plan: list[_Item] = []
        held: list[int] = []
        chunks = index.find_many(run.packed)
        over = self._ns.expired_many(chunks, at_ms)
        for i, (chunk, expired) in enumerate(zip(chunks.tolist(), over.tolist(), strict=True)):
            parts = [
                (j, p) for j, p in enumerate(run.parts) if i in needed[run.family.parts[p].group]
            ]
            if not parts:
                self._states[i] = pb.NOT_NEEDED
                continue
            if chunk == NONE and self._pool is None:
                self._states[i] = self._ns.ghosts.reason(run.keys[i])
                continue
            if expired:
                self._states[i] = pb.MISS_EXPIRED
                continue
            rows = [index.find_object(chunk, p) if chunk != NONE else NONE for _, p in parts]
            if NONE in rows and self._pool is None:
                self._states[i] = self._ns.ghosts.reason(run.keys[i])
                continue
            if chunk != NONE:
                held.append(chunk)
            self._undelivered[i] = len(rows)
            plan.extend(
                self._item(i * len(run.parts) + j, row)
                for (j, _), row in zip(parts, rows, strict=True)
            )
        self._residency.touch(self._ns, held)
        return plan

    def _item(self, at: int, row: int) -> _Item:
        """The plan's item for the request's object of that index."""
        i, j = divmod(at, len(self.run.parts))
        if row == NONE:
            part = self.run.family.parts[self.run.parts[j]]
            guess = part.bytes or min(part.max_bytes, USUAL_BYTES)
            return _Item(at, i, NONE, 0, guess, guess, TierKind.OBJECT)
        index = self._ns.index
        length = index.object_length[row]
        return _Item(at, i, row, index.generation[row], length, length)

    def _wanted(self, item: _Item) -> Wanted:
        """What to ask of the bucket for an item."""
        run = self.run
        j = item.index % len(run.parts)
        parent = run.keys[item.chunk - 1] if item.chunk else run.parent
        return Wanted(run.family, run.keys[item.chunk], parent, run.parts[j])

    # -- handing out ---------------------------------------------------------------------------

    async def next(self) -> list[Grant] | None:
        """What is ready next, in order, leased until `delivered`; None at the end.

        After the deadline, or when an object cannot be had, its chunk is a miss and the rest goes
        on. Only what is handed out or loaded ahead is leased: a Get that waits pins nothing else.
        """
        grants: list[Grant] = []
        nbytes = 0
        while self._plan and (not grants or nbytes < self._batch_bytes):
            self._look_ahead()
            item = self._plan[0]
            if item.load is not None and not item.load.done():
                if grants:
                    break
                await self._wait(item)
            if self._pool is not None and self._try_pool(item):
                continue
            self._plan.popleft()
            self._looked -= 1
            self._looked_bytes -= item.window_bytes
            grant = self._grant(item)
            if grant is not None:
                grants.append(grant)
                nbytes += grant.length_bytes
        return grants or None

    def _look_ahead(self) -> None:
        """Start loading the plan's next objects that are not in RAM, up to the window.

        Each is looked at once, and the window refilled when half of it is used up; one that was in
        RAM and has left it since is loaded when its turn comes.
        """
        first = self._plan[0]
        resident = self._ns.index.place[TierKind.RAM]
        if self._looked and first.row != NONE and resident[first.row] == NONE:
            self._load([first])
        if self._looked and self._looked_bytes > self._window_bytes // 2:
            return
        loading: list[_Item] = []
        for item in islice(self._plan, self._looked, None):
            full = self._looked_bytes + item.window_bytes > self._window_bytes
            if self._looked and full:
                break
            self._looked += 1
            self._looked_bytes += item.window_bytes
            loading.append(item)
        if self._pool is not None:
            self._load_far([item for item in loading if item.row == NONE])
            loading = [item for item in loading if item.row != NONE]
        self._load(loading)

    def _load_far(self, items: list[_Item]) -> None:
        """Have those of the items brought from the bucket that have not come here meanwhile."""
        if self._pool is None:
            return
        far = [
            item
            for item in items
            if not (self._came(item) or self._gap or self._states[item.chunk] >= FIRST_MISS)
        ]
        wanted = [self._wanted(item) for item in far]
        futures = self._pool.want(self._ns, wanted, self._deadline)
        for item, future in zip(far, futures, strict=True):
            item.tier = TierKind.OBJECT
            item.load = future

    def _came(self, item: _Item) -> bool:
        """Whether an object that no local tier had is there now: by a put, or another's load."""
        index, wanted = self._ns.index, self._wanted(item)
        chunk = self._ns.find(wanted.key, now_ms())
        row = index.find_object(chunk, wanted.part) if chunk != NONE else NONE
        if row == NONE or index.place[TierKind.RAM][row] == NONE:
            return False
        item.row, item.generation = row, index.generation[row]
        item.length_bytes, item.tier = index.object_length[row], TierKind.RAM
        return True

    def _try_pool(self, item: _Item) -> bool:
        """Ask the bucket for what this node turned out to have no (good) copy of. False: there is
        nothing to ask, or it was asked already.
        """
        if item.row == NONE or self._gap or time.monotonic() > self._deadline:
            return False
        if item.load is not None:
            if not item.load.done() or item.load.cancelled():
                return False
            if item.load.result().state not in _ELSEWHERE:
                return False
        elif self._alive(item) and self._ns.index.place[TierKind.RAM][item.row] != NONE:
            return False
        item.row, item.load = NONE, None
        self._load_far([item])
        return True

    def _load(self, items: list[_Item]) -> None:
        """Load those of the items that are below RAM and not being loaded for us yet."""
        if self._loader is None:
            return
        below = [
            item
            for item in items
            if item.load is None
            and self._states[item.chunk] < FIRST_MISS
            and self._alive(item)
            and self._ns.index.place[TierKind.RAM][item.row] == NONE
        ]
        if not below:
            return
        for item in below:
            item.tier = TierKind.NVME
        if self._bypass:
            copies = self._loader.want_copies(self._ns, [item.row for item in below])
            for item, copied in zip(below, copies, strict=True):
                item.load = copied
            below = [item for item in below if item.load is None]
        futures = self._loader.want(self._ns, [item.row for item in below], self._deadline)
        for item, future in zip(below, futures, strict=True):
            item.load = future

    def _alive(self, item: _Item) -> bool:
        return self._ns.index.alive(item.row, item.generation)

    async def _wait(self, item: _Item) -> None:
        assert item.load is not None
        left = self._deadline - time.monotonic()
        if left > 0:
            await asyncio.wait([item.load], timeout=left)

    def _grant(self, item: _Item) -> Grant | None:
        """Turn the next item into a grant; None (and a miss) if it cannot be had."""
        state = self._lease(item)
        if not state and (
            self._states[item.chunk] >= FIRST_MISS or time.monotonic() > self._deadline
        ):
            state = int(pb.MISS_DEADLINE)
        if state:
            self._give_up(item, state)
            return None
        self._granted[item.index] = item
        if item.copy is not None:
            checksum, pieces = item.copy.checksum, item.copy.pieces
            view = item.view = item.copy.view()
        else:
            checksum, pieces = self._ram.checksums(item.place)
            with self._ram.view(item.place) as writable:
                view = item.view = writable.toreadonly()
        return Grant(item.index, item.length_bytes, checksum, item.tier, view, pieces)

    def _lease(self, item: _Item) -> int:
        """Lease the item's RAM place. Gives 0, or why it cannot be had."""
        if item.load is not None:
            if not item.load.done():
                item.load.cancel()  # the load itself goes on and lands in RAM
                return int(pb.MISS_DEADLINE)
            return self._take(item)
        if item.row == NONE:
            return int(pb.MISS_AFTER_GAP)
        place = self._ns.index.place[TierKind.RAM][item.row] if self._alive(item) else NONE
        if place == NONE:
            return int(pb.MISS_EVICTED)
        self._ram.lease(place)
        item.place = place
        return 0

    def _take(self, item: _Item) -> int:
        """Take over what the item's load, which is done, has brought. Gives 0, or why nothing."""
        assert item.load is not None
        end = item.load.result()
        if isinstance(end, Loaded):
            item.place = end.place
            if item.row == NONE and end.place != NONE:
                item.length_bytes = self._ram.locate(end.place).length_bytes
        else:
            item.copy = end.copy
        return end.state

    def _drop(self, item: _Item) -> None:
        """End the item's lease, or give its copy back; a load that runs goes on without us."""
        if item.load is not None and item.place == NONE and item.copy is None:
            if not item.load.done():
                item.load.cancel()
            elif not item.load.cancelled():
                self._take(item)
        if item.view is not None:
            let_go(item.view)
        if item.place != NONE:
            self._ram.release(item.place)
            item.place = NONE
        if item.copy is not None and self._loader is not None:
            self._loader.give_back(item.copy)
            item.copy = None
        item.load = None

    def _give_up(self, item: _Item, state: int) -> None:
        self._gap = self._gap or item.row == NONE
        self._drop(item)
        self._miss(item, state)

    def _miss(self, item: _Item, state: int) -> None:
        if self._states[item.chunk] < FIRST_MISS:
            self._states[item.chunk] = state

    def delivered(self, grants: Sequence[Grant]) -> None:
        """The transport took these grants' bytes in full: they count, and their leases end."""
        for item in self._delivered(grants):
            self._drop(item)
        self._released()

    def kept(self, grants: Sequence[Grant]) -> list[int]:
        """These grants count as delivered; their views end, their leases are the caller's. Gives
        the leased places. Not for a stream that reads past RAM.
        """
        return [item.place for item in self._delivered(grants)]

    def _delivered(self, grants: Sequence[Grant]) -> list[_Item]:
        self._ended = time.monotonic()
        items = [self._granted.pop(grant.index) for grant in grants]
        for grant, item in zip(grants, items, strict=True):
            let_go(grant.view)
            i = item.chunk
            self._undelivered[i] -= 1
            self.chunk_bytes[i] = self.chunk_bytes.get(i, 0) + item.length_bytes
            if self._states[i] < FIRST_MISS:
                self._states[i] = max(self._states[i], int(item.tier))
        return items

    def decline(self, grants: Sequence[Grant]) -> None:
        """The caller has no room for these, nor for what would come after: nothing does."""
        for grant in grants:
            item = self._granted.pop(grant.index)
            let_go(grant.view)
            self._give_up(item, int(pb.MISS_DECLINED))
        for item in self._plan:
            self._give_up(item, int(pb.MISS_DECLINED))
        self._plan.clear()
        self._released()

    @property
    def observed(self) -> tuple[TierKind, int, float]:
        """Slowest tier, payload bytes and seconds of what was delivered, for rates."""
        held = [s for s in self._states if TierKind.RAM <= s <= TierKind.OBJECT]
        tier = TierKind(max(held, default=TierKind.RAM))
        return tier, sum(self.chunk_bytes.values()), self._ended - self._began

    @property
    def exhausted(self) -> bool:
        """Whether nothing comes after what `next` gave last, so that `states` is final."""
        return not self._plan

    @property
    def states(self) -> bytes:
        """One ChunkState per key, taking what was handed out as delivered; final once `exhausted`.

        It travels with the last bytes, and means nothing to a client that does not get those.
        """
        states, left = bytearray(self._states), list(self._undelivered)
        for item in self._granted.values():
            left[item.chunk] -= 1
            if states[item.chunk] < FIRST_MISS:
                states[item.chunk] = max(states[item.chunk], int(item.tier))
        return _with_misses(states, left)

    @property
    def outcome(self) -> bytes:
        """One ChunkState per key: held only where everything was delivered."""
        return _with_misses(self._states, self._undelivered)

    async def close(self) -> None:
        """End every lease and count hits and misses. What was not delivered counts as a miss."""
        if self._closed:
            return
        self._closed = True
        for item in (*self._plan, *self._granted.values()):
            self._drop(item)
        self._plan.clear()
        self._granted.clear()
        self._released()
        self._count(self)


def _with_misses(states: bytearray, left: list[int]) -> bytes:
    return bytes(
        state if state >= FIRST_MISS or not objects else int(pb.MISS_DEADLINE)
        for state, objects in zip(states, left, strict=True)
    )
