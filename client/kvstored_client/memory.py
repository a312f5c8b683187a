"""Bytes at addresses: copies and hashes that release the GIL (memoryview assignment does not)."""

from __future__ import annotations

import ctypes
from typing import cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored_client.buffers import Regions
from kvstored_client.fragments import FEW, copy, move

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_view_at = ctypes.pythonapi.PyMemoryView_FromMemory
_view_at.restype = ctypes.py_object
_view_at.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_PYBUF_READ = 0x100


def address_of(data: bytes) -> int:
    """Where a bytes object's contents lie; valid while it lives."""
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


class Cursor:
    """Goes through the fragments of some Regions, as if they lay back to back."""

    __slots__ = ("_address", "_ends", "_fragment", "_left", "_regions")

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._ends: NDArray[np.int64] | None = None  # of each fragment, in that row
        self._fragment = -1
        self._address = 0
        self._left = 0

    def seek(self, number: int) -> None:
        """Go to the beginning of object `number`."""
        self._open(self._regions.first.item(number))

    def _open(self, fragment: int) -> None:
        self._fragment = fragment
        self._address = self._regions.addresses.item(fragment)
        self._left = self._regions.lengths.item(fragment)

    def write_bytes(self, data: bytes) -> None:
        """Copy all of `data` to here."""
        nbytes = len(data)
        if self._left >= nbytes:
            copy(self._address, data, nbytes)
            self._address += nbytes
            self._left -= nbytes
        else:
            self.write(address_of(data), nbytes)

    def write(self, source: int, nbytes: int) -> None:
        """Copy `nbytes` from an address to here."""
        if self._is_far(nbytes):
            addresses, lengths, offsets = self._take_all(nbytes)
            move(addresses, offsets + source, lengths)
            return
        while nbytes:
            address, count = self._take(nbytes)
            copy(address, source, count)
            source += count
            nbytes -= count

    def read(self, target: int, nbytes: int) -> None:
        """Copy `nbytes` from here to an address."""
        if self._is_far(nbytes):
            addresses, lengths, offsets = self._take_all(nbytes)
            move(offsets + target, addresses, lengths)
            return
        while nbytes:
            address, count = self._take(nbytes)
            copy(target, address, count)
            target += count
            nbytes -= count

    def _take(self, nbytes: int) -> tuple[int, int]:
        """(address, bytes) of the next stretch, at most `nbytes` of it; goes behind it."""
        while not self._left:
            self._open(self._fragment + 1)
        address = self._address
        count = min(nbytes, self._left)
        self._address += count
        self._left -= count
        return address, count

    def _is_far(self, nbytes: int) -> bool:
        """Whether the next `nbytes` lie in so many fragments that arrays pay."""
        if nbytes <= self._left:
            return False
        lengths = self._regions.lengths
        ahead = self._fragment + FEW
        if ahead >= len(lengths):
            return False
        if self._ends is None:
            self._ends = np.cumsum(lengths)
        here = self._ends.item(self._fragment) if self._fragment >= 0 else 0
        return here - self._left + nbytes > self._ends.item(ahead)

    def _take_all(
        self, nbytes: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(addresses, lengths, offsets in the stream) of the next `nbytes`; goes behind them."""
        ends = cast("NDArray[np.int64]", self._ends)
        while not self._left:
            self._open(self._fragment + 1)
        first = self._fragment
        stop = ends.item(first) - self._left + nbytes
        last = int(np.searchsorted(ends, stop))
        addresses = self._regions.addresses[first : last + 1].copy()
        lengths = self._regions.lengths[first : last + 1].copy()
        addresses[0], lengths[0] = self._address, self._left
        beyond = ends.item(last) - stop
        lengths[-1] -= beyond
        self._open(last)
        self._address += self._left - beyond
        self._left = beyond
        return addresses, lengths, np.cumsum(lengths) - lengths


def new_frame(nbytes: int) -> bytes:
    """A bytes object with arbitrary contents, to be filled before anyone else sees it.

    That is what PyBytes_FromStringAndSize without a source is for; it spares a copy that would
    hold the GIL.
    """
    return cast("bytes", _new_bytes(None, nbytes))


def checksum(regions: Regions, number: int) -> bytes:
    """XXH3-128 of object `number`, canonical form, 16 bytes."""
    digest = xxhash.xxh3_128()
    here = slice(regions.first.item(number), regions.first.item(number + 1))
    addresses, lengths = regions.addresses[here].tolist(), regions.lengths[here].tolist()
    for address, nbytes in zip(addresses, lengths, strict=True):
        digest.update(_view_at(address, nbytes, _PYBUF_READ))
    return digest.digest()
