"""Frames of the local session, shared by client and daemon. Defined in docs/protocol.md, "Local
session"; recorded in proto/golden/local_frames.json. No I/O.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

HEADER = struct.Struct("<IBBHQ")
"""Length of the body (uint32), kind, flags, zero (uint16), request id (uint64)."""

HEADER_BYTES = HEADER.size
MAX_BODY_BYTES = 16 << 20
"""Of any frame; the longest request is a Put of 65,536 objects with checksums, under 2 MiB."""

POSITION = struct.Struct("<QQ")
"""A message of the data channel: request id of the Put, position in its payload."""

ABANDONED = (1 << 64) - 1
"""Position by which the daemon says that it takes no more of a put; its answer says why."""


class Kind(enum.IntEnum):
    """What a frame carries. Requests are answered by frames of the same kind and request id."""

    OPEN = 1
    HELLO = 2
    MATCH = 3
    ACQUIRE = 4
    RELEASE = 5
    RESERVE = 6
    COMMIT = 7
    PUT = 8
    PREFETCH = 9
    PIN = 10
    UNPIN = 11
    TOUCH = 12
    DELETE = 13
    LIST = 14
    USAGE = 15
    # notices of the client: not answered
    RETIRED = 32
    CANCEL = 33
    # notices of the daemon, on the session's socket
    SEGMENT = 64
    RING = 65
    AREA = 66
    # notices of the daemon, on the events channel
    RETIRE = 96
    GOODBYE = 97


class Flag(enum.IntFlag):
    """Bits of a frame's flags."""

    REPLY = 1
    LAST = 2  # no further reply to this request follows
    ERROR = 4  # the body is an Error; always with LAST


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. `kind` may be a number that this version does not know."""

    kind: int
    flags: int
    request_id: int
    body: bytes


class BadFrameError(ValueError):
    """The bytes are no frame of this protocol; nothing after them can be understood."""


def pack(kind: int, flags: int, request_id: int, body: bytes = b"") -> bytes:
    """A frame's bytes: header, then body."""
    return HEADER.pack(len(body), kind, flags, 0, request_id) + body


def unpack_header(data: bytes | bytearray | memoryview, at: int = 0) -> tuple[int, int, int, int]:
    """(body length, kind, flags, request id) of the header at `at`. Raises BadFrameError."""
    length, kind, flags, zero, request_id = HEADER.unpack_from(data, at)
    if length > MAX_BODY_BYTES or zero:
        raise BadFrameError(f"a frame of kind {kind} announces {length} bytes, reserved {zero}")
    return length, kind, flags, request_id


class FrameReader:
    """Cuts a stream into frames; keeps what is not whole yet, at most one frame of it."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._rest = bytearray()

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has begun and not ended."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes, in order. Raises BadFrameError."""
        if not self._rest and len(data) >= HEADER_BYTES:  # the usual case: whole frames
            frames, at = self._cut(data)
            self._rest += memoryview(data)[at:]
            return frames
        self._rest += data
        frames, at = self._cut(self._rest)
        del self._rest[:at]
        return frames

    def _cut(self, buffer: bytes | bytearray) -> tuple[list[Frame], int]:
        """The whole frames at the beginning, and where they end."""
        frames: list[Frame] = []
        at, end = 0, len(buffer)
        while end - at >= HEADER_BYTES:
            length, kind, flags, request_id = unpack_header(buffer, at)
            if length > self._max_body_bytes:
                raise BadFrameError(f"a frame of kind {kind} announces {length} bytes")
            stop = at + HEADER_BYTES + length
            if stop > end:
                break
            body = bytes(buffer[at + HEADER_BYTES : stop])
            frames.append(Frame(kind, flags, request_id, body))
            at = stop
        return frames, at
