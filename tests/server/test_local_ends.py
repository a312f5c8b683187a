"""How local sessions end: by their client, by its death, by the daemon; and what is left then."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from server import local_holder
from server import local_wire as w
from server.local_serving import PART_BYTES, TOKEN, LocalServed, content, local_serving, run
from server.local_wire import LocalWire, Refused

from kvstored.errors import Draining
from kvstored.server.limits import Limits, LocalLimits
from kvstored.server.local import peer as peer_module
from kvstored.server.local.session import HIGH_BYTES
from kvstored_client.proto import kvstore_pb2 as pb

CHUNKS = 8
HELD_BYTES = CHUNKS * PART_BYTES
STALL_S = 0.5
LIMITS = replace(Limits(), stall_timeout_s=STALL_S, local=LocalLimits(max_sessions=6))


@pytest.fixture
def served() -> Iterator[LocalServed]:
    with local_serving(LIMITS) as running:
        running.fill(run(CHUNKS), [content(i) for i in range(CHUNKS)])
        yield running


@contextlib.contextmanager
def bystander(served: LocalServed) -> Iterator[LocalWire]:
    """A session that must notice nothing."""
    with served.session() as wire:
        granted = wire.acquire(run(1), 1)
        yield wire
        assert wire.bytes_of(granted.rows[0]) == content(0)
        assert wire.acquire(run(2), 2).states == bytes([pb.IN_RAM] * 2)
        wire.release(1, 2)


@pytest.fixture(params=["peerpidfd", "pidfd_open"])
def pidfds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels before 6.5 do not name the peer by a pidfd."""
    if request.param == "pidfd_open":
        monkeypatch.setattr(peer_module, "_SO_PEERPIDFD", 9999)


# ---- by the client -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["shutdown", "close"])
def test_the_clients_end_frees_everything(served: LocalServed, how: str) -> None:
    wire = LocalWire(served.path)
    wire.open()
    wire.acquire(run(CHUNKS), 1)
    wire.call(w.MATCH, pb.MatchRequest(run=run(CHUNKS), hold=True, hold_id=2))
    wire.call(
        w.RESERVE,
        pb.ReserveRequest(run=run(1, salt=b"new"), lease_id=3, lengths_bytes=[PART_BYTES]),
    )
    assert served.figures.leased_bytes == 2 * HELD_BYTES + PART_BYTES
    if how == "shutdown":
        wire.shut_down()
    else:
        wire.socket.close()
    served.becomes(served.nothing_held)
    figures = served.figures
    assert (figures.sessions, figures.quarantined_sessions) == (0, 0)
    assert figures.ended == {"client": 1}
    wire.close()


@pytest.mark.usefixtures("pidfds")
@pytest.mark.parametrize("fork", ["fork", "alone"])
def test_a_killed_client_frees_everything_though_a_forked_child_lives(
    served: LocalServed, fork: str
) -> None:
    with bystander(served):
        holder = subprocess.Popen(
            [sys.executable, local_holder.__file__, str(served.path), str(CHUNKS), fork],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert holder.stdout is not None
        pid, child = map(int, holder.stdout.readline().split())
        assert pid == holder.pid
        try:
            assert served.figures.leased_bytes == HELD_BYTES + PART_BYTES
            holder.kill()
            served.becomes(lambda: served.server.figures().leased_bytes == PART_BYTES, 1.0)
            if child:
                os.kill(child, 0)  # it lives, and has the socket
                assert served.figures.ended == {"death": 1}
            assert served.look(lambda: served.ram.leased_bytes) == PART_BYTES
        finally:
            holder.kill()
            if child:
                os.kill(child, signal.SIGKILL)
            holder.communicate()


def test_a_client_that_died_before_it_was_seen_is_not_served(
    monkeypatch: pytest.MonkeyPatch, served: LocalServed
) -> None:
    """Its process is gone, its socket was left to a child of it."""
    monkeypatch.setattr(peer_module, "_SO_PEERPIDFD", 9999)
    with LocalServedPaused(served):
        connecting = (
            "import os, socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
            "os.fork() or (print(os.getpid(), flush=True), sys.stdin.read())"
        )
        client = subprocess.Popen(
            [sys.executable, "-c", connecting, str(served.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert client.stdout is not None
        client.stdout.readline()
        client.wait(w.GIVE_UP_S)
    with served.session():
        assert served.figures.sessions == 1
        assert served.look(lambda: len(served.server._sessions)) == 1
    client.communicate()


class LocalServedPaused:
    """The server accepts nobody meanwhile."""

    def __init__(self, served: LocalServed) -> None:
        self._served = served

    def __enter__(self) -> None:
        self._served.look(self._served.server._stop_accepting)

    def __exit__(self, *_: object) -> None:
        self._served.look(self._served.server._accept_more)


# ---- by the daemon -------------------------------------------------------------------------------

GARBAGE = {
    "random bytes": bytes(range(200, 256)) * 100,
    "reserved bits": w.HEADER.pack(0, w.MATCH, 0, 1, 5),
    "too long": w.HEADER.pack(16 << 20, w.MATCH, 0, 0, 5),
    "flags": w.frame(w.MATCH, 5, pb.MatchRequest(run=run(1)), flags=w.REPLY),
    "unknown kind": w.frame(77, 5),
    "a daemon's kind": w.frame(w.SEGMENT, 5),
    "open again": w.frame(w.OPEN, 5, pb.LocalOpen(protocol_version=1, namespace="default")),
    "not its message": w.frame(w.MATCH, 5, b"\xff" * 40),
    "retired that is none": w.frame(w.RETIRED, 0, b"\xff" * 40),
    "an id in use": w.frame(w.HELLO, 5, pb.HelloRequest(protocol_version=1, namespace="default"))
    * 2,
}


@pytest.mark.parametrize("name", GARBAGE)
def test_what_is_no_frame_ends_that_session_alone(served: LocalServed, name: str) -> None:
    with bystander(served), served.session() as wire:
        granted = wire.acquire(run(CHUNKS), 1)
        wire.send_raw(GARBAGE[name])
        wire.until_ended()
        kind, error = wire.event()
        assert isinstance(error, pb.Error)
        assert (kind, error.code) == (w.GOODBYE, pb.BAD_REQUEST)
        assert error.message
        assert error.hint
        figures = served.figures
        assert figures.ended == {"broken frame": 1}
        assert figures.quarantined_sessions == 1
        # Its views stay good, and counted, until the client is done with them.
        assert figures.leased_bytes == HELD_BYTES + PART_BYTES
        served.look(lambda: served.ram.leased_bytes == HELD_BYTES)
        wire.send_raw(b"more of it, which nobody reads" * 1000)
        assert [wire.bytes_of(row) for row in granted.rows] == [content(i) for i in range(CHUNKS)]
        wire.shut_down()
        served.becomes(lambda: served.server.figures().leased_bytes == PART_BYTES)
        assert served.figures.quarantined_sessions == 0
        assert served.figures.ended == {"broken frame": 1}


def test_a_quarantined_session_ends_with_its_process_too(served: LocalServed) -> None:
    script = (
        "import sys; from pathlib import Path; from server.local_wire import LocalWire\n"
        "from server.local_serving import run\n"
        "w = LocalWire(Path(sys.argv[1])); w.open(); w.acquire(run(8), 1)\n"
        "w.send_raw(b'x' * 64); w.until_ended(); print('.', flush=True); sys.stdin.read()"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", script, str(served.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert client.stdout is not None
    assert client.stdout.readline() == b".\n"
    assert served.figures.quarantined_sessions == 1
    assert served.figures.leased_bytes == HELD_BYTES
    client.kill()
    served.becomes(served.nothing_held, 1.0)
    client.communicate()


@pytest.mark.parametrize(
    "opening",
    [
        b"\xff" * 100,
        w.frame(w.MATCH, 1, pb.MatchRequest(run=run(1))),
        w.HEADER.pack(1 << 20, w.OPEN, 0, 0, 1),
        w.frame(w.OPEN, 1, b"\xff" * 10),
        w.frame(w.OPEN, 1, pb.LocalOpen(protocol_version=1, namespace="default"))
        + w.frame(w.USAGE, 2, pb.UsageRequest(namespace="default")),
    ],
)
def test_who_does_not_begin_with_open_is_shut_out(served: LocalServed, opening: bytes) -> None:
    with bystander(served):
        wire = LocalWire(served.path)
        wire.send_raw(opening)
        wire.until_gone()
        wire.close()
        assert served.figures.ended == {"broken frame": 1}


@pytest.mark.parametrize("sent", [b"", w.frame(w.OPEN, 1)[:9]])
def test_who_does_not_open_in_time_is_shut_out(served: LocalServed, sent: bytes) -> None:
    wire = LocalWire(served.path)
    wire.send_raw(sent)
    wire.until_gone()
    wire.close()
    assert served.figures.ended == {"not opened": 1}


def test_half_a_frame_and_silence(served: LocalServed) -> None:
    with bystander(served), served.session() as wire:
        wire.acquire(run(CHUNKS), 1)
        wire.send_raw(w.frame(w.MATCH, 5, pb.MatchRequest(run=run(1)))[:-3])
        wire.until_ended()
        assert wire.event()[0] == w.GOODBYE
        assert served.figures.ended == {"stalled": 1}
        assert served.figures.leased_bytes == HELD_BYTES + PART_BYTES


def test_a_client_that_never_reads(served: LocalServed) -> None:
    with bystander(served) as other, served.session() as wire:
        session = served.look(lambda: [*served.server._sessions][-1])
        matches = w.frame(w.MATCH, 5, pb.MatchRequest(run=run(CHUNKS))) * 100
        assert wire.events is not None
        wire.socket.setblocking(False)
        most = sent = 0
        while not select.select([wire.events], [], [], 0)[0]:
            with contextlib.suppress(BlockingIOError):
                sent = (sent + wire.socket.send(matches[sent:])) % len(matches)
            most = max(most, served.look(lambda: session._outbox.queued_bytes))
            assert other.acquire(run(1), 3).states == bytes([pb.IN_RAM])
            other.release(3)
        assert wire.event()[0] == w.GOODBYE
        assert served.figures.ended == {"stalled": 1}
        assert 0 < most < 2 * HIGH_BYTES


def test_a_client_that_reads_late_gets_every_answer_and_no_more_is_queued() -> None:
    with local_serving() as served, served.session() as wire:
        served.fill(run(CHUNKS), [content(i) for i in range(CHUNKS)])
        session = served.look(lambda: [*served.server._sessions][-1])
        one = w.frame(w.LIST, 5, pb.ListRequest(namespace="default"))
        lists = one * 5
        wire.socket.setblocking(False)
        sent = 0
        for _ in range(600):  # little by little: all of it is read as long as there is room
            with contextlib.suppress(BlockingIOError):
                sent += wire.socket.send(lists[sent % len(lists) :])
            answered = sent // len(one)
            served.becomes(
                lambda n=answered: (
                    session._outbox.queued_bytes > HIGH_BYTES
                    or [verb for verb, _ in served.ended].count("list") == n
                )
            )
            served.look(lambda: None)
        assert served.look(lambda: session._outbox.queued_bytes) < HIGH_BYTES + 100_000
        wire.socket.settimeout(w.GIVE_UP_S)
        for _ in range(sent // len(one)):
            assert wire.answer(5).flags == w.REPLY | w.LAST
        if rest := sent % len(one):
            wire.send_raw(one[rest:])
            wire.answer(5)
        assert served.look(lambda: session._outbox.queued_bytes) == 0
        assert wire.acquire(run(1), 1).states == bytes([pb.IN_RAM])


def test_an_idle_session_is_left_alone(served: LocalServed) -> None:
    """Silence between frames is no stall: another session stalls meanwhile, and is seen to."""
    with served.session() as idle, served.session() as wire:
        idle.acquire(run(1), 1)
        for _ in range(2):
            unopened = LocalWire(served.path)
            unopened.until_gone()
            unopened.close()
        assert wire.acquire(run(1), 1).states == bytes([pb.IN_RAM])
        assert idle.acquire(run(1), 2).states == bytes([pb.IN_RAM])


def test_a_full_events_channel_ends_the_session(served: LocalServed) -> None:
    with bystander(served), served.session() as wire:
        session = served.look(lambda: [*served.server._sessions][-1])
        served.look(lambda: [session.retire_areas([i]) for i in range(10_000)])
        assert served.figures.ended == {"events": 1}
        wire.until_ended()


def test_a_closed_events_channel_ends_the_session(served: LocalServed) -> None:
    with bystander(served), served.session() as wire:
        assert wire.events is not None
        wire.events.close()
        session = served.look(lambda: [*served.server._sessions][-1])
        served.look(lambda: session.retire_areas([1]))
        assert served.figures.ended == {"events": 1}
        wire.until_ended()


def test_a_stop_says_goodbye_and_views_stay_good(served: LocalServed) -> None:
    with served.session() as wire:
        granted = wire.acquire(run(CHUNKS), 1)
        served.do(served.server.stop())
        kind, error = wire.event()
        assert isinstance(error, pb.Error)
        assert (kind, error.code) == (w.GOODBYE, Draining.code)
        wire.until_gone()
        assert served.figures.leased_bytes == 0
        assert [wire.bytes_of(row) for row in granted.rows] == [content(i) for i in range(CHUNKS)]
    with pytest.raises(FileNotFoundError):
        LocalWire(served.path)


def test_a_draining_daemon_refuses_requests_and_sessions(served: LocalServed) -> None:
    with served.session() as wire:
        served.look(served.dispatcher.start_draining)
        with pytest.raises(Refused) as caught:
            wire.acquire(run(1), 1)
        assert caught.value.code == pb.DRAINING
        wire.release(1)  # what frees memory is served still
        other = LocalWire(served.path)
        with pytest.raises(Refused) as caught:
            other.open()
        assert caught.value.code == pb.DRAINING
        other.close()
        assert served.do(served.server.drain(1.0))


# ---- how many ------------------------------------------------------------------------------------


def test_one_namespace_has_half_of_the_sessions(served: LocalServed) -> None:
    with contextlib.ExitStack() as stack:
        first, *_ = [stack.enter_context(served.session()) for _ in range(3)]
        refused = LocalWire(served.path)
        with pytest.raises(Refused) as caught:
            refused.open()
        assert caught.value.code == pb.RESOURCE_EXHAUSTED
        refused.close()
        stack.enter_context(served.session("locked", token=TOKEN))
        # One that the daemon has ended still counts: its memory is still held.
        first.send_raw(b"x" * 64)
        first.until_ended()
        refused = LocalWire(served.path)
        with pytest.raises(Refused):
            refused.open()
        refused.close()
        first.shut_down()
        served.becomes(lambda: served.server.figures().quarantined_sessions == 0)
        stack.enter_context(served.session())


def test_those_who_only_connect_do_not_keep_others_out() -> None:
    with local_serving(replace(Limits(), local=LocalLimits(max_sessions=4))) as served:
        served.fill(run(2), [content(0), content(1)])
        with bystander(served):
            idle = [LocalWire(served.path) for _ in range(12)]
            with served.session() as wire:
                assert len(wire.acquire(run(1), 1).rows) == 1
            assert served.look(lambda: len(served.server._sessions)) <= 4 + 2
            for wire in idle:
                wire.close()


def test_the_socket_has_the_mode_of_the_other(served: LocalServed) -> None:
    assert Path(served.path).stat().st_mode & 0o777 == 0o660
