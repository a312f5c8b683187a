"""What the service manager hears, on a real datagram socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstored.sdnotify import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket and what NOTIFY_SOCKET says of it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@kvstored-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name[1:] if name.startswith("@") else name)
        listener.settimeout(5)
        yield listener, name


def test_messages(manager: tuple[socket.socket, str]) -> None:
    listener, name = manager
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": name})
    for tell, expected in (
        (lambda: notifier.ready("all well"), b"READY=1\nSTATUS=all well"),
        (lambda: notifier.stopping("bye"), b"STOPPING=1\nSTATUS=bye"),
        (lambda: notifier.status("busy"), b"STATUS=busy"),
        (notifier.watchdog, b"WATCHDOG=1"),
        (lambda: notifier.extend_timeout(1.5), b"EXTEND_TIMEOUT_USEC=1500000"),
    ):
        tell()
        assert listener.recv(4096) == expected


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "42"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "43"}, 0.0),
        ({"WATCHDOG_USEC": "often"}, 0.0),
    ],
)
def test_watchdog_interval_is_half_of_ours(environ: dict[str, str], interval_s: float) -> None:
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": "/x", **environ}, pid=42)
    assert notifier.watchdog_interval_s == interval_s


def test_nobody_listens(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    Notifier.from_environment({}).ready("to nobody")
    assert caplog.records == []
    Notifier.from_environment({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready("to nobody")
    assert "could not be told" in caplog.text
