"""Small files read and replaced whole, and the directories that they lie in, through `Files`.

Everything blocks and raises OSError as the `Files` do.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvstored.io.base import Files


def is_there(files: Files, path: Path) -> bool:
    """Whether something lies at a path."""
    try:
        files.stat(path)
    except FileNotFoundError:
        return False
    return True


def write_all(files: Files, fd: int, data: bytes, offset_bytes: int) -> None:
    """Write all of it, in as many calls as that takes."""
    left = memoryview(data)
    while left:
        done = files.pwritev(fd, [left], offset_bytes)
        offset_bytes += done
        left = left[done:]


def read_whole(files: Files, path: Path) -> bytes:
    """What a file holds."""
    fd = files.open(path, os.O_RDONLY)
    try:
        data = memoryview(bytearray(files.stat(path).st_size))
        at = 0
        while at < len(data) and (done := files.preadv(fd, [data[at:]], at)):
            at += done
        return bytes(data[:at])
    finally:
        files.close(fd)


def replace_file(files: Files, path: Path, data: bytes) -> None:
    """Have a file (mode 0600) hold this; durable on return, and never there in part.

    It is written beside itself, as NAME.new; one that a crash has left is made anew.
    """
    fresh = path.with_name(path.name + ".new")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        fd = files.open(fresh, flags)
    except FileExistsError:
        files.unlink(fresh)  # not written over: its mode, or what it links to, may be another's
        fd = files.open(fresh, flags)
    try:
        write_all(files, fd, data, 0)
        files.fdatasync(fd)
    finally:
        files.close(fd)
    files.rename(fresh, path)
    files.sync_directory(path.parent)


def make_directory(files: Files, path: Path, *, parents_mode: int = 0o700) -> None:
    """Have a directory (mode 0700) be there, and those above it; durable on return where it was
    not.
    """
    for part in (*reversed(path.parents), path):
        if is_there(files, part):
            continue
        with suppress(FileExistsError):  # of somebody who may not have come as far as to sync it
            files.mkdir(part, 0o700 if part == path else parents_mode)
        files.sync_directory(part.parent)
