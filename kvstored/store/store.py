"""The tiered store: one object that the verbs drive. Owned by the verbs' loop, without locks."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstored import errors
from kvstored.store import families, prefetching, recovery
from kvstored.store.accounting import Accounts
from kvstored.store.api import (
    Family,
    Leased,
    MatchAnswer,
    PutOffer,
    PutTicket,
    Received,
    Run,
    StoppedReport,
)
from kvstored.store.counting import count_get, count_leased, count_match
from kvstored.store.deleting import Deleter
from kvstored.store.index import NONE, TIER_BIT
from kvstored.store.leasing import AcquireStream, hold_run, lease_run
from kvstored.store.loader import Loaded, Loader
from kvstored.store.lookup import match
from kvstored.store.namespace import MAX_PINNED_CHUNKS, Namespace
from kvstored.store.pooling import Pooling, PoolingSettings
from kvstored.store.putting import Putter
from kvstored.store.rates import Rates
from kvstored.store.reading import GetStream
from kvstored.store.residency import Residency, now_ms
from kvstored.store.room import Room
from kvstored.store.rotten import drop_rotten
from kvstored.store.trash import Trash
from kvstored.store.views import list_page, status_reply, usage_reply
from kvstored.store.volumes import Volumes
from kvstored.store.writer import Writer
from kvstored.supervise import Supervisor
from kvstored.tiers.base import VOLUME_SHIFT, Recovered, Tier, TierKind
from kvstored.tiers.object.api import Pool
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.proto import admin_pb2
from kvstored_client.proto import kvstore_pb2 as pb

log = logging.getLogger("kvstored.store")

SWEEP_EVERY_S = 1.0
SWEEP_ROWS = 16384
MAX_PIN_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class NamespaceSettings:
    """`default_ttl_ms` 0: chunks do not expire by themselves."""

    name: str
    default_ttl_ms: int = 0


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Bounds of the store. Caps of tiers and namespaces are the tiers' own settings."""

    namespaces: tuple[NamespaceSettings, ...] = (NamespaceSettings("default"),)
    max_dirty_bytes: int = 256 << 20
    max_tenants: int = 1000
    namespace_caps: Mapping[tuple[str, TierKind], int] = field(default_factory=dict)
    pooling: PoolingSettings = field(default_factory=PoolingSettings)


class Store:
    """Chunks of every namespace over RAM and, where configured, NVMe and a shared bucket."""

    def __init__(
        self,
        ram: RamTier,
        nvme: Tier | None,
        settings: StoreSettings,
        supervisor: Supervisor,
        pool: Pool | None = None,
    ) -> None:
        """`open` opens the tiers and `close` closes them; the supervisor stays the caller's."""
        self.namespace_caps = settings.namespace_caps
        self.boot_epoch = secrets.randbits(64)
        self.started = time.monotonic()
        self.accounts = Accounts(settings.max_tenants)
        self.rates = Rates()
        self.ram = ram
        self.nvme = nvme
        self.tiers: dict[TierKind, Tier] = {TierKind.RAM: ram}
        if nvme is not None:
            self.tiers[TierKind.NVME] = nvme
        self._supervisor = supervisor
        self.namespaces = {
            ns.name: Namespace(ns.name, number, ns.default_ttl_ms)
            for number, ns in enumerate(settings.namespaces)
        }
        self._trash = Trash(self.tiers)
        ram.on_freed = self._trash.freed.notify
        self.residency = Residency(self.accounts, self.tiers, self._trash.discard)
        self._room = Room(
            self.tiers, self.namespaces, self.residency, self._trash, self._busy, self._wanted
        )
        self._volumes = Volumes(self.namespaces, self.residency, self._trash)
        self.writer: Writer | None = None
        self._loader: Loader | None = None
        if nvme is not None:
            self.writer = Writer(ram, nvme, self.residency, self._room, self._trash)
            self._loader = Loader(ram, nvme, self.residency, self._room)
        self.pooling: Pooling | None = None
        if pool is not None:
            self.pooling = Pooling(
                pool,
                settings.pooling,
                ram,
                self._loader,
                self.writer,
                self.residency,
                self._room,
                self._trash.freed.notify,
            )
        self._putter = Putter(
            ram,
            self.writer,
            self.residency,
            self._room,
            self._trash,
            settings.max_dirty_bytes,
            self.pooling.offering.stored if self.pooling is not None else None,
        )
        self._deleter = Deleter(
            self.tiers, self.writer, self._volumes, self.pooling, self.residency, self._trash
        )
        self._sweep_at: dict[str, int] = {}

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the tiers and recover; index, caps and accounts are right before it returns."""
        await self.ram.open()
        if self.nvme is not None:
            found = await self.nvme.open()
            self.accounts.recovery_dropped = dict(found.dropped)
            unwanted = recovery.load(found, self.nvme.kind, self.namespaces.get, self.residency)
            self._trash.discard(self.nvme.kind, unwanted)
            self.nvme.on_lost, self.nvme.on_found = self.volume_lost, self.volume_found
            log.info(
                "recovered",
                extra={"fields": {"objects": len(found.place), "dropped": found.dropped}},
            )
        self._supervisor.start("store-trash", self._trash.run)
        self._supervisor.start("store-sweeper", self._sweep)
        if self.writer is not None:
            self._supervisor.start("store-writer", self.writer.run)
        if self.pooling is not None:
            await self.pooling.open(self.namespaces)

    async def close(self, deadline_s: float) -> StoppedReport:
        """Make what was accepted durable within the deadline, close the tiers, say what is lost."""
        until = time.monotonic() + deadline_s
        lost = (0, 0)
        if self.writer is not None:
            self.writer.try_again()
            waiting = self.writer.in_flight()
            if waiting:
                await asyncio.wait(waiting, timeout=max(0.0, until - time.monotonic()))
            lost = self.writer.fail_all()
        await self._close_pool(until)
        for tier in reversed(self.tiers.values()):  # RAM last: the others read from it
            left = max(0.05, until - time.monotonic())
            try:
                await asyncio.wait_for(self._close_tier(tier), left)
            except errors.KvstoredError as error:
                log.warning("deletes are not durable", extra={"fields": {"error": str(error)}})
            except TimeoutError:
                log.warning(
                    "tier did not close in time", extra={"fields": {"tier": tier.kind.name}}
                )
        return StoppedReport(*lost)

    async def _close_pool(self, until: float) -> None:
        """Bring up what can be within half of the time that is left; the rest stays owed."""
        if self.pooling is None:
            return
        left_s = max(0.1, until - time.monotonic()) / 2
        try:
            owed = await asyncio.wait_for(self.pooling.close(left_s), 1.5 * left_s)
        except TimeoutError:
            log.warning("the bucket did not close in time")
        else:
            if owed:
                log.info("owed to the bucket", extra={"fields": {"objects": owed}})

    async def _close_tier(self, tier: Tier) -> None:
        if tier is self.nvme and self._loader is not None:
            await self._loader.close()
        try:
            await self._trash.flush(tier.kind)
        finally:
            await tier.close()

    async def _sweep(self) -> None:
        """Drop chunks whose time is over, a slice of each namespace at a time."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)  # a period, not a wait for something
            for ns in self.namespaces.values():
                rows = ns.index.chunk_rows
                begin = self._sweep_at.get(ns.name, 0)
                if begin >= rows:
                    begin = 0
                stop = min(rows, begin + SWEEP_ROWS)
                at_ms = now_ms()
                due = [
                    row
                    for row, expires in enumerate(ns.index.expires_ms[begin:stop], begin)
                    if 0 < expires <= at_ms
                ]
                self.residency.expire(ns, due, at_ms)
                await self._volumes.sweep(ns, begin, stop)
                self._sweep_at[ns.name] = stop

    def volume_lost(self, number: int) -> None:
        """Hold no longer what the NVMe tier's volume of that number has; see Tier.on_lost."""
        self._volumes.lost(number)
        if self._loader is not None:
            self._loader.lost(number << VOLUME_SHIFT, number + 1 << VOLUME_SHIFT)

    async def volume_found(self, found: Recovered) -> None:
        """Hold what a volume that has come back has; see Tier.on_found."""
        await self._volumes.found(found)

    def drop_rotten(self, place: int, gone: bool = False) -> bool:
        """Drop what a scrub found rotten, or `gone`, at a place of the NVMe tier; False: nothing is
        there.
        """
        return drop_rotten(self.namespaces.values(), self.residency, self._trash, place, gone)

    def _busy(self, ns: Namespace, chunk: int, tier: TierKind) -> bool:
        """Whether something is under way that needs the chunk to stay in the tier."""
        if ns.holds and (key := ns.index.key(chunk)) in ns.holds:
            others = ns.index.tiers[chunk] & ~TIER_BIT[tier]
            if not others or tier is not TierKind.RAM or ns.holds.in_ram(key):
                return True
        if tier is TierKind.RAM:
            if self.writer is not None and self.writer.busy(ns, chunk):
                return True
            places = ns.index.place[TierKind.RAM]
            return any(
                self.ram.leased(places[row])
                for row in ns.index.object_rows(chunk)
                if places[row] != NONE
            )
        return self._loader is not None and self._loader.busy(ns, chunk)

    def _wanted(self, ns: Namespace, chunk: int) -> bool:
        """Whether the chunk may not be lost, though its bytes may stay where a reader looks."""
        return (
            ns.pinned(chunk)
            or (bool(ns.holds) and ns.index.key(chunk) in ns.holds)
            or (self.writer is not None and self.writer.busy(ns, chunk))
            or (self._loader is not None and self._loader.busy(ns, chunk))
        )

    # -- families ------------------------------------------------------------------------------

    def namespace(self, name: str) -> Namespace:
        """The state of a configured namespace; raises Unauthenticated, as for a wrong token."""
        ns = self.namespaces.get(name)
        if ns is None:
            raise errors.Unauthenticated(
                "no access to this namespace", "check the namespace's name and the token"
            )
        return ns

    async def declare(self, namespace: str, spec: pb.FamilySpec) -> Family:
        """Take a family's spec in and remember it over restarts.

        Raises BadRequest, FamilyConflict or ResourceExhausted; see Families.declare.
        """
        ns = self.namespace(namespace)
        self.accounts.model_label(spec.model)
        family, new = ns.families.declare(spec)
        if new and self.nvme is not None:
            serialised = families.spec_of(family, spec)
            await self.nvme.remember_family(namespace, family.fingerprint, serialised)
        return family

    def family(self, namespace: str, fingerprint: bytes) -> Family:
        """A declared family; raises UnknownFamily."""
        return self.namespace(namespace).families.get(fingerprint)

    # -- verbs ---------------------------------------------------------------------------------

    def match(self, run: Run, mode: int, depth: int) -> MatchAnswer:
        """Which chunks are held. Misses that it reports are counted, unless the run is a probe."""
        answer = match(self.namespace(run.namespace), run, mode, depth, self.rates.eta_ms)
        count_match(self.accounts, run, answer.states)
        return answer

    async def match_pool(self, run: Run, mode: int, deadline: float) -> MatchAnswer:
        """`match` as far as the bucket; what that has not said by the deadline is a miss. Without
        a bucket: as far as this node.
        """
        if self.pooling is None:
            return self.match(run, mode, pb.DEPTH_NODE)
        ns = self.namespace(run.namespace)
        answer = await self.pooling.match(ns, run, mode, deadline, self.rates.eta_ms)
        count_match(self.accounts, run, answer.states)
        return answer

    def open_get(self, run: Run, deadline: float, bypass_ram: bool = False) -> GetStream:
        """A stream of the run's objects. The caller must `close` it, whatever happens.

        `bypass_ram`: keep no copy in RAM of what is not there, as far as that can be had.
        """
        return GetStream(
            self.namespace(run.namespace),
            run,
            deadline,
            self.ram,
            self._loader,
            self.residency,
            self._trash.freed.notify,
            self._count_get,
            bypass_ram,
            self.pooling.loads if self.pooling is not None else None,
        )

    def _count_get(self, stream: GetStream) -> None:
        states = stream.outcome
        count_get(self.accounts, stream.run, states, stream.chunk_bytes)
        self.rates.observe(*stream.observed)
        if self.pooling is not None and not stream.run.probe:
            self.pooling.offering.used(self.namespace(stream.run.namespace), stream.run, states)

    def acquire_now(self, run: Run, max_bytes: int) -> tuple[Leased, bytes] | None:
        """Lease the whole run, if all of it is in RAM and within `max_bytes` (padded), with one
        ChunkState per key; None, and nothing done, otherwise. Counts the hits.

        The caller ends the leases by `release`.
        """
        ns = self.namespace(run.namespace)
        answer = lease_run(ns, run, self.ram, self.residency, max_bytes)
        if answer is not None:
            count_leased(self.accounts, run, answer[0].lengths_bytes)
            if self.pooling is not None and not run.probe:
                self.pooling.offering.used(ns, run, answer[1])
        return answer

    def open_acquire(self, run: Run, deadline: float, room: Callable[[int], bool]) -> AcquireStream:
        """A stream of the run's objects, leased; see AcquireStream. The caller must `close` it, and
        `release` what it handed out.
        """
        return AcquireStream(self.open_get(run, deadline), self.ram, room)

    def release(self, places: NDArray[np.int64]) -> None:
        """End the leases of what `acquire_now` or an AcquireStream gave."""
        self.ram.release_many(places)
        self._trash.freed.notify()

    def hold(self, run: Run, states: bytes) -> tuple[list[bytes], int]:
        """Keep the chunks that `states` says are held from eviction, in whatever tier they are,
        until `unhold`. Gives their keys, and what they take up in RAM (padded bytes).
        """
        return hold_run(self.namespace(run.namespace), run, states)

    def unhold(self, namespace: str, keys: Iterable[bytes]) -> None:
        """The twin of `hold`: once for each time a key was held."""
        self.namespace(namespace).holds.remove(keys)
        self._trash.freed.notify()

    async def begin_put(self, offer: PutOffer) -> PutTicket:
        """Plan a put and reserve its room; end it by `commit_put` or `abort_put`."""
        return await self._putter.begin(self.namespace(offer.run.namespace), offer)

    def publish_part(self, ticket: PutTicket, received: Sequence[Received]) -> None:
        """Publish what was received so far, if that is of use before the put has come whole: where
        there is a tier below RAM. `commit_put` is told of it again.
        """
        if self.writer is not None:
            self._putter.publish_part(ticket, received)

    async def commit_put(self, ticket: PutTicket, received: Sequence[Received]) -> bytes:
        """Publish what was received. Gives one PutState per object."""
        return await self._putter.commit(ticket, received)

    async def abort_put(self, ticket: PutTicket) -> None:
        """Give back what a ticket reserved. Idempotent, also after `commit_put`."""
        self._putter.abort(ticket)

    def touch(self, run: Run, ttl_ms: int) -> bytes:
        """Mark chunks as just used; renew their time to live unless `ttl_ms` is 0."""
        ns = self.namespace(run.namespace)
        answer = match(ns, run, pb.EACH, pb.DEPTH_NODE, self.rates.eta_ms)
        at_ms = now_ms()
        found = ns.find_many(run.packed, at_ms)
        rows = found[found != NONE]
        self.residency.touch(ns, rows)
        if ttl_ms and len(rows):
            ns.index.set_expiries(rows, at_ms + ttl_ms)
        return answer.states

    async def delete(self, run: Run, corrupt: bool = False, deadline: float | None = None) -> int:
        """Drop the run's chunks, and what lies below them, from every tier; durably. `deadline`
        (time.monotonic()): for the bucket; None: some time.

        Raises KvstoredError where a device cannot be told: nothing reads them in this run, but the
        delete is not sure to outlive it; or where the bucket has not confirmed it. Only the keys
        named that this node held count in the answer.
        """
        return await self._deleter.delete(self.namespace(run.namespace), run, corrupt, deadline)

    async def purge(self, namespace: str, tenant: str, deadline: float) -> tuple[int, int]:
        """Drop everything of a namespace, or of one of its tenants unless "": chunks of this node,
        and objects of the bucket, whichever node stored them; how many of each.

        Raises BadRequest for a namespace that nothing can be known of, KvstoredError where some may
        be left by the deadline (time.monotonic()).
        """
        ns = self.namespaces.get(namespace)
        return await self._deleter.purge(namespace, ns, tenant, deadline)

    async def prefetch(self, run: Run, deadline: float) -> bytes:
        """Bring the run's leading chunks into RAM, as many as half of the namespace's RAM cap
        holds. Gives where each is when it returns.
        """
        ns = self.namespace(run.namespace)
        most_bytes = self.ram.namespace_usage(ns.name).cap_bytes // 2
        futures = prefetching.begin(ns, run, most_bytes, deadline, self._loader, self.pooling)
        for future in futures:  # nobody reads what it brings: its lease ends as it begins
            future.add_done_callback(self._release_loaded)
        if futures:
            await asyncio.wait(futures, timeout=max(0.0, deadline - time.monotonic()))
        return match(ns, run, pb.EACH, pb.DEPTH_NODE, self.rates.eta_ms).states

    def _release_loaded(self, future: asyncio.Future[Loaded]) -> None:
        if not future.cancelled() and (place := future.result().place) != NONE:
            self.ram.release(place)
            self._trash.freed.notify()

    def pin(self, run: Run, ttl_ms: int) -> bytes:
        """Protect the run's chunks from eviction for a time (at most, and by default, an hour).

        Raises ResourceExhausted beyond the bound on pinned chunks of a namespace.
        """
        ns = self.namespace(run.namespace)
        at_ms = now_ms()
        found = ns.find_many(run.packed, at_ms)
        rows = found[found != NONE].tolist()
        if len(ns.pins) + len(set(rows).difference(ns.pins)) > MAX_PINNED_CHUNKS:
            raise errors.ResourceExhausted(
                f"more than {MAX_PINNED_CHUNKS} chunks pinned", "unpin some", retry_after_ms=1000
            )
        until = time.monotonic() + min(ttl_ms or MAX_PIN_MS, MAX_PIN_MS) / 1000
        ns.pins.update(dict.fromkeys(rows, until))
        return match(ns, run, pb.EACH, pb.DEPTH_NODE, self.rates.eta_ms).states

    def unpin(self, run: Run) -> int:
        """End pins of the run's chunks. Gives how many were pinned."""
        ns = self.namespace(run.namespace)
        if not ns.pins:
            return 0
        rows = ns.index.find_many(run.packed)
        return sum(ns.pins.pop(row, None) is not None for row in rows[rows != NONE].tolist())

    def list(self, namespace: str, family: bytes, cursor: bytes, limit: int) -> pb.ListReply:
        """One page of a namespace's chunks; see proto ListReply."""
        return list_page(self.namespace(namespace), family, cursor, limit)

    def usage(self, namespace: str) -> pb.UsageReply:
        """What a namespace and its tenants hold."""
        self.namespace(namespace)
        return usage_reply(self, namespace)

    def status(self) -> admin_pb2.StatusReply:
        """The figures of Admin.Status that are the store's."""
        return status_reply(self)
