"""Sees every file operation of one volume: what is under way since when, what failed, how much."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lmdb

from kvstored.io.base import Buffer, Files
from kvstored.tiers.nvme.breaker import Seen
from kvstored.tiers.nvme.format import BLOCK_BYTES

_GONE = frozenset({errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTCONN, errno.ENOMEDIUM})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # the file system's condition, not the device's


@dataclass(slots=True)
class _Kind:
    failures: int = 0
    successes: int = 0
    gone: bool = False
    error: str = ""


class _Ending:
    """How a call ended: `failure` None means well."""

    failure: Exception | None = None

    def moved(self, nbytes: int) -> None:
        """A transfer of so many bytes. All are of whole blocks, so that one that ends elsewhere, or
        brings nothing, has come to an end that the file should not have.
        """
        if nbytes <= 0 or nbytes % BLOCK_BYTES:
            self.failure = OSError(errno.EIO, f"ended after {nbytes} B")


class WatchedFiles(Files):
    """Passes calls on to another `Files` and keeps the books. Thread-safe.

    Reads are one kind of call; everything else is the other ("change").
    """

    def __init__(self, inner: Files) -> None:
        self.inner = inner
        self.errors: Counter[str] = Counter()
        """Failed transfers, syncs and commits, by operation."""
        self.written_bytes = 0
        """What went to files; what LMDB writes by itself is not among it."""
        self._lock = threading.Lock()
        self._tokens = itertools.count()
        self._under_way: dict[int, tuple[str, float]] = {}
        self._kinds = {"read": _Kind(), "change": _Kind()}

    def seen(self, kind: str, now: float) -> Seen:
        """What calls of a kind ("read", "change") have shown; `now` is of time.monotonic."""
        with self._lock:
            known = self._kinds[kind]
            starts = [since for what, since in self._under_way.values() if what == kind]
            oldest = max(0.0, now - min(starts)) if starts else 0.0
            return Seen(oldest, known.failures, known.successes, known.gone, known.error)

    def idle(self) -> bool:
        """Whether no call is under way."""
        with self._lock:
            return not self._under_way

    def fresh(self) -> None:
        """Forget failures: what comes next is judged by itself."""
        with self._lock:
            for kind in self._kinds.values():
                kind.failures, kind.gone, kind.error = 0, False, ""

    @contextmanager
    def _call(self, operation: str, kind: str, *, counts: bool = False) -> Iterator[_Ending]:
        token = next(self._tokens)
        with self._lock:
            self._under_way[token] = (kind, time.monotonic())
        ending = _Ending()
        try:
            yield ending
        except (OSError, lmdb.Error) as error:
            ending.failure = error
            raise
        finally:
            with self._lock:
                del self._under_way[token]
                if counts:
                    self._count(operation, self._kinds[kind], ending.failure)

    def _count(self, operation: str, kind: _Kind, failure: Exception | None) -> None:
        if failure is None:
            kind.successes += 1
            kind.failures, kind.gone = 0, False
            return
        number = failure.errno if isinstance(failure, OSError) else None
        if number in _FULL or isinstance(failure, lmdb.MapFullError):
            return
        self.errors[operation] += 1
        kind.failures += 1
        kind.gone = number in _GONE
        kind.error = f"{operation}: {failure}"

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """See Files."""
        with self._call("open", "change"):
            return self.inner.open(path, flags, mode)

    def close(self, fd: int) -> None:
        """See Files."""
        with self._call("close", "change"):
            self.inner.close(fd)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        """See Files."""
        with self._call("read", "read", counts=True) as ending:
            done = self.inner.preadv(fd, buffers, offset_bytes)
            ending.moved(done)
        return done

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset_bytes: int) -> int:
        """See Files."""
        with self._call("write", "change", counts=True) as ending:
            done = self.inner.pwritev(fd, buffers, offset_bytes)
            ending.moved(done)
        with self._lock:
            self.written_bytes += done
        return done

    def fdatasync(self, fd: int) -> None:
        """See Files."""
        with self._call("sync", "change", counts=True):
            self.inner.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        """See Files."""
        with self._call("sync", "change", counts=True):
            self.inner.sync_directory(path)

    def fallocate(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        """See Files."""
        with self._call("fallocate", "change"):
            self.inner.fallocate(fd, offset_bytes, length_bytes)

    def truncate(self, fd: int, length_bytes: int) -> None:
        """See Files."""
        with self._call("truncate", "change"):
            self.inner.truncate(fd, length_bytes)

    def rename(self, source: Path, target: Path) -> None:
        """See Files."""
        with self._call("rename", "change"):
            self.inner.rename(source, target)

    def unlink(self, path: Path) -> None:
        """See Files."""
        with self._call("unlink", "change"):
            self.inner.unlink(path)

    def mkdir(self, path: Path, mode: int = 0o700) -> None:
        """See Files."""
        with self._call("mkdir", "change"):
            self.inner.mkdir(path, mode)

    def rmdir(self, path: Path) -> None:
        """See Files."""
        with self._call("rmdir", "change"):
            self.inner.rmdir(path)

    def listdir(self, path: Path) -> list[str]:
        """See Files."""
        with self._call("listdir", "change"):
            return self.inner.listdir(path)

    def stat(self, path: Path) -> os.stat_result:
        """See Files."""
        with self._call("stat", "change"):
            return self.inner.stat(path)

    def fstat(self, fd: int) -> os.stat_result:
        """See Files."""
        with self._call("fstat", "change"):
            return self.inner.fstat(fd)

    def statvfs(self, path: Path) -> os.statvfs_result:
        """See Files."""
        with self._call("statvfs", "change"):
            return self.inner.statvfs(path)

    def lock(self, fd: int) -> None:
        """See Files."""
        with self._call("lock", "change"):
            self.inner.lock(fd)

    def commit(self, path: Path, action: Callable[[], None]) -> None:
        """See Files."""
        with self._call("commit", "change", counts=True):
            self.inner.commit(path, action)
