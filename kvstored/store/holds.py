"""Which keys somebody keeps from eviction although they are not leased. No I/O."""

from __future__ import annotations

from collections.abc import Iterable


class Holds:
    """Chunks that a session keeps from eviction between match and acquire, in whatever tier.

    By key, not by row: a key that was deleted and stored again meanwhile is held still.
    """

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._counts

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, keys: Iterable[bytes]) -> None:
        """Hold each key once more."""
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1

    def remove(self, keys: Iterable[bytes]) -> None:
        """Hold each key once less; the twin of `add`."""
        for key in keys:
            left = self._counts.get(key, 0) - 1
            if left > 0:
                self._counts[key] = left
            else:
                self._counts.pop(key, None)
