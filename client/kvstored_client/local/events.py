"""A session's own thread: obeys RETIRE and GOODBYE, says what finalisers have left to say, reads
for requests that were given up, and closes everything when the session is over.
"""

from __future__ import annotations

import select
import socket
import threading
import time

from google.protobuf.message import DecodeError

from kvstored_client.failures import (
    CLIENT_CLOSED,
    Failure,
    FailureKind,
    GarbageError,
    failure_of_error,
)
from kvstored_client.local.errors import StepError
from kvstored_client.local.link import Link
from kvstored_client.local.wake import Closing, Released, Unmapped
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import HEADER_BYTES, BadFrameError, Frame, FrameReader, Kind, pack

_LONGEST_BYTES = 1 << 20
_PATIENCE_S = 5.0
_RELEASES_PER_FRAME = 4096


def start(link: Link, channel: socket.socket) -> None:
    """Serve a link that has just been opened; `channel` is closed with it."""
    events = _Events(link, channel)
    link.last_words = events.take
    link.on_child = channel.close
    try:
        threading.Thread(target=events.run, name="kvstored-session", daemon=True).start()
    except RuntimeError as error:
        link.last_words = link.on_child = _nothing
        channel.close()
        raise StepError(Failure(FailureKind.NOT_LOCAL, f"no thread: {error}")) from error


class _Events:
    """The events channel: frames of the daemon, one per message."""

    def __init__(self, link: Link, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._link = link
        self._channel = channel
        self._lock = threading.RLock()  # whoever obeys may find that the session has ended
        self._ended = False

    def run(self) -> None:
        """The thread."""
        link = self._link
        link.served = True  # before it looks whether the session is over; see open_link
        try:
            while not link.finished():
                reading = link.begin_reading()
                readable = self._poll(reading)
                if reading:
                    link.end_reading(readable=readable)
                self._say(link)
                self.take()
        finally:
            link.last_words = _nothing
            link.close()
            self._channel.close()

    def _poll(self, reading: bool) -> bool:
        """Wait for anything; whether the session's socket is to be read."""
        poll = select.poll()
        poll.register(self._link.outbox.wake.fd, select.POLLIN)
        if not self._ended:
            poll.register(self._channel, select.POLLIN)
        stream = self._link.stream.fileno()
        if reading and stream >= 0:
            poll.register(stream, select.POLLIN)
            poll.register(self._link.stream.wake.fd, select.POLLIN)
        return any(fd == stream for fd, _ in poll.poll())

    def _say(self, link: Link) -> None:
        released: list[int] = []
        unmapped = pb.LocalRetire()
        for item in link.outbox.take():
            if isinstance(item, Released):
                released.append(item.lease_id)
            elif isinstance(item, Unmapped):
                _note(unmapped, item)
            elif isinstance(item, Closing):
                link.end(CLIENT_CLOSED, mute=False)
        for at in range(0, len(released), _RELEASES_PER_FRAME):
            link.release_now(released[at : at + _RELEASES_PER_FRAME])
        self._tell(unmapped)

    def _tell(self, unmapped: pb.LocalRetire) -> None:
        if unmapped.segment_ids or unmapped.area_ids:
            frame = pack(Kind.RETIRED, 0, 0, unmapped.SerializeToString())
            try:
                self._link.send(frame, time.monotonic() + _PATIENCE_S, patient=True)
            except StepError as error:
                self._link.end(error.failure)

    def take(self) -> None:
        """Obey what has come. Also for others who see that the session has ended: the reason came
        before, on this channel.
        """
        with self._lock:
            try:
                while not self._ended and (message := self._receive()):
                    self._obey(_only_frame(message))
            except (GarbageError, BadFrameError, DecodeError) as error:
                self._ended = True
                self._link.end(GarbageError(str(error)).failure())

    def _receive(self) -> bytes:
        try:
            message = self._channel.recv(_LONGEST_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError:
            message = b""
        if not message:
            self._ended = True
            self._link.drain()
        return message

    def _obey(self, frame: Frame) -> None:
        if frame.kind == Kind.RETIRE:
            asked = pb.LocalRetire.FromString(frame.body)
            done = pb.LocalRetire()
            for number in asked.segment_ids:
                if self._link.segments.retire(number):
                    done.segment_ids.append(number)
            for number in asked.area_ids:
                if self._link.areas.retire(number):
                    done.area_ids.append(number)
            self._tell(done)
        elif frame.kind == Kind.GOODBYE:
            self._link.end(failure_of_error(pb.Error.FromString(frame.body)))


def _only_frame(message: bytes) -> Frame:
    frames = FrameReader().feed(message) if len(message) >= HEADER_BYTES else []
    if len(frames) != 1 or len(message) != HEADER_BYTES + len(frames[0].body):
        raise GarbageError(f"{len(message)} bytes on the events channel are not one frame")
    return frames[0]


def _note(unmapped: pb.LocalRetire, item: Unmapped) -> None:
    (unmapped.area_ids if item.is_area else unmapped.segment_ids).append(item.mapping_id)


def _nothing() -> None:
    pass
