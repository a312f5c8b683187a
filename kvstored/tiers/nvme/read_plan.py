"""Which transfers bring a set of slots into memory. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstored.tiers.base import PIECE_BYTES
from kvstored.tiers.nvme.header import HEADER_BYTES

TRANSFER_BYTES = 4 << 20
"""Payload of one transfer, more or less, where much is read at once: fewer and larger ones leave
less to do for processors that have other work, and more at the device while they do that.
"""

GAP_BYTES = 16 << 10
"""What may lie between two objects that are read together; it is read too, and thrown away."""

MAX_SPANS = 32
"""Objects of one transfer, at most."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where an object lies in the data file: a header block, and behind it the padded payload."""

    index: int  # the reader's own number for it
    offset_bytes: int
    padded_bytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """Part of one payload, whole pieces of it. With `start_bytes` 0 the header comes in front."""

    index: int
    start_bytes: int
    stop_bytes: int
    gap_bytes: int = 0  # lies before it in the same transfer

    @property
    def header_bytes(self) -> int:
        """Header in front of it."""
        return 0 if self.start_bytes else HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Transfer:
    """One contiguous read of the data file."""

    offset_bytes: int
    spans: tuple[Span, ...]

    def singly(self) -> list[Transfer]:
        """A transfer for each span."""
        found = []
        at = self.offset_bytes
        for span in self.spans:
            at += span.gap_bytes
            found.append(
                Transfer(at, (Span(span.index, span.start_bytes, span.stop_bytes),)),
            )
            at += span.header_bytes + span.stop_bytes - span.start_bytes
        return found


def transfer_bytes(payload_bytes: int, at_once: int) -> int:
    """What one transfer should bring for `at_once` of them to have a share of that much payload."""
    share = -(-payload_bytes // (at_once * PIECE_BYTES)) * PIECE_BYTES
    return min(max(share, PIECE_BYTES), TRANSFER_BYTES)


def plan(slots: Iterable[Slot], about_bytes: int = TRANSFER_BYTES) -> list[Transfer]:
    """Transfers in order of their offset. Objects of more than `about_bytes` are cut into parts of
    whole pieces, each of at most half as much again and a piece; smaller neighbours are read
    together, up to `about_bytes`.
    """
    found: list[Transfer] = []
    first = end = payload_bytes = 0
    spans: list[Span] = []
    for slot in sorted(slots, key=lambda slot: slot.offset_bytes):
        gap = slot.offset_bytes - end
        together = payload_bytes + slot.padded_bytes <= about_bytes and len(spans) < MAX_SPANS
        if not (spans and together and 0 <= gap <= GAP_BYTES):
            if spans:
                found.append(Transfer(first, tuple(spans)))
            spans, payload_bytes, first, gap = [], 0, slot.offset_bytes, 0
        if slot.padded_bytes > about_bytes:
            found += _cut(slot, about_bytes)
            continue
        spans.append(Span(slot.index, 0, slot.padded_bytes, gap))
        payload_bytes += slot.padded_bytes
        end = slot.offset_bytes + HEADER_BYTES + slot.padded_bytes
    if spans:
        found.append(Transfer(first, tuple(spans)))
    return found


def _cut(slot: Slot, about_bytes: int) -> list[Transfer]:
    """Transfers of nearly the same size, cut where pieces end."""
    count = max(1, (slot.padded_bytes + about_bytes // 2) // about_bytes)
    step = -(-slot.padded_bytes // (count * PIECE_BYTES)) * PIECE_BYTES
    found = []
    for start in range(0, slot.padded_bytes, step):
        span = Span(slot.index, start, min(start + step, slot.padded_bytes))
        at = slot.offset_bytes + start + (HEADER_BYTES if start else 0)
        found.append(Transfer(at, (span,)))
    return found
