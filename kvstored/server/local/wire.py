"""One local session's socket: frames in, frames and descriptors out, nothing that waits.

Own sockets and not asyncio's transports: a descriptor must leave with the first byte of its frame,
so the socket is written by sendmsg. It is read by plain recv: what a client sends as descriptors
the kernel drops.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from kvstored_client.proto.local import BadFrameError, Frame, FrameReader

READ_BYTES = 64 << 10
_BATCH_BYTES = 256 << 10
_BATCH_PIECES = 64


class _Piece:
    """One frame on its way out. `fds` leave with its first byte; `owned`: ours to close."""

    __slots__ = ("data", "fds", "owned")

    def __init__(self, data: bytes, fds: tuple[int, ...]) -> None:
        self.data: bytes | memoryview = data
        self.fds = fds
        self.owned = False

    def keep_fds(self) -> None:
        """The caller's may be closed before these can be sent."""
        kept: list[int] = []
        try:
            for fd in self.fds:
                kept.append(os.dup(fd))  # noqa: PERF401 - those made before one fails are closed
        except OSError:
            for fd in kept:
                os.close(fd)
            raise
        self.fds = tuple(kept)
        self.owned = True

    def drop_fds(self) -> None:
        if self.owned:
            for fd in self.fds:
                os.close(fd)
        self.fds = ()


class Outbox:
    """The sending half. `on_gone` is called when the peer has closed its side, `on_failed(error)`
    when something cannot be sent although it has not, `on_room` when all has been sent after
    something had to wait.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        on_gone: Callable[[], None],
        on_failed: Callable[[OSError], None],
        on_room: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._socket = connection
        self._on_gone = on_gone
        self._on_failed = on_failed
        self._on_room = on_room
        self._pieces: deque[_Piece] = deque()
        self._closed = False
        self.queued_bytes = 0
        self.stuck_since: float | None = None
        """Loop time since which the peer has taken nothing; None while nothing waits."""

    def put(self, data: bytes) -> None:
        """Queue one frame; `flush` sends it."""
        if not self._closed:
            self._pieces.append(_Piece(data, ()))
            self.queued_bytes += len(data)

    def put_with_fds(self, data: bytes, fds: Sequence[int]) -> None:
        """Queue and send a frame with descriptors, which stay the caller's."""
        if self._closed:
            return
        piece = _Piece(data, tuple(fds))
        self._pieces.append(piece)
        self.queued_bytes += len(data)
        self.flush()
        if piece.fds:
            try:
                piece.keep_fds()
            except OSError as error:
                self._fail(error)

    def flush(self) -> None:
        """Send what the peer takes now; the rest follows by itself."""
        try:
            while self._pieces:
                self._sent(self._send())
        except (BlockingIOError, InterruptedError):
            if self.stuck_since is None:
                self.stuck_since = self._loop.time()
                self._loop.add_writer(self._socket.fileno(), self._writable)
        except (BrokenPipeError, ConnectionResetError):
            self.close()
            self._on_gone()
        except OSError as error:  # too many descriptors in flight, and the like
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.close()
        self._on_failed(error)

    def close(self) -> None:
        """Forget what was not sent; nothing more is. The socket stays the caller's. Idempotent."""
        self._closed = True
        self._stop_waiting()
        for piece in self._pieces:
            piece.drop_fds()
        self._pieces.clear()
        self.queued_bytes = 0

    def _send(self) -> int:
        first = self._pieces[0]
        ancillary = []
        if first.fds:
            rights = array.array("i", first.fds)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        if len(self._pieces) == 1 and not ancillary:
            return self._socket.send(first.data)
        batch: list[bytes | memoryview] = []
        size = 0
        for piece in self._pieces:
            # Descriptors go with the first byte of what is sent: their frame begins a message.
            if batch and (piece.fds or size >= _BATCH_BYTES or len(batch) >= _BATCH_PIECES):
                break
            batch.append(piece.data)
            size += len(piece.data)
        return self._socket.sendmsg(batch, ancillary)

    def _sent(self, nbytes: int) -> None:
        self.queued_bytes -= nbytes
        if self.stuck_since is not None:
            self.stuck_since = self._loop.time()
        self._pieces[0].drop_fds()
        while self._pieces and nbytes >= len(self._pieces[0].data):
            nbytes -= len(self._pieces.popleft().data)
        if nbytes:
            first = self._pieces[0]
            first.data = memoryview(first.data)[nbytes:]

    def _writable(self) -> None:
        self.flush()
        if not self._pieces and not self._closed:
            self._stop_waiting()
            self._on_room()

    def _stop_waiting(self) -> None:
        if self.stuck_since is not None:
            self.stuck_since = None
            self._loop.remove_writer(self._socket.fileno())


class Inbox:
    """The receiving half: whole frames, one at a time, and no more read than is worked on.

    `on_frames` is called when there are some; `on_end` when the peer has shut its side down or
    closed it, `on_broken(error)` when its bytes are no frames.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        max_body_bytes: int,
        on_frames: Callable[[], None],
        on_end: Callable[[], None],
        on_broken: Callable[[BadFrameError], None],
    ) -> None:
        self._loop = loop
        self._socket = connection
        self._on_frames = on_frames
        self._on_end = on_end
        self._on_broken = on_broken
        self._reader = FrameReader(max_body_bytes)
        self._reading = False
        self._discarding = False
        self.frames: deque[Frame] = deque()
        self.half_since: float | None = None
        """Loop time since which a frame has been begun and not ended."""

    def start(self) -> None:
        """Read. Idempotent."""
        if not self._reading:
            self._reading = True
            if self.half_since is not None:
                self.half_since = self._loop.time()
            self._loop.add_reader(self._socket.fileno(), self._readable)

    def pause(self) -> None:
        """Leave what the peer sends in the kernel, until `start`."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket.fileno())

    def discard(self) -> None:
        """From now on look for the peer's end alone."""
        self._discarding = True
        self.half_since = None
        self.frames.clear()
        self.start()

    def allow(self, max_body_bytes: int) -> None:
        """Take larger frames from now on. Raises BadFrameError when one has begun already."""
        if self.frames or self._reader.pending_bytes:
            raise BadFrameError("something follows OPEN before its answer")
        self._reader = FrameReader(max_body_bytes)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        # A peer that closes with answers unread leaves an error behind, beside what it sent before.
        # The loop tells of that once, and then no more of this socket.
        if not data or self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.pause()
            self._on_end()
        elif not self._discarding:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        try:
            frames = self._reader.feed(data)
        except BadFrameError as error:
            self._on_broken(error)
            return
        if not self._reader.pending_bytes:
            self.half_since = None
        elif frames or self.half_since is None:
            self.half_since = self._loop.time()
        if frames:
            self.frames.extend(frames)
            self._on_frames()


class Events:
    """The daemon's end of the events channel: a frame per message, never waited for."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)

    @property
    def clients_fd(self) -> int:
        """To be sent to the client, and then given up by `hand_over`."""
        return self._theirs.fileno()

    def hand_over(self) -> None:
        """The client has its end now: its closing of it must be seen."""
        self._theirs.close()

    def send(self, frame: bytes) -> bool:
        """False when the channel is full, or the client has closed its end."""
        try:
            return self._ours.send(frame) == len(frame)
        except OSError:
            return False

    def close(self) -> None:
        """The client reads an end after the last message. Idempotent."""
        with contextlib.suppress(OSError):
            self._ours.close()
        self._theirs.close()
