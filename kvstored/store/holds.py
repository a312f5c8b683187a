"""Which keys somebody keeps from eviction although they are not leased. No I/O."""

from __future__ import annotations

from collections.abc import Iterable


class Holds:
    """Chunks that a session keeps from eviction between match and acquire, in whatever tier.

    By key, not by row: a key that was deleted and stored again meanwhile is held still. A key that
    was in RAM when it was held stays there; one that was below is only kept from being lost.
    """

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._in_ram: dict[bytes, int] = {}  # of those, how many were in RAM

    def __contains__(self, key: bytes) -> bool:
        return key in self._counts

    def __bool__(self) -> bool:
        return bool(self._counts)

    def in_ram(self, key: bytes) -> bool:
        """Whether somebody holds the key who found it in RAM."""
        return key in self._in_ram

    def add(self, keys: Iterable[bytes], in_ram: Iterable[bytes] = ()) -> None:
        """Hold each key once more. `in_ram`: those of them that are in RAM now."""
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1
        for key in in_ram:
            self._in_ram[key] = self._in_ram.get(key, 0) + 1

    def remove(self, keys: Iterable[bytes]) -> None:
        """Hold each key once less; the twin of `add`."""
        for key in keys:
            left = self._counts.get(key, 0) - 1
            if left > 0:
                self._counts[key] = left
                # Who held it in RAM is not told apart: it stays as long as it may have to.
                self._in_ram.update({key: left} if self._in_ram.get(key, 0) > left else {})
            else:
                self._counts.pop(key, None)
                self._in_ram.pop(key, None)
