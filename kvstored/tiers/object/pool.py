"""The bucket as the store sees it: `Pool`, put together from its parts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from kvstored.supervise import Supervisor
from kvstored.tiers.base import ObjectMeta
from kvstored.tiers.object.api import (
    Fetch,
    Fetched,
    ObjectName,
    Offer,
    Outcome,
    Pool,
    PoolStatus,
    Swept,
)
from kvstored.tiers.object.fetching import Fetcher
from kvstored.tiers.object.format import HEADER_BYTES, HeaderError, NewerHeader, decode
from kvstored.tiers.object.guarded import GuardedBucket
from kvstored.tiers.object.naming import path_of
from kvstored.tiers.object.parts import ExistencePart, JanitorPart, WriteBackPart
from kvstored.tiers.object.settings import ObjectSettings

logger = logging.getLogger(__name__)

DROP_TIMEOUT_S = 5.0
MAX_DROPS = 64
"""Rotten objects that are being dropped at once; more stay until somebody meets them again."""


class BucketPool(Pool):
    """See Pool. The parts share `bucket`; `supervisor` keeps its probes going."""

    def __init__(
        self,
        settings: ObjectSettings,
        bucket: GuardedBucket,
        supervisor: Supervisor,
        *,
        existence: ExistencePart,
        write_back: WriteBackPart,
        janitor: JanitorPart,
    ) -> None:
        self._bucket = bucket
        self._supervisor = supervisor
        self._existence = existence
        self._write_back = write_back
        self._janitor = janitor
        self._fetcher = Fetcher(
            bucket, settings.parallel, settings.range_bytes, settings.range_timeout_s
        )
        self._fetched_bytes = 0
        self._drops: dict[ObjectName, asyncio.Task[None]] = {}

    async def open(self) -> None:
        """As in Pool."""
        await self._bucket.open()
        self._supervisor.start("object_breaker", self._bucket.watch)
        await self._write_back.open()
        await self._janitor.open()

    async def close(self, timeout_s: float) -> int:
        """As in Pool. The supervisor is stopped by its owner, before this."""
        await self._janitor.close()
        owed = await self._write_back.close(timeout_s)
        for task in self._drops.values():
            task.cancel()
        await asyncio.gather(*self._drops.values(), return_exceptions=True)
        await self._bucket.close()
        return owed

    async def leading(
        self, names: Sequence[Sequence[ObjectName]], deadline: float
    ) -> list[Sequence[int]]:
        """As in Pool."""
        return await self._existence.leading(names, deadline)

    async def each(
        self, names: Sequence[Sequence[ObjectName]], deadline: float
    ) -> list[Sequence[int] | None]:
        """As in Pool."""
        return await self._existence.each(names, deadline)

    async def fetch(
        self,
        items: Sequence[Fetch],
        deadline: float,
        arrived: Callable[[int, Fetched], None],
    ) -> None:
        """As in Pool. What is rotten is dropped behind the caller's back, so that it may be written
        anew; he has his answer before that.
        """

        def note(index: int, fetched: Fetched) -> None:
            self._note(items[index].name, fetched)
            arrived(index, fetched)

        try:
            await self._fetcher.fetch(items, deadline, note)
        except Exception:  # a bug; every item has arrived as CANCELLED, which is a miss
            logger.exception("fetching from the bucket failed")

    def _note(self, name: ObjectName, fetched: Fetched) -> None:
        self._bucket.count("get", fetched.outcome)
        if fetched.outcome is Outcome.OK and fetched.meta is not None:
            self._fetched_bytes += fetched.meta.length_bytes
        elif fetched.outcome is Outcome.ABSENT:
            self._existence.absent([name])
        elif (
            fetched.outcome is Outcome.CORRUPT
            and name not in self._drops
            and len(self._drops) < MAX_DROPS
        ):
            task = asyncio.ensure_future(self._drop(name, fetched.meta))
            self._drops[name] = task
            task.add_done_callback(lambda task: self._dropped(name, task))

    def _dropped(self, name: ObjectName, task: asyncio.Task[None]) -> None:
        del self._drops[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("dropping a rotten object failed", exc_info=error)

    async def _drop(self, name: ObjectName, meta: ObjectMeta | None) -> None:
        """Drop a stored object that was found rotten, unless another has taken its place."""
        deadline = time.monotonic() + DROP_TIMEOUT_S
        block = bytearray(HEADER_BYTES)
        got = await self._bucket.get_range(path_of(name), 0, memoryview(block), deadline)
        if got.outcome is not Outcome.OK:
            return
        try:
            stands = decode(block).meta
        except NewerHeader:
            return
        except HeaderError:
            stands = None
        if stands is not None and meta is not None and stands != meta:
            return
        if await self._bucket.delete([path_of(name)], deadline) is Outcome.OK:
            self._existence.forget([name])
            logger.warning("dropped a rotten object from the bucket: %s", path_of(name))

    def offer(self, offers: Sequence[Offer]) -> int:
        """As in Pool."""
        taken = self._write_back.offer(offers)
        self._existence.forget([_name_of(offer.meta) for offer in offers[:taken]])
        return taken

    async def delete(self, names: Sequence[ObjectName], deadline: float) -> bool:
        """As in Pool."""
        try:
            return await self._write_back.delete(names, deadline)
        finally:
            self._existence.forget(names)

    async def delete_all(self, namespace: str, tenant: str, deadline: float) -> Swept:
        """As in Pool. Uploads end first, or one of them would come after the sweep."""
        if not await self._write_back.cancel(namespace, tenant, deadline):
            return Swept(0, Outcome.DEADLINE)
        try:
            return await self._janitor.delete_all(namespace, tenant, deadline)
        finally:
            self._existence.clear()

    def owed(self) -> Sequence[ObjectName]:
        """As in Pool."""
        return self._write_back.left

    def disown(self, names: Sequence[ObjectName]) -> None:
        """As in Pool."""
        self._write_back.disown(names)

    def status(self) -> PoolStatus:
        """As in Pool."""
        backlog, inventory = self._write_back.backlog, self._janitor.inventory
        return PoolStatus(
            url=self._bucket.url,
            health=self._bucket.health,
            backlog_objects=backlog.objects,
            backlog_bytes=backlog.bytes,
            forgetful=backlog.forgetful,
            in_flight=backlog.in_flight,
            uploaded_bytes=backlog.uploaded_bytes,
            fetched_bytes=self._fetched_bytes,
            known_bytes=inventory.known_bytes,
            known_objects=inventory.known_objects,
            outcomes=self._bucket.counts(),
            janitor=inventory.words,
        )


def _name_of(meta: ObjectMeta) -> ObjectName:
    return ObjectName(meta.namespace, meta.family, meta.key, meta.part)
