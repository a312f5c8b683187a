"""`kvstored serve` as a process: it really serves, says so, and ends as it should."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon.daemon_helpers import (
    DEADLINE_S,
    Process,
    config_file,
    counters,
    environment,
    fetch,
    process,
    serving,
)
from server.serving import PART_BYTES, Refused, Wire, header, keys, run

from kvstored_client.proto import admin_pb2 as admin
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods

TOKEN = "token-of-the-team"
RAM_ONLY = {"KVSTORED_NVME__ENABLED": "false"}
CHUNK_TOKENS = 64


def _wire(folder: Path, name: str = "k.sock", token: str | None = None) -> Wire:
    return Wire(f"unix:{folder}/run/{name}", token)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Process]:
    """A ready daemon without an NVMe tier."""
    with serving(tmp_path, environ=environment(**RAM_ONLY)) as running:
        running.wait_event("ready")
        yield running


def test_ready_means_served_and_a_stop_leaves_nothing(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(DEADLINE_S)
        told: list[str] = []

        def hear(word: str) -> None:
            while not any(word in message for message in told):
                told.append(manager.recv(4096).decode())

        environ = environment(
            **RAM_ONLY, NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="200000"
        )
        with serving(tmp_path, environ=environ) as running:
            hear("READY=1")
            wire = _wire(tmp_path)
            assert len(wire.hello().namespace_salt) == 32
            wire.close()
            told.clear()
            hear("WATCHDOG=1")
            running.child.terminate()
            hear("STOPPING=1")
            assert running.status() == 0
    assert running.wait_event("stopping")["reason"] == "SIGTERM"
    assert running.wait_event("stopped")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_start_is_said_to_take_its_time_until_it_is_ready(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(DEADLINE_S)
        environ = environment(**RAM_ONLY, NOTIFY_SOCKET=str(tmp_path / "notify"))
        with serving(tmp_path, environ=environ):
            assert manager.recv(4096).startswith(b"EXTEND_TIMEOUT_USEC=")
            assert manager.recv(4096).startswith(b"READY=1")


def test_a_second_daemon_is_refused(tmp_path: Path, daemon: Process) -> None:
    with serving(tmp_path, environ=environment(**RAM_ONLY)) as second:
        assert second.status() == 2
        assert f"in use by process {daemon.child.pid}" in second.stderr
        assert "Traceback" not in second.stderr


def test_a_live_socket_is_refused_and_a_stale_one_replaced(tmp_path: Path, daemon: Process) -> None:
    elsewhere = environment(**RAM_ONLY, KVSTORED_DAEMON__DATA_DIR=str(tmp_path / "other"))
    with serving(tmp_path, environ=elsewhere) as second:
        assert second.status() == 2
        assert "another process listens" in second.stderr
        assert "Traceback" not in second.stderr
    wire = _wire(tmp_path)
    wire.hello()  # the first one is unharmed
    daemon.child.kill()
    daemon.status()
    assert (tmp_path / "run/k.sock").exists()
    with serving(tmp_path, environ=elsewhere) as third:
        third.wait_event("ready")
        _wire(tmp_path).hello()
        third.child.send_signal(signal.SIGINT)
        assert third.status() == 0
    wire.close()


def test_a_taken_tcp_port_is_a_mistake(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environ = environment(
            **RAM_ONLY, KVSTORED_LISTEN__TCP=f"127.0.0.1:{taken.getsockname()[1]}"
        )
        with serving(tmp_path, "", "--insecure", environ=environ) as running:
            assert running.status() == 2
            assert "cannot listen on 127.0.0.1" in running.stderr
            assert "Traceback" not in running.stderr


def test_a_stop_during_the_start_ends_it(tmp_path: Path) -> None:
    with serving(tmp_path, environ=environment(**RAM_ONLY)) as running:
        while not (tmp_path / "data/lock").exists():
            assert running.child.poll() is None
        running.child.terminate()
        assert running.status() == 0
    assert "Traceback" not in running.stderr


def test_open_files_are_raised_to_the_hard_limit(daemon: Process) -> None:
    text = Path(f"/proc/{daemon.child.pid}/limits").read_text()
    soft, hard = next(x for x in text.splitlines() if x.startswith("Max open files")).split()[3:5]
    assert soft == hard


def test_tokens_of_the_configuration_decide(tmp_path: Path) -> None:
    extra = """
[[namespace]]
name = "team"
token_env = ["TEAM_TOKEN"]
admin = true
"""
    environ = environment(**RAM_ONLY, TEAM_TOKEN=TOKEN, KVSTORED_LISTEN__TCP="127.0.0.1:0")
    with serving(tmp_path, extra, environ=environ) as running:
        tcp = str(running.wait_event("ready")["tcp"])
        anonymous, known, wrong = Wire(tcp), Wire(tcp, TOKEN), Wire(tcp, TOKEN + "!")
        local = _wire(tmp_path)
        salts = {known.hello(namespace="team").namespace_salt, local.hello().namespace_salt}
        assert len(salts) == 2
        for wire, namespace in ((anonymous, "default"), (anonymous, "team"), (wrong, "team"),
                                (known, "default"), (local, "team")):  # fmt: skip
            with pytest.raises(Refused, match="UNAUTHENTICATED"):
                wire.hello(namespace=namespace)
        status = known.unary(methods.STATUS, admin.StatusRequest())
        assert isinstance(status, admin.StatusReply)
        assert {n.name for n in status.namespaces} == {"default", "team"}
        for wire in (anonymous, known, wrong, local):
            wire.close()
    assert TOKEN not in running.stderr


def test_insecure_opens_tcp(tmp_path: Path) -> None:
    environ = environment(**RAM_ONLY, KVSTORED_LISTEN__TCP="127.0.0.1:0")
    with serving(tmp_path, "", "--insecure", environ=environ) as running:
        wire = Wire(str(running.wait_event("ready")["tcp"]))
        wire.hello()
        wire.close()


def test_known_traffic_gives_exact_figures_and_idling_none(tmp_path: Path, daemon: Process) -> None:
    http = str(daemon.wait_event("ready")["http"])
    assert fetch(http, "/readyz")[0] == 200
    wire = _wire(tmp_path)
    wire.hello()
    payload = [os.urandom(PART_BYTES) for _ in range(3)]
    context = pb.Context(tenant="t1")
    head = header(3)
    head.ctx.CopyFrom(context)
    _, states = wire.put(head, payload)
    assert set(states) == {pb.STORED}
    _, states = wire.put(head, [])
    assert set(states) == {pb.EXISTED}
    objects, _, _ = wire.get(pb.GetRequest(ctx=context, run=run(3)))
    assert [objects[i] for i in range(3)] == payload
    absent = run(2, salt=b"absent")
    wire.unary(methods.MATCH, pb.MatchRequest(ctx=context, run=absent, mode=pb.EACH))
    with pytest.raises(Refused):
        wire.unary(methods.MATCH, pb.MatchRequest(run=run(keys=keys(1)[:31])))
    wire.close()

    found = counters(fetch(http, "/metrics")[1])
    hit = 'model="m",namespace="default",tenant="t1",tier="ram"'
    miss = 'model="m",namespace="default",reason="never_stored",tenant="t1"'
    held = 'namespace="default",tenant="t1",tier="ram"'
    assert {
        f"kvstored_hit_chunks_total{{{hit}}}": 3,
        f"kvstored_hit_tokens_total{{{hit}}}": 3 * CHUNK_TOKENS,
        f"kvstored_hit_bytes_total{{{hit}}}": 3 * PART_BYTES,
        f"kvstored_miss_chunks_total{{{miss}}}": 2,
        f"kvstored_miss_tokens_total{{{miss}}}": 2 * CHUNK_TOKENS,
        f"kvstored_miss_bytes_total{{{miss}}}": 2 * PART_BYTES,
        f"kvstored_stored_objects_total{{{held}}}": 3,
        f"kvstored_stored_bytes_total{{{held}}}": 3 * PART_BYTES,
        f"kvstored_tenant_charged_bytes{{{held}}}": 3 * PART_BYTES,
        'kvstored_put_objects_total{namespace="default",outcome="stored",tenant="t1"}': 3,
        'kvstored_put_objects_total{namespace="default",outcome="existed",tenant="t1"}': 3,
        'kvstored_call_seconds_count{tier="ram",verb="get"}': 1,
        'kvstored_call_seconds_count{tier="none",verb="put"}': 2,
        'kvstored_call_errors_total{code="BAD_KEYS",verb="match"}': 1,
        'kvstored_tier_charged_bytes{tier="ram"}': 3 * PART_BYTES,
        'kvstored_tier_cap_bytes{tier="ram"}': 64 << 20,
        "kvstored_leased_bytes": 0,
    }.items() <= found.items()

    def still() -> dict[str, float]:
        """Everything but what may move by itself: byte-seconds and the loop's lateness."""
        now = counters(fetch(http, "/metrics")[1])
        moving = ("kvstored_tenant_byte_seconds", "kvstored_loop_lag_seconds")
        return {k: v for k, v in now.items() if not k.startswith(moving)}

    before = still()
    fetch(http, "/healthz")
    # Long enough for every periodic task of the store to have come round.
    signal.sigtimedwait([], 2.5)
    assert still() == before


def test_tenant_labels_are_bounded(tmp_path: Path) -> None:
    environ = environment(**RAM_ONLY, KVSTORED_TENANTS__MAX="2")
    with serving(tmp_path, environ=environ) as running:
        http = str(running.wait_event("ready")["http"])
        wire = _wire(tmp_path)
        wire.hello()
        for tenant in ("a", "b", "c", "d"):
            context = pb.Context(tenant=tenant)
            wire.unary(methods.MATCH, pb.MatchRequest(ctx=context, run=run(1), mode=pb.EACH))
        wire.close()
        found = counters(fetch(http, "/metrics")[1])
    chunks = {k: v for k, v in found.items() if k.startswith("kvstored_miss_chunks")}
    assert sorted(chunks.values()) == [1, 1, 2]
    assert any('tenant="other"' in name for name in chunks)


STUCK = """
import os, sys, threading
from kvstored.stopping import block_signals
block_signals()
from pathlib import Path
from kvstored import config, daemon
never, _ = os.pipe()
threading.Thread(target=os.read, args=(never, 1)).start()
loaded = config.load(Path(sys.argv[1]), os.environ)
if sys.argv[2] == "loop":
    threading.Timer(0, lambda: None)
    start = daemon.Daemon.request_stop
    def stuck(self, reason):
        start(self, reason)
        self._loop.call_soon_threadsafe(os.read, never, 1)
    daemon.Daemon.request_stop = stuck
daemon.serve(loaded)
"""


def test_a_thread_in_the_kernel_does_not_hold_the_stop_up(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    with process("-c", STUCK, str(file), "thread", environ=environment(**RAM_ONLY)) as running:
        running.wait_event("ready")
        running.child.terminate()
        assert running.status() == 0
        assert running.wait_event("stopped")


def test_nor_does_a_stuck_verbs_loop(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    environ = environment(**RAM_ONLY, KVSTORED_DAEMON__STOP_TIMEOUT_S="1")
    with process("-c", STUCK, str(file), "loop", environ=environ) as running:
        running.wait_event("ready")
        running.child.terminate()
        assert running.status() == 0
        assert running.wait_event("the stop took too long")["unfinished"]
