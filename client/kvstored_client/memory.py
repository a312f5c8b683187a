"""Bytes at addresses: copies and hashes that release the GIL (memoryview assignment does not)."""

from __future__ import annotations

import ctypes
from typing import cast

import numpy as np
import xxhash

from kvstored_client.buffers import Regions

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_view_at = ctypes.pythonapi.PyMemoryView_FromMemory
_view_at.restype = ctypes.py_object
_view_at.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_PYBUF_READ = 0x100

copy = ctypes.memmove
"""copy(destination address, source address, bytes)."""


def address_of(data: bytes) -> int:
    """Where a bytes object's contents lie; valid while it lives."""
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


class Cursor:
    """Goes through the objects of some Regions, fragment by fragment."""

    __slots__ = ("_address", "_fragment", "_left", "_regions")

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._fragment = 0
        self._address = 0
        self._left = 0

    def seek(self, number: int) -> None:
        """Go to the beginning of object `number`."""
        self._open(self._regions.first[number])

    def _open(self, fragment: int) -> None:
        self._fragment = fragment
        self._address = self._regions.addresses[fragment]
        self._left = self._regions.lengths[fragment]

    def take(self, nbytes: int) -> tuple[int, int]:
        """(address, bytes) of the next stretch, at most `nbytes` of it; goes behind it."""
        if self._left == 0:
            self._open(self._fragment + 1)
        address = self._address
        count = min(nbytes, self._left)
        self._address += count
        self._left -= count
        return address, count

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
        while nbytes:
            address, count = self.take(nbytes)
            copy(address, source, count)
            source += count
            nbytes -= count

    def read(self, target: int, nbytes: int) -> None:
        """Copy `nbytes` from here to an address."""
        while nbytes:
            address, count = self.take(nbytes)
            copy(target, address, count)
            target += count
            nbytes -= count


def new_frame(nbytes: int) -> bytes:
    """A bytes object with arbitrary contents, to be filled before anyone else sees it.

    That is what PyBytes_FromStringAndSize without a source is for; it spares a copy that would
    hold the GIL.
    """
    return cast("bytes", _new_bytes(None, nbytes))


def checksum(regions: Regions, number: int) -> bytes:
    """XXH3-128 of object `number`, canonical form, 16 bytes."""
    digest = xxhash.xxh3_128()
    for fragment in range(regions.first[number], regions.first[number + 1]):
        address, nbytes = regions.addresses[fragment], regions.lengths[fragment]
        digest.update(_view_at(address, nbytes, _PYBUF_READ))
    return digest.digest()
