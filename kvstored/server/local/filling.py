"""Copies payload bytes into reserved extents and hashes the copy while it is in the cache.

Runs in a mover's thread; the copies and hashes let other threads run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import xxhash

from kvstored.server.limits import PIECE_BYTES
from kvstored.store.api import Received, WantedObject

STEP_BYTES = 2 << 20
"""Taken at a time; copied and hashed by pieces."""


class Filling:
    """Fills the wanted objects in order. What is hashed is the daemon's copy, never the source.

    Keeps no view but while it fills one: `let_go` after the last `take`.
    """

    def __init__(self, wanted: Sequence[WantedObject]) -> None:
        self._wanted = wanted
        self._next = 0  # index of the object that is being filled
        self._filled = 0  # its bytes that are in place
        self.received: list[Received] = []
        self.taken_bytes = 0

    def take(self, source: int, nbytes: int) -> None:
        """Take the next bytes of the payload from an address, objects back to back.

        All of them belong to wanted objects; the caller has checked that.
        """
        while nbytes:
            wanted = self._wanted[self._next]
            taken = min(nbytes, STEP_BYTES, wanted.length_bytes - self._filled)
            if taken == wanted.length_bytes <= PIECE_BYTES:
                self._whole(wanted, source)
            else:
                taken = self._part(wanted, source, taken)
            source += taken
            nbytes -= taken
            self.taken_bytes += taken

    def _whole(self, wanted: WantedObject, source: int) -> None:
        """An object that is not larger than a piece, in one go."""
        ctypes.memmove(_address(wanted.view), source, wanted.length_bytes)
        digest = xxhash.xxh3_128_digest(wanted.view)
        # Of inputs of more than 240 bytes, the low half of XXH3-128 is XXH3-64.
        self.received.append(Received(wanted.index, digest, digest[:7:-1]))
        self._next += 1

    def _part(self, wanted: WantedObject, source: int, nbytes: int) -> int:
        """Some bytes of an object, up to the end of their piece; how many."""
        start = self._filled
        if not start:
            self._hash = xxhash.xxh3_128()
            self._pieces: list[bytes] = []
            self._piece = xxhash.xxh3_64()
        length = wanted.length_bytes
        piece_end = min(length, (start // PIECE_BYTES + 1) * PIECE_BYTES)
        stop = min(start + nbytes, piece_end)
        ctypes.memmove(_address(wanted.view) + start, source, stop - start)
        with wanted.view[start:stop] as own:
            self._hash.update(own)
            if length > PIECE_BYTES:
                self._piece.update(own)
        if stop == piece_end and length > PIECE_BYTES:
            self._pieces.append(self._piece.digest()[::-1])
            self._piece.reset()
        self._filled = stop
        if stop == length:
            digest = self._hash.digest()
            pieces = b"".join(self._pieces) or digest[:7:-1]
            self.received.append(Received(wanted.index, digest, pieces))
            self._next += 1
            self._filled = 0
        return stop - start

    def let_go(self) -> None:
        """Hold no view any longer; `take` must not be called afterwards."""
        self._wanted = ()


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
