"""Dropping stored objects by the thousand: lists of them, or all of a namespace or tenant."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

MOST_UNREAD: Final = 8
"""Headers, of up to a thousand, that a server may fail to give for these objects' sake alone."""

_OF_ONE_OBJECT: Final = frozenset({Outcome.SERVER, Outcome.SHORT, Outcome.LONG})


class Unreadable(Exception):
    """A header could not be read; `outcome` says why."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome


GO_ON_S: Final = 600.0
"""For how long it is known where a sweep stopped that ran out of time."""

MOST_STOPPED: Final = 64


@dataclass(slots=True)
class _Pass:
    """One pass over all of a namespace, by one call or several. `upto`: all paths up to it are
    done. `dropped`: by all of them.
    """

    upto: str = ""
    dropped: int = 0
    unsure: Outcome = Outcome.OK  # something is left of which nobody can say whose it is
    sorted: bool = True  # so far the listing came in order, as S3 lists
    until: float = 0.0  # worth going on with


class Sweeper:
    """See the module. `parallel`: headers read at once."""

    def __init__(
        self, bucket: Bucket, parallel: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._bucket = bucket
        self._parallel = parallel
        self._now = now
        self._stopped: dict[tuple[str, str], _Pass] = {}  # by namespace and tenant

    async def sweep(self, namespace: str, tenant: str, deadline: float) -> Swept:
        """As `Pool.delete_all`. Whose an object is only its header tells, and a namespace may have
        more than can be read by a deadline: the next call goes on where this one stopped.
        """
        dropped = 0
        for _ in range(ROUNDS):
            at = self._stopped.pop((namespace, tenant), None)
            if at is None or at.until < self._now():
                at = _Pass()
            before = at.dropped
            outcome = await self._round(namespace, tenant, deadline, at)
            dropped += at.dropped - before
            if outcome is not Outcome.OK:
                self._remember((namespace, tenant), at)
                return Swept(dropped, outcome)
            if at.unsure is not Outcome.OK:
                return Swept(dropped, at.unsure)
            if not at.dropped:
                return Swept(dropped, Outcome.OK)
        return Swept(dropped, Outcome.EXISTED)  # somebody writes as fast as this drops

    def _remember(self, whose: tuple[str, str], at: _Pass) -> None:
        if whose[1] and at.sorted:
            at.until = self._now() + GO_ON_S
            self._stopped[whose] = at
            while len(self._stopped) > MOST_STOPPED:
                del self._stopped[next(iter(self._stopped))]

    async def _round(self, namespace: str, tenant: str, deadline: float, at: _Pass) -> Outcome:
        """What is left of one pass. OK: it is over."""
        last = ""
        async for page in self._bucket.list_pages(listing_prefix(namespace), deadline):
            if page.outcome is not Outcome.OK:
                return page.outcome
            entries: Sequence[Entry] = page.entries
            paths = [last, *(entry.path for entry in entries)]
            at.sorted = at.sorted and paths == sorted(paths)  # a directory's are not
            last = paths[-1]
            entries = [entry for entry in entries if entry.path > at.upto or not at.sorted]
            if tenant:
                try:
                    found = await self.headers(entries, deadline)
                except Unreadable as error:
                    return error.outcome
                if any(candidate.unread for candidate in found):
                    at.unsure = Outcome.SERVER
                elif any(candidate.newer for candidate in found):
                    at.unsure = Outcome.CONFLICT  # only a newer version can tell
                entries = [c.entry for c in found if c.rotten or c.is_of(tenant)]
            failed = await self.drop([entry.path for entry in entries], deadline)
            if failed is not Outcome.OK:
                return failed
            at.dropped += len(entries)
            at.upto = max(at.upto, last) if at.sorted else ""
        return Outcome.OK

    async def drop(self, paths: Sequence[str], deadline: float) -> Outcome:
        """Drop stored objects, all of them if OK."""
        for at in range(0, len(paths), BATCH):
            outcome = await self._bucket.delete(paths[at : at + BATCH], deadline)
            if outcome is not Outcome.OK:
                return outcome
        return Outcome.OK

    async def headers(self, entries: Sequence[Entry], deadline: float) -> list[Candidate]:
        """What the headers of stored objects say. What has gone meanwhile counts as rotten. Raises
        Unreadable as soon as the bucket does not give one, but for a few that a server which gives
        others fails to give: what its disks have lost must not keep all else from being dropped.
        """
        found: dict[int, Candidate] = {}
        unread = 0
        waiting = iter(enumerate(entries))

        async def work() -> None:
            nonlocal unread
            for at, entry in waiting:
                try:
                    found[at] = await self._header(entry, deadline)
                except Unreadable as error:
                    unread += 1
                    if error.outcome not in _OF_ONE_OBJECT or unread > MOST_UNREAD:
                        raise
                    found[at] = Candidate(entry, None, unread=True)

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
