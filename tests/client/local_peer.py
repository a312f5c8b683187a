"""A scripted daemon's side of the local session: real sockets and memfds, honest or not."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash
from google.protobuf.message import Message

from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import Flag, Frame, FrameReader, Kind, pack

_F_ADD_SEALS, _SEALS = 1033, 1 | 2 | 4
REPLY, LAST, ERROR = int(Flag.REPLY), int(Flag.LAST), int(Flag.ERROR)
SALT = b"s" * 32
OPENED = pb.LocalOpened(
    protocol_version=1,
    boot_epoch=7,
    session_id=1,
    max_leased_bytes=64 << 20,
    max_staging_bytes=64 << 20,
    max_requests=16,
)
HELLO = pb.HelloReply(
    protocol_version=1,
    min_protocol_version=1,
    server="scripted",
    boot_epoch=7,
    namespace_salt=SALT,
    limits=pb.Limits(max_keys_per_call=16_384, max_objects_per_call=65_536),
)


def memory(content: bytes, *, sealed: bool = True) -> int:
    """A descriptor of shared memory."""
    fd = os.memfd_create("scripted", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    if sealed:
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    return fd


class Conversation:
    """One session, as a script sees it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.events, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.data, self._their_data = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._frames = FrameReader()
        self._ready: list[Frame] = []
        self.seen: list[Frame] = []

    def next(self) -> Frame | None:
        """The client's next frame; None when it has ended the session."""
        while not self._ready:
            try:
                data = self.sock.recv(1 << 20)
            except OSError:
                return None
            if not data:
                return None
            self._ready = self._frames.feed(data)
        self.seen.append(self._ready[0])
        return self._ready.pop(0)

    def request(self, kind: Kind) -> Frame:
        """The next request of a kind; others are answered as usual."""
        while (frame := self.next()) is not None:
            if frame.kind == kind:
                return frame
            self.answer_as_usual(frame)
        raise ConnectionError

    def answer_as_usual(self, frame: Frame) -> None:
        """OPEN and HELLO get what they need; notices and releases nothing."""
        if frame.kind == Kind.OPEN:
            self.answer(frame, OPENED, fds=[self._theirs.fileno()])
        elif frame.kind == Kind.HELLO:
            self.answer(frame, HELLO)
        elif frame.kind == Kind.MATCH:
            count = len(pb.MatchRequest.FromString(frame.body).run.keys) // 32
            states = bytes([pb.IN_RAM]) * count
            self.answer(frame, pb.MatchReply(chunks=count, tokens=64 * count, states=states))

    def answer(
        self,
        frame: Frame,
        message: Message | bytes = b"",
        flags: int = REPLY | LAST,
        fds: list[int] | None = None,
    ) -> None:
        body = message if isinstance(message, bytes) else message.SerializeToString()
        self.send(pack(frame.kind, flags, frame.request_id, body), fds)

    def refuse(self, frame: Frame, code: int) -> None:
        error = pb.Error(code=code, message="told to refuse")  # type: ignore[arg-type]  # a number
        self.answer(frame, error, REPLY | LAST | ERROR)

    def notice(self, kind: int, message: Message | bytes, fds: list[int] | None = None) -> None:
        body = message if isinstance(message, bytes) else message.SerializeToString()
        self.send(pack(kind, 0, 0, body), fds)

    def send(self, data: bytes, fds: list[int] | None = None) -> None:
        if fds:
            socket.send_fds(self.sock, [data], fds)
        else:
            self.sock.sendall(data)

    def segment(self, number: int, content: bytes, **options: bool) -> None:
        """Lend a segment."""
        fd = memory(content, **options)
        try:
            size = len(content)
            self.notice(Kind.SEGMENT, pb.LocalSegment(segment_id=number, size_bytes=size), [fd])
        finally:
            os.close(fd)

    def ring(self, nbytes: int) -> int:
        """Lend a ring; the descriptor of its memory, to be closed."""
        fd = memory(bytes(nbytes))
        self.notice(Kind.RING, pb.LocalRing(size_bytes=nbytes), [fd, self._their_data.fileno()])
        return fd

    def close(self) -> None:
        for sock in (self.sock, self.events, self._theirs, self.data, self._their_data):
            sock.close()


def rows(
    contents: list[bytes], segment: int = 1, first: int = 0, states: bytes = b""
) -> pb.AcquireReply:
    """What an honest daemon says of objects that lie page by page in one segment."""
    reply = pb.AcquireReply(states=states)
    at = 0
    for i, content in enumerate(contents, first):
        reply.indices.append(i)
        reply.segment_ids.append(segment)
        reply.offsets_bytes.append(at)
        reply.lengths_bytes.append(len(content))
        reply.checksums += xxhash.xxh3_128_digest(content)
        reply.tiers += bytes([pb.TIER_RAM])
        at += -(-len(content) // 4096) * 4096
    return reply


def laid_out(contents: list[bytes]) -> bytes:
    """The segment in which `rows` says they lie."""
    return b"".join(content.ljust(-(-len(content) // 4096) * 4096, b"\0") for content in contents)


Script = Callable[[Conversation], None]


class LocalPeer:
    """Listens where a daemon would, and runs `script` for each session."""

    def __init__(self, folder: Path) -> None:
        self.target = f"unix://{folder}/w.sock"
        self.script: Script = lambda talk: None
        self.sessions: list[Conversation] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "w-local.sock"))
        self._listener.listen()
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            talk = Conversation(sock)
            self.sessions.append(talk)
            thread = threading.Thread(target=self._serve, args=(talk,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, talk: Conversation) -> None:
        with contextlib.suppress(OSError):
            self.script(talk)
            while (frame := talk.next()) is not None:
                talk.answer_as_usual(frame)

    def settle(self) -> None:
        """End every conversation; when it returns no thread holds a descriptor of its script's."""
        for talk in self.sessions:
            with contextlib.suppress(OSError):
                talk.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        self.settle()
        for talk in self.sessions:
            talk.close()


@contextlib.contextmanager
def local_peer() -> Iterator[LocalPeer]:
    folder = Path(tempfile.mkdtemp(prefix="kv"))
    peer = LocalPeer(folder)
    try:
        yield peer
    finally:
        peer.close()
        shutil.rmtree(folder)
