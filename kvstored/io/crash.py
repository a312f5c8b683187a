"""A `Files` that remembers what was made durable, and shows what a power loss leaves. For tests.

    files = CrashFiles(RealFiles(), root)
    ...                                          # use it; files.mark("said yes") in between
    for at in files.sync_points:
        files.restore(elsewhere, at, Nothing())  # `root` as it would be if power went just before
        files.marks(at)                          # what had been said by then

Everything goes to the real files as well. Changes become durable as POSIX has it: a file's bytes
and length by `fdatasync` of the file, its name by `sync_directory`; what was written before a sync
*began* is covered by it. After a sync that failed, what it covered may be lost for good, whatever
later syncs say. LMDB writes by itself: its file is compared before and after each commit, which
makes it durable. Thread-safe. Renames from one directory to another are not supported.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kvstored.io.base import Buffer, Files
from kvstored.io.crash_image import (
    PAGE_BYTES,
    Change,
    Directory,
    Entry,
    File,
    Node,
    Pages,
    Resize,
    Survival,
    Write,
    write_tree,
)

LMDB_NAME = "data.mdb"
_UNTRACKED = {"lock.mdb"}  # LMDB's own, of no meaning once nobody has it open
_READ_BYTES = 1 << 20

C = TypeVar("C", bound=Change)


class CrashFiles(Files):
    """Passes calls on to another `Files`, keeping a history of those below `root`."""

    def __init__(self, inner: Files, root: Path) -> None:
        """`root` exists; all that is in it counts as durable."""
        self.inner = inner
        self.sync_points: list[int] = []
        """Numbers of the events by which something became durable, in order."""
        self._root_path = root
        self._lock = threading.RLock()
        self._clock = 0
        self._marks: list[tuple[int, object]] = []
        self._fds: dict[int, File] = {}
        self._shadows: dict[File, bytes] = {}  # LMDB files as they were last seen
        self._root = Directory()
        self._adopt(self._root, root)

    # ---- what a test asks -------------------------------------------------------------------

    @property
    def now(self) -> int:
        """Number of the next event: the state at the end of all that was done."""
        with self._lock:
            return self._clock + 1

    def mark(self, note: object) -> None:
        """Put something that was said into the history."""
        with self._lock:
            self._marks.append((self._tick(), note))

    def marks(self, at: int) -> list[object]:
        """What had been said just before event `at`."""
        with self._lock:
            return [note for number, note in self._marks if number < at]

    def restore(self, target: Path, at: int, survival: Survival) -> None:
        """Make `target`, which must not exist, what is left of `root` if power goes just before
        event `at`; `survival` decides about what was not synced.
        """
        with self._lock:
            write_tree(self._root, target, at, survival)

    # ---- history ----------------------------------------------------------------------------

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _begin(self, node: Node | None, change: C) -> C:
        with self._lock:
            change.began = self._tick()
            if node is not None:
                node.changes.append(change)
        return change

    def _end(self, change: Change) -> None:
        with self._lock:
            change.ended = self._tick()

    def _synced(self, node: Node | None, action: Callable[[], None]) -> None:
        """Run a sync; what had ended before it began is durable when it returns."""
        with self._lock:
            self._tick()
            covered = [] if node is None else [c for c in node.changes if _waits_for_sync(c)]
        try:
            action()
        except BaseException:
            for change in covered:
                change.lost = True
            raise
        with self._lock:
            number = self._tick()
            for change in covered:
                change.durable = number
            if covered:
                self.sync_points.append(number)

    # ---- names ------------------------------------------------------------------------------

    def _adopt(self, directory: Directory, path: Path) -> None:
        """Take over what a real directory holds as durable."""
        for name in sorted(os.listdir(path)):
            if name not in _UNTRACKED:
                node = self._discover(directory, path / name)
                for change in (directory.changes[-1], *(c for c in node.changes)):
                    change.durable = change.began

    def _discover(self, directory: Directory, path: Path) -> Node:
        """Enter something that appeared without us."""
        node: Node = Directory() if path.is_dir() else File()
        self._enter(directory, {path.name: node})
        if isinstance(node, Directory):
            self._adopt(node, path)
        elif path.name == LMDB_NAME:
            self._look(node, path)
        else:
            with path.open("rb") as file:
                for offset, data in enumerate(iter(lambda: file.read(_READ_BYTES), b"")):
                    if any(data):
                        write = Write(0, offset_bytes=offset * _READ_BYTES, data=data)
                        self._end(self._begin(node, write))
                self._end(self._begin(node, Resize(0, length_bytes=file.tell(), grow=True)))
        return node

    def _enter(self, directory: Directory | None, names: dict[str, Node | None]) -> None:
        """Record a change of a directory that has been made."""
        if directory is None:
            return
        with self._lock:
            for name, node in names.items():
                if node is None:
                    directory.live.pop(name, None)
                else:
                    directory.live[name] = node
            self._end(self._begin(directory, Entry(0, names=names)))

    def _node(self, path: Path) -> Node | None:
        """The node of a path, also of one that was made without us; None outside of `root`."""
        try:
            parts = path.relative_to(self._root_path).parts
        except ValueError:
            return None
        node: Node = self._root
        at = self._root_path
        for name in parts:
            at = at / name
            if not isinstance(node, Directory) or name in _UNTRACKED:
                return None
            known = node.live.get(name)
            if known is None:
                if not at.exists():
                    return None
                known = self._discover(node, at)
            node = known
        return node

    def _directory(self, path: Path) -> Directory | None:
        node = self._node(path)
        return node if isinstance(node, Directory) else None

    # ---- LMDB -------------------------------------------------------------------------------

    def _look(self, file: File, path: Path, began: int | None = None) -> None:
        """Record how an LMDB file differs from when it was last seen."""
        with self._lock:
            fresh, old = path.read_bytes(), self._shadows.get(file, b"")
            changed = {
                at // PAGE_BYTES: fresh[at : at + PAGE_BYTES]
                for at in range(0, len(fresh), PAGE_BYTES)
                if fresh[at : at + PAGE_BYTES] != (old[at : at + PAGE_BYTES] or bytes(PAGE_BYTES))
            }
            self._shadows[file] = fresh
            if len(fresh) != len(old):
                self._end(self._begin(file, Resize(0, length_bytes=len(fresh))))
            if changed:
                pages = self._begin(file, Pages(0, pages=changed, one_commit=began is not None))
                if began is not None:
                    pages.began = began
                self._end(pages)

    def commit(self, path: Path, action: Callable[[], None]) -> None:
        """See Files."""
        file = self._node(path / LMDB_NAME)
        if not isinstance(file, File):
            self.inner.commit(path, action)
            return
        self._look(file, path / LMDB_NAME)
        with self._lock:
            began = self._tick()
        try:
            self.inner.commit(path, action)
        finally:
            self._look(file, path / LMDB_NAME, began)
        self._synced(file, lambda: None)

    # ---- files ------------------------------------------------------------------------------

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """See Files."""
        with self._lock:
            node = self._node(path)
            fd = self.inner.open(path, flags, mode)
            if node is None and flags & os.O_CREAT:
                node = File()
                self._enter(self._directory(path.parent), {path.name: node})
            if isinstance(node, File):
                self._fds[fd] = node
                if flags & os.O_TRUNC:
                    self._end(self._begin(node, Resize(0)))
            return fd

    def close(self, fd: int) -> None:
        """See Files."""
        with self._lock:
            self._fds.pop(fd, None)
        self.inner.close(fd)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        """See Files."""
        return self.inner.preadv(fd, buffers, offset_bytes)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset_bytes: int) -> int:
        """See Files."""
        data = b"".join(bytes(buffer) for buffer in buffers)
        change = self._begin(self._fds.get(fd), Write(0, offset_bytes=offset_bytes, data=data))
        done = self.inner.pwritev(fd, buffers, offset_bytes)
        change.data = data[:done]
        self._end(change)
        return done

    def fdatasync(self, fd: int) -> None:
        """See Files."""
        file = self._fds.get(fd)
        if file in self._shadows:
            self._look(file, Path(f"/proc/self/fd/{fd}"))
        self._synced(file, lambda: self.inner.fdatasync(fd))

    def sync_directory(self, path: Path) -> None:
        """See Files."""
        directory = self._directory(path)
        for name in os.listdir(path) if directory is not None else ():
            self._node(path / name)
        self._synced(directory, lambda: self.inner.sync_directory(path))

    def fallocate(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        """See Files."""
        length = offset_bytes + length_bytes
        change = self._begin(self._fds.get(fd), Resize(0, length_bytes=length, grow=True))
        self.inner.fallocate(fd, offset_bytes, length_bytes)
        self._end(change)

    def truncate(self, fd: int, length_bytes: int) -> None:
        """See Files."""
        change = self._begin(self._fds.get(fd), Resize(0, length_bytes=length_bytes))
        self.inner.truncate(fd, length_bytes)
        self._end(change)

    def rename(self, source: Path, target: Path) -> None:
        """See Files."""
        with self._lock:
            node, directory = self._node(source), self._directory(source.parent)
            if node is not None and source.parent != target.parent:
                raise NotImplementedError("renames from one directory to another")
            self.inner.rename(source, target)
            self._enter(directory, {source.name: None, target.name: node})

    def unlink(self, path: Path) -> None:
        """See Files."""
        with self._lock:
            known = self._node(path)
            self.inner.unlink(path)
            if known is not None:
                self._enter(self._directory(path.parent), {path.name: None})

    def mkdir(self, path: Path, mode: int = 0o700) -> None:
        """See Files."""
        with self._lock:
            self.inner.mkdir(path, mode)
            self._enter(self._directory(path.parent), {path.name: Directory()})

    def rmdir(self, path: Path) -> None:
        """See Files."""
        with self._lock:
            known = self._node(path)
            self.inner.rmdir(path)
            if known is not None:
                self._enter(self._directory(path.parent), {path.name: None})

    def listdir(self, path: Path) -> list[str]:
        """See Files."""
        return self.inner.listdir(path)

    def stat(self, path: Path) -> os.stat_result:
        """See Files."""
        return self.inner.stat(path)

    def fstat(self, fd: int) -> os.stat_result:
        """See Files."""
        return self.inner.fstat(fd)

    def statvfs(self, path: Path) -> os.statvfs_result:
        """See Files."""
        return self.inner.statvfs(path)

    def lock(self, fd: int) -> None:
        """See Files."""
        self.inner.lock(fd)


def _waits_for_sync(change: Change) -> bool:
    """Whether a sync that begins now covers a change."""
    return change.ended is not None and change.durable is None and not change.lost
