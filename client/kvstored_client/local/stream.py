"""The session's socket: whole frames out, frames and descriptors in. One sender and one receiver at
a time; who that is others decide (link.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections import deque

from kvstored_client.failures import DEADLINE_PASSED, Failure, FailureKind, GarbageError
from kvstored_client.local.errors import StepError
from kvstored_client.local.segments import MapError
from kvstored_client.local.wake import Wake
from kvstored_client.proto.local import Frame, FrameReader

_READ_BYTES = 256 << 10
_MAX_FDS = 16
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_FDS * 4)
_PATIENCE_S = 5.0
_MOST_IN_VAIN = 6

SPIN_S = 0.0004
"""How long a wait looks without sleeping, at most."""


class StreamOverError(Exception):
    """Nothing more can be sent or received; `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class Stream:
    """A connected Unix stream socket. `wake` ends a `wait` early."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._send_lock = threading.Lock()
        self.wake = Wake()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self.wake.fd, select.POLLIN)
        # On one processor the answer can only come while this thread sleeps.
        self._sit_out = 0 if len(os.sched_getaffinity(0)) > 1 else sys.maxsize
        self._in_vain = 0
        self._buffer = bytearray(_READ_BYTES)
        self._reader = FrameReader()
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        """For polling."""
        return self._sock.fileno()

    def shutdown(self) -> None:
        """Tell the peer that this is the end.

        What came and was not read is read first: else the peer would see a connection that was
        reset, and not one that has ended.
        """
        with contextlib.suppress(OSError):  # the peer was faster, or there is no more
            self._sock.shutdown(socket.SHUT_RDWR)
            while self._sock.recv_into(self._buffer, 0, socket.MSG_DONTWAIT):
                pass

    def close(self) -> None:
        """Without a word: the same socket may be open in another process."""
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())

    # ---- receiving -------------------------------------------------------------------------------

    def wait(self, left_s: float) -> bool:
        """Whether there is something to receive, after at most `left_s` seconds."""
        ready = self._spin(left_s) or self._poll.poll(max(0, -int(-left_s * 1000 // 1)))
        readable = False
        for fd, _ in ready:
            if fd == self.wake.fd:
                self.wake.clear()
            else:
                readable = True
        return readable

    def _spin(self, left_s: float) -> list[tuple[int, int]]:
        """Look for a moment without sleeping: most answers come sooner than a processor that went
        to sleep wakes up, with its caches cold. Where they don't, it is tried ever more rarely.
        """
        if self._sit_out:
            self._sit_out -= 1
            return []
        end = time.perf_counter() + min(left_s, SPIN_S)
        while not (ready := self._poll.poll(0)):
            if time.perf_counter() >= end:
                self._in_vain = min(self._in_vain + 1, _MOST_IN_VAIN)
                self._sit_out = 1 << self._in_vain
                return []
        self._in_vain = 0
        return ready

    def receive(self) -> list[Frame]:
        """What one receive brings. Raises StreamOverError at the end, GarbageError, BadFrameError,
        and MapError if descriptors were lost.
        """
        try:
            count, ancillary, flags, _ = self._sock.recvmsg_into(
                [self._buffer], _ANCILLARY_BYTES, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return []
        except OSError as error:
            raise StreamOverError(_broken(error)) from error
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds.extend(memoryview(data[: len(data) // 4 * 4]).cast("i"))
        if flags & socket.MSG_CTRUNC:
            raise MapError("descriptors were lost: this process may have no room for more")
        if not count:
            failure = Failure(FailureKind.UNREACHABLE, "the daemon ended the local session")
            raise StreamOverError(failure)
        return self._reader.feed(bytes(memoryview(self._buffer)[:count]))

    def take_fds(self, count: int) -> list[int]:
        """Descriptors of a frame, for the caller to close. Raises GarbageError."""
        if len(self._fds) < count:
            raise GarbageError(f"{len(self._fds)} descriptors came where {count} belong")
        return [self._fds.popleft() for _ in range(count)]

    def check_fds(self) -> None:
        """After all frames were taken: raises GarbageError for descriptors of none."""
        if len(self._fds) > _MAX_FDS or (self._fds and not self._reader.pending_bytes):
            raise GarbageError("descriptors came that belong to no frame")

    # ---- sending ---------------------------------------------------------------------------------

    def send(self, data: bytes, deadline: float, *, patient: bool = False) -> None:
        """Send one frame. Raises StepError if none of it was sent by the deadline, StreamOverError
        if it was cut short. `patient`: what has begun gets some seconds more.
        """
        wait_s = max(0.0, deadline - time.monotonic())
        if not self._send_lock.acquire(timeout=wait_s):
            raise StepError(DEADLINE_PASSED)
        try:
            self._send(data, deadline, patient)
        finally:
            self._send_lock.release()

    def try_send(self, data: bytes) -> None:
        """Send a short frame if nobody has to wait for that, else not. Raises StreamOverError."""
        if not self._send_lock.acquire(blocking=False):
            return
        try:
            sent = self._send_some(data)
        except OSError as error:
            raise StreamOverError(_broken(error)) from error
        finally:
            self._send_lock.release()
        if 0 < sent < len(data):
            raise StreamOverError(Failure(FailureKind.UNREACHABLE, "a frame was cut short"))

    def _send(self, data: bytes, deadline: float, patient: bool) -> None:
        sent = 0
        rest: bytes | memoryview = data
        try:
            while True:
                sent += self._send_some(rest)
                if sent == len(data):
                    return
                if sent and patient:
                    deadline, patient = time.monotonic() + _PATIENCE_S, False
                if not self._await_room(deadline):
                    break
                rest = memoryview(data)[sent:]
        except OSError as error:
            raise StreamOverError(_broken(error)) from error
        except BaseException as error:
            if sent:
                failure = Failure(FailureKind.UNREACHABLE, "sending was interrupted")
                raise StreamOverError(failure) from error
            raise
        if sent:
            raise StreamOverError(Failure(FailureKind.DEADLINE, "the daemon reads no requests"))
        raise StepError(DEADLINE_PASSED)

    def _send_some(self, data: bytes | memoryview) -> int:
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0

    def _await_room(self, deadline: float) -> bool:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        return bool(poll.poll(max(1, int(left * 1000))))


def _broken(error: OSError) -> Failure:
    return Failure(FailureKind.UNREACHABLE, f"the local session broke: {error.strerror or error}")
