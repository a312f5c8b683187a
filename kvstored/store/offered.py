"""Which objects a bucket is known to have, or will be given: what need not be offered once more.

A table of fixed size, a slot per hash of an object; of two that fall on one slot the later one
stays, and the other is offered once more than need be. An entry is of the object as it is held here
(its row of the index and that row's generation): one that was lost here and is stored anew may have
been lost by the bucket, too, so it is offered anew.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstored.store.namespace import Namespace
from kvstored.tiers.object.policy import KEY_BYTES, SLOTS, hash_of, hashed

_PART_STEP: Final = 0xD1B54A32D192ED03  # odd
_WORD: Final = (1 << 64) - 1

Hashes = NDArray[np.uint64]
Mask = NDArray[np.bool_]


class Offered:
    """See the module. Hashes are those of `hashes` and `hash_one`; `held` those of `held_as`."""

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = np.uint64(slots)
        self._hashes = np.zeros(slots, np.uint64)
        self._held = np.zeros(slots, np.uint64)

    def known(self, hashes: Hashes, held: Hashes) -> Mask:
        """Of which objects the bucket has what is held here now, or will be given it."""
        at = hashes % self._slots
        known: Mask = (self._hashes[at] == hashes) & (self._held[at] == held)
        return known

    def outdated(self, hashes: Hashes, held: Hashes) -> Mask:
        """Which objects were offered, or came from the bucket, in an earlier life of theirs."""
        at = hashes % self._slots
        outdated: Mask = (self._hashes[at] == hashes) & (self._held[at] != held)
        return outdated

    def note(self, hashes: Hashes, held: Hashes) -> None:
        """These were offered."""
        at = hashes % self._slots
        self._hashes[at], self._held[at] = hashes, held

    def note_one(self, number: int, held: int) -> None:
        """As `note`."""
        at = number % len(self._hashes)
        self._hashes[at], self._held[at] = number, held

    def drop(self, hashes: Hashes) -> None:
        """The bucket has, or is about to have, these no more."""
        at = hashes % self._slots
        self._hashes[at[self._hashes[at] == hashes]] = 0

    def drop_one(self, number: int, held: int) -> None:
        """What was held so has not gone up; another that took its place stays noted."""
        at = number % len(self._hashes)
        if (self._hashes[at], self._held[at]) == (number, held):
            self._hashes[at] = 0

    def clear(self) -> None:
        """The bucket may have lost anything."""
        self._hashes[:] = 0


def hashes(space: int, packed: bytes, parts: Hashes) -> Hashes:
    """One number per object: keys of 32 bytes back to back, and their parts (or one for all)."""
    chunks = hashed(space, np.frombuffer(packed, np.uint8).reshape(-1, KEY_BYTES))
    return chunks + parts * np.uint64(_PART_STEP)  # wraps around


def hash_one(space: int, key: bytes, part: int) -> int:
    """As `hashes`, of one object, at a tenth of the cost."""
    return (hash_of(space, key) + part * _PART_STEP) & _WORD


def held_as(ns: Namespace, row: int) -> int:
    """How an object is held here: differs from any other object's, and from its next life's."""
    return row << 32 | ns.index.generation[row]
