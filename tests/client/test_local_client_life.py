"""The same-node client when processes fork, daemons restart, and local sessions cannot be had."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from local_clients import (
    FAMILY,
    MIB,
    LocalServed,
    chunks,
    client_of,
    join_session_threads,
    local_serving,
)
from support_daemon import Daemon, running_daemon

from kvstored.server.limits import Limits, LocalLimits
from kvstored_client import KVClient, LeaseEndedError
from kvstored_client.transports import auto

PREFIX = FAMILY.prefix(range(64 * 8))
DATA = chunks(8)


@pytest.fixture(scope="module")
def served() -> Iterator[LocalServed]:
    with local_serving(cap_bytes=64 * MIB) as running:
        yield running


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        yield running


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; how it ended: 0 if all was well, else as os.wait says."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:
            logging.getLogger().exception("in the child")
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_parent_and_child_each_have_a_session(daemon: Daemon) -> None:
    with KVClient(daemon.target) as client:
        assert client.put(PREFIX, DATA).reason == ""
        with client.acquire(PREFIX) as lease:
            view = lease[0]

            def child() -> None:
                with pytest.raises(LeaseEndedError):
                    lease[1]
                out = np.zeros_like(DATA)
                assert client.get(PREFIX, out).chunks == 8
                assert (out == DATA).all()
                with client.acquire(PREFIX) as own:
                    assert bytes(own[1]) == DATA[1].tobytes()
                    assert client.put(FAMILY.prefix(range(1, 65)), DATA[:1]).reason == ""
                client.close()

            assert in_child(child) == 0
            assert bytes(view) == DATA[0].tobytes()
            assert client.match(PREFIX).chunks == 8
            del view
        out = np.zeros_like(DATA)
        assert client.get(PREFIX, out).chunks == 8
    join_session_threads()


def test_a_child_that_looks_at_its_parents_view_dies_rather_than_read(daemon: Daemon) -> None:
    with KVClient(daemon.target) as client:
        client.put(PREFIX, DATA)
        with client.acquire(PREFIX) as lease:
            views = [lease[0]]

            def look() -> None:
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
                bytes(views[0])

            assert os.WTERMSIG(in_child(look)) == signal.SIGSEGV
            # And dropping it there neither unmaps nor releases anything.
            assert in_child(lambda: lease._take_grants().clear()) == 0
            assert bytes(views[0]) == DATA[0].tobytes()
            views.clear()
    join_session_threads()


def test_a_child_unmaps_nothing_that_it_has_put_there_itself(daemon: Daemon) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    fixed, private, anonymous, read_write = 0x100000, 2, 0x20, 3
    with KVClient(daemon.target) as client:
        client.put(PREFIX, DATA)
        lease = client.acquire(PREFIX)
        address = int(lease._contents.addresses[0])

        def child() -> None:
            nonlocal lease
            page = ctypes.c_void_p(address)
            nbytes = ctypes.c_size_t(4096)
            flags = fixed | private | anonymous
            assert libc.mmap(page, nbytes, read_write, flags, -1, ctypes.c_long(0)) == address
            ctypes.memmove(address, b"mine", 4)
            mapping = lease._contents.grants[0].mappings[0]
            assert mapping.address <= address < mapping.address + mapping.nbytes
            del lease
            mapping.__del__()
            assert ctypes.string_at(address, 4) == b"mine"

        assert in_child(child) == 0
        lease.release()
    join_session_threads()


def test_a_fork_while_other_threads_call(daemon: Daemon) -> None:
    with KVClient(daemon.target) as client:
        client.put(PREFIX, DATA)
        over = threading.Event()
        wrong: list[object] = []

        def work() -> None:
            out = np.zeros_like(DATA)
            while not over.is_set():
                got = client.get(PREFIX, out)
                if got.chunks != 8 or not (out == DATA).all():
                    wrong.append(got)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):

                def child() -> None:
                    assert client.get(PREFIX, np.zeros_like(DATA)).chunks == 8

                assert in_child(child) == 0
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert not wrong
    join_session_threads()


def test_a_restarted_daemon_is_found_again_and_old_views_stay() -> None:
    with running_daemon() as daemon, KVClient(daemon.target) as client:
        assert client.put(PREFIX, DATA).stored == 8
        with client.acquire(PREFIX) as lease:
            view = lease[3]
        daemon.kill()
        assert bytes(view) == DATA[3].tobytes()
        daemon.start()
        assert client.put(PREFIX, DATA).reason == ""
        out = np.zeros_like(DATA)
        assert client.get(PREFIX, out).chunks == 8
        assert (out == DATA).all()
        with client.acquire(PREFIX) as lease:
            assert bytes(lease[3]) == DATA[3].tobytes()
        assert bytes(view) == DATA[3].tobytes()
        daemon.stop()
        got = client.get(PREFIX, out)
        assert (got.chunks, got.reason) == (0, "unreachable")
        assert client.acquire(PREFIX).reason == "unreachable"
        del view
    join_session_threads()


def test_no_descriptor_and_no_thread_is_left(served: LocalServed) -> None:
    def round_of_use() -> None:
        with client_of(served) as client:
            client.put(PREFIX, DATA)
            with client.acquire(PREFIX) as lease, client.reserve(FAMILY.prefix(range(70))):
                assert bytes(lease[0]) == DATA[0].tobytes()

    round_of_use()
    served.becomes(lambda: served.server.figures().sessions == 0 and served.nothing_held())
    before = descriptors()
    for _ in range(3):
        round_of_use()
        served.becomes(lambda: served.server.figures().sessions == 0 and served.nothing_held())
    assert descriptors() == before


def test_grpc_does_where_no_local_session_can_be_had(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "kvstored_client")
    with running_daemon() as daemon, KVClient(daemon.target) as client:
        local = Path(daemon.folder, "k-local.sock")
        aside = local.with_name("aside.sock")
        local.rename(aside)
        assert client.put(PREFIX, DATA).stored == 8
        out = np.zeros_like(DATA)
        for _ in range(3):
            assert client.get(PREFIX, out).chunks == 8
        assert (out == DATA).all()
        lease = client.acquire(PREFIX)
        assert (len(lease), lease.reason) == (0, "not_local")
        assert "k-local.sock" in lease.detail
        slots = client.reserve(PREFIX)
        assert slots.reason == "not_local"
        assert slots.commit().refused == 8
        match = client.match(PREFIX, hold=True)
        assert (match.chunks, match.hold) == (8, None)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "no local session" in caplog.text
        aside.rename(local)
        monkeypatch.setattr(auto, "FIRST_PAUSE_S", 0.0)
        with client.acquire(PREFIX) as lease:  # asks for a session at once
            assert len(lease) == 8
        assert "a local session again" in caplog.text
        assert client._transport._worth_a_try()
    join_session_threads()


def test_too_many_sessions_go_by_grpc() -> None:
    limits = Limits(local=LocalLimits(max_sessions=1))
    with local_serving(limits, cap_bytes=16 * MIB) as small, client_of(small) as first:
        assert first.put(PREFIX, DATA).stored == 8
        with KVClient(first.target) as second:
            # Nobody serves gRPC here, which is what it then says.
            assert second.match(PREFIX).reason == "unreachable"
            assert second.acquire(PREFIX).reason == "unreachable"
        assert first.match(PREFIX).chunks == 8


def test_a_token_is_asked_for_as_over_grpc(daemon: Daemon) -> None:
    from support_daemon import TOKEN

    for token, reason in ((None, "unauthenticated"), ("wrong", "unauthenticated"), (TOKEN, "")):
        with KVClient(daemon.target, "locked", token=token) as client:
            assert client.put(PREFIX, DATA).reason == reason
            assert client.acquire(PREFIX).reason == reason
    join_session_threads()


def test_closing_ends_running_calls(served: LocalServed) -> None:
    with client_of(served) as client:
        client.put(PREFIX, DATA)
        begun = threading.Barrier(5)
        reasons: list[str] = []

        def work() -> None:
            out = np.zeros_like(DATA)
            begun.wait()
            try:
                while not (reason := client.get(PREFIX, out).reason):
                    pass
                reasons.append(reason)
            except Exception as error:
                reasons.append(type(error).__name__)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        begun.wait()
        client.close()
        for thread in threads:
            thread.join(20)
        assert len(reasons) == 4
        assert set(reasons) <= {"closed", "ClosedError"}
    served.becomes(served.nothing_held)
