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
    for name, (device, inode, length_bytes) in known.items():
        try:
            found = files.stat(directory / name)
        except (FileNotFoundError, NotADirectoryError):
            return f"{directory / name} was removed while it was in use"
        if (found.st_dev, found.st_ino) != (device, inode):
            return f"{directory / name} was replaced while it was in use"
        if found.st_size < length_bytes:
            return (
                f"{directory / name} was cut to {found.st_size} B, of {length_bytes}, while it was "
                "in use"
            )
    return ""
