"""/metrics, /healthz and /readyz on real sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from daemon.daemon_helpers import DEADLINE_S, counters, fetch, fetch_unix
from prometheus_client import CollectorRegistry

from kvstored.config import TcpAddress
from kvstored.looplag import LoopLag
from kvstored.server.http import LOOP_STUCK_AFTER_S, MAX_REQUESTS, Health, HttpServer
from kvstored.server.local.figures import LocalFigures
from kvstored.server.metrics import (
    CallAccounts,
    MetricsCollector,
    MetricsSources,
    RamFigures,
    Snapshot,
    take_snapshot,
)
from kvstored.server.sockets import ListenError
from kvstored.store.accounting import Accounts
from kvstored_client.proto import admin_pb2 as admin

LOCAL = LocalFigures(2, 1, 12288, 8192, {"died": 3})
LOOPBACK = TcpAddress("127.0.0.1", 0)


@dataclass
class Figures:
    """What the probes and metrics are fed with."""

    phase: str = "ready"
    silent_s: float = 0.0
    snapshot: Callable[[], Snapshot] = Snapshot
    restarts: dict[str, int] = field(default_factory=lambda: {"loop-lag": 2})

    def server(self, address: TcpAddress | Path = LOOPBACK) -> HttpServer:
        registry = CollectorRegistry()
        sources = MetricsSources(
            snapshot=lambda: self.snapshot(),
            lag=lambda: LoopLag(0.001, 0.002, 0.003, 10),
            task_restarts=lambda: self.restarts,
            phase=lambda: self.phase,
            started_s=1e9,
        )
        registry.register(MetricsCollector(sources))
        health = Health(phase=lambda: self.phase, loop_silent_s=lambda: self.silent_s)
        return HttpServer(address, registry, health)


@pytest.fixture
def figures() -> Figures:
    return Figures()


@pytest.fixture
def address(figures: Figures) -> Iterator[str]:
    server = figures.server()
    yield server.start()
    server.stop()


def test_probes_tell_phases_apart(figures: Figures, address: str) -> None:
    for phase, ready in (("starting", 503), ("ready", 200), ("draining", 503)):
        figures.phase = phase
        assert fetch(address, "/healthz")[0] == 200
        status, body = fetch(address, "/readyz")
        assert (status, json.loads(body)["phase"]) == (ready, phase)


def test_a_stuck_loop_is_neither_ready_nor_healthy(figures: Figures, address: str) -> None:
    figures.silent_s = LOOP_STUCK_AFTER_S + 1
    assert fetch(address, "/healthz")[0] == 503
    assert fetch(address, "/readyz")[0] == 503
    figures.silent_s = 0.1
    assert fetch(address, "/healthz")[0] == 200


def test_other_paths_and_methods(address: str) -> None:
    status, body = fetch(address, "/etc/passwd")
    assert (status, json.loads(body)["try"]) == (404, ["/metrics", "/healthz", "/readyz"])
    assert fetch(address, "/metrics", "POST")[0] == 405
    assert fetch(address, "/healthz", "DELETE")[0] == 405


def test_no_snapshot_no_figures(figures: Figures, address: str) -> None:
    def late() -> Snapshot:
        raise TimeoutError

    def broken() -> Snapshot:
        raise KeyError("a bug")

    for snapshot in (late, broken):
        figures.snapshot = snapshot
        status, body = fetch(address, "/metrics")
        assert status == 503
        assert "kvstored_info" not in body
    figures.snapshot = Snapshot
    assert fetch(address, "/metrics")[0] == 200


def test_unix_socket_and_its_end(figures: Figures, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    server = figures.server(path)
    assert server.start() == f"unix:{path}"
    assert path.stat().st_mode & 0o777 == 0o660
    assert fetch_unix(path, "/readyz").startswith("HTTP/1.0 200")
    with pytest.raises(ListenError, match="another process listens"):
        figures.server(path).start()
    server.stop()
    server.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_is_a_mistake_to_mend(figures: Figures, address: str) -> None:
    taken = TcpAddress("127.0.0.1", int(address.rpartition(":")[2]))
    with pytest.raises(ListenError, match="Address already in use"):
        figures.server(taken).start()


def test_idle_peers_do_not_pile_up(address: str) -> None:
    host, _, port = address.rpartition(":")
    peers = [socket.create_connection((host, int(port)), DEADLINE_S) for _ in range(MAX_REQUESTS)]
    try:
        for peer in peers:
            peer.sendall(b"GET /healthz HTTP/1.0\r\n")  # and no end of the headers
        with socket.create_connection((host, int(port)), DEADLINE_S) as one_more:
            assert one_more.recv(1) == b""  # hung up on
    finally:
        for peer in peers:
            peer.close()


def test_metrics_render_the_accounts_exactly(figures: Figures, address: str) -> None:
    accounts = Accounts(clock=lambda: 0.0)
    accounts.hits["ns", "t", "m", "nvme"].add(3, 192, 3000)
    accounts.misses["ns", "t", "m", "evicted"].add(2, 128, 2000)
    accounts.stored["ns", "t", "ram"].add(5, 0, 5000)
    accounts.evicted["ns", "ram", "room"].add(1, 0, 1000)
    accounts.puts["ns", "t", "stored"] = 5
    accounts.conflicts["ns"] = 1
    accounts.checksum_failures["nvme"] = 4
    accounts.charge("ns", "t", "ram", 4096, 1)
    accounts.recovery_dropped["corrupt"] = 6
    calls = CallAccounts(accounts)
    calls.call_ended("get", "ok", 0.0003, "nvme")
    calls.call_ended("get", "ok", 99.0, "nvme")
    calls.call_ended("put", "BAD_KEYS", 0.002, "")
    status = admin.StatusReply(chunks=7, dirty_bytes=8, leased_bytes=9, families=10)
    status.tiers.add(
        name="ram", cap_bytes=100, footprint_bytes=50, charged_bytes=40, objects=4,
        health="out of memory", mode="memfd",
    )  # fmt: skip
    status.namespaces.add(name="ns", tier="ram", charged_bytes=40, cap_bytes=60)
    figures.snapshot = lambda: take_snapshot(
        accounts, status, {"room": 11}, LOCAL, RamFigures(segments=3, huge_bytes=4096)
    )

    found = counters(fetch(address, "/metrics")[1])
    expected = {
        'kvstored_hit_chunks_total{model="m",namespace="ns",tenant="t",tier="nvme"}': 3,
        'kvstored_hit_tokens_total{model="m",namespace="ns",tenant="t",tier="nvme"}': 192,
        'kvstored_hit_bytes_total{model="m",namespace="ns",tenant="t",tier="nvme"}': 3000,
        'kvstored_miss_chunks_total{model="m",namespace="ns",reason="evicted",tenant="t"}': 2,
        'kvstored_miss_tokens_total{model="m",namespace="ns",reason="evicted",tenant="t"}': 128,
        'kvstored_miss_bytes_total{model="m",namespace="ns",reason="evicted",tenant="t"}': 2000,
        'kvstored_stored_objects_total{namespace="ns",tenant="t",tier="ram"}': 5,
        'kvstored_stored_bytes_total{namespace="ns",tenant="t",tier="ram"}': 5000,
        'kvstored_evicted_objects_total{namespace="ns",reason="room",tier="ram"}': 1,
        'kvstored_evicted_bytes_total{namespace="ns",reason="room",tier="ram"}': 1000,
        'kvstored_put_objects_total{namespace="ns",outcome="stored",tenant="t"}': 5,
        'kvstored_conflicts_total{namespace="ns"}': 1,
        'kvstored_checksum_failures_total{tier="nvme"}': 4,
        'kvstored_call_errors_total{code="BAD_KEYS",verb="put"}': 1,
        'kvstored_call_seconds_count{tier="nvme",verb="get"}': 2,
        'kvstored_call_seconds_sum{tier="nvme",verb="get"}': 99.0003,
        'kvstored_call_seconds_bucket{le="0.00025",tier="nvme",verb="get"}': 0,
        'kvstored_call_seconds_bucket{le="0.0005",tier="nvme",verb="get"}': 1,
        'kvstored_call_seconds_bucket{le="10",tier="nvme",verb="get"}': 1,
        'kvstored_call_seconds_bucket{le="+Inf",tier="nvme",verb="get"}': 2,
        'kvstored_call_seconds_count{tier="none",verb="put"}': 1,
        'kvstored_tenant_charged_bytes{namespace="ns",tenant="t",tier="ram"}': 4096,
        'kvstored_tenant_objects{namespace="ns",tenant="t",tier="ram"}': 1,
        'kvstored_tenant_byte_seconds{namespace="ns",tenant="t",tier="ram"}': 0,
        'kvstored_not_written_objects_total{reason="room"}': 11,
        'kvstored_recovery_dropped_objects{reason="corrupt"}': 6,
        'kvstored_tier_cap_bytes{tier="ram"}': 100,
        'kvstored_tier_footprint_bytes{tier="ram"}': 50,
        'kvstored_tier_charged_bytes{tier="ram"}': 40,
        'kvstored_tier_objects{tier="ram"}': 4,
        'kvstored_tier_healthy{tier="ram"}': 0,
        'kvstored_tier_info{mode="memfd",tier="ram"}': 1,
        'kvstored_namespace_cap_bytes{namespace="ns",tier="ram"}': 60,
        'kvstored_namespace_charged_bytes{namespace="ns",tier="ram"}': 40,
        'kvstored_task_restarts_total{task="loop-lag"}': 2,
        'kvstored_loop_lag_seconds{quantile="0.5"}': 0.001,
        'kvstored_loop_lag_seconds{quantile="0.99"}': 0.002,
        'kvstored_loop_lag_seconds{quantile="1"}': 0.003,
        "kvstored_ram_segments": 3,
        "kvstored_ram_huge_bytes": 4096,
        "kvstored_local_sessions": 2,
        "kvstored_local_quarantined_sessions": 1,
        "kvstored_local_leased_bytes": 12288,
        "kvstored_local_staging_bytes": 8192,
        'kvstored_local_sessions_ended_total{reason="died"}': 3,
        "kvstored_chunks": 7,
        "kvstored_dirty_bytes": 8,
        "kvstored_leased_bytes": 9,
        "kvstored_families": 10,
        "kvstored_ready": 1,
    }
    for name, value in expected.items():
        assert found.pop(name, None) == pytest.approx(value), name
    left = {name for name in found if not name.startswith("kvstored_call_seconds")}
    assert left == {'kvstored_info{version="0.1.0"}', "kvstored_start_time_seconds"}
