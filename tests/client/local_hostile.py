"""What the tests of peers that say anything on the local socket share: the steps of what they say,
and a client that leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from local_clients import join_session_threads
from local_peer import LAST, REPLY, Conversation, LocalPeer, Script, laid_out, rows
from wire_server import FAMILY, OBJECT_BYTES, payload

from kvstored_client import KVClient, Timeouts
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import Kind, pack

CHUNKS = 4
PREFIX = FAMILY.prefix(range(64 * CHUNKS))
CONTENTS = [payload(i) for i in range(CHUNKS)]
HELD = bytes([pb.IN_RAM]) * CHUNKS
SHORT_S = 0.5


@contextlib.contextmanager
def clean_client(peer: LocalPeer) -> Iterator[KVClient]:
    """A client of that peer, and afterwards nothing of it is left."""
    before = descriptors()
    with KVClient(peer.target, timeouts=Timeouts(5, 5, 5, 5)) as made:
        yield made
    join_session_threads()
    peer.settle()
    after = descriptors()
    assert not [target for target in after if "memfd" in target]
    if made._transport._wire is None:  # what grpc leaves open is its own affair
        assert len(after) == len(before) + 5 * len(peer.sessions), after


def descriptors() -> list[str]:
    """What this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def acquired(*steps: Callable[[Conversation, object], None]) -> Script:
    """Answers the first Acquire by these steps."""

    def script(talk: Conversation) -> None:
        frame = talk.request(Kind.ACQUIRE)
        for step in steps:
            step(talk, frame)

    return script


def segment(content: bytes = laid_out(CONTENTS), number: int = 1, **options: bool) -> Callable:  # type: ignore[type-arg]
    return lambda talk, frame: talk.segment(number, content, **options)


def reply(changes: dict[str, object] | None = None, flags: int = REPLY | LAST) -> Callable:  # type: ignore[type-arg]
    """An honest answer with some fields replaced."""
    message = rows(CONTENTS, states=HELD)
    for name, value in (changes or {}).items():
        if isinstance(value, bytes):
            setattr(message, name, value)
        else:
            getattr(message, name)[:] = value
    return lambda talk, frame: talk.answer(frame, message, flags)


def raw(data: bytes, fds: Callable[[], list[int]] = list) -> Callable:  # type: ignore[type-arg]
    def send(talk: Conversation, frame: object) -> None:
        numbers = fds()
        try:
            talk.send(data, numbers)
        finally:
            for fd in numbers:
                os.close(fd)

    return send


def lent(number: int, size: int, *fds: Callable[[], int]) -> Callable:  # type: ignore[type-arg]
    """A SEGMENT notice with whatever descriptors."""
    body = pb.LocalSegment(segment_id=number, size_bytes=size).SerializeToString()
    return raw(pack(Kind.SEGMENT, 0, 0, body), lambda: [make() for make in fds])


WHOLE = len(laid_out(CONTENTS))
SIZES = [OBJECT_BYTES] * CHUNKS
OFFSETS = [i * OBJECT_BYTES for i in range(CHUNKS)]


def plain_file() -> int:
    return os.open("/proc/self/exe", os.O_RDONLY | os.O_CLOEXEC)
