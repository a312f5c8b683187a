"""Where the body of one object comes down: checked piece by piece, never beyond its memory."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable

import numpy as np
import xxhash

from kvstored.tiers.base import PIECE_BYTES, ObjectMeta, padded_bytes
from kvstored.tiers.object.api import Fetch, Outcome
from kvstored.tiers.object.format import (
    HEADER_BYTES,
    HeaderError,
    NewerHeader,
    decode,
    is_named,
    stored_bytes,
)
from kvstored.tiers.object.ranges import Span

Ask = Callable[[ObjectMeta], Awaitable[memoryview | None]]
"""Asks whoever wants the object for memory."""


class Landing:
    """One object on its way. All of it on the bucket's loop."""

    def __init__(self, item: Fetch, ask: Ask) -> None:
        self.item = item
        self.meta: ObjectMeta | None = None
        self.in_flight = 0
        self.left_bytes = -1
        """Of the payload, not yet verified; below 0 as long as its length is unknown."""
        self.failure: Outcome | None = None
        self._ask = ask
        self._asked: asyncio.Future[memoryview | None] | None = None
        self._memory: memoryview | None = None

    @property
    def complete(self) -> bool:
        """Whether every piece is there and verified."""
        return self.left_bytes == 0

    @property
    def known(self) -> bool:
        """Whether the header has been read and there is memory."""
        return self._memory is not None

    async def take_header(self, block: bytes) -> Outcome:
        """Read the header, and ask for memory. OK: the payload may come. Again after a retry, and
        then it has to be the same header: no two objects are ever mixed.
        """
        try:
            meta = decode(block).meta
        except NewerHeader:
            return Outcome.ABSENT  # for this version; others may read it, so it is not rotten
        except HeaderError:
            return Outcome.CORRUPT
        if not is_named(meta, self.item.name) or self.meta not in (None, meta):
            return Outcome.CORRUPT
        if self.item.length_bytes and meta.length_bytes != self.item.length_bytes:
            return Outcome.LENGTH
        self.meta = meta
        if self._asked is None:
            self._asked = asyncio.ensure_future(self._ask(meta))
        memory = await asyncio.shield(self._asked)  # asked once, whatever becomes of this read
        if memory is None:
            return Outcome.CANCELLED
        if not self.known:
            if len(memory) < padded_bytes(meta.length_bytes):
                raise ValueError(f"{len(memory)} B of memory for {meta.length_bytes} B of object")
            self._memory = memory
            self.left_bytes = meta.length_bytes
        return Outcome.OK

    def reading(self, span: Span) -> SpanReading:
        """A new attempt to read a span."""
        return SpanReading(self, span)

    def done(self, span: Span) -> None:
        """A span has come in full."""
        assert self.meta is not None
        self.left_bytes -= min(span.stop_bytes, self.meta.length_bytes) - span.start_bytes
        if self.complete:
            self._clear_padding(self.meta.length_bytes)

    def _clear_padding(self, length_bytes: int) -> None:
        count = padded_bytes(length_bytes) - length_bytes
        if count and self._memory is not None:
            at = ctypes.addressof(ctypes.c_char.from_buffer(self._memory, length_bytes))
            ctypes.memset(at, 0, count)

    def fits(self, total_bytes: int) -> bool:
        """Whether a stored object of that length (0: unknown) can be this one."""
        return self.meta is not None and total_bytes in (0, stored_bytes(self.meta.length_bytes))

    def window(self, span: Span) -> memoryview:
        """The memory of a span, and nothing else."""
        assert self._memory is not None
        assert self.meta is not None
        return self._memory[span.start_bytes : min(span.stop_bytes, self.meta.length_bytes)]

    def expected(self, piece: int) -> bytes:
        """The checksum of a piece."""
        assert self.meta is not None
        return self.meta.piece_checksums[8 * piece : 8 * piece + 8]


class SpanReading:
    """One attempt at one span: the sink of a read."""

    def __init__(self, landing: Landing, span: Span) -> None:
        self._landing = landing
        self._span = span
        self._header = bytearray()
        self._window: memoryview | None = None if span.first else landing.window(span)
        self._at = 0  # bytes of the window that are filled
        self._checked = 0  # and verified
        self.verdict = Outcome.OK
        """What was wrong with the bytes themselves, if the read was ended for it."""

    @property
    def complete(self) -> bool:
        """Whether all of the span is there and verified."""
        return self._window is not None and self._checked == len(self._window)

    async def sink(self, chunk: memoryview) -> bool:
        """Take in a chunk of the body, as `Sink`."""
        if self._window is None:
            lacking = HEADER_BYTES - len(self._header)
            self._header += chunk[:lacking]
            chunk = chunk[lacking:]
            if len(self._header) < HEADER_BYTES:
                return True
            self.verdict = await self._landing.take_header(bytes(self._header))
            if self.verdict is not Outcome.OK:
                return False
            self._window = self._landing.window(self._span)
        if self._at + len(chunk) > len(self._window):
            # the stored object is longer than its header says
            self.verdict = Outcome.CORRUPT
            return False
        self._copy(self._window, chunk)
        return self._check(self._window)

    def _copy(self, window: memoryview, chunk: memoryview) -> None:
        if len(chunk):
            target = np.frombuffer(window[self._at : self._at + len(chunk)], np.uint8)
            np.copyto(target, np.frombuffer(chunk, np.uint8))
            self._at += len(chunk)

    def _check(self, window: memoryview) -> bool:
        """Verify the pieces that are whole by now."""
        while self._checked < self._at:
            stop = min(self._checked + PIECE_BYTES, len(window))
            if stop > self._at:
                return True
            piece = (self._span.start_bytes + self._checked) // PIECE_BYTES
            digest = xxhash.xxh3_64_intdigest(window[self._checked : stop])
            if digest.to_bytes(8, "little") != self._landing.expected(piece):
                self.verdict = Outcome.CORRUPT
                return False
            self._checked = stop
        return True
