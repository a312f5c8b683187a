"""A real daemon for tests: `python -m kvstored serve` on a directory of its own.

Ready is when it says so by sd_notify; it is stopped by the id of its process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

GIVE_UP_S = 60.0
"""When a test gives up waiting; nothing asserts that anything is faster."""

TOKEN = secrets.token_hex(16)
"""Token of the namespace "locked"."""


@dataclass
class Daemon:
    """One data directory and the daemon on it, which can be killed and started again."""

    folder: Path
    child: subprocess.Popen[bytes] | None = None

    @property
    def target(self) -> str:
        """For KVClient, namespaces "default" (no token) and "locked" (TOKEN)."""
        return f"unix://{self.folder}/k.sock"

    @property
    def admin_target(self) -> str:
        """The operators' socket."""
        return f"unix://{self.folder}/k-admin.sock"

    @property
    def log(self) -> str:
        """All that it said so far."""
        return (self.folder / "log").read_text()

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        assert self.child is None
        notify = self.folder / "notify"
        notify.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
            ear.bind(str(notify))
            ear.settimeout(GIVE_UP_S)
            environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORED_")}
            with (self.folder / "log").open("ab") as log:
                self.child = subprocess.Popen(
                    [sys.executable, *self._program(), "serve", "--config", self._config()],
                    env={**environ, "NOTIFY_SOCKET": str(notify)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            self._await_ready(ear)

    def _program(self) -> list[str]:
        return ["-m", "kvstored"]

    def _await_ready(self, ear: socket.socket) -> None:
        assert self.child is not None
        # Whoever waits for READY must also notice that the daemon ended instead.
        watcher = threading.Thread(target=self._tell_end, args=(self.child,), daemon=True)
        watcher.start()
        while True:
            message = ear.recv(4096)
            if b"READY=1" in message:
                return
            # Of this one: word of an earlier one's end may come as late as this.
            assert message != _ended(self.child), self.log

    def _tell_end(self, child: subprocess.Popen[bytes]) -> None:
        child.wait()
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth,
        ):
            mouth.sendto(_ended(child), str(self.folder / "notify"))

    def _config(self) -> str:
        file = self.folder / "kvstored.toml"
        token = self.folder / "locked.token"
        token.write_text(TOKEN + "\n")
        token.chmod(0o600)
        file.write_text(
            f"""
[daemon]
data_dir = "{self.folder}/data"
stop_timeout_s = 20
[listen]
unix = "{self.folder}/k.sock"
http = "127.0.0.1:0"
[ram]
cap_bytes = "128MiB"
[nvme]
cap_bytes = "192MiB"
[[namespace]]
name = "default"
[[namespace]]
name = "locked"
token_files = ["{token}"]
"""
        )
        return str(file)

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and wait for the end."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.send_signal(number)
            child.wait(GIVE_UP_S)


def _ended(child: subprocess.Popen[bytes]) -> bytes:
    return b"ENDED %d" % child.pid


@contextlib.contextmanager
def running_daemon() -> Iterator[Daemon]:
    """A started daemon; nothing is left of it afterwards."""
    # Short: the path of a Unix socket has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="kvstored-"))
    daemon = Daemon(folder)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.kill()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One daemon per test module. A test that ends it starts it again."""
    with running_daemon() as running:
        yield running
