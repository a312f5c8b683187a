"""Columns of places: what is known of each object, without a Python object for any."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CHECKSUM_BYTES = 16
ROW_BYTES = 5 * 4 + 2 + 1 + CHECKSUM_BYTES

FREE = 0
RESERVED = 1
READABLE = 2
DOOMED = 3  # deleted under lease: unreadable, its bytes stay until the last release

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_GENERATION_MASK = (1 << 31) - 1  # places stay below 2**63
_NO_ROW = _ROW_MASK
_STEP = 1024  # rows made at once; the arrays' own slack is memory that is not touched yet


class PlaceError(ValueError):
    """A place used against its life (freed, not readable, not leased): a bug of the caller."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The table's columns as numpy sees them, for many rows at once. Not to be kept: growth of
    the table replaces them.
    """

    segment: NDArray[np.uint32]
    slot: NDArray[np.uint16]
    length_bytes: NDArray[np.uint32]
    readers: NDArray[np.uint32]
    state: NDArray[np.uint8]
    generation: NDArray[np.uint32]
    checksum: NDArray[np.uint64]  # rows of 2


class PlaceTable:
    """Rows of fixed width, reused; a place names a row and the row's generation.

    Arrays are public for `places.py`, which alone changes them: one row at a time in the arrays,
    many at once in `columns`.
    """

    def __init__(self) -> None:
        self.segment = array("I")  # of a free row: the next free row
        self.slot = array("H")
        self.length_bytes = array("I")
        self.readers = array("I")
        self.tag = array("I")  # hash of key and part
        self.state = array("B")
        self._generation = array("I")
        self._checksums = array("B")
        self._free_row = _NO_ROW
        self.columns = self._columns()

    def __len__(self) -> int:
        """Rows ever made."""
        return len(self.state)

    def add(self, segment: int, slot: int, length_bytes: int) -> int:
        """Row number of a new place in state RESERVED."""
        if self._free_row == _NO_ROW:
            self._grow()
        row = self._free_row
        self._free_row = self.segment[row]
        self.segment[row] = segment
        self.slot[row] = slot
        self.length_bytes[row] = length_bytes
        self.readers[row] = 0
        self.state[row] = RESERVED
        return row

    def add_many(
        self, segment: int, slots: NDArray[np.int64], length_bytes: int
    ) -> NDArray[np.int64]:
        """Row numbers of new places in state RESERVED, one per slot."""
        rows = np.fromiter(self._free_rows(len(slots)), np.int64, len(slots))
        columns = self.columns
        columns.segment[rows] = segment
        columns.slot[rows] = slots
        columns.length_bytes[rows] = length_bytes
        columns.readers[rows] = 0
        columns.state[rows] = RESERVED
        return rows

    def remove(self, row: int) -> None:
        """Free a row; the place that named it is stale from now on."""
        self.state[row] = FREE
        self._generation[row] = (self._generation[row] + 1) & _GENERATION_MASK
        self.segment[row] = self._free_row
        self._free_row = row

    def place(self, row: int) -> int:
        """The place that names a row in use."""
        return self._generation[row] << _ROW_BITS | row

    def places(self, rows: NDArray[np.int64]) -> list[int]:
        """The places that name rows in use."""
        places: list[int] = (
            self.columns.generation[rows].astype(np.int64) << _ROW_BITS | rows
        ).tolist()
        return places

    def row(self, place: int) -> int:
        """Row of a place. Raises PlaceError when the place was freed or never given."""
        row = place & _ROW_MASK
        if (
            not 0 <= row < len(self.state)
            or self._generation[row] != place >> _ROW_BITS
            or self.state[row] == FREE
        ):
            raise PlaceError(f"place {place:#x} is not in use")
        return row

    def rows(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of places, in order. Raises PlaceError when one was freed or never given."""
        rows = places & _ROW_MASK
        columns = self.columns
        try:
            named = columns.generation[rows] == places >> _ROW_BITS
        except IndexError:  # a row beyond the table: find out which
            named = rows < len(self)
        else:
            named &= columns.state[rows] != FREE
        if not named.all():
            raise PlaceError(f"place {int(places[named.argmin()]):#x} is not in use")
        return rows

    def checksum(self, row: int) -> bytes:
        """The object's XXH3-128, 16 bytes."""
        return self._checksums[row * CHECKSUM_BYTES : (row + 1) * CHECKSUM_BYTES].tobytes()

    def set_checksum(self, row: int, checksum: bytes) -> None:
        """Record the object's XXH3-128, 16 bytes."""
        self._checksums[row * CHECKSUM_BYTES : (row + 1) * CHECKSUM_BYTES] = array("B", checksum)

    def _free_rows(self, count: int) -> Iterator[int]:
        """Rows that are free, taken from the list of them."""
        for _ in range(count):
            if self._free_row == _NO_ROW:
                self._grow()
            row = self._free_row
            self._free_row = self.segment[row]
            yield row

    def _grow(self) -> None:
        """More rows, all of them free."""
        first = len(self)
        del self.columns  # an array with a view does not grow
        for name, per_row in _ARRAYS:
            more = bytes(_STEP * per_row * getattr(self, name).itemsize)
            try:
                getattr(self, name).frombytes(more)
            except BufferError:  # a frame that a traceback keeps alive still has a view
                setattr(self, name, getattr(self, name)[:])
                getattr(self, name).frombytes(more)
        self.columns = columns = self._columns()
        columns.generation[first:] = 1  # so that 0 is never a place
        columns.segment[first:] = np.arange(first + 1, first + _STEP + 1)
        self.segment[-1] = _NO_ROW
        self._free_row = first

    def _columns(self) -> Columns:
        return Columns(
            np.frombuffer(self.segment, np.uint32),
            np.frombuffer(self.slot, np.uint16),
            np.frombuffer(self.length_bytes, np.uint32),
            np.frombuffer(self.readers, np.uint32),
            np.frombuffer(self.state, np.uint8),
            np.frombuffer(self._generation, np.uint32),
            np.frombuffer(self._checksums, np.uint64).reshape(-1, 2),
        )


_ARRAYS = (
    ("segment", 1),
    ("slot", 1),
    ("length_bytes", 1),
    ("readers", 1),
    ("tag", 1),
    ("state", 1),
    ("_generation", 1),
    ("_checksums", CHECKSUM_BYTES),
)
