"""Which reads bring an object. Pure.

An object's header and the first of its payload come in one read, since that a round trip saved; the
rest, once the header has said how long it is, in reads of their own. Every read but the last is a
whole number of pieces, so that each piece is checked by whoever has read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstored.tiers.base import PIECE_BYTES
from kvstored.tiers.object.format import HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of an object's payload, from and up to. `first`: the header comes with them."""

    start_bytes: int
    stop_bytes: int

    @property
    def first(self) -> bool:
        """Whether the header comes with it."""
        return self.start_bytes == 0

    @property
    def stored_start_bytes(self) -> int:
        """Where the read begins in the stored object."""
        return 0 if self.first else HEADER_BYTES + self.start_bytes

    @property
    def stored_length_bytes(self) -> int:
        """How much of the stored object is read."""
        return HEADER_BYTES + self.stop_bytes - self.stored_start_bytes


def whole_pieces(range_bytes: int) -> int:
    """The length of one read of payload: whole pieces, at least one."""
    return max(PIECE_BYTES, range_bytes // PIECE_BYTES * PIECE_BYTES)


def first_span(length_bytes: int, range_bytes: int) -> Span:
    """The first read of an object; `length_bytes` 0: not known, then it may find less."""
    most = whole_pieces(range_bytes)
    return Span(0, min(length_bytes or most, most))


def further_spans(length_bytes: int, first: Span, range_bytes: int) -> list[Span]:
    """What is to be read besides the first, once the length is known."""
    step = whole_pieces(range_bytes)
    return [
        Span(at, min(at + step, length_bytes)) for at in range(first.stop_bytes, length_bytes, step)
    ]


def pause_s(attempt: int, throttled: bool, draw: float) -> float:
    """How long to wait before a read is tried again. `attempt`: 1 for the first repetition;
    `draw`: at random, from 0 to 1, so that not all who failed together come back together.
    """
    base_s = 0.25 if throttled else 0.05
    return float(base_s * 2 ** (attempt - 1) * (0.5 + draw))
