"""Deletes that hold: from every local tier, from what a volume brings back, from the bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from kvstored import errors
from kvstored.store.api import Run
from kvstored.store.index import NONE
from kvstored.store.namespace import Namespace
from kvstored.store.pooling import Pooling
from kvstored.store.purging import purge_here
from kvstored.store.residency import Residency
from kvstored.store.trash import Trash
from kvstored.store.volumes import Volumes
from kvstored.store.writer import Writer
from kvstored.tiers.base import Tier, TierKind
from kvstored_client.identity import KEY_BYTES
from kvstored_client.proto import kvstore_pb2 as pb

DELETE_ROWS = 256


class Deleter:
    """The deletes and purges of one store."""

    def __init__(
        self,
        tiers: Mapping[TierKind, Tier],
        writer: Writer | None,
        volumes: Volumes,
        pooling: Pooling | None,
        residency: Residency,
        trash: Trash,
    ) -> None:
        self._tiers = tiers
        self._nvme = tiers.get(TierKind.NVME)
        self._writer = writer
        self._volumes = volumes
        self._pooling = pooling
        self._residency = residency
        self._trash = trash

    async def delete(self, ns: Namespace, run: Run, corrupt: bool, deadline: float | None) -> int:
        """See Store.delete."""
        if self._pooling is None:
            return (await self._delete_here(ns, run, corrupt))[0]
        return await self._pooling.delete(
            ns, run, deadline, lambda: self._delete_here(ns, run, corrupt)
        )

    async def purge(
        self, namespace: str, ns: Namespace | None, tenant: str, deadline: float
    ) -> tuple[int, int]:
        """See Store.purge. `ns`: the namespace, where this node has it."""
        if not namespace or (ns is None and self._pooling is None):
            raise errors.BadRequest(
                f"there is no namespace {namespace!r}", "name one of the daemon's"
            )

        async def here() -> int:
            return await purge_here(ns, tenant, self._delete_here) if ns is not None else 0

        if self._pooling is None:
            return await here(), 0
        return await self._pooling.purge(namespace, tenant, deadline, here)

    async def _delete_here(
        self, ns: Namespace, run: Run, corrupt: bool
    ) -> tuple[int, Sequence[bytes]]:
        """Drop the run's chunks from the local tiers; how many it held, and all keys that went."""
        keys = dict.fromkeys(run.keys)  # held or not: a volume that is away may have them
        adopted = self._volumes.adopted
        dropped = await self._drop(ns, run.packed, keys, corrupt)
        while True:
            # Also those that another delete, or the clock, has dropped and is still waiting for.
            if self._writer is not None and (dying := self._writer.dying(ns)):
                await asyncio.wait(dying)
            if self._nvme is not None:
                await self._nvme.forget(ns.name, run.family.fingerprint, list(keys))
                await self._volumes.settled(ns, keys)
            # What a volume brought back after we had looked, and before the tier was told.
            if self._volumes.adopted == adopted:
                break
            adopted = self._volumes.adopted
            if not await self._drop(ns, b"".join(keys), keys, corrupt):
                break
        for tier in self._tiers:
            await self._trash.flush(tier)
        return dropped, [*keys]

    async def _drop(
        self, ns: Namespace, packed: bytes, keys: dict[bytes, None], corrupt: bool
    ) -> int:
        """Drop chunks and what lies below them, whose keys are added to `keys`; how many were held
        of those named.
        """
        state = pb.MISS_CORRUPT if corrupt else pb.MISS_DELETED
        reason = "corrupt" if corrupt else "deleted"
        dropped = 0
        # From the end, a slice at a time: others have their turn between slices that were held.
        for stop in range(len(packed) // KEY_BYTES, 0, -DELETE_ROWS):
            first = max(0, stop - DELETE_ROWS)
            found = ns.index.find_many(packed[first * KEY_BYTES : stop * KEY_BYTES])
            rows = found[found != NONE][::-1].tolist()
            for chunk in rows:
                if ns.index.held(chunk):  # else it went with one that is above it, or came twice
                    below = self._residency.drop_subtree(ns, chunk, state, reason)
                    keys.update(dict.fromkeys(below))
                    dropped += 1
            if rows and first:
                await asyncio.sleep(0)  # others have their turn between slices
        return dropped
