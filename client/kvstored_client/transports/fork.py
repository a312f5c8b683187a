"""Fork: no call may be under way in grpc's threads while the process is copied.

A child that inherits a live connection shares its socket with the parent: either may read or write
the other's bytes, and grpc's locks stay held by threads that the child does not have. So before a
fork every transport of the process stops: new calls wait, running ones get a moment, what is left
is interrupted (and run again in the parent, by itself), and the connection is closed. Afterwards
parent and child each connect anew.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol


class ForkAware(Protocol):
    """Called in the thread that forks."""

    def before_fork(self) -> None:
        """Stand still."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Start anew; locks may be held by threads that no longer exist."""


_members: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_lock = threading.Lock()
_registered = False


def join(member: ForkAware) -> None:
    """Tell `member` of every fork from now on."""
    with _lock:
        _members.add(member)


def register_hooks() -> None:
    """Must come after grpc's first channel: hooks run in reverse order before a fork, and ours has
    to end the calls before grpc's own waits for its threads.
    """
    global _registered
    with _lock:
        if _registered:
            return
        _registered = True
        os.register_at_fork(
            before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
        )


_stopped: list[ForkAware] = []


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    # A fork cannot be refused from here, and what is not stopped cleanly still starts anew.
    with contextlib.suppress(Exception):
        yield


def _before() -> None:
    _lock.acquire()
    _stopped[:] = list(_members)
    for member in _stopped:
        with _quietly():
            member.before_fork()


def _after_in_parent() -> None:
    for member in _stopped:
        with _quietly():
            member.after_fork_in_parent()
    _stopped.clear()
    _lock.release()


def _after_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for member in _stopped:
        with _quietly():
            member.after_fork_in_child()
    _stopped.clear()
