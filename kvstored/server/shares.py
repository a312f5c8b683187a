"""How much of the daemon one namespace may take up at a time. Belongs to the verbs' loop."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from kvstored.errors import ResourceExhausted


class Shares:
    """At most half of a total for each namespace, so that none can keep every other out."""

    def __init__(self, total: int, what: str, retry_after_ms: int) -> None:
        self._most = max(1, total // 2)
        self._what = what
        self._retry_after_ms = retry_after_ms
        self._running: Counter[str] = Counter()

    def take(self, namespace: str) -> None:
        """One more, until `give_back`. Raises ResourceExhausted.

        The namespace must have been admitted: names that callers make up are not counted.
        """
        if self._running[namespace] >= self._most:
            raise ResourceExhausted(
                f"{self._most} {self._what} of namespace {namespace!r} are running, which is its "
                "half of the daemon's limit",
                f"try again in {self._retry_after_ms} ms",
                retry_after_ms=self._retry_after_ms,
            )
        self._running[namespace] += 1

    def give_back(self, namespace: str) -> None:
        """The twin of `take`."""
        self._running[namespace] -= 1

    @contextlib.contextmanager
    def taken(self, namespace: str) -> Iterator[None]:
        """`take` until the end of the block."""
        self.take(namespace)
        try:
            yield
        finally:
            self.give_back(namespace)
