"""What the daemon asks of its own process: limits, modes of new files, the interpreter's knobs."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import resource
import stat
import sys
from pathlib import Path

from kvstored.errors import ConfigError

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter lock while others wait. The default of 5 ms would let
one Python thread hold the verbs' loop up for longer than a whole look-up takes."""


def prepare() -> None:
    """Set this process up; once, before threads start."""
    faulthandler.enable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    os.umask(0o027)  # nothing of the daemon's is anybody's business outside its group
    raise_open_files()


def raise_open_files() -> int:
    """Raise the bound on open descriptors to the hard limit, and return it.

    Every client connection and every segment is one; the soft limit is for programs that select().
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def freeze_heap() -> int:
    """Take everything allocated so far out of the collector's sight; returns how many objects.

    The index stays for ever: walking a million objects of it in every full collection would stop
    the verbs' loop for a quarter of a second.
    """
    gc.collect()
    gc.freeze()
    give_back_heap()
    return gc.get_freeze_count()


def give_back_heap() -> bool:
    """Have the C library return free memory of its heaps to the system.

    What the start needed for a moment would otherwise stay, as the heap's top is kept for frames.
    False where the library has no such call; then nothing changes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return bool(trim is not None and trim(0))


def prepare_socket_directory(path: Path, key: str) -> None:
    """Make a directory for sockets, or check that it is safe to use one that exists.

    Raises ConfigError, naming `key`, where others could put a socket of their own in our place: it
    must belong to this user or root, and not everybody may write there (unless it is sticky, as
    /tmp is, which will do for a path that the operator chose).
    """
    try:
        path.mkdir(mode=0o750, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise ConfigError(
            [f"{key}: the directory {path} cannot be made: {error.strerror}; choose another path"]
        ) from error
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            [f"{key}: the directory {path} belongs to user {found.st_uid}; choose another path"]
        )
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise ConfigError([f"{key}: everybody may write in {path}; run chmod o-w {path}"])
