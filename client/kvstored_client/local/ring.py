"""The ring by which payload goes to the daemon, and the data channel with both sides' positions."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable

from kvstored_client.failures import CANCELLED, Failure, FailureKind, GarbageError
from kvstored_client.local.errors import LinkOverError, StepError
from kvstored_client.local.segments import Mapping, map_memory
from kvstored_client.local.wake import Outbox, Wake
from kvstored_client.proto.local import ABANDONED, POSITION

PIECE_BYTES = 1 << 20
"""Copied between two positions: small enough to be in the cache still when the daemon takes it."""


class Ring:
    """Used by one upload at a time. `wake` ends its waiting early."""

    def __init__(self, memory: Mapping, data: socket.socket) -> None:
        self._memory = memory
        self._data = data
        data.setblocking(False)
        self.wake = Wake()
        self._poll = select.poll()
        self._poll.register(data, select.POLLIN)
        self._poll.register(self.wake.fd, select.POLLIN)

    @classmethod
    def made_of(cls, memory: int, data: int, nbytes: int, outbox: Outbox, deadline: float) -> Ring:
        """Of the descriptors that came with RING, which stay the caller's.

        Raises MapError, GarbageError, OSError.
        """
        mapping = map_memory(memory, nbytes, outbox, deadline, writable=True)
        return cls(mapping, unix_socket(os.dup(data), socket.SOCK_SEQPACKET))

    @property
    def address(self) -> int:
        """Where it begins."""
        return self._memory.address

    @property
    def piece_bytes(self) -> int:
        """How much is copied between two positions."""
        return max(1, min(PIECE_BYTES, self._memory.nbytes // 4))

    def close(self) -> None:
        """The data channel; the memory goes with the last reference."""
        self._data.close()

    def pass_on(
        self,
        request_id: int,
        payload_bytes: int,
        ahead_bytes: int,
        copy_to: Callable[[int, int], bool],
        check: Callable[[], None],
        deadline: float,
    ) -> bool:
        """Bring a put's payload to the daemon; False if it takes no more, as its answer will say.

        Of the payload the first `ahead_bytes` are in the ring already, at most a piece of it.
        `copy_to(address, bytes)` writes the next bytes. `check` raises when there is no point in
        going on. Raises what it raises, and LinkOverError, GarbageError.
        """
        size = self._memory.nbytes
        written = taken = 0
        piece = self.piece_bytes
        while written < payload_bytes:
            check()
            free = size - (written - taken)
            count = min(piece, payload_bytes - written, size - written % size)
            if free < count:
                position = self._taken(request_id, taken, written, deadline)
            else:
                if written or not ahead_bytes:
                    if not copy_to(self._memory.address + written % size, count):
                        raise StepError(CANCELLED)
                    written += count
                else:
                    written = ahead_bytes
                self._send(POSITION.pack(request_id, written), check, deadline)
                position = self._taken(request_id, taken, written, 0.0)
            if position == ABANDONED:
                return False
            taken = position
        return True

    def _taken(self, request_id: int, taken: int, written: int, deadline: float) -> int:
        """How far the daemon has come, as its last message says; waits for one until the deadline,
        or until it is woken.
        """
        left = deadline - time.monotonic()
        if left > 0:
            for fd, _ in self._poll.poll(max(1, int(left * 1000))):
                if fd == self.wake.fd:
                    self.wake.clear()
        while True:
            try:
                message = self._data.recv(2 * POSITION.size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return taken
            except OSError as error:
                raise _gone() from error
            if not message:
                raise _gone()
            if len(message) != POSITION.size:
                raise GarbageError(f"{len(message)} bytes on the data channel")
            number, position = POSITION.unpack(message)
            if number != request_id:
                continue  # of a put that has ended
            if position == ABANDONED:
                return ABANDONED
            if not taken <= position <= written:
                raise GarbageError(f"the daemon took {position} bytes of {written}")
            taken = position

    def _send(self, message: bytes, check: Callable[[], None], deadline: float) -> None:
        while True:
            try:
                self._data.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                pass
            except OSError as error:
                raise _gone() from error
            check()
            poll = select.poll()
            poll.register(self._data, select.POLLOUT)
            poll.register(self.wake.fd, select.POLLIN)
            ready = poll.poll(max(1, int((deadline - time.monotonic()) * 1000)))
            if any(fd == self.wake.fd for fd, _ in ready):
                self.wake.clear()


def unix_socket(fd: int, kind: int) -> socket.socket:
    """A descriptor that came, as the socket it should be; closed if it is none.

    Raises GarbageError.
    """
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        os.close(fd)
        raise GarbageError("a descriptor that came is no socket") from error
    if sock.family != socket.AF_UNIX or sock.type != kind:
        sock.close()
        raise GarbageError("a socket that came is of another kind")
    return sock


def _gone() -> LinkOverError:
    failure = Failure(FailureKind.UNREACHABLE, "the daemon ended the data channel")
    return LinkOverError(failure, unanswered=True)
