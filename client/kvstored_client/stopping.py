"""Asking a call under way to end: one flag from whoever gives up to whoever works."""

from __future__ import annotations

import threading
from collections.abc import Callable


class StopFlag:
    """Set once, by any thread, for good. `is_set` costs an attribute's read.

    Not for signal handlers and finalisers: `set` takes a lock.
    """

    __slots__ = ("_callbacks", "_lock", "_set")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[object, Callable[[], None]] = {}
        self._set = False

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._set

    def set(self) -> None:
        """Set it, and call what waits for that, in this thread. Again: nothing."""
        with self._lock:
            if self._set:
                return
            self._set = True
            callbacks, self._callbacks = list(self._callbacks.values()), {}
        for callback in callbacks:
            callback()

    def on_set(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once when the flag is set, in the thread that sets it; at once if it is.

        It must be quick and must not raise. Returns what takes it back: a step that has ended
        leaves nothing behind (the callback may be running at that moment, in the other thread).
        """
        entry = object()
        with self._lock:
            if not self._set:
                self._callbacks[entry] = callback
                return lambda: self._forget(entry)
        callback()
        return _nothing

    def _forget(self, entry: object) -> None:
        with self._lock:
            self._callbacks.pop(entry, None)


def _nothing() -> None:
    pass
