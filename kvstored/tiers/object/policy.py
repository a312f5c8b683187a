"""Which chunks go up to the bucket, and when. Pure.

    all         every chunk, when it is stored
    second_hit  a chunk that is seen twice: stored and then used, or stored again
    shared      a chunk from which two different chunks go on, and all that is above it: what
                requests have in common, and not what only one of them had

What was seen is remembered in tables of fixed size, one slot per hash of a chunk; of two chunks
that fall on one slot the later one stays. What is forgotten that way, or at a restart, goes up one
use later. Asked for whole runs at a time, since hits come by the thousand.

Composed by the store: it asks `stored` after a publish and `used` after hits, offers what is due,
and tells `refused` what the pool did not take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Keys = NDArray[np.uint8]
    Mask = NDArray[np.bool_]
    Hashes = NDArray[np.uint64]

SLOTS: Final = 1 << 20
"""Chunks remembered; 8 or 16 bytes each."""

KEY_BYTES: Final = 32
_ODD: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1
_FEW = np.uint64(3)  # the bits of a slot that hold its state
_SEEN = np.uint64(1)
_DUE = np.uint64(2)


@dataclass(frozen=True, slots=True)
class Due:
    """What goes up now, of the n chunks that were told of: `own` these chunks themselves, `above`
    the parents of these and everything above them.
    """

    own: Mask
    above: Mask


class Policy(ABC):
    """See the module. `space` is a number of (namespace, family); `keys` and `parents` are n rows
    of 32 bytes, zeros for a parent that there is none of; the keys of one call differ.
    """

    @abstractmethod
    def stored(self, space: int, keys: Keys, parents: Keys) -> Due:
        """Chunks were offered by a client: stored now, or there already."""

    def used(self, space: int, keys: Keys) -> Mask:
        """Chunks were hit; which of them go up now."""
        return np.zeros(len(keys), np.bool_)

    @property
    def heeds_uses(self) -> bool:
        """Whether `used` may find anything due; hits are many, and each look costs."""
        return False

    @abstractmethod
    def refused(self, space: int, keys: Keys) -> None:
        """The pool did not take these, which were due: they are due again at the next occasion."""


class All(Policy):
    """Everything, at once; what was refused then, when it is used."""

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = slots
        self._refused: Hashes | None = None
        self._left = 0  # slots in use

    def stored(self, space: int, keys: Keys, parents: Keys) -> Due:
        """As in Policy."""
        return Due(np.ones(len(keys), np.bool_), np.zeros(len(keys), np.bool_))

    def used(self, space: int, keys: Keys) -> Mask:
        """As in Policy."""
        if self._refused is None:
            return np.zeros(len(keys), np.bool_)
        hashes = hashed(space, keys)
        at = hashes % np.uint64(self._slots)
        due: Mask = self._refused[at] == hashes
        self._refused[at[due]] = 0
        self._left -= len(np.unique(at[due]))
        return due

    @property
    def heeds_uses(self) -> bool:
        """As in Policy."""
        return self._left > 0

    def refused(self, space: int, keys: Keys) -> None:
        """As in Policy."""
        if self._refused is None:
            self._refused = np.zeros(self._slots, np.uint64)
        hashes = hashed(space, keys)
        at = hashes % np.uint64(self._slots)
        self._left += int(np.count_nonzero(self._refused[np.unique(at)] == 0))
        self._refused[at] = hashes


class SecondHit(Policy):
    """What was seen twice."""

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = np.zeros(slots, np.uint64)

    def stored(self, space: int, keys: Keys, parents: Keys) -> Due:
        """As in Policy."""
        return Due(self.used(space, keys), np.zeros(len(keys), np.bool_))

    def used(self, space: int, keys: Keys) -> Mask:
        """As in Policy."""
        hashes = hashed(space, keys)
        at = hashes % np.uint64(len(self._slots))
        known = self._slots[at]
        same = (known & ~_FEW) == hashes
        due: Mask = same & ((known & _FEW) == _SEEN)
        self._slots[at] = hashes | np.where(same, _DUE, _SEEN)
        return due

    @property
    def heeds_uses(self) -> bool:
        """As in Policy."""
        return True

    def refused(self, space: int, keys: Keys) -> None:
        """As in Policy."""
        hashes = hashed(space, keys)
        self._slots[hashes % np.uint64(len(self._slots))] = hashes | _SEEN


class Shared(Policy):
    """What two different chunks go on from."""

    def __init__(self, slots: int = SLOTS) -> None:
        self._parents = np.zeros(slots, np.uint64)
        self._children = np.zeros(slots, np.uint64)

    def stored(self, space: int, keys: Keys, parents: Keys) -> Due:
        """As in Policy."""
        above, children = hashed(space, parents), hashed(space, keys)
        at = above % np.uint64(len(self._parents))
        known, child = self._parents[at], self._children[at]
        same = (known & ~_FEW) == above
        due = same & ((known & _FEW) == _SEEN) & (child != children) & parents.any(axis=1)
        state = np.where(same, known & _FEW, _SEEN)
        self._parents[at] = above | np.where(due, _DUE, state)
        self._children[at] = np.where(due, child, children)
        return Due(np.zeros(len(keys), np.bool_), due)

    def refused(self, space: int, keys: Keys) -> None:
        """As in Policy: they are due at the next child."""
        hashes = hashed(space, keys)
        at = hashes % np.uint64(len(self._parents))
        self._parents[at] = hashes | _SEEN
        self._children[at] = 0  # differs from every child


def hashed(space: int, keys: Keys) -> Hashes:
    """One number per chunk, never 0, its two lowest bits clear. Keys are hashes already."""
    words = np.ascontiguousarray(keys).reshape(-1, KEY_BYTES).view("<u8")
    salt = np.uint64((space + 1) * _ODD & _WORD)
    mixed = words[:, 0] ^ (words[:, 1] * np.uint64(_ODD)) ^ salt
    found: Hashes = (mixed & ~_FEW) | np.uint64(4)
    return found


def hash_of(space: int, key: bytes) -> int:
    """As `hashed`, of one key, at a tenth of the cost."""
    first, second = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:16], "little")
    mixed = first ^ (second * _ODD & _WORD) ^ ((space + 1) * _ODD & _WORD)
    return (mixed & ~3) | 4


POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "all": All,
    "shared": Shared,
    "second_hit": SecondHit,
}
"""By their names in the configuration (`object.write_back`)."""


def make_policy(name: str) -> Policy:
    """The policy of that name. Raises KeyError; the configuration has been checked by then."""
    return POLICIES[name]()
