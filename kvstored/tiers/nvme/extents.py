"""Which transfers write a batch of slots: adjacent slots together, large objects cut up. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvstored.tiers.nvme.header import HEADER_BYTES

MOST_BYTES = 8 << 20
LEAST_BYTES = 1 << 20
MOST_BUFFERS = 512
"""Buffers of one transfer; the kernel takes 1024."""


@dataclass(frozen=True, slots=True)
class SlotImage:
    """What is to lie in one slot. `header` and `payload` are aligned and whole blocks long."""

    offset_bytes: int
    header: memoryview
    payload: memoryview


@dataclass(slots=True)
class Extent:
    """One transfer: `buffers` one behind the other from `offset_bytes` on.

    `members`: rows of the slots of which something is in it; `headers`: of those with their header.
    """

    offset_bytes: int
    end_bytes: int
    buffers: list[memoryview] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    headers: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Length of the transfer."""
        return self.end_bytes - self.offset_bytes


def transfer_bytes(total_bytes: int, threads: int) -> int:
    """How long transfers of a batch should be: two for each thread, within what devices like."""
    share = total_bytes // (2 * threads) // LEAST_BYTES * LEAST_BYTES
    return min(max(share, LEAST_BYTES), MOST_BYTES)


def plan(images: Sequence[SlotImage], most_bytes: int) -> list[Extent]:
    """Cut slots into transfers of about that many bytes. Slots may come in any order."""
    found: list[Extent] = []
    for row in sorted(range(len(images)), key=lambda i: images[i].offset_bytes):
        at = images[row].offset_bytes
        for buffer in _pieces(images[row], most_bytes):
            last = found[-1] if found else None
            if (
                last is None
                or last.end_bytes != at
                or last.nbytes + len(buffer) > most_bytes + HEADER_BYTES
                or len(last.buffers) >= MOST_BUFFERS
            ):
                last = Extent(at, at)
                found.append(last)
            last.buffers.append(buffer)
            at += len(buffer)
            last.end_bytes = at
            if not last.members or last.members[-1] != row:
                last.members.append(row)
            if buffer is images[row].header:
                last.headers.append(row)
    return found


def _pieces(image: SlotImage, most_bytes: int) -> Iterator[memoryview]:
    yield image.header
    if len(image.payload) <= most_bytes:
        yield image.payload
        return
    for at in range(0, len(image.payload), most_bytes):
        yield image.payload[at : at + most_bytes]
