"""What a device may hold after a power loss, worked out from the changes made to it.

A change is *certain* from the event on that made it durable; before that, and from the event on
that began it, the device may have it, have it in part, or not have it. A `Survival` decides. What
is decided for one file says nothing of another: only a sync orders things.
"""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAGE_BYTES = 4096
_SECTORS_BYTES = (512, 4096)
META_PAGES = (0, 1)
"""Of an LMDB file: what a commit writes last, once everything else of it is on the device."""


@dataclass(slots=True)
class Change:
    """One change to a file or directory, with the numbers of the events of its life."""

    began: int
    ended: int | None = None  # None: it failed or is under way, and no sync covers it
    durable: int | None = None
    lost: bool = False  # a sync that covered it failed; no later one makes up for that

    def certain(self, at: int) -> bool:
        """Whether the device has it for sure just before the event of that number."""
        return self.durable is not None and self.durable < at


@dataclass(slots=True)
class Write(Change):
    """Bytes written to a file."""

    offset_bytes: int = 0
    data: bytes = b""


@dataclass(slots=True)
class Resize(Change):
    """A file's new length: at least that where `grow`, else exactly that."""

    length_bytes: int = 0
    grow: bool = False


@dataclass(slots=True)
class Pages(Change):
    """Pages of an LMDB file that differ from what it was before, by number.

    `one_commit`: they are one commit's, so that some of them may survive without the meta page.
    """

    pages: dict[int, bytes] = field(default_factory=dict)
    one_commit: bool = False


@dataclass(slots=True)
class Entry(Change):
    """Names of a directory that now mean something else; None: nothing. One change is atomic."""

    names: dict[str, Node | None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class File:
    """A file, whatever its name; its changes in the order they began."""

    changes: list[Change] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Directory:
    """A directory; `live` is what the running system sees in it."""

    changes: list[Change] = field(default_factory=list)
    live: dict[str, Node] = field(default_factory=dict)


Node = File | Directory


class Survival(ABC):
    """Decides what becomes of changes that are not certain."""

    @abstractmethod
    def ranges(self, length_bytes: int) -> list[tuple[int, int]]:
        """Begin and end of the parts of a write of that length that are on the device."""

    @abstractmethod
    def whole(self) -> bool:
        """Whether a change that cannot be torn is on the device."""

    @abstractmethod
    def leading(self, count: int) -> int:
        """How many of a directory's changes are on the device: they keep their order."""


class Nothing(Survival):
    """Only what was synced is left."""

    def ranges(self, length_bytes: int) -> list[tuple[int, int]]:
        """See Survival."""
        del length_bytes
        return []

    def whole(self) -> bool:
        """See Survival."""
        return False

    def leading(self, count: int) -> int:
        """See Survival."""
        del count
        return 0


class Everything(Survival):
    """The device had it all, as after the death of the process alone."""

    def ranges(self, length_bytes: int) -> list[tuple[int, int]]:
        """See Survival."""
        return [(0, length_bytes)]

    def whole(self) -> bool:
        """See Survival."""
        return True

    def leading(self, count: int) -> int:
        """See Survival."""
        return count


class Torn(Survival):
    """Any part, drawn at random: of each write all, nothing, or some sectors of 512 or 4096 B."""

    def __init__(self, seed: int | str) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret

    def ranges(self, length_bytes: int) -> list[tuple[int, int]]:
        """See Survival."""
        how = self._rng.random()
        if how < 0.3:
            return []
        if how < 0.5:
            return [(0, length_bytes)]
        sector = self._rng.choice(_SECTORS_BYTES)
        keep = self._rng.random()
        return [
            (at, min(at + sector, length_bytes))
            for at in range(0, length_bytes, sector)
            if self._rng.random() < keep
        ]

    def whole(self) -> bool:
        """See Survival."""
        return self._rng.random() < 0.5

    def leading(self, count: int) -> int:
        """See Survival."""
        return self._rng.randint(0, count)


def write_tree(directory: Directory, target: Path, at: int, survival: Survival) -> None:
    """Make a real directory of what is left just before event `at`. `target` must not exist."""
    target.mkdir()
    for name, node in sorted(_entries(directory.changes, at, survival).items()):
        if isinstance(node, Directory):
            write_tree(node, target / name, at, survival)
        else:
            _write_file(node.changes, target / name, at, survival)


def _entries(changes: Sequence[Change], at: int, survival: Survival) -> dict[str, Node]:
    """What a directory lists. Its first changes survive, never a later without an earlier."""
    begun = [c for c in changes if c.began < at and isinstance(c, Entry)]
    certain = max((i + 1 for i, c in enumerate(begun) if c.certain(at)), default=0)
    kept = certain + survival.leading(len(begun) - certain)
    found: dict[str, Node] = {}
    for change in begun[:kept]:
        for name, node in change.names.items():
            if node is None:
                found.pop(name, None)
            else:
                found[name] = node
    return found


def _write_file(changes: Sequence[Change], path: Path, at: int, survival: Survival) -> None:
    """Apply what survives of a file's changes, in order; holes stay holes."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for change in changes:
            if change.began < at:
                _apply(fd, change, change.certain(at), survival)
    finally:
        os.close(fd)


def _apply(fd: int, change: Change, certain: bool, survival: Survival) -> None:
    if isinstance(change, Write):
        length = len(change.data)
        for begin, end in [(0, length)] if certain else survival.ranges(length):
            os.pwrite(fd, change.data[begin:end], change.offset_bytes + begin)
    elif isinstance(change, Resize):
        if certain or survival.whole():
            held = os.fstat(fd).st_size
            os.ftruncate(fd, max(held, change.length_bytes) if change.grow else change.length_bytes)
    elif isinstance(change, Pages):
        for number in _surviving_pages(change, certain, survival):
            os.pwrite(fd, change.pages[number], number * PAGE_BYTES)


def _surviving_pages(change: Pages, certain: bool, survival: Survival) -> list[int]:
    """LMDB writes a commit's pages, syncs, and only then writes the meta page that names them."""
    if certain or survival.whole():
        return sorted(change.pages)
    if not change.one_commit:
        return []
    return [n for n in sorted(set(change.pages) - set(META_PAGES)) if survival.whole()]
