"""Whether the files under a volume's directory are still those that are open, and as long.

Files that were removed, replaced or cut short under a running daemon take writes and syncs as
before, and nothing of that is there after a restart: only their names tell. Everything blocks and
is meant for a thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvstored.io.base import Files
from kvstored.tiers.nvme.volume import DATA, INDEX, SMALL, SUPERBLOCK

_FILES = (SUPERBLOCK, DATA, f"{INDEX}/data.mdb", f"{SMALL}/data.mdb")

Inventory = Mapping[str, tuple[int, int, int]]
"""By name below the directory: device, inode, and length in bytes."""


def take(files: Files, directory: Path) -> Inventory:
    """What there is now, of a volume that was just opened. Raises OSError."""
    found = {name: files.stat(directory / name) for name in _FILES}
    return {name: (s.st_dev, s.st_ino, s.st_size) for name, s in found.items()}


def fault(files: Files, directory: Path, known: Inventory) -> str:
    """What is not as it was, in words; "" if all is. Raises OSError where that cannot be told."""
    for name, was in known.items():
        if wrong := _changed(files, directory / name, was):
            return wrong
    return ""


def vanished(files: Files, directory: Path, known: Inventory, data_fd: int) -> str:
    """What is surely not as it was, in words; "" if nothing is.

    For what was just synced and committed. A name that cannot be looked up is no removal, unless
    the open data file has no name left. Never raises.
    """
    for name, was in known.items():
        try:
            wrong = _changed(files, directory / name, was)
        except OSError:
            wrong = _nameless(files, directory / DATA, data_fd)
        if wrong:
            return wrong
    return ""


def _nameless(files: Files, path: Path, fd: int) -> str:
    try:
        return "" if files.fstat(fd).st_nlink else _removed(path)
    except OSError:
        return ""  # the device is in trouble that its other calls will show


def _removed(path: Path) -> str:
    return f"{path} was removed while it was in use"


def _changed(files: Files, path: Path, was: tuple[int, int, int]) -> str:
    """What is not as it was of one file. Raises OSError where that cannot be told."""
    device, inode, length_bytes = was
    try:
        found = files.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return _removed(path)
    if (found.st_dev, found.st_ino) != (device, inode):
        return f"{path} was replaced while it was in use"
    if found.st_size < length_bytes:
        return f"{path} was cut to {found.st_size} B, of {length_bytes}, while it was in use"
    return ""
