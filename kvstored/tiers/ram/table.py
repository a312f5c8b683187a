"""Columns of places: what is known of each object, without a Python object for any."""

from __future__ import annotations

from array import array

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


class PlaceError(ValueError):
    """A place used against its life (freed, not readable, not leased): a bug of the caller."""


class PlaceTable:
    """Rows of fixed width, reused; a place names a row and the row's generation.

    Columns are public for `places.py`, which alone changes them.
    """

    def __init__(self) -> None:
        self.segment = array("I")  # of a free row: the next free row
        self.slot = array("H")
        self.length_bytes = array("I")
        self.readers = array("I")
        self.tag = array("I")  # hash of key and part
        self.state = bytearray()
        self._generation = array("I")
        self._checksums = bytearray()
        self._free_row = _NO_ROW

    def __len__(self) -> int:
        """Rows ever made."""
        return len(self.state)

    def add(self, segment: int, slot: int, length_bytes: int) -> int:
        """Row number of a new place in state RESERVED."""
        row = self._free_row
        if row == _NO_ROW:
            row = self._append()
        else:
            self._free_row = self.segment[row]
        self.segment[row] = segment
        self.slot[row] = slot
        self.length_bytes[row] = length_bytes
        self.readers[row] = 0
        self.state[row] = RESERVED
        return row

    def remove(self, row: int) -> None:
        """Free a row; the place that named it is stale from now on."""
        self.state[row] = FREE
        self._generation[row] = (self._generation[row] + 1) & _GENERATION_MASK
        self.segment[row] = self._free_row
        self._free_row = row

    def place(self, row: int) -> int:
        """The place that names a row in use."""
        return self._generation[row] << _ROW_BITS | row

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

    def checksum(self, row: int) -> bytes:
        """The object's XXH3-128, 16 bytes."""
        return bytes(self._checksums[row * CHECKSUM_BYTES : (row + 1) * CHECKSUM_BYTES])

    def set_checksum(self, row: int, checksum: bytes) -> None:
        """Record the object's XXH3-128, 16 bytes."""
        self._checksums[row * CHECKSUM_BYTES : (row + 1) * CHECKSUM_BYTES] = checksum

    def _append(self) -> int:
        row = len(self.state)
        for column in (self.segment, self.slot, self.length_bytes, self.readers, self.tag):
            column.append(0)
        self._generation.append(1)  # so that 0 is never a place
        self.state.append(FREE)
        self._checksums.extend(bytes(CHECKSUM_BYTES))
        return row
