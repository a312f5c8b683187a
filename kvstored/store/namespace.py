"""One trust domain: its index, recency, ghosts, families and pins, shared with no other."""

from __future__ import annotations

import asyncio
import time

import numpy as np
from numpy.typing import NDArray

from kvstored.store.bulk import BulkIndex
from kvstored.store.families import Families
from kvstored.store.ghosts import Ghosts
from kvstored.store.holds import Holds
from kvstored.store.index import EXPIRES, NONE, TIERS
from kvstored.store.lru import LeafLru

MAX_PINNED_CHUNKS = 65536


class Namespace:
    """All that the store knows of one namespace."""

    def __init__(self, name: str, number: int, default_ttl_ms: int = 0) -> None:
        self.name = name
        self.number = number
        self.default_ttl_ms = default_ttl_ms
        self.index = BulkIndex()
        self.lru = {tier: LeafLru(self.index, tier) for tier in TIERS}
        self.ghosts = Ghosts()
        self.families = Families(name)
        self.tenants: list[str] = []
        self._tenant_numbers: dict[str, int] = {}
        # Whose turn it is to wait for room, first come: puts, and loads that a reader waits for.
        self.put_queue = asyncio.Lock()
        self.load_queue = asyncio.Lock()
        self.holds = Holds()
        self.pins: dict[int, float] = {}  # chunk row -> time.monotonic() at which the pin ends

    def tenant_number(self, label: str) -> int:
        """The number under which chunks carry a (bounded) tenant label."""
        number = self._tenant_numbers.get(label)
        if number is None:
            number = self._tenant_numbers[label] = len(self.tenants)
            self.tenants.append(label)
        return number

    def pinned(self, chunk: int) -> bool:
        """Whether a pin protects the chunk now."""
        until = self.pins.get(chunk)
        if until is None:
            return False
        if until <= time.monotonic():
            del self.pins[chunk]
            return False
        return True

    def expired(self, chunk: int, now_ms: int) -> bool:
        """Whether the chunk's time to live is over."""
        expires_ms = self.index.expires_ms[chunk]
        return 0 < expires_ms <= now_ms

    def expired_many(self, chunks: NDArray[np.int32], now_ms: int) -> NDArray[np.bool_]:
        """Which of the rows are chunks whose time is over (NONE is none); shapes [n] and [n]."""
        index = self.index
        brief = np.frombuffer(index.brief, np.uint64).take(chunks, mode="clip")
        over = (brief & np.uint64(EXPIRES)).view(np.int64) > 0
        if over.any():
            over &= np.frombuffer(index.expires_ms, np.uint64).take(chunks, mode="clip") <= now_ms
            over &= chunks >= 0
        return over

    def find_many(self, packed: bytes, now_ms: int) -> NDArray[np.int32]:
        """`find` of every key; shape [keys]. `packed`: whole keys back to back."""
        chunks = self.index.find_many(packed)
        chunks[self.expired_many(chunks, now_ms)] = NONE
        return chunks

    def find(self, key: bytes, now_ms: int) -> int:
        """The row of a chunk that is held and has not expired, or NONE."""
        chunk = self.index.find(key)
        if chunk != NONE and self.expired(chunk, now_ms):
            return NONE
        return chunk
