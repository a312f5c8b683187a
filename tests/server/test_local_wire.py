"""Descriptors leave with the first byte of their frame; who connected; too few descriptors."""

from __future__ import annotations

import array
import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from server.local_serving import content, local_serving, run

from kvstored.server.local import listener, peer
from kvstored.server.local.wire import Outbox
from kvstored.trouble import EVERY_S, Trouble

_DEAF = "no local session can be accepted: %s"


class Ends:
    """An outbox on a real socket, and what it said."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.theirs.setblocking(False)
        self.said: list[object] = []
        self.room = asyncio.Event()
        self.outbox = Outbox(
            loop,
            self.ours,
            lambda: self.said.append("gone"),
            self.said.append,
            self.room.set,
        )

    def take(self, most: int) -> tuple[bytes, list[int]]:
        data, ancillary, _, _ = self.theirs.recvmsg(most, socket.CMSG_SPACE(64))
        return data, [fd for _, _, raw in ancillary for fd in array.array("i", raw)]

    def close(self) -> None:
        self.outbox.close()
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as running:
        yield running


def same_file(fd: int, path: Path) -> bool:
    found, wanted = os.fstat(fd), path.stat()
    os.close(fd)
    return (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)


def test_descriptors_survive_their_owner_and_come_with_their_frame(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in "ab"]

    async def main() -> None:
        ends = Ends(asyncio.get_running_loop())
        ends.outbox.put(b"x" * (4 << 20))  # more than the socket takes
        for file in files:
            with file.open("w") as opened:
                ends.outbox.put_with_fds(file.name.encode() * 100, [opened.fileno()])
        ends.outbox.put(b"z" * 100)
        ends.outbox.flush()
        assert ends.outbox.stuck_since is not None
        came, descriptors = b"", []
        while len(came) < (4 << 20) + 300:
            try:
                data, fds = ends.take(1 << 16)
            except BlockingIOError:
                await asyncio.sleep(0)
                continue
            if fds:
                # The kernel gives them out with, or before, the first byte of their frame.
                descriptors.append((len(came), len(data), fds))
            came += data
        assert came == b"x" * (4 << 20) + b"a" * 100 + b"b" * 100 + b"z" * 100
        assert [len(fds) for _, _, fds in descriptors] == [1, 1]
        for i, (at, length, fds) in enumerate(descriptors):
            assert at <= (4 << 20) + 100 * i < at + length
            assert same_file(fds[0], files[i])
        await ends.room.wait()
        assert (ends.outbox.queued_bytes, ends.outbox.stuck_since, ends.said) == (0, None, [])
        ends.close()

    runner.run(main())


def test_what_was_not_sent_is_closed(runner: asyncio.Runner, tmp_path: Path) -> None:
    async def main() -> None:
        before = len(os.listdir("/proc/self/fd"))
        ends = Ends(asyncio.get_running_loop())
        ends.outbox.put(b"x" * (4 << 20))
        with (tmp_path / "f").open("w") as opened:
            ends.outbox.put_with_fds(b"f", [opened.fileno()])
        ends.close()
        assert len(os.listdir("/proc/self/fd")) == before

    runner.run(main())


def test_a_peer_that_is_gone_and_a_lack_of_descriptors_are_told_apart(
    runner: asyncio.Runner,
) -> None:
    """The first frees what the client had, the second must not: it may be looking at it."""

    async def main() -> None:
        ends = Ends(asyncio.get_running_loop())
        ends.outbox.put(b"x" * (4 << 20))
        ends.outbox.flush()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            ends.outbox.put_with_fds(b"f", [0])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        (failure,) = ends.said
        assert isinstance(failure, OSError)
        assert failure.errno == errno.EMFILE
        ends.close()
        other = Ends(asyncio.get_running_loop())
        other.theirs.close()
        other.outbox.put(b"x")
        other.outbox.flush()
        assert other.said == ["gone"]
        other.close()

    runner.run(main())


def test_a_client_whose_process_cannot_be_seen_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As from another pid namespace: its death is not seen, the end of its socket is."""
    seen = peer.identify

    def unseen(connection: socket.socket) -> peer.Peer:
        found = seen(connection)
        assert found.pid == os.getpid()
        assert found.pidfd is not None
        os.close(found.pidfd)
        return peer.Peer(0, found.uid, found.gid, None)

    monkeypatch.setattr(listener, "identify", unseen)
    with local_serving() as served:
        served.fill(run(1), [content(0)])
        for _ in range(2):
            with served.session() as wire:
                assert len(wire.acquire(run(1), 1).rows) == 1
            served.becomes(served.nothing_held)
        said = [r for r in caplog.records if "cannot be seen" in r.getMessage()]
        assert len(said) == 1


def test_connections_wait_while_there_are_no_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is said once, however often it is tried again."""
    tries: list[Exception] = []
    came = Trouble.came

    def counted(trouble: Trouble, error: Exception, now: float) -> None:
        tries.append(error)
        came(trouble, error, now)

    monkeypatch.setattr(Trouble, "came", counted)
    monkeypatch.setattr(listener, "_RETRY_ACCEPT_S", 0.001)
    with local_serving() as served:
        served.fill(run(1), [content(0)])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket(socket.AF_UNIX) as early:
            early.settimeout(20)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                early.connect(str(served.path))
                served.becomes(lambda: len(tries) >= 3)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            served.becomes(lambda: served.server._accepting)
            with served.session() as wire:
                assert len(wire.acquire(run(1), 1).rows) == 1
    assert [r.getMessage() for r in caplog.records].count(_DEAF % tries[0]) == 1


def test_trouble_that_goes_on_is_said_again_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    trouble = Trouble(logging.getLogger("kvstored.test"), "it is: %s")
    for now in (0.0, 1.0, EVERY_S - 1, EVERY_S, EVERY_S + 1):
        trouble.came(OSError("so"), now)
    said = [(r.getMessage(), getattr(r, "fields", {})) for r in caplog.records]
    assert said == [("it is: so", {}), ("it is: so", {"times_unsaid": 2})]


def test_the_end_of_the_daemon_is_no_warning_for_each_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with local_serving() as served, served.session():
        served.do(served.server.stop())
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
