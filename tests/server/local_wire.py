"""A bare client of the local session, written from docs/protocol.md alone, that can misbehave."""

from __future__ import annotations

import array
import contextlib
import itertools
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import Message

from kvstored_client.proto import kvstore_pb2 as pb

GIVE_UP_S = 30.0

HEADER = struct.Struct("<IBBHQ")
REPLY, LAST, ERROR = 1, 2, 4
OPEN, HELLO, MATCH, ACQUIRE, RELEASE, RESERVE, COMMIT, PUT = range(1, 9)
PREFETCH, PIN, UNPIN, TOUCH, DELETE, LIST, USAGE = range(9, 16)
RETIRED, CANCEL = 32, 33
SEGMENT, RING, AREA = 64, 65, 66
RETIRE, GOODBYE = 96, 97
DESCRIPTORS = {SEGMENT: 1, RING: 2, AREA: 1}
REPLIES: dict[int, type[Message]] = {
    HELLO: pb.HelloReply,
    MATCH: pb.MatchReply,
    ACQUIRE: pb.AcquireReply,
    RELEASE: pb.ReleaseReply,
    RESERVE: pb.ReserveReply,
    COMMIT: pb.PutReply,
    PREFETCH: pb.PrefetchReply,
    PIN: pb.PinReply,
    UNPIN: pb.UnpinReply,
    TOUCH: pb.TouchReply,
    DELETE: pb.DeleteReply,
    LIST: pb.ListReply,
    USAGE: pb.UsageReply,
}


class Refused(Exception):
    """An ERROR frame."""

    def __init__(self, error: pb.Error) -> None:
        super().__init__(f"{pb.ErrorCode.Name(error.code)}: {error.message}")
        self.code = error.code
        self.error = error


class Ended(Exception):
    """The daemon has shut its sending side down."""


@dataclass
class Got:
    """One frame from the daemon, with the descriptors that came for it."""

    kind: int
    flags: int
    request_id: int
    body: bytes
    fds: list[int] = field(default_factory=list)


def frame(kind: int, request_id: int, message: Message | bytes = b"", flags: int = 0) -> bytes:
    """A client's frame."""
    body = message if isinstance(message, bytes) else message.SerializeToString()
    return HEADER.pack(len(body), kind, flags, 0, request_id) + body


@dataclass
class Granted:
    """All replies to one Acquire: one entry per row, and the states."""

    rows: list[tuple[int, int, int, int, bytes, int]]  # index, segment, offset, length, sum, tier
    states: bytes
    replies: int


class LocalWire:
    """One session. Blocking, with a time-out. `segments`: mapped ones, by id."""

    def __init__(self, path: Path, connection: socket.socket | None = None) -> None:
        """`connection`: connected already, perhaps by another process."""
        self.socket = connection or _connected(path)
        self.events: socket.socket | None = None
        self.opened = pb.LocalOpened()
        self.segments: dict[int, mmap.mmap] = {}
        self.keep_fds = False
        self.segment_fds: dict[int, int] = {}  # with `keep_fds`
        self.notices: list[Got] = []  # RING and AREA, whose descriptors are the test's to close
        self._ids = itertools.count(1)
        self._fds: deque[int] = deque()
        self._data = bytearray()
        self._frames: deque[Got] = deque()

    # ---- frames ----------------------------------------------------------------------------------

    def send(self, kind: int, request_id: int, message: Message | bytes = b"") -> None:
        self.socket.sendall(frame(kind, request_id, message))

    def send_raw(self, data: bytes, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self.socket.sendmsg([data], rights)
        if sent < len(data):  # to send nothing fails, too, where the peer has hung up
            self.socket.sendall(data[sent:])

    def receive(self) -> Got:
        """The next frame; Ended when there will be none."""
        while not self._frames:
            data, ancillary, flags, _ = self.socket.recvmsg(1 << 20, socket.CMSG_SPACE(64 * 4))
            assert not flags & socket.MSG_CTRUNC
            for level, kind, packed in ancillary:
                assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
                self._fds.extend(array.array("i", packed))
            if not data:
                raise Ended
            self._data += data
            self._cut()
        return self._frames.popleft()

    def _cut(self) -> None:
        while len(self._data) >= HEADER.size:
            length, kind, flags, zero, request_id = HEADER.unpack_from(self._data)
            assert zero == 0
            stop = HEADER.size + length
            if len(self._data) < stop:
                return
            got = Got(kind, flags, request_id, bytes(self._data[HEADER.size : stop]))
            del self._data[:stop]
            count = DESCRIPTORS.get(kind, 0)
            if kind == OPEN and not flags & ERROR:
                count = 1
            # They came no later than the first byte of their frame, in order.
            got.fds = [self._fds.popleft() for _ in range(count)]
            self._frames.append(got)

    def answer(self, request_id: int) -> Got:
        """The next answer to this request, and no other; notices on the way are obeyed.

        Raises Refused for an ERROR.
        """
        while True:
            got = self.receive()
            if got.flags & REPLY:
                assert got.request_id == request_id, got
                if got.flags & ERROR:
                    assert got.flags & LAST
                    raise Refused(pb.Error.FromString(got.body))
                return got
            self.obey(got)

    def outcome(self, request_id: int) -> int:
        """The ErrorCode of the next answer; 0: none."""
        try:
            self.answer(request_id)
        except Refused as error:
            return error.code
        return 0

    def obey(self, notice: Got) -> None:
        """Map a segment; keep RING and AREA for the test."""
        assert notice.request_id == 0
        if notice.kind != SEGMENT:
            self.notices.append(notice)
            return
        told = pb.LocalSegment.FromString(notice.body)
        (fd,) = notice.fds
        assert told.segment_id not in self.segments, "told twice"
        self.segments[told.segment_id] = mmap.mmap(fd, told.size_bytes, prot=mmap.PROT_READ)
        if self.keep_fds:
            self.segment_fds[told.segment_id] = fd
        else:
            os.close(fd)

    # ---- verbs -----------------------------------------------------------------------------------

    def open(self, namespace: str = "default", **fields: object) -> pb.LocalOpened:
        request = pb.LocalOpen(protocol_version=1, namespace=namespace, client="test")
        for name, value in fields.items():
            setattr(request, name, value)
        self.send(OPEN, 1 << 40, request)
        got = self.answer(1 << 40)
        assert got.flags == REPLY | LAST
        self.opened = pb.LocalOpened.FromString(got.body)
        self.events = socket.socket(fileno=got.fds[0])
        self.events.settimeout(GIVE_UP_S)
        assert self.events.type == socket.SOCK_SEQPACKET
        return self.opened

    def new_id(self) -> int:
        return next(self._ids)

    def call(self, kind: int, request: Message | bytes) -> Message:
        """A request with one answer."""
        request_id = self.new_id()
        self.send(kind, request_id, request)
        got = self.answer(request_id)
        assert got.flags == REPLY | LAST
        assert got.kind == kind
        return REPLIES[kind].FromString(got.body)

    def start_acquire(self, run: pb.ChunkRun, lease_id: int, deadline_ms: int = 0) -> int:
        """Send an Acquire; its request id."""
        request = pb.AcquireRequest(run=run, lease_id=lease_id)
        request.ctx.deadline_ms = deadline_ms
        request_id = self.new_id()
        self.send(ACQUIRE, request_id, request)
        return request_id

    def acquired(self, request_id: int) -> Granted:
        """All answers to an Acquire."""
        granted = Granted([], b"", 0)
        while True:
            got = self.answer(request_id)
            assert got.kind == ACQUIRE
            reply = pb.AcquireReply.FromString(got.body)
            granted.replies += 1
            granted.rows += rows_of(reply)
            assert bool(reply.states) == bool(got.flags & LAST)
            if got.flags & LAST:
                granted.states = reply.states
                return granted

    def acquire(self, run: pb.ChunkRun, lease_id: int, deadline_ms: int = 0) -> Granted:
        return self.acquired(self.start_acquire(run, lease_id, deadline_ms))

    def release(self, *lease_ids: int) -> None:
        """And wait for the answer."""
        self.call(RELEASE, pb.ReleaseRequest(lease_ids=lease_ids))

    def release_quietly(self, *lease_ids: int) -> None:
        """As engines do: not answered. Done when a later request is."""
        self.send(RELEASE, 0, pb.ReleaseRequest(lease_ids=lease_ids))

    def bytes_of(self, row: tuple[int, int, int, int, bytes, int]) -> bytes:
        _, segment_id, offset, length, _, _ = row
        return self.segments[segment_id][offset : offset + length]

    def event(self) -> tuple[int, Message]:
        """The next message of the events channel; Ended at its end."""
        assert self.events is not None
        message = self.events.recv(1 << 16)
        if not message:
            raise Ended
        length, kind, flags, zero, request_id = HEADER.unpack_from(message)
        assert (flags, zero, request_id) == (0, 0, 0)
        assert length == len(message) - HEADER.size
        body = message[HEADER.size :]
        return kind, (pb.LocalRetire if kind == RETIRE else pb.Error).FromString(body)

    # ---- the end ---------------------------------------------------------------------------------

    def until_ended(self) -> None:
        """Read on until the daemon has shut its side down."""
        try:
            while True:
                for fd in self.receive().fds:
                    os.close(fd)
        except Ended:
            pass

    def until_gone(self) -> None:
        """Read on until the daemon has closed the socket."""
        with contextlib.suppress(ConnectionResetError):  # it did not read all that was sent
            self.until_ended()

    def shut_down(self) -> None:
        """End the session as a client should."""
        self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()
        if self.events is not None:
            self.events.close()
        for fd in [
            *self._fds,
            *self.segment_fds.values(),
            *(f for n in self.notices for f in n.fds),
        ]:
            with contextlib.suppress(OSError):
                os.close(fd)
        for mapped in self.segments.values():
            mapped.close()


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(GIVE_UP_S)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def rows_of(reply: pb.AcquireReply) -> list[tuple[int, int, int, int, bytes, int]]:
    """The columns of a reply, row by row."""
    count = len(reply.indices)
    sums = [reply.checksums[i * 16 : i * 16 + 16] for i in range(count)]
    assert len(reply.checksums) == 16 * count
    assert len(reply.tiers) == count
    columns = (reply.segment_ids, reply.offsets_bytes, reply.lengths_bytes)
    return list(zip(reply.indices, *columns, sums, reply.tiers, strict=True))
