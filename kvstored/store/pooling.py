"""All that a store does with a bucket, in one place: loads, offers, match, deletes.

What the bucket has is not in the index: it is asked for by name whenever no local tier has a chunk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvstored import errors
from kvstored.store.api import MatchAnswer, Run
from kvstored.store.index import NONE
from kvstored.store.loader import Loaded, Loader
from kvstored.store.namespace import Namespace
from kvstored.store.offering import Offering
from kvstored.store.pool_loads import PoolLoads, Wanted
from kvstored.store.pool_match import match_pool
from kvstored.store.residency import Residency
from kvstored.store.room import Room
from kvstored.store.writer import Writer
from kvstored.tiers.base import TierKind
from kvstored.tiers.object.api import ObjectName, Outcome, Pool
from kvstored.tiers.object.policy import make_policy
from kvstored.tiers.ram.tier import RamTier

DELETE_TIMEOUT_S = 30.0
SLICE_NAMES = 1000
"""Deleted in one go: what S3 takes in one request."""


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """`write_back`: which chunks go up (kvstored.tiers.object.policy). `promote_below_bytes`: what
    is brought goes to NVMe as well as long as fewer bytes wait to be written; 0: never.
    `cap_bytes`: the janitor's, to be shown.
    """

    write_back: str = "all"
    promote_below_bytes: int = 0
    cap_bytes: int = 0


Here = Callable[[], Awaitable[tuple[int, Sequence[bytes]]]]
"""Drops chunks from the local tiers: how many there were, and the keys of all that are to go."""


class Pooling:
    """One store's bucket. Belongs to the verbs' loop."""

    def __init__(
        self,
        pool: Pool,
        settings: PoolingSettings,
        ram: RamTier,
        loader: Loader | None,
        writer: Writer | None,
        residency: Residency,
        room: Room,
        released: Callable[[], None],
    ) -> None:
        """`released()` is called whenever leases ended, for those who wait for room."""
        self.pool = pool
        self.cap_bytes = settings.cap_bytes
        self.offering = Offering(
            pool, make_policy(settings.write_back), ram, loader, residency, released
        )
        promote_below_bytes, came = settings.promote_below_bytes, self.offering.came
        self.loads = PoolLoads(pool, ram, residency, room, writer, promote_below_bytes, came)

    async def open(self, namespaces: dict[str, Namespace]) -> None:
        """Begin, once the local tiers have said what they hold."""
        await self.pool.open()
        await self.offering.again(namespaces)

    async def close(self, timeout_s: float) -> int:
        """End everything within the time, while the local tiers are still there to be read; how
        many objects are still owed.
        """
        self.offering.finish()
        await self.loads.close()
        return await self.pool.close(timeout_s)

    async def match(
        self,
        ns: Namespace,
        run: Run,
        mode: int,
        deadline: float,
        eta_ms: Callable[[dict[TierKind, int]], float],
    ) -> MatchAnswer:
        """Match as far as the bucket, by the deadline (time.monotonic())."""
        return await match_pool(ns, run, mode, self.pool, deadline, self.loads.seen, eta_ms)

    def prefetch(
        self, ns: Namespace, run: Run, most_bytes: int, deadline: float
    ) -> list[asyncio.Future[Loaded]]:
        """Begin to bring the run's leading chunks that no local tier has, up to `most_bytes`."""
        wanted: list[Wanted] = []
        parents = [run.parent, *run.keys[:-1]]
        for key, parent, chunk in zip(
            run.keys, parents, ns.index.find_many(run.packed).tolist(), strict=True
        ):
            for part in run.parts:
                if chunk != NONE and ns.index.find_object(chunk, part) != NONE:
                    continue
                wanted.append(Wanted(run.family, key, parent, part))
                most_bytes -= wanted[-1].most_bytes
            if most_bytes <= 0:
                break
        return self.loads.want(ns, wanted, deadline)

    async def delete(self, ns: Namespace, run: Run, deadline: float | None, here: Here) -> int:
        """Delete a run's chunks from the local tiers by `here`, and from the bucket; gives the
        number that `here` gave. Nothing that was dropped comes back by a load that began before.

        Raises KvstoredError where the bucket did not confirm it in time.
        """
        until = deadline if deadline is not None else time.monotonic() + DELETE_TIMEOUT_S
        named, below = run.keys, list[bytes]()
        self.loads.begin_delete(ns.name, named)
        try:
            dropped, keys = await here()
            below = list(set(keys).difference(named))
            self.loads.begin_delete(ns.name, below)
            gone = [*named, *below]
            self.offering.deleted(ns, run.family, gone)
            names = [
                ObjectName(ns.name, run.family.fingerprint, key, part.name)
                for key in dict.fromkeys(gone)
                for part in run.family.parts
            ]
            await self._delete(names, until)
        finally:
            self.loads.end_delete(ns.name, named)
            self.loads.end_delete(ns.name, below)
        return dropped

    async def _delete(self, names: Sequence[ObjectName], deadline: float) -> None:
        for at in range(0, len(names), SLICE_NAMES):
            if not await self.pool.delete(names[at : at + SLICE_NAMES], deadline):
                raise errors.BucketSilent(
                    "deleted here, but the bucket has not confirmed it: other nodes may still "
                    "find these chunks, and this one, too",
                    "delete them again once the bucket answers (kvctl tiers)",
                )
            await asyncio.sleep(0)  # others have their turn

    async def purge(
        self, namespace: str, tenant: str, deadline: float, here: Callable[[], Awaitable[int]]
    ) -> tuple[int, int]:
        """Drop everything of a namespace, or of one of its tenants unless "": from the local tiers
        by `here`, and from the bucket, whichever node stored it. What `here` gave, and how many
        objects the bucket dropped. Raises KvstoredError where some may be left.
        """
        self.loads.begin_purge(namespace, tenant)
        try:
            chunks = await here()
            self.offering.forget()
            return chunks, await self._purge(namespace, tenant, deadline)
        finally:
            self.loads.end_purge(namespace, tenant)

    async def _purge(self, namespace: str, tenant: str, deadline: float) -> int:
        swept = await self.pool.delete_all(namespace, tenant, deadline)
        if swept.outcome is not Outcome.OK:
            late = swept.outcome is Outcome.DEADLINE
            raise errors.BucketSilent(
                f"{swept.objects} objects are deleted from the bucket; some may be left "
                f"({swept.outcome.value})",
                "call it again: it goes on where it stopped (kvctl --timeout gives it more time)"
                if late
                else "call it again once the bucket answers (kvctl tiers)",
            )
        return swept.objects
