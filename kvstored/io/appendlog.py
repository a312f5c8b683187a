"""A file that grows by synced appends, and that is now and then replaced whole.

    head        as the user of the file says, or none
    frames      of (length in bytes, XXH3-64 of the payload, payload), the numbers as u64

What `append` has returned for is read again after a power loss. What it had not returned for may
lie torn at the end. Numbers are little-endian. Everything blocks, is meant for one thread, and
raises OSError where it could not be made durable.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvstored.io.base import Files
from kvstored.io.whole import is_there, read_whole, replace_file, write_all

_FRAME = struct.Struct("<QQ")
FRAME_BYTES = _FRAME.size
"""What a frame takes besides its payload."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was read: the payloads of the whole frames, up to the first that is not whole."""

    payloads: list[bytes]
    whole_bytes: int
    """Length of the head and the whole frames; 0 where the head is not what it should be."""

    length_bytes: int
    """Length of the file."""

    damaged: bool
    """Whether what lies behind the whole frames can not be one frame that was never synced."""


class AppendLog:
    """One such file. `head` is empty for a file that `append` makes; a file that has a head is
    made by `replace` alone, so that the head is never torn.
    """

    def __init__(self, files: Files, path: Path, *, head: bytes = b"") -> None:
        self.path = path
        self._files = files
        self._head = head
        self._named = False  # the file's name is known to be durable

    def load(self) -> Found:
        """Read the file, if there is one, and change nothing about it."""
        data = read_whole(self._files, self.path) if is_there(self._files, self.path) else b""
        if not data.startswith(self._head):
            return Found([], 0, len(data), damaged=bool(data))
        payloads = []
        whole = len(self._head)
        for payload, end in _frames(data, whole):
            payloads.append(payload)
            whole = end
        return Found(payloads, whole, len(data), damaged=not _can_be_torn(data, whole))

    def append(self, payload: bytes, *, synced: bool = True) -> int:
        """Add a frame; durable on return, unless not `synced`. Gives the file's new length in
        bytes. After an OSError the frame is not there as far as that could be brought about.

        Raises ValueError for an empty payload, behind which nothing would be read.
        """
        if not payload:
            raise ValueError("an empty payload")
        fd = self._files.open(self.path, os.O_RDWR | (0 if self._head else os.O_CREAT))
        try:
            end = self._files.stat(self.path).st_size
            frame = _framed(payload)
            try:
                write_all(self._files, fd, frame, end)
                if synced:
                    self._files.fdatasync(fd)
            except OSError:
                self._files.truncate(fd, end)  # or what comes later would lie behind a torn frame
                raise
        finally:
            self._files.close(fd)
        if not self._named:  # also if it is there: who made it may not have come this far
            self._files.sync_directory(self.path.parent)
            self._named = True
        return end + len(frame)

    def replace(self, payloads: Iterable[bytes]) -> int:
        """Have the file hold these and nothing else; durable on return. Gives its length in
        bytes. After an OSError it holds either this or what it held before.
        """
        self._named = False
        body = self._head + b"".join(map(_framed, payloads))
        replace_file(self._files, self.path, body)
        self._named = True
        return len(body)

    def cut(self, length_bytes: int) -> None:
        """Drop what lies behind that; durable on return."""
        fd = self._files.open(self.path, os.O_RDWR)
        try:
            self._files.truncate(fd, length_bytes)
            self._files.fdatasync(fd)
        finally:
            self._files.close(fd)

    def remove(self) -> None:
        """Remove the file, if there is one; durable on return where there was."""
        self._named = False
        try:
            self._files.unlink(self.path)
        except FileNotFoundError:
            return
        self._files.sync_directory(self.path.parent)


def _framed(payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def _frames(data: bytes, at: int) -> Iterator[tuple[bytes, int]]:
    """Payload and end of each whole frame, up to the first that is not."""
    while at + _FRAME.size <= len(data):
        length, check = _FRAME.unpack_from(data, at)
        end = at + _FRAME.size + length
        payload = data[at + _FRAME.size : end]
        if len(payload) != length or xxhash.xxh3_64_intdigest(payload) != check or not length:
            return
        yield payload, end
        at = end


def _can_be_torn(data: bytes, at: int) -> bool:
    """Whether what lies behind the last whole frame can be one that was never synced: nothing
    whole follows it.
    """
    if at + _FRAME.size > len(data):
        return True
    length, _ = _FRAME.unpack_from(data, at)
    return at + _FRAME.size + int(length) >= len(data) or not any(data[at : at + _FRAME.size])
