"""The daemon's side of a volume's index child: started, asked, and seen to be gone.

A child that dies, or does not answer in time, is not started again by itself: whether its last
commit holds is not known then. The volume is, with a walk; see Member.look.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import lmdb

from kvstored.tiers.nvme import index_wire as wire

CHILD_MODULE = "kvstored.tiers.nvme.index_child"
DEADLINE_S = 60.0
"""For one request: a commit on a device that is busy may take long."""
_TURNS = 12
"""In which a deadline passes. While this process is stopped (a SIGSTOP, a paused machine) the child
is, as a rule, too: of that time, however long, one turn at most counts.
"""
_MESSAGE_BYTES = 300
_CRASHES = frozenset(-s for s in (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV, signal.SIGILL))

T = TypeVar("T")


class IndexProcess:
    """The index child of one volume. Thread-safe; everything blocks but `died`."""

    def __init__(self, directory: Path, deadline_s: float = DEADLINE_S) -> None:
        """Start it, once every earlier child of this volume has ended. Raises OSError."""
        self._directory = directory
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._died = ""
        self._closed = False
        self._asked: dict[socket.socket, str] = {}  # what is not answered, or never was
        self._said = os.memfd_create("kvstored-index", os.MFD_CLOEXEC)
        pairs = [socket.socketpair() for _ in range(wire.CHANNELS)]
        self._sockets = [ours for ours, _ in pairs]
        theirs = [their for _, their in pairs]
        try:
            self._process = _spawn(directory, theirs, self._said)
        except BaseException:
            _release(self._sockets, self._said)
            raise
        finally:
            for their in theirs:
                their.close()
        self._abandoned = weakref.finalize(self, _abandon, self._process, self._sockets, self._said)
        self._abandoned.atexit = False  # it sees our end by itself
        self._pools: dict[str, queue.SimpleQueue[socket.socket]] = {}
        for sock in self._sockets:
            sock.settimeout(deadline_s)
        for name, sock in zip(wire.WRITERS, self._sockets, strict=False):
            self._pools[name] = queue.SimpleQueue()
            self._pools[name].put(sock)
        self._pools["read"] = queue.SimpleQueue()
        for sock in self._sockets[len(wire.WRITERS) :]:
            self._pools["read"].put(sock)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def died(self) -> str:
        """How it came to its end, "" while it lives or where it was to. Does not block."""
        if not self._died and not self._closed and self._process.poll() is not None:
            self._died = self._how()
        return self._died

    @property
    def suspects(self) -> frozenset[str]:
        """Environments that it was at when it died of itself, as one does of a damaged file."""
        crashed = self._process.returncode in _CRASHES
        return frozenset(list(self._asked.values()) if crashed else ())

    def ask(self, channel: str, *request: bytes) -> list[bytes]:
        """Have something done: "read", or a change of one of WRITERS.

        Raises lmdb.Error, or OSError; ENOTCONN where the child is gone, and then only once it is.
        """
        pool = self._pools[channel]
        try:
            sock = self._in_turns(partial(_got, pool))
        except TimeoutError as error:
            raise self._failed(error) from error
        try:
            if self.died or self._closed:
                raise self._gone()
            try:
                self._asked[sock] = os.path.basename(os.fsdecode(request[1]))
                wire.send(sock, request)
                self._in_turns(partial(_readable, sock))
                answer = wire.receive(sock)
                del self._asked[sock]
            except (wire.EndedError, OSError) as error:
                raise self._failed(error) from error
        finally:
            pool.put(sock)
        return _unwrapped(answer)

    def _in_turns(self, wait: Callable[[float], T | None]) -> T:
        """What `wait(seconds)` gives in the end. Raises TimeoutError."""
        for _ in range(_TURNS):
            found = wait(self._deadline_s / _TURNS)
            if found is not None:
                return found
        raise TimeoutError("timed out")

    def _gone(self) -> OSError:
        return OSError(errno.ENOTCONN, self._died or "the index process was ended")

    def _failed(self, error: Exception) -> OSError:
        """End what cannot be talked to, and wait until it has."""
        with self._lock:
            if not self._died:
                timed_out = isinstance(error, TimeoutError)
                if timed_out:
                    self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)  # it hung up: it is on its way
                self._process.kill()
                self._process.wait()
                late = f", for it gave no answer for {self._deadline_s:g} s" if timed_out else ""
                self._died = self._how() + late
        return self._gone()

    def _how(self) -> str:
        code = self._process.returncode
        how = f"signal {-code}" if code < 0 else f"exit {code}"
        try:
            size = os.fstat(self._said).st_size
            said = os.pread(self._said, _MESSAGE_BYTES, max(0, size - _MESSAGE_BYTES))
        except OSError:
            said = b""
        words = " ".join(said.decode(errors="replace").split())
        return f"the index process ended: {how}{': ' if words else ''}{words}"

    def close(self) -> None:
        """Have it end, and wait until it has: its files may be used by another then."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for sock in self._sockets:
                sock.close()
            try:
                self._process.wait(self._deadline_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._abandoned.detach()
            os.close(self._said)


def _got(pool: queue.SimpleQueue[socket.socket], seconds: float) -> socket.socket | None:
    try:
        return pool.get(timeout=seconds)
    except queue.Empty:
        return None


def _readable(sock: socket.socket, seconds: float) -> bool | None:
    """True once there is something to read, or nothing will come any more."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return True if poll.poll(seconds * 1000) else None


def _spawn(directory: Path, theirs: Sequence[socket.socket], said: int) -> subprocess.Popen[bytes]:
    """Start the child with a lock on the directory that lasts as long as it does.

    Waited for: the child of a daemon that was killed may still be at its last commit.
    """
    fds = [sock.fileno() for sock in theirs]
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return subprocess.Popen(
            [sys.executable, "-m", CHILD_MODULE, *map(str, fds)],
            pass_fds=[*fds, lock],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            process_group=0,  # what a terminal sends is not for it
        )
    finally:
        os.close(lock)


def _release(sockets: Sequence[socket.socket], said: int) -> None:
    for sock in sockets:
        sock.close()
    os.close(said)


def _abandon(process: subprocess.Popen[bytes], sockets: Sequence[socket.socket], said: int) -> None:
    """What is left of an owner that never closed it."""
    _release(sockets, said)
    process.kill()
    process.wait()


def _unwrapped(answer: list[bytes]) -> list[bytes]:
    """What was asked for. Raises what the child says was raised."""
    how, *rest = answer
    if how == wire.DONE:
        return rest
    what, text = rest[0].decode(), rest[1].decode(errors="replace")
    if how == wire.LMDB_ERROR:
        kind = getattr(lmdb, what, lmdb.Error)
        raise kind(text)
    raise OSError(int(what), text)
