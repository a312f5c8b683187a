"""One at a time, among nodes that share nothing but a bucket.

A lease is a row of stored objects `control/<name>/<number>`, each created once and only by who may:
the highest number is the one that counts. A holder takes the next number to hold on, and deletes
those below. Who wants the lease may take the next number once the highest has not changed for
`expires_s` while he watched. So no clocks are compared; a holder counts its time from before it
asked, and stops a good deal earlier than anyone else may begin.

The body of each says who took it, and what the holder wants others to know.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from kvstored.tiers.object.api import Outcome
from kvstored.tiers.object.backend import Bucket, Entry
from kvstored.tiers.object.naming import CONTROL

_log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S: Final = 10.0
MOST_BODY_BYTES: Final = 4096
_SURE: Final = 0.6
"""The part of `expires_s` for which a holder trusts in what it holds."""


class Lease:
    """See the module. `owner`: a node's name, for people."""

    def __init__(
        self,
        bucket: Bucket,
        name: str,
        owner: str,
        expires_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{CONTROL}/{name}"
        self._owner = owner
        self._now = now
        self.expires_s = expires_s
        self._mine = 0  # the last number that was ours
        self._until = 0.0
        self._seen: tuple[int, int] | None = None  # the highest number, and when it was made
        self._seen_at = 0.0
        self._bucket_ms = (0, 0.0)  # the bucket's clock, and ours at that moment
        self.words: Mapping[str, object] = {}
        """What the last holder, whoever it was, wanted others to know."""
        self.changed = False
        """Whether the last `take` found that somebody had taken it since the one before."""

    @property
    def held(self) -> bool:
        """Whether nobody else can have it yet."""
        return self._now() < self._until

    def bucket_now_ms(self) -> int:
        """The time by the bucket's clock, which is what ages are to be compared with."""
        at_ms, at = self._bucket_ms
        return at_ms + int(1000 * (self._now() - at))

    async def take(self, words: Mapping[str, object]) -> bool:
        """Take it, if it is free or was ours last. `words` go with it."""
        entries = await self._entries()
        if entries is None:
            return False
        if entries:
            top = max(entries)
            mark = (top, entries[top].modified_ms)
            self.changed = self._seen is not None and mark != self._seen and top != self._mine
            if mark != self._seen:
                self._seen, self._seen_at = mark, self._now()
            free = top == self._mine or self._now() - self._seen_at >= self.expires_s
            if not free:
                self.words = await self._read(entries[top].path)
                return False
        return await self._take(max(entries, default=0) + 1, words)

    async def keep(self, words: Mapping[str, object], *, always: bool = False) -> bool:
        """Hold on to it: anew if half of the time is over, or `always`. False: it is lost."""
        if not self.held:
            return False
        half = self._until - self._now() > _SURE * self.expires_s / 2
        if half and not always:
            return True
        return await self._take(self._mine + 1, words)

    def leave(self) -> None:
        """Stop holding it. Others may have it when its time is over."""
        self._until = 0.0

    async def _take(self, number: int, words: Mapping[str, object]) -> bool:
        began = self._now()
        self._until = 0.0
        path = f"{self._prefix}/{number:020d}"
        body = json.dumps({"owner": self._owner} | dict(words)).encode()
        outcome = await self._bucket.put_if_absent(path, [body], _soon())
        if outcome is not Outcome.OK:
            return False
        entries = await self._entries()
        if not entries or max(entries) != number:  # ours was an old number, deleted long ago
            await self._bucket.delete([path], _soon())
            return False
        self._mine, self._until = number, began + _SURE * self.expires_s
        self._bucket_ms = (entries[number].modified_ms, began)
        self.words = words
        lower = [entry.path for found, entry in entries.items() if found < number]
        if lower:
            await self._bucket.delete(lower, _soon())
        return self.held

    async def _entries(self) -> dict[int, Entry] | None:
        """All numbers there are; None if that cannot be known now."""
        found: dict[int, Entry] = {}
        async for page in self._bucket.list_pages(self._prefix, _soon()):
            if page.outcome is not Outcome.OK:
                return None
            for entry in page.entries:
                with suppress(ValueError):
                    found[int(entry.path.rpartition("/")[2])] = entry
        return found

    async def _read(self, path: str) -> Mapping[str, object]:
        body = bytearray(MOST_BODY_BYTES)
        got = await self._bucket.get_range(path, 0, memoryview(body), _soon())
        if got.outcome is Outcome.OK:
            with suppress(ValueError):
                words = json.loads(body[: got.received_bytes])
                if isinstance(words, dict):
                    return words
        return {}


def _soon() -> float:
    return time.monotonic() + REQUEST_TIMEOUT_S
