"""Raw frames: cutting granted objects into messages, joining messages into reserved extents.

No gRPC here; both halves run on the stream loop and touch at most a frame at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import xxhash

from kvstored.errors import BadRequest, Overlong, TooLarge, Truncated
from kvstored.server.limits import PIECE_BYTES
from kvstored.store.api import Grant, Received, WantedObject
from kvstored_client.proto import kvstore_pb2 as pb

FRAME_BYTES = 1 << 20
BLOCK_BYTES = 32 << 20


def blocks(grants: Sequence[Grant], block_bytes: int = BLOCK_BYTES) -> Iterator[Sequence[Grant]]:
    """Grants in order, in blocks of at most `block_bytes`, or of one larger object."""
    start = total = 0
    for i, grant in enumerate(grants):
        if i > start and total + grant.length_bytes > block_bytes:
            yield grants[start:i]
            start, total = i, 0
        total += grant.length_bytes
    if start < len(grants):
        yield grants[start:]


def head(grants: Sequence[Grant]) -> pb.GetBlock:
    """The typed message before a block's frames."""
    return pb.GetBlock(
        objects=[
            pb.GetObject(
                index=g.index,
                length_bytes=g.length_bytes,
                checksum=g.checksum,
                tier=cast("pb.TierKind", g.tier),
            )
            for g in grants
        ],
        payload_bytes=sum(g.length_bytes for g in grants),
    )


def cut(lengths_bytes: Sequence[int], frame_bytes: int) -> Iterator[list[tuple[int, int, int]]]:
    """Frames over objects laid back to back, as lists of (object, start, stop).

    Every frame but the last has exactly `frame_bytes`.
    """
    frame: list[tuple[int, int, int]] = []
    room = frame_bytes
    for index, length in enumerate(lengths_bytes):
        start = 0
        while start < length:
            stop = min(length, start + room)
            frame.append((index, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield frame
                frame, room = [], frame_bytes
    if frame:
        yield frame


def frames(grants: Sequence[Grant], frame_bytes: int = FRAME_BYTES) -> Iterator[bytes]:
    """The bytes of a block, one copy each; a frame is made when it is asked for."""
    for plan in cut([g.length_bytes for g in grants], frame_bytes):
        if len(plan) == 1:
            index, start, stop = plan[0]
            yield bytes(grants[index].view[start:stop])
        else:
            yield b"".join([grants[index].view[start:stop] for index, start, stop in plan])


class FrameJoiner:
    """Fills the wanted objects of a put from its frames, and hashes the daemon's own copy.

    Nothing is kept but positions; after `finish` or any error no byte is written any more.
    """

    def __init__(self, wanted: Sequence[WantedObject], max_frame_bytes: int) -> None:
        self._wanted = wanted
        self._max_frame_bytes = max_frame_bytes
        self._object = 0
        self._offset = 0
        self.expected_bytes = sum(w.length_bytes for w in wanted)
        self.received_bytes = 0
        self._received: list[Received] = []
        self._begin_object()

    def _begin_object(self) -> None:
        self._offset = 0
        self._whole = xxhash.xxh3_128()
        self._piece = xxhash.xxh3_64()
        self._pieces: list[bytes] = []
        more = self._object < len(self._wanted)
        self._target = np.frombuffer(self._wanted[self._object].view if more else b"", np.uint8)

    def add(self, frame: bytes) -> None:
        """Take the next frame.

        Raises TooLarge (over the frame limit), Overlong (more than planned), BadRequest (empty).
        """
        size = len(frame)
        if size > self._max_frame_bytes:
            raise TooLarge(
                f"a frame of {size} bytes at payload byte {self.received_bytes}",
                f"send frames of at most {self._max_frame_bytes} bytes",
            )
        if not size:
            raise BadRequest(
                f"an empty frame at payload byte {self.received_bytes}", "send no empty frames"
            )
        if self.received_bytes + size > self.expected_bytes:
            raise Overlong(
                f"payload byte {self.received_bytes + size} of {self.expected_bytes} planned",
                "send exactly the bytes of the wanted objects, then close the stream",
            )
        self.received_bytes += size
        source = np.frombuffer(frame, dtype=np.uint8)
        done = 0
        while done < size:
            done += self._fill(source[done:])

    def _fill(self, source: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
        """Copy and hash up to the end of the piece, the object or the source; the bytes taken."""
        length = self._wanted[self._object].length_bytes
        piece_end = min(length, (self._offset // PIECE_BYTES + 1) * PIECE_BYTES)
        taken = min(len(source), piece_end - self._offset)
        own = self._target[self._offset : self._offset + taken]
        np.copyto(own, source[:taken])
        # Not the frame: what is hashed is what will be read.
        self._whole.update(own.data)
        self._piece.update(own.data)
        self._offset += taken
        if self._offset == piece_end:
            self._pieces.append(self._piece.intdigest().to_bytes(8, "little"))
            self._piece.reset()
        if self._offset == length:
            self._end_object()
        return taken

    def _end_object(self) -> None:
        index = self._wanted[self._object].index
        self._received.append(Received(index, self._whole.digest(), b"".join(self._pieces)))
        self._object += 1
        self._begin_object()

    def let_go(self) -> None:
        """Hold the extents no longer; `add` must not be called afterwards."""
        self._wanted = ()
        self._target = np.frombuffer(b"", np.uint8)

    def finish(self) -> list[Received]:
        """The objects, all of them complete. Raises Truncated when bytes are missing."""
        if self.received_bytes != self.expected_bytes:
            raise Truncated(
                f"the payload ended at byte {self.received_bytes} of {self.expected_bytes}",
                "send all wanted objects in full; nothing of this put was stored",
            )
        return self._received
