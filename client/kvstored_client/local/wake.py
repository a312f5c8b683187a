"""Waking a thread that polls, also from a finaliser: an eventfd, and a queue without locks."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import dataclass


class Wake:
    """An eventfd. Closed when the last who could write to it lets go: a number that is closed
    earlier could be somebody else's file by the time that a finaliser writes to it.
    """

    __slots__ = ("fd",)

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        """Make it readable. Takes no lock, never blocks, never raises."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make it unreadable until it is set again."""
        with contextlib.suppress(OSError):
            os.eventfd_read(self.fd)

    def close_in_child(self) -> None:
        """After a fork, in the child: it shares the eventfd with its parent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close_in_child()


@dataclass(frozen=True, slots=True)
class Released:
    """The last object that looked at a grant is gone."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class Unmapped:
    """A segment or area that was to be unmapped is."""

    mapping_id: int
    is_area: bool


class Closing:
    """The client itself is gone."""


class Outbox:
    """What finalisers have to say to the session's thread."""

    __slots__ = ("_items", "wake")

    def __init__(self) -> None:
        self._items: deque[Released | Unmapped | Closing] = deque()
        self.wake = Wake()

    def post(self, item: Released | Unmapped | Closing) -> None:
        """Leave a word. May be called in a finaliser, in any thread: it takes no lock."""
        self._items.append(item)
        self.wake.set()

    def take(self) -> list[Released | Unmapped | Closing]:
        """All that was left since the last time."""
        self.wake.clear()
        taken = []
        while self._items:
            taken.append(self._items.popleft())
        return taken
