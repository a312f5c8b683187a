"""What of a bucket goes first: what a listing shows, and the headers of the oldest. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstored.tiers.base import ObjectMeta
from kvstored.tiers.object.backend import Entry
from kvstored.tiers.object.naming import name_of

MOST_OLDEST: Final = 20_000
"""Objects that one run may drop; what bounds its memory."""

WINDOW: Final = 2
"""Of the oldest so many times the bytes that must go are looked at, to find the best to drop."""

SLACK_MS: Final = 60_000
"""And what came so soon after those: the chunks of one prefix come within moments."""


class Survey:
    """What a whole listing showed: totals, and the oldest objects. Other things are not counted."""

    def __init__(self, most_oldest: int = MOST_OLDEST) -> None:
        self.objects = 0
        self.bytes = 0
        self._most = most_oldest
        self._oldest: list[tuple[int, str, int]] = []  # a heap: the youngest of them first

    def add(self, entries: Iterable[Entry]) -> None:
        """Take in a page."""
        for entry in entries:
            if name_of(entry.path) is None:
                continue
            self.objects += 1
            self.bytes += entry.length_bytes
            item = (-entry.modified_ms, entry.path, entry.length_bytes)
            if len(self._oldest) < self._most:
                heapq.heappush(self._oldest, item)
            elif item > self._oldest[0]:
                heapq.heapreplace(self._oldest, item)

    def oldest(self) -> list[Entry]:
        """The oldest, oldest first."""
        return [
            Entry(path, length, -negative)
            for negative, path, length in sorted(self._oldest, reverse=True)
        ]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored object with what its header says: None where that is damaged, is of a version that
    is not known here (`newer`), or was not given (`unread`).
    """

    entry: Entry
    meta: ObjectMeta | None
    newer: bool = False
    unread: bool = False

    @property
    def rotten(self) -> bool:
        """Whether it is of no use to anybody."""
        return self.meta is None and not self.newer and not self.unread

    def is_of(self, tenant: str) -> bool:
        """Whether it is known to be a tenant's."""
        return self.meta is not None and self.meta.tenant == tenant

    def expired(self, now_ms: int) -> bool:
        """Whether its time is over."""
        return self.meta is not None and 0 < self.meta.expires_ms <= now_ms


_ChunkId = tuple[str, bytes, bytes]
"""Namespace, family, key."""


@dataclass(slots=True)
class _Chunk:
    """The objects of one chunk. `age_ms`: when it, or anything that goes on from it, came."""

    depth: int
    parent: _ChunkId
    age_ms: int = 0  # Unix time
    entries: list[Entry] = field(default_factory=list)


def window(oldest: Sequence[Entry], need_bytes: int) -> list[Entry]:
    """Of the oldest, those whose headers are worth reading to drop `need_bytes`."""
    left, until_ms = WINDOW * need_bytes, 0
    for at, entry in enumerate(oldest):
        if left > 0:
            until_ms = entry.modified_ms + SLACK_MS
        elif entry.modified_ms > until_ms:
            return list(oldest[:at])
        left -= entry.length_bytes
    return list(oldest)


def victims(candidates: Sequence[Candidate], need_bytes: int, now_ms: int) -> list[Entry]:
    """What to drop, in this order, until `need_bytes` are gone.

    First what nobody can read any more: rotten, or over its time. Then whole chunks, the oldest
    first, where a chunk is as young as the youngest that goes on from it: so what goes first is the
    end of a prefix, and never its head alone, as far as the candidates show.
    """
    found = [c.entry for c in candidates if c.rotten or c.expired(now_ms)]
    left = need_bytes - sum(entry.length_bytes for entry in found)
    dead = set(found)
    for chunk in _in_order([c for c in candidates if c.entry not in dead]):
        if left <= 0:
            break
        found += chunk.entries
        left -= sum(entry.length_bytes for entry in chunk.entries)
    return found


def _in_order(candidates: Iterable[Candidate]) -> list[_Chunk]:
    chunks: dict[_ChunkId, _Chunk] = {}
    for candidate in candidates:
        meta, entry = candidate.meta, candidate.entry
        if meta is None:  # of a newer version, or unread: nothing is known of it but its age
            chunks["", b"", entry.path.encode()] = _Chunk(
                0, ("", b"", b""), entry.modified_ms, [entry]
            )
            continue
        space = (meta.namespace, meta.family)
        chunk = chunks.setdefault((*space, meta.key), _Chunk(meta.depth, (*space, meta.parent)))
        chunk.entries.append(entry)
        chunk.age_ms = max(chunk.age_ms, entry.modified_ms)
    deepest_first = sorted(chunks.values(), key=lambda chunk: -chunk.depth)
    for chunk in deepest_first:
        parent = chunks.get(chunk.parent)
        if parent is not None:
            parent.age_ms = max(parent.age_ms, chunk.age_ms)
    return sorted(deepest_first, key=lambda chunk: chunk.age_ms)
