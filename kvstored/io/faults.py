"""A `Files` that fails on purpose, by operation, path and count. For tests and torture.

    files = FaultyFiles(RealFiles())
    files.inject(Fault("fdatasync", "*/data", error=errno.EIO, skip=2, times=1))

Rules are tried in the order they were injected; the first one that is due decides. Operations on a
descriptor match by the path it was opened with. Thread-safe. Every call is counted in `calls`.
"""

from __future__ import annotations

import fnmatch
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstored.io.base import Buffer, Files


@dataclass
class Fault:
    """What to do to calls of `operation` (a method's name, or "*") on paths matching `path` (glob).

    The first `skip` matching calls pass; then `times` calls (None: all) are hit. Of the effects
    below, `stuck` and `delay_s` come first, then `error`; `short` and `flip` change the transfer.
    """

    operation: str
    path: str = "*"
    skip: int = 0
    times: int | None = None
    error: int | None = None  # errno to raise
    after: bool = False  # raise only once the operation was really done
    short: float | None = None  # fraction of the bytes that are transferred, rounded down to `unit`
    unit_bytes: int = 4096
    flip: int | None = None  # index of a bit of the transfer to invert
    delay_s: float = 0.0
    stuck: threading.Event | None = None  # waits until it is set
    exception: Callable[[], Exception] | None = None  # raised instead of OSError(error)
    seen: int = field(default=0, init=False)
    hits: int = field(default=0, init=False)

    def due(self, operation: str, path: str) -> bool:
        """Count a call if it matches, and say whether this one is to be hit."""
        if self.operation not in ("*", operation) or not fnmatch.fnmatch(path, self.path):
            return False
        self.seen += 1
        if self.seen <= self.skip or (self.times is not None and self.hits >= self.times):
            return False
        self.hits += 1
        return True

    def raise_error(self, path: str) -> None:
        """Raise what the fault says, if it says anything."""
        if self.exception is not None:
            raise self.exception()
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error), path)


_NO_FAULT = Fault("", times=0)


class FaultyFiles(Files):
    """Passes calls on to another `Files`, with faults."""

    def __init__(self, inner: Files) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self._faults: list[Fault] = []
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    def inject(self, fault: Fault) -> Fault:
        """Add a rule; it is given back so that its `hits` can be read."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Drop all rules. Calls stuck in one stay until its event is set."""
        with self._lock:
            self._faults.clear()

    def _begin(self, operation: str, where: Path | int) -> tuple[Fault, str]:
        with self._lock:
            path = self._paths.get(where, "?") if isinstance(where, int) else str(where)
            self.calls[operation] += 1
            fault = next((f for f in self._faults if f.due(operation, path)), _NO_FAULT)
        if fault.stuck is not None:
            fault.stuck.wait()
        if fault.delay_s:
            time.sleep(fault.delay_s)
        if not fault.after:
            fault.raise_error(path)
        return fault, path

    def _plain(self, operation: str, where: Path | int, action: Callable[[], None]) -> None:
        fault, path = self._begin(operation, where)
        action()
        if fault.after:
            fault.raise_error(path)

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """See Files."""
        self._begin("open", path)
        fd = self.inner.open(path, flags, mode)
        with self._lock:
            self._paths[fd] = str(path)
        return fd

    def close(self, fd: int) -> None:
        """See Files."""
        with self._lock:
            self._paths.pop(fd, None)
        self.inner.close(fd)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        """See Files."""
        fault, path = self._begin("preadv", fd)
        wanted = [memoryview(b) for b in buffers]
        if fault.short is not None:
            wanted = _shortened(wanted, fault)
        done = self.inner.preadv(fd, wanted, offset_bytes) if wanted else 0
        if fault.flip is not None:
            _flip(wanted, fault.flip)
        if fault.after:
            fault.raise_error(path)
        return done

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset_bytes: int) -> int:
        """See Files."""
        fault, path = self._begin("pwritev", fd)
        given = [memoryview(b) for b in buffers]
        if fault.short is not None:
            given = _shortened(given, fault)
        if fault.flip is None:
            done = self.inner.pwritev(fd, given, offset_bytes) if given else 0
        else:
            done = self._write_flipped(fd, given, offset_bytes, fault.flip)
        if fault.after:
            fault.raise_error(path)
        return done

    def _write_flipped(
        self, fd: int, given: Sequence[memoryview], offset_bytes: int, bit: int
    ) -> int:
        """Write the bytes, then damage one on the device; nobody's buffer is touched."""
        done = self.inner.pwritev(fd, given, offset_bytes)
        joined = bytearray(b"".join(given))
        joined[bit // 8 % len(joined)] ^= 1 << bit % 8
        at = bit // 8 % len(joined)
        flipped = self.inner.open(Path(self._paths[fd]), os.O_WRONLY)
        try:
            self.inner.pwritev(flipped, [bytes(joined[at : at + 1])], offset_bytes + at)
            self.inner.fdatasync(flipped)
        finally:
            self.inner.close(flipped)
        return done

    def fdatasync(self, fd: int) -> None:
        """See Files."""
        self._plain("fdatasync", fd, lambda: self.inner.fdatasync(fd))

    def sync_directory(self, path: Path) -> None:
        """See Files."""
        self._plain("sync_directory", path, lambda: self.inner.sync_directory(path))

    def fallocate(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        """See Files."""
        self._plain("fallocate", fd, lambda: self.inner.fallocate(fd, offset_bytes, length_bytes))

    def truncate(self, fd: int, length_bytes: int) -> None:
        """See Files."""
        self._plain("truncate", fd, lambda: self.inner.truncate(fd, length_bytes))

    def rename(self, source: Path, target: Path) -> None:
        """See Files."""
        self._plain("rename", source, lambda: self.inner.rename(source, target))

    def unlink(self, path: Path) -> None:
        """See Files."""
        self._plain("unlink", path, lambda: self.inner.unlink(path))

    def mkdir(self, path: Path, mode: int = 0o700) -> None:
        """See Files."""
        self._plain("mkdir", path, lambda: self.inner.mkdir(path, mode))

    def rmdir(self, path: Path) -> None:
        """See Files."""
        self._plain("rmdir", path, lambda: self.inner.rmdir(path))

    def listdir(self, path: Path) -> list[str]:
        """See Files."""
        self._begin("listdir", path)
        return self.inner.listdir(path)

    def stat(self, path: Path) -> os.stat_result:
        """See Files."""
        self._begin("stat", path)
        return self.inner.stat(path)

    def fstat(self, fd: int) -> os.stat_result:
        """See Files."""
        self._begin("fstat", fd)
        return self.inner.fstat(fd)

    def statvfs(self, path: Path) -> os.statvfs_result:
        """See Files."""
        self._begin("statvfs", path)
        return self.inner.statvfs(path)

    def lock(self, fd: int) -> None:
        """See Files."""
        self._plain("lock", fd, lambda: self.inner.lock(fd))

    def commit(self, path: Path, action: Callable[[], None]) -> None:
        """See Files."""
        self._plain("commit", path, lambda: self.inner.commit(path, action))


def _shortened(buffers: Sequence[memoryview], fault: Fault) -> list[memoryview]:
    """The leading part of the buffers that a short transfer moves."""
    if fault.short is None:
        return list(buffers)
    left = int(sum(len(b) for b in buffers) * fault.short) // fault.unit_bytes * fault.unit_bytes
    kept: list[memoryview] = []
    for buffer in buffers:
        if left <= 0:
            break
        kept.append(buffer[:left])
        left -= len(kept[-1])
    return kept


def _flip(buffers: Sequence[memoryview], bit: int) -> None:
    """Invert one bit of the buffers taken as one run of bytes."""
    at = bit // 8 % max(1, sum(len(b) for b in buffers))
    for buffer in buffers:
        if at < len(buffer):
            buffer[at] ^= 1 << bit % 8
            return
        at -= len(buffer)
