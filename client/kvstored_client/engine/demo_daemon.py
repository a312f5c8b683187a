"""A daemon of the demo's own: its directory, its sockets, gone when the demo ends."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

START_S = 60.0
STOP_S = 60.0


class DaemonFailed(RuntimeError):
    """The daemon did not start or stop as it should. The message ends with what it said."""


class PrivateDaemon:
    """`kvstored serve` in a directory made for it. A context manager; inside, `start` and `stop`
    may be called in turn, and data stays from one start to the next.

    `ram_cap` and `nvme_cap` are sizes as the configuration takes them.
    """

    def __init__(self, ram_cap: str = "512MiB", nvme_cap: str = "768MiB") -> None:
        self._caps = (ram_cap, nvme_cap)
        self._folder = Path()
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        """Where everything of it is, inside the context."""
        return self._folder

    @property
    def target(self) -> str:
        """What a KVClient is given."""
        return f"unix://{self._folder}/kvstored.sock"

    @property
    def log(self) -> str:
        """What the daemon said so far."""
        return (self._folder / "log").read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Id of the running daemon; 0 when there is none."""
        return 0 if self._child is None else self._child.pid

    def __enter__(self) -> PrivateDaemon:
        # Short, because a Unix socket's path may have 107 bytes only.
        self._folder = Path(tempfile.mkdtemp(prefix="kvstored-demo-"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.kill()
        finally:
            shutil.rmtree(self._folder)

    def start(self) -> None:
        """Start it and wait until it says that it is ready. Raises DaemonFailed."""
        config = self._write_config()
        address = self._folder / "notify"
        address.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
            ear.bind(str(address))
            environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORED_")}
            with (self._folder / "log").open("ab") as log:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "kvstored", "serve", "--config", str(config)],
                    env={**environ, "NOTIFY_SOCKET": str(address)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # A Ctrl-C in the terminal is for the demo, which then stops its daemon.
                    start_new_session=True,
                )
            self._await_ready(self._child, ear)

    def stop(self) -> None:
        """Stop it in order: what it accepted is on disk afterwards. Raises DaemonFailed."""
        child, self._child = self._child, None
        if child is None:
            return
        child.send_signal(signal.SIGTERM)
        try:
            status = child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._child = child
            raise DaemonFailed(f"no end within {STOP_S:.0f} s of SIGTERM\n{self.log}") from None
        if status != 0:
            raise DaemonFailed(f"ended with status {status}\n{self.log}")

    def kill(self) -> None:
        """End it at once, as kill -9 does. Nothing when it does not run."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()

    def _await_ready(self, child: subprocess.Popen[bytes], ear: socket.socket) -> None:
        ended = os.pidfd_open(child.pid)
        try:
            while True:
                readable, _, _ = select.select([ear.fileno(), ended], [], [], START_S)
                if ear.fileno() in readable and b"READY=1" in ear.recv(4096):
                    return
                if ended in readable:
                    raise DaemonFailed(f"the daemon ended while starting\n{self.log}")
                if not readable:
                    raise DaemonFailed(f"the daemon is not ready after {START_S:.0f} s\n{self.log}")
        finally:
            os.close(ended)

    def _write_config(self) -> Path:
        path = self._folder / "kvstored.toml"
        ram_cap, nvme_cap = self._caps
        path.write_text(
            f"""\
[daemon]
data_dir = "{self._folder}/data"
[listen]
unix = "{self._folder}/kvstored.sock"
http = "{self._folder}/http.sock"
[ram]
cap_bytes = "{ram_cap}"
[nvme]
cap_bytes = "{nvme_cap}"
"""
        )
        return path
