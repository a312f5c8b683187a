"""Leaf-first LRU over the chunks that one namespace holds in one tier.

A doubly linked list held in arrays beside the index. Whoever uses a chunk touches its ancestors
after it, so a parent is always at least as recent as its children and the old end of the list is a
leaf; rows that may not go (a resident child, a lease, a pin) are passed over.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

NONE = -1


class LeafLru:
    """Recency order of chunk rows."""

    def __init__(self) -> None:
        self._older = array("i")
        self._newer = array("i")
        self._oldest = NONE
        self._newest = NONE

    def add(self, row: int) -> None:
        """Put a row at the recent end. It must not be in the list."""
        if row >= len(self._older):
            missing = row + 1 - len(self._older)
            self._older.extend([NONE] * missing)
            self._newer.extend([NONE] * missing)
        self._older[row], self._newer[row] = self._newest, NONE
        if self._newest == NONE:
            self._oldest = row
        else:
            self._newer[self._newest] = row
        self._newest = row

    def remove(self, row: int) -> None:
        """Take a row out. It must be in the list."""
        older, newer = self._older[row], self._newer[row]
        if older == NONE:
            self._oldest = newer
        else:
            self._newer[older] = newer
        if newer == NONE:
            self._newest = older
        else:
            self._older[newer] = older
        self._older[row] = self._newer[row] = NONE

    def touch(self, row: int) -> None:
        """Move a row to the recent end."""
        if self._newest != row:
            self.remove(row)
            self.add(row)

    def from_oldest(self) -> Iterator[int]:
        """Rows from the least recently used on. The list may lose the row just given, no other."""
        row = self._oldest
        while row != NONE:
            following = self._newer[row]
            yield row
            row = following

    def victim(self, evictable: Callable[[int], bool]) -> int:
        """The evictable row used longest ago; NONE if there is none."""
        return next(filter(evictable, self.from_oldest()), NONE)
