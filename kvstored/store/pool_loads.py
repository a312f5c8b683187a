"""Brings objects from the bucket into RAM, each at most once however many ask for it.

What has come is published as a put's object is: bytes in place, checksums verified, then the index;
its row is made from the stored header, after that has proved to be of the object asked for. Nothing
of the index stands for an object before that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from kvstored.store.api import Family, let_go
from kvstored.store.index import NONE
from kvstored.store.loader import Loaded
from kvstored.store.namespace import Namespace
from kvstored.store.residency import Residency, now_ms
from kvstored.store.room import Room
from kvstored.store.writer import Writer
from kvstored.tiers.base import NoRoom, ObjectMeta, TierKind
from kvstored.tiers.object.api import Fetch, Fetched, ObjectName, Outcome, Pool
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.proto import kvstore_pb2 as pb

log = logging.getLogger("kvstored.store")

FIRST_BATCH_BYTES = 64 << 20
"""Room that is made, at most, for a prefix of which nobody knows yet whether the bucket has it; a
sixteenth of a small cap. More once its first object's header has come."""

BATCH_BYTES = 32 << 20
MOST_ASKED = 64
"""Objects of unknown length that are asked for in one go."""

MOST_KNOWN = 65_536
KNOWN_FOR_S = 30.0
WORTH_IT_S = 0.02
"""A reader with less time than this left does not begin anew what another's deadline cut short."""

_ABSENT = -1  # instead of a state: the bucket has no such object
_STATES = {
    Outcome.ABSENT: _ABSENT,
    Outcome.CORRUPT: int(pb.MISS_CORRUPT),
    Outcome.DEADLINE: int(pb.MISS_DEADLINE),
    Outcome.LENGTH: int(pb.MISS_DECLINED),
    Outcome.CANCELLED: int(pb.MISS_DECLINED),
}


Came = Callable[[Namespace, Family, bytes, int, int], None]
"""Told of an object that has come: where it belongs, its key, part and row."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One object that no local tier has. `parent`: the key before it in its prefix, or b""."""

    family: Family
    key: bytes
    parent: bytes
    part: int  # index in family.parts

    def name_in(self, ns: Namespace) -> ObjectName:
        """What the bucket calls it."""
        return ObjectName(
            ns.name, self.family.fingerprint, self.key, self.family.parts[self.part].name
        )

    @property
    def exact_bytes(self) -> int:
        """Its length where the part declares one, else 0."""
        return self.family.parts[self.part].bytes

    @property
    def most_bytes(self) -> int:
        """The longest that the part may be."""
        return self.exact_bytes or self.family.parts[self.part].max_bytes


@dataclass(slots=True, eq=False)
class _Load:
    ns: Namespace
    wanted: Wanted
    name: ObjectName
    deadline: float
    length_bytes: int = 0  # 0: unknown yet
    expected: bool = False  # the bucket was lately seen to have it
    state: int = 0  # why it is of no use, if its memory was refused
    absent: bool = False
    purged: frozenset[str] = frozenset()  # tenants that were purged since it began
    ended: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # its header has come, or its end
    waiters: list[tuple[asyncio.Future[Loaded], float]] = field(default_factory=list)


class PoolLoads:
    """Loads from the bucket under way, by name."""

    def __init__(
        self,
        pool: Pool,
        ram: RamTier,
        residency: Residency,
        room: Room,
        writer: Writer | None,
        promote_below_bytes: int,
        came: Came,
    ) -> None:
        """`writer`: what comes goes to NVMe as well, as long as fewer than `promote_below_bytes`
        wait for that; None: it does not. `came` is told of each object that is held now.
        """
        self._came = came
        self._pool = pool
        self._ram = ram
        self._residency = residency
        self._room = room
        self._writer = writer
        self._promote_below_bytes = promote_below_bytes
        self._loads: dict[ObjectName, _Load] = {}
        self._deleting: Counter[tuple[str, bytes]] = Counter()  # (namespace, key)
        self._purging: Counter[tuple[str, str]] = Counter()  # (namespace, tenant or "" for all)
        self._known: OrderedDict[ObjectName, tuple[int, float]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- what is asked of it -------------------------------------------------------------------

    def want(
        self, ns: Namespace, wanted: Sequence[Wanted], deadline: float
    ) -> list[asyncio.Future[Loaded]]:
        """Load objects, in order, as there is room; see Loader.want. All ends by the deadline
        (time.monotonic()), also for who joins a load that another began with less time.
        """
        futures: list[asyncio.Future[Loaded]] = []
        fresh: list[_Load] = []
        loop = asyncio.get_running_loop()
        for item in wanted:
            future: asyncio.Future[Loaded] = loop.create_future()
            futures.append(future)
            if (ns.name, item.key) in self._deleting or (ns.name, "") in self._purging:
                future.set_result(Loaded(NONE, int(pb.MISS_DELETED)))
                continue
            name = item.name_in(ns)
            load = self._loads.get(name)
            if load is None:
                load = self._new(ns, item, name, deadline)
                fresh.append(load)
            load.waiters.append((future, deadline))
        if fresh:
            self._start(self._load_all(fresh))
        return futures

    def seen(self, name: ObjectName, length_bytes: int) -> None:
        """The bucket was just seen to have an object; 0: of unknown length."""
        self._known[name] = (length_bytes, time.monotonic() + KNOWN_FOR_S)
        self._known.move_to_end(name)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def begin_delete(self, namespace: str, keys: Iterable[bytes]) -> None:
        """Nothing of these chunks is brought until `end_delete`; what is on its way is of no use.

        So that what a delete has dropped does not come back by a load that began before it.
        """
        gone = {(namespace, key) for key in keys}
        self._deleting.update(gone)
        for load in [load for load in self._loads.values() if _chunk_of(load) in gone]:
            self._end(load, NONE, int(pb.MISS_DELETED))

    def end_delete(self, namespace: str, keys: Iterable[bytes]) -> None:
        """The twin of `begin_delete`."""
        for key in set(keys):
            self._deleting[namespace, key] -= 1
            if not self._deleting[namespace, key]:
                del self._deleting[namespace, key]

    def begin_purge(self, namespace: str, tenant: str) -> None:
        """As `begin_delete`, of everything of a namespace, or of one of its tenants unless "":
        whose an object is its header tells, so others' come as before.
        """
        self._purging[namespace, tenant] += 1
        for load in [load for load in self._loads.values() if load.ns.name == namespace]:
            if tenant:
                load.purged |= {tenant}
            else:
                self._end(load, NONE, int(pb.MISS_DELETED))

    def end_purge(self, namespace: str, tenant: str) -> None:
        """The twin of `begin_purge`."""
        self._purging[namespace, tenant] -= 1
        if not self._purging[namespace, tenant]:
            del self._purging[namespace, tenant]

    async def close(self) -> None:
        """End the loads under way; their waiters have missed."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # -- loads ---------------------------------------------------------------------------------

    def _new(self, ns: Namespace, wanted: Wanted, name: ObjectName, deadline: float) -> _Load:
        load = self._loads[name] = _Load(ns, wanted, name, deadline, wanted.exact_bytes)
        load.purged = frozenset(tenant for space, tenant in self._purging if space == ns.name)
        known = self._known.pop(name, None)
        if known is not None and known[1] > time.monotonic():
            load.expected = True
            load.length_bytes = load.length_bytes or known[0]
        return load

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a load from the bucket failed", exc_info=error)

    async def _load_all(self, loads: list[_Load]) -> None:
        """Reserve batch after batch, as Loader does, and fetch each while room is made for the
        next. Of a prefix that nobody has seen lately, the second only once the first one's first
        object has proved to be there: else what is of use would be evicted for nothing.
        """
        waiting = dict.fromkeys(loads)
        fetches: list[asyncio.Task[None]] = []
        try:
            while rest := [load for load in waiting if not load.ended]:
                await self._learn_lengths(rest)
                if not (batch := self._next_batch(rest)):
                    continue  # none of those that were asked for is there
                placed = await self._reserve(batch)
                if not placed:
                    break
                fetches.append(self._start(self._fetch(placed)))
                for load, _ in placed:
                    del waiting[load]
                if waiting and not batch[0].expected:
                    await batch[0].begun.wait()
                    if batch[0].absent:
                        self._give_up(waiting)
        finally:
            for load in waiting:
                if not load.ended:
                    self._end(load, NONE, int(pb.MISS_DECLINED))  # no room within the time
        if fetches:
            await asyncio.wait(fetches)  # each answers its waiters and tells of its own failure

    def _give_up(self, loads: Iterable[_Load]) -> None:
        """What lies behind a gap is of no use, and is most likely not there either."""
        for load in loads:
            if not (load.ended or load.expected):
                self._end(load, NONE, int(pb.MISS_AFTER_GAP))

    async def _learn_lengths(self, loads: list[_Load]) -> None:
        """Of parts whose sizes vary; many in one go, once the first is unknown."""
        if loads[0].length_bytes:
            return
        unknown = [load for load in loads if not load.length_bytes][:MOST_ASKED]
        found = await self._pool.each([[load.name] for load in unknown], loads[0].deadline)
        for load, lengths in zip(unknown, found, strict=True):
            if lengths is None:
                late = time.monotonic() >= load.deadline
                if not load.ended:
                    self._end(load, NONE, int(pb.MISS_DEADLINE) if late else self._absent(load))
                self._give_up(loads)
                break
            load.length_bytes, load.expected = lengths[0], True

    def _next_batch(self, loads: list[_Load]) -> list[_Load]:
        """Leading loads of known length."""
        loads = [load for load in loads if not load.ended]
        if not loads:
            return []
        cap_bytes = self._ram.namespace_usage(loads[0].ns.name).cap_bytes
        most_bytes = BATCH_BYTES if loads[0].expected else min(FIRST_BATCH_BYTES, cap_bytes // 16)
        batch: list[_Load] = []
        nbytes = 0
        for load in takewhile(lambda load: load.length_bytes, loads):
            if batch and nbytes >= most_bytes:
                break
            batch.append(load)
            nbytes += load.length_bytes
        return batch

    async def _reserve(self, batch: list[_Load]) -> list[tuple[_Load, int]]:
        """Places for the leading loads; waits only where there is no room for even one."""
        ns = batch[0].ns
        lengths = [load.length_bytes for load in batch]
        places = await self._room.reserve(TierKind.RAM, ns, lengths)
        if isinstance(places[0], NoRoom):
            until = batch[0].deadline
            places = await self._room.reserve(TierKind.RAM, ns, lengths[:1], until, ns.load_queue)
        placed: list[tuple[_Load, int]] = []
        for load, place in zip(batch, places, strict=False):
            if isinstance(place, NoRoom):
                break
            placed.append((load, place))
        return placed

    async def _fetch(self, placed: list[tuple[_Load, int]]) -> None:
        """Fetch a batch into its places; each is published and handed on as it arrives."""
        unsettled = dict(enumerate(placed))
        views: dict[int, memoryview] = {}

        def arrived(i: int, fetched: Fetched) -> None:
            load, place = unsettled.pop(i)
            if (view := views.pop(i, None)) is not None:
                let_go(view)
            if not self._settle(load, place, fetched):
                self._ram.cancel([place])  # nothing more is written to it

        def item_of(i: int, load: _Load, place: int) -> Fetch:
            def into(meta: ObjectMeta) -> memoryview | None:
                if load.ended or not self._fits(load, meta):
                    return None
                load.begun.set()
                view = views[i] = self._ram.view(place, padded=True)
                return view

            return Fetch(load.name, load.length_bytes, into)

        items = [item_of(i, load, place) for i, (load, place) in enumerate(placed)]
        try:
            await self._pool.fetch(items, max(load.deadline for load, _ in placed), arrived)
        finally:
            for load, place in unsettled.values():  # a bug in the pool
                self._ram.cancel([place])
                self._end(load, NONE, int(pb.MISS_TIER_DOWN))

    @staticmethod
    def _fits(load: _Load, meta: ObjectMeta) -> bool:
        """Whether the object is of use here; else `load.state` says why not."""
        if meta.tenant in load.purged:
            load.state = int(pb.MISS_DELETED)
        elif 0 < meta.expires_ms <= now_ms():
            load.state = int(pb.MISS_EXPIRED)
        elif meta.length_bytes > load.wanted.most_bytes:
            load.state = int(pb.MISS_DECLINED)
        return not load.state

    def _settle(self, load: _Load, place: int, fetched: Fetched) -> bool:
        """Publish what has come and answer its waiters. False: the place is not used."""
        if load.ended:
            return False
        if fetched.outcome is Outcome.OK and fetched.meta is not None:
            if fetched.meta.tenant in load.purged:  # while its bytes were coming
                self._end(load, NONE, int(pb.MISS_DELETED))
                return False
            return self._publish(load, place, fetched.meta)
        if fetched.outcome is Outcome.CORRUPT:
            self._residency.accounts.checksum_failures["object"] += 1
        state = load.state or _STATES.get(fetched.outcome, int(pb.MISS_TIER_DOWN))
        load.absent = state == _ABSENT
        self._end(load, NONE, self._absent(load) if load.absent else state)
        return False

    @staticmethod
    def _absent(load: _Load) -> int:
        return int(load.ns.ghosts.reason(load.wanted.key))

    def _publish(self, load: _Load, place: int, meta: ObjectMeta) -> bool:
        """Make an object that is in place, and verified, readable."""
        ns, index = load.ns, load.ns.index
        chunk = index.find(load.wanted.key)
        if chunk != NONE and ns.expired(chunk, now_ms()):
            self._residency.expire(ns, [chunk], now_ms())
            chunk = index.find(load.wanted.key)
        row = index.find_object(chunk, load.wanted.part) if chunk != NONE else NONE
        if row == NONE:
            if chunk == NONE:
                chunk = self._add_chunk(load, meta)
            row = index.add_object(chunk, load.wanted.part, meta.length_bytes, meta.checksum)
        elif index.place[TierKind.RAM][row] != NONE:  # a put was faster
            self._end(load, index.place[TierKind.RAM][row], 0)
            return False
        elif (index.object_length[row], index.checksum(row)) != (
            meta.length_bytes,
            meta.checksum,
        ):
            self._residency.accounts.conflicts[ns.name] += 1
            self._end(load, NONE, int(pb.MISS_DECLINED))
            return False
        self._ram.publish(place, meta)
        self._residency.place_object(ns, row, TierKind.RAM, place)
        self._came(ns, load.wanted.family, load.wanted.key, load.wanted.part, row)
        self._promote(ns, chunk, row, meta, place)
        self._end(load, place, 0)
        return True

    def _add_chunk(self, load: _Load, meta: ObjectMeta) -> int:
        ns, wanted = load.ns, load.wanted
        ns.ghosts.forget(wanted.key)
        tenant = self._residency.accounts.tenant_label(ns.name, meta.tenant)
        return ns.index.add_chunk(
            wanted.key,
            wanted.parent or meta.parent,
            family=ns.families.number(wanted.family.fingerprint),
            tenant=ns.tenant_number(tenant),
            depth=meta.depth,
            end_token=meta.end_token,
            expires_ms=meta.expires_ms,
        )

    def _promote(self, ns: Namespace, chunk: int, row: int, meta: ObjectMeta, place: int) -> None:
        writer = self._writer
        if writer is None or ns.index.place[TierKind.NVME][row] != NONE:
            return
        if writer.dirty_bytes + writer.claimed_bytes < self._promote_below_bytes:
            tenant = ns.tenants[ns.index.tenant[chunk]]
            parent = ns.index.parent_key(chunk)
            writer.submit(ns, row, replace(meta, tenant=tenant, parent=parent), place)

    def _end(self, load: _Load, place: int, state: int) -> None:
        """Answer every waiter that is still there, each with a lease of its own. Idempotent."""
        load.ended = True
        load.begun.set()
        if self._loads.get(load.name) is load:
            del self._loads[load.name]
        waiters, load.waiters = load.waiters, []
        late: list[tuple[asyncio.Future[Loaded], float]] = []
        for waiter, deadline in waiters:
            if waiter.done():
                continue
            if state == pb.MISS_DEADLINE and deadline > time.monotonic() + WORTH_IT_S:
                late.append((waiter, deadline))
                continue
            if place != NONE:
                self._ram.lease(place)
            waiter.set_result(Loaded(place, state))
        if late and max(deadline for _, deadline in late) > load.deadline:
            self._again(load, late)
        else:
            for waiter, _ in late:
                waiter.set_result(Loaded(NONE, state))

    def _again(self, load: _Load, late: list[tuple[asyncio.Future[Loaded], float]]) -> None:
        """For those who have more time than who began it had."""
        deadline = max(deadline for _, deadline in late)
        again = self._new(load.ns, load.wanted, load.name, deadline)
        again.waiters = late
        self._start(self._load_all([again]))


def _chunk_of(load: _Load) -> tuple[str, bytes]:
    return load.ns.name, load.wanted.key
