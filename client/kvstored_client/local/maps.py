"""What one session has mapped: segments, areas, and when to unmap them. Shared by threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored_client.failures import GarbageError
from kvstored_client.local.segments import Mapping, map_memory
from kvstored_client.local.wake import Outbox, Unmapped
from kvstored_client.proto import kvstore_pb2 as pb

OFFSET_ALIGNMENT = 4096
_MAX_UNSEEN = 4096
_CHECKSUM_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Leased objects of one answer, all within what is mapped.

    Columns of shape [rows]: `indices` of objects in the request, `addresses` and `lengths` in
    bytes; `checksums` 16 bytes and `tiers` 1 byte per row. `mappings` keep the memory mapped.
    """

    indices: NDArray[np.int64]
    addresses: NDArray[np.int64]
    lengths: NDArray[np.int64]
    checksums: bytes
    tiers: bytes
    mappings: list[Mapping]


class Table:
    """Mappings of one kind by id. Ids are never reused."""

    def __init__(self, outbox: Outbox, *, areas: bool) -> None:
        self._outbox = outbox
        self._areas = areas
        self._lock = threading.Lock()
        self._mapped: dict[int, Mapping] = {}
        self._coming: set[int] = set()
        # Retired before they came (True: while they were being mapped).
        self._unwanted: dict[int, bool] = {}

    def add(self, number: int, fd: int, nbytes: int, deadline: float) -> None:
        """Map one; not if it was retired meanwhile. Raises MapError and GarbageError."""
        with self._lock:
            if self._unwanted.pop(number, None) is not None:
                return
            if number in self._mapped or number in self._coming:
                raise GarbageError(f"{self._name(number)} came twice")
            self._coming.add(number)
        mapping = None
        try:
            mapping = map_memory(fd, nbytes, self._outbox, deadline, writable=self._areas)
        finally:
            with self._lock:
                self._coming.discard(number)
                retired = self._unwanted.pop(number, None)
                if mapping is not None and retired is None:
                    self._mapped[number] = mapping
            if retired is not None and mapping is not None:
                mapping.retiring = Unmapped(number, self._areas)

    def get(self, number: int) -> Mapping:
        """Raises GarbageError."""
        mapping = self._mapped.get(number)
        if mapping is None:
            raise GarbageError(f"{self._name(number)} was never lent")
        return mapping

    def retire(self, number: int) -> bool:
        """Let go of one; whether it is unmapped at once. Else the outbox says when it is."""
        with self._lock:
            mapping = self._mapped.pop(number, None)
            if mapping is None:
                if len(self._unwanted) >= _MAX_UNSEEN:
                    raise GarbageError(f"{_MAX_UNSEEN} segments were retired that never came")
                coming = number in self._coming
                self._unwanted[number] = coming
                return not coming
        mapping.retiring = Unmapped(number, self._areas)
        return False

    def clear(self) -> None:
        """The session is over: each goes with the last view of it."""
        with self._lock:
            mapped, self._mapped = self._mapped, {}
        del mapped

    def _name(self, number: int) -> str:
        return f"{'area' if self._areas else 'segment'} {number}"


def resolve(segments: Table, reply: pb.AcquireReply) -> Rows:
    """The rows of an answer as addresses. Raises GarbageError unless each is within its segment."""
    count = len(reply.indices)
    columns = (reply.segment_ids, reply.offsets_bytes, reply.lengths_bytes, reply.tiers)
    whole = all(len(column) == count for column in columns)
    if not whole or len(reply.checksums) != count * _CHECKSUM_BYTES:
        raise GarbageError(f"{count} leased objects with columns of other lengths")
    try:
        offsets = np.fromiter(reply.offsets_bytes, np.int64, count)
        lengths = np.fromiter(reply.lengths_bytes, np.int64, count)
    except OverflowError as error:
        raise GarbageError("a leased object of 2^63 bytes, or there") from error
    mappings = {number: segments.get(number) for number in set(reply.segment_ids)}
    sizes: NDArray[np.int64] | int
    bases: NDArray[np.int64] | int
    if len(mappings) == 1:
        (mapping,) = mappings.values()
        sizes, bases = mapping.nbytes, mapping.address
    else:
        numbers = list(reply.segment_ids)
        sizes = np.array([mappings[number].nbytes for number in numbers], np.int64)
        bases = np.array([mappings[number].address for number in numbers], np.int64)
    # Subtracted, not added: a sum of what a peer says may wrap.
    wrong = (lengths > sizes - offsets) | (lengths <= 0) | (offsets & (OFFSET_ALIGNMENT - 1) != 0)
    if wrong.any():
        raise GarbageError("a leased object lies outside its segment")
    return Rows(
        np.fromiter(reply.indices, np.int64, count),
        offsets + bases,
        lengths,
        reply.checksums,
        reply.tiers,
        list(mappings.values()),
    )
