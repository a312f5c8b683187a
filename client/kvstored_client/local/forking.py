"""Fork: a child begins a session of its own. Its parent's goes on, undisturbed.

Nothing has to stand still: the child closes its copies of the descriptors without a word, and what
is mapped is not mapped in the child at all.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Protocol


class Forked(Protocol):
    """What has to begin anew."""

    def after_fork_in_child(self) -> None:
        """Called in the child; locks may be held by threads that it does not have."""


_members: weakref.WeakSet[Forked] = weakref.WeakSet()
_lock = threading.Lock()
_registered = False


def join(member: Forked) -> None:
    """Tell `member` in each child from now on."""
    global _registered
    with _lock:
        _members.add(member)
        if not _registered:
            _registered = True
            os.register_at_fork(after_in_child=_after_in_child)


def _after_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for member in list(_members):
        # A fork cannot be taken back from here.
        with contextlib.suppress(Exception):
            member.after_fork_in_child()
