"""Fork: grpc must not run in the process while it is copied.

A child that inherits a live connection shares its socket with the parent: either may read or write
the other's bytes, and grpc's locks stay held by threads that the child does not have. grpc's own
fork handlers help only a process that is making no call, and not always a child's own child. So
before a fork every transport of the process stops: new calls wait, running ones get a moment, what
is left is interrupted (and run again in the parent, by itself), and the connection is dropped. With
its last channel gone grpc shuts down, threads and all. Afterwards parent and child each begin anew.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
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


_GRPC_THREADS = (
    "event_engine",
    "lifeguard",
    "grpc_",
    "timer_manager",
    "resolver-exec",
    "default-exec",
)
"""How the threads of grpc's core are called in the kernel; they end when it has shut down."""

_SHUTDOWN_LIMIT_S = 1.0
_SHARED_LIMIT_S = 0.05
"""For a process in which others use grpc too, as the last fork has shown."""

_COLLECT_AT_S = 0.032

_limit_s = _SHUTDOWN_LIMIT_S

_members: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_lock = threading.Lock()
_registered = False


def join(member: ForkAware) -> None:
    """Tell `member` of every fork from now on."""
    with _lock:
        _members.add(member)


def register_hooks() -> None:
    """To be called after grpc's first channel was made: hooks run in reverse order before a fork,
    and ours has to end the calls before any of grpc's waits for its threads.
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
    with _quietly():
        _await_shutdown()


def _await_shutdown() -> None:
    """Wait until grpc's core has ended. It does not where others in the process use it too; then
    its own fork handlers have to do.
    """
    global _limit_s
    end = time.monotonic() + _limit_s
    pause_s = 0.001
    while (runs := _grpc_runs()) and time.monotonic() < end:
        time.sleep(pause_s)
        pause_s *= 2
        if pause_s == _COLLECT_AT_S:
            gc.collect()  # a channel may hang in a reference cycle
    _limit_s = _SHARED_LIMIT_S if runs else _SHUTDOWN_LIMIT_S


def _grpc_runs() -> bool:
    tasks = "/proc/self/task"
    for task in os.listdir(tasks):
        with contextlib.suppress(OSError), open(f"{tasks}/{task}/comm") as comm:
            if comm.read().startswith(_GRPC_THREADS):
                return True
    return False


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
