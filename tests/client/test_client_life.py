"""A daemon that is absent, dies, comes back; a client that drains, closes, forks, is shared."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from client_kinds import MakeClient, make_client
from support_daemon import GIVE_UP_S, Daemon, daemon
from wire_server import (
    FAMILY,
    OBJECT_BYTES,
    Canary,
    WireServer,
    block,
    honest_get,
    payload,
    wire_server,
)

from kvstored_client import ConnectError, DeadlineError, KVClient, KVFamily, KVPart, PutState
from kvstored_client.proto import kvstore_pb2 as pb

__all__ = ["daemon", "make_client"]
CHUNKS = 4
PREFIX = FAMILY.prefix(range(64 * CHUNKS))
MIB = 1 << 20


@pytest.fixture
def server() -> Iterator[WireServer]:
    with wire_server() as running:
        yield running


def until(condition: Callable[[], bool]) -> None:
    """Ask again and again; for what has no signal to wait for."""
    end = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.02)


def test_an_absent_daemon_is_a_miss_that_is_logged_once(
    make_client: MakeClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(f"unix://{tmp_path}/nobody.sock")
    caplog.set_level(logging.INFO, "kvstored_client")
    for _ in range(3):
        canary = Canary(CHUNKS)
        assert client.match(PREFIX).reason == "unreachable"
        got = client.get(PREFIX, canary.into)
        assert (got.chunks, got.reason, got.nbytes) == (0, "unreachable", 0)
        assert canary.untouched()
        put = client.put(PREFIX, canary.into)
        assert set(put.outcomes) == {PutState.REFUSED_UNREACHABLE}
        assert client.touch(PREFIX).reason == "unreachable"
        assert client.delete(PREFIX).reason == "unreachable"
    assert len(caplog.records) == 1
    with pytest.raises(ConnectError, match=r"UNAVAILABLE|no daemon at"):
        client.check()


def test_a_peer_that_accepts_and_says_nothing_costs_the_deadline(
    make_client: MakeClient, tmp_path: Path
) -> None:
    path = str(tmp_path / "mute.sock")
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(path)
        mute.listen()
        client = make_client(f"unix://{path}")
        assert client.match(PREFIX, timeout_s=0.3).reason == "deadline"
        assert client.get(PREFIX, Canary(CHUNKS).into, timeout_s=0.3).reason == "deadline"
        with pytest.raises(DeadlineError):
            client.check(timeout_s=0.3)


def test_kill_minus_9_in_the_middle_and_back_again(daemon: Daemon, make_client: MakeClient) -> None:
    family = KVFamily("m", "life", "float32", parts=[KVPart("kv", MIB)])
    prefix = family.prefix(range(64 * 24))
    data = np.random.default_rng(1).integers(0, 160, (24, MIB), dtype=np.uint8)
    client = make_client(daemon.target)
    client.put(prefix, data, durability="durable")
    assert client.match(prefix).chunks == 24
    results = []
    begun = threading.Event()

    def read_until_a_miss() -> None:
        into = np.full((24, MIB), 0xA5, np.uint8)
        while True:
            result = client.get(prefix, into)
            results.append((result, into))
            begun.set()
            if result.chunks < 24:
                return

    reader = threading.Thread(target=read_until_a_miss)
    reader.start()
    assert begun.wait(GIVE_UP_S)
    daemon.kill()
    reader.join(GIVE_UP_S)
    assert not reader.is_alive()
    result, into = results[-1]
    assert result.reason == "unreachable"
    for i in np.flatnonzero(result.ok):
        assert np.array_equal(into[i], data[i])
    assert client.match(prefix).reason == "unreachable"
    daemon.start()
    until(lambda: client.match(prefix).chunks == 24)
    into = np.zeros_like(data)
    back = client.get(prefix, into)
    assert back.chunks == 24
    assert back.bytes_by_tier == {"nvme": 24 * MIB}
    assert np.array_equal(into, data)


def test_another_daemon_at_the_same_place_is_greeted_anew(make_client: MakeClient) -> None:
    with wire_server() as first:
        client = make_client(first.target)
        assert client.get(PREFIX, Canary(CHUNKS).into).chunks == CHUNKS
        first.stop()
        assert client.get(PREFIX, Canary(CHUNKS).into).chunks == 0
        second = WireServer(Path(first.target.removeprefix("unix://")).parent)
        second.hello.boot_epoch = 2
        second.hello.namespace_salt = b"n" * 32
        try:
            until(lambda: client.get(PREFIX, Canary(CHUNKS).into).chunks == CHUNKS)
            assert second.gets[-1].run.keys == PREFIX.keys(b"n" * 32)
            assert len(second.hellos) == 1
        finally:
            second.stop()


def test_drain_waits_for_running_calls_and_close_ends_them(
    server: WireServer, make_client: MakeClient
) -> None:
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def script(request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield block({0: payload(0)})
        yield payload(0)
        begun.release()
        while not go_on.wait(0.05) and context.is_active():
            pass
        messages = honest_get(request)
        for _ in range(3):
            next(messages)
        yield from messages

    server.on_get = script
    client = make_client(server.target)
    canary = Canary(CHUNKS)
    assert client.drain(0.1)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.get, PREFIX, canary.into)
        assert begun.acquire(timeout=GIVE_UP_S)
        assert not client.drain(0.05)
        go_on.set()
        assert client.drain(GIVE_UP_S)
        assert running.result(GIVE_UP_S).chunks == CHUNKS
        server.wait_ended()

        go_on.clear()
        canary = Canary(CHUNKS)
        running = pool.submit(client.get, PREFIX, canary.into)
        assert begun.acquire(timeout=GIVE_UP_S)
        client.close()
        result = running.result(GIVE_UP_S)
        before = canary.all.copy()
        go_on.set()
        server.wait_ended()
    assert result.reason == "closed"
    assert result.chunks <= 1
    assert np.array_equal(canary.all, before)


def test_many_threads_share_one_client(daemon: Daemon, make_client: MakeClient) -> None:
    client = make_client(daemon.target)

    def one(seed: int) -> bool:
        family = KVFamily("m", f"threads{seed % 3}", "float32", parts=[KVPart("kv", 64 << 10)])
        prefix = family.prefix([seed] * 64 * 5)
        data = np.random.default_rng(seed).integers(0, 256, (5, 64 << 10), dtype=np.uint8)
        into = np.zeros_like(data)
        return (
            client.put(prefix, data).refused == 0
            and client.match(prefix).chunks == 5
            and client.get(prefix, into).chunks == 5
            and np.array_equal(into, data)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(40)))


FORKER = """
import os, sys, threading
import numpy as np
from kvstored_client import KVClient, KVFamily, KVPart

target = sys.argv[1]
client = KVClient(target)
family = KVFamily("m", "fork", "float32", parts=[KVPart("kv", 1 << 20)])
prefix = family.prefix(range(64 * 12))
data = np.random.default_rng(3).integers(0, 256, (12, 1 << 20), dtype=np.uint8)
assert client.put(prefix, data).refused == 0

def right():
    into = np.zeros_like(data)
    result = client.get(prefix, into)
    assert result.chunks == 12, result
    assert np.array_equal(into, data)
    assert client.match(prefix).chunks == 12
    assert client.put(prefix, data).existed == 12

right()
stop, problems, rounds = threading.Event(), [], [0] * 3

def worker(i):
    while not stop.is_set():
        try:
            right()
        except BaseException as error:
            problems.append(repr(error))
            return
        rounds[i] += 1

threads = [threading.Thread(target=worker, args=(i,)) for i in range(3)]
for thread in threads:
    thread.start()
statuses = []
for round in range(6):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            right()
            grandchild = os.fork()
            if grandchild == 0:
                right()
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
            right()
        finally:
            os._exit(code)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
before = sum(rounds)
while sum(rounds) < before + 6 and not problems:
    stop.wait(0.01)
stop.set()
for thread in threads:
    thread.join()
right()
print(statuses, problems)
client.close()
"""


def test_a_client_survives_forks_while_its_calls_go_on(daemon: Daemon) -> None:
    with KVClient(daemon.target) as here:
        here.check()
        with subprocess.Popen(
            [sys.executable, "-c", FORKER, daemon.target],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as forker:
            try:
                out, err = forker.communicate(timeout=GIVE_UP_S)
            except subprocess.TimeoutExpired:
                # Whichever of the family is stuck: none may outlive the test.
                os.killpg(forker.pid, signal.SIGKILL)
                raise
    assert forker.returncode == 0, err
    assert out.strip() == f"{[0] * 6} []", err


def test_bytes_of_a_call_are_counted_by_their_tier(server: WireServer) -> None:
    def script(request: pb.GetRequest, context: object) -> Iterator[bytes]:
        tiers = [pb.TIER_RAM, pb.TIER_NVME, pb.TIER_NVME, pb.TIER_OBJECT]
        for i, tier in enumerate(tiers):
            head = pb.GetBlock.FromString(block({i: payload(i)}))
            head.objects[0].tier = tier
            yield head.SerializeToString()
            yield payload(i)
        yield block({}, last=True, states=bytes(map(int, tiers)))

    server.on_get = script
    with KVClient(server.target) as client:
        result = client.get(PREFIX, Canary(CHUNKS).into)
    assert result.bytes_by_tier == {
        "ram": OBJECT_BYTES,
        "nvme": 2 * OBJECT_BYTES,
        "object": OBJECT_BYTES,
    }


def test_tcp_targets_are_names_and_ports(server: WireServer, make_client: MakeClient) -> None:
    client = make_client(server.tcp_target, token="t0ken")
    canary = Canary(CHUNKS)
    assert client.get(PREFIX, canary.into).chunks == CHUNKS
    assert server.metadata[0]["authorization"] == "Bearer t0ken"
    server.stop()
    assert client.get(PREFIX, canary.into).reason == "unreachable"
    nowhere = make_client("dns:///no-such-host.invalid:9440")
    assert nowhere.match(PREFIX, timeout_s=5).reason in ("unreachable", "deadline")


SHOW_VERBOSITY = "import os, kvstored_client.client; print(os.environ['GRPC_VERBOSITY'])"


@pytest.mark.parametrize(("given", "used"), [(None, "ERROR"), ("INFO", "INFO")])
def test_a_verbosity_of_grpc_that_the_user_set_stays(given: str | None, used: str) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "GRPC_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", SHOW_VERBOSITY],
        env=environ | ({} if given is None else {"GRPC_VERBOSITY": given}),
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=True,
    )
    assert done.stdout == used + "\n"
