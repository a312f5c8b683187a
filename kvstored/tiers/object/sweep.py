"""Dropping stored objects by the thousand: lists of them, or all of a namespace or tenant."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from kvstored.tiers.object.api import Outcome, Swept
from kvstored.tiers.object.backend import Bucket, Entry
from kvstored.tiers.object.eviction import Candidate
from kvstored.tiers.object.format import HEADER_BYTES, HeaderError, NewerHeader, decode, is_named
from kvstored.tiers.object.naming import listing_prefix, name_of

BATCH: Final = 1000
"""Objects per request, where the bucket takes so many."""

ROUNDS: Final = 4
"""A sweep lists again until it finds nothing: others may still be writing."""

REQUEST_TIMEOUT_S: Final = 30.0


class Unreadable(Exception):
    """A header could not be read; `outcome` says why."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome


class Sweeper:
    """See the module. `parallel`: headers read at once."""

    def __init__(self, bucket: Bucket, parallel: int) -> None:
        self._bucket = bucket
        self._parallel = parallel

    async def sweep(self, namespace: str, tenant: str, deadline: float) -> Swept:
        """As `Pool.delete_all`."""
        dropped = 0
        for _ in range(ROUNDS):
            gone, outcome = await self._round(namespace, tenant, deadline)
            dropped += gone
            if outcome is not Outcome.OK or not gone:
                return Swept(dropped, outcome)
        return Swept(dropped, Outcome.EXISTED)  # somebody writes as fast as this drops

    async def _round(self, namespace: str, tenant: str, deadline: float) -> tuple[int, Outcome]:
        dropped, outcome = 0, Outcome.OK
        async for page in self._bucket.list_pages(listing_prefix(namespace), deadline):
            if page.outcome is not Outcome.OK:
                return dropped, page.outcome
            entries: Sequence[Entry] = page.entries
            if tenant:
                try:
                    found = await self.headers(entries, deadline)
                except Unreadable as error:
                    return dropped, error.outcome
                if any(candidate.newer for candidate in found):
                    outcome = Outcome.CONFLICT  # whose it is only a newer version can tell
                entries = [c.entry for c in found if c.rotten or c.is_of(tenant)]
            failed = await self.drop([entry.path for entry in entries], deadline)
            if failed is not Outcome.OK:
                return dropped, failed
            dropped += len(entries)
        return dropped, outcome

    async def drop(self, paths: Sequence[str], deadline: float) -> Outcome:
        """Drop stored objects, all of them if OK."""
        for at in range(0, len(paths), BATCH):
            outcome = await self._bucket.delete(paths[at : at + BATCH], deadline)
            if outcome is not Outcome.OK:
                return outcome
        return Outcome.OK

    async def headers(self, entries: Sequence[Entry], deadline: float) -> list[Candidate]:
        """What the headers of stored objects say. What has gone meanwhile counts as rotten. Raises
        Unreadable as soon as the bucket does not give one.
        """
        found: dict[int, Candidate] = {}
        waiting = iter(enumerate(entries))

        async def work() -> None:
            for at, entry in waiting:
                found[at] = await self._header(entry, deadline)

        workers = [asyncio.ensure_future(work()) for _ in range(min(self._parallel, len(entries)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return [found[at] for at in range(len(entries))]

    async def _header(self, entry: Entry, deadline: float) -> Candidate:
        block = bytearray(HEADER_BYTES)
        until = min(deadline, time.monotonic() + REQUEST_TIMEOUT_S)
        got = await self._bucket.get_range(entry.path, 0, memoryview(block), until)
        if got.outcome not in (Outcome.OK, Outcome.ABSENT):
            raise Unreadable(got.outcome)
        try:
            meta = decode(memoryview(block)[: got.received_bytes]).meta
        except NewerHeader:
            return Candidate(entry, None, newer=True)
        except HeaderError:
            return Candidate(entry, None)
        name = name_of(entry.path)
        return Candidate(entry, meta if name is not None and is_named(meta, name) else None)
