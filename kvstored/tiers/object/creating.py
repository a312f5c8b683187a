"""Creating one object in the bucket, and finding out whose stands where the name is taken."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from kvstored.tiers.base import ObjectMeta
from kvstored.tiers.object.api import Outcome
from kvstored.tiers.object.backend import Bucket
from kvstored.tiers.object.format import (
    HEADER_BYTES,
    HeaderError,
    NewerHeader,
    decode,
    encode,
    object_bytes,
    stored_bytes,
)

_log = logging.getLogger(__name__)

TRANSIENT: Final = frozenset(
    {
        Outcome.ABSENT,  # it went while we looked at it
        Outcome.CORRUPT,  # what stood there was dropped
        Outcome.SHORT,
        Outcome.LONG,
        Outcome.DEADLINE,
        Outcome.THROTTLED,
        Outcome.SERVER,
        Outcome.NETWORK,
        Outcome.NAME,
        Outcome.DENIED,
        Outcome.NO_BUCKET,
        Outcome.OPEN,
    }
)
"""Outcomes after which a repetition may go better: credentials come back, too."""

OF_THE_BUCKET: Final = frozenset(
    {Outcome.NETWORK, Outcome.NAME, Outcome.DENIED, Outcome.NO_BUCKET, Outcome.OPEN}
)
"""Those that say nothing of the object: no reason to give it up, however often they come."""

MOST_DOUBLINGS: Final = 4


class Creator:
    """Creates objects. `range_timeout_s` is what one request of `range_bytes` may take; a longer
    one is given as many times that. `writer`: this node's name, for people, in each header.
    """

    def __init__(
        self,
        bucket: Bucket,
        range_bytes: int,
        range_timeout_s: float,
        writer: str = "",
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._bucket = bucket
        self._range_bytes = range_bytes
        self._range_timeout_s = range_timeout_s
        self._writer = writer
        self._now_ms = now_ms

    async def create(
        self, path: str, meta: ObjectMeta, payload: memoryview, repetition: int = 0
    ) -> Outcome:
        """Create an object, once. OK; EXISTED, CONFLICT or LENGTH where another stands; CORRUPT
        where what stood there was rotten, or over its time, and has been dropped; or what failed.

        Each repetition is given twice the time of the one before, up to 16 times: a slow line is
        no reason to send the same bytes for ever and never to the end.
        """
        try:
            block = encode(meta, self._now_ms(), self._writer)
        except ValueError as error:
            _log.error("an object that no header can hold: %s", error)
            return Outcome.CANCELLED
        ranges = -(-stored_bytes(meta.length_bytes) // self._range_bytes)
        timeout_s = ranges * self._range_timeout_s * 2 ** min(repetition, MOST_DOUBLINGS)
        outcome = await self._bucket.put_if_absent(
            path, [block, payload], time.monotonic() + timeout_s
        )
        return await self._whose(path, meta) if outcome is Outcome.EXISTED else outcome

    async def _whose(self, path: str, meta: ObjectMeta) -> Outcome:
        """What stands under the name of an object."""
        block = bytearray(HEADER_BYTES)
        deadline = time.monotonic() + self._range_timeout_s
        got = await self._bucket.get_range(path, 0, memoryview(block), deadline)
        if got.outcome is not Outcome.OK:
            return got.outcome
        try:
            there = decode(memoryview(block)[: got.received_bytes]).meta
        except NewerHeader:
            return Outcome.CONFLICT
        except HeaderError:
            return await self._drop(path)
        if object_bytes(got.total_bytes) != there.length_bytes or _identity(there) != _identity(
            meta
        ):
            return await self._drop(path)
        if 0 < there.expires_ms <= self._now_ms():
            return await self._drop(path)
        if there.length_bytes != meta.length_bytes:
            return Outcome.LENGTH
        return Outcome.EXISTED if there.checksum == meta.checksum else Outcome.CONFLICT

    async def _drop(self, path: str) -> Outcome:
        outcome = await self._bucket.delete([path], time.monotonic() + self._range_timeout_s)
        return Outcome.CORRUPT if outcome is Outcome.OK else outcome


def _identity(meta: ObjectMeta) -> tuple[str, bytes, bytes, str]:
    return meta.namespace, meta.family, meta.key, meta.part
