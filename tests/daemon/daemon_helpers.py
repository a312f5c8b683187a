"""Running daemons and small processes for the tests of this directory."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

DEADLINE_S = 60.0
"""When a test gives up; nothing asserts that anything is faster."""


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what would configure a daemon."""
    ours = ("KVSTORED_", "NOTIFY_SOCKET", "WATCHDOG_", "STATE_DIRECTORY", "RUNTIME_DIRECTORY")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(ours)}, **more}


@dataclass
class Process:
    """A child whose stderr is read line by line as it comes."""

    child: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    _grown: threading.Condition = field(default_factory=threading.Condition)
    _ended: bool = False

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            with self._grown:
                self.lines.append(line.rstrip("\n"))
                self._grown.notify_all()
        with self._grown:
            self._ended = True
            self._grown.notify_all()

    def wait_line(self, text: str) -> str:
        """The first line that holds `text`, waited for."""

        def found() -> str | None:
            return next((line for line in self.lines if text in line), None)

        with self._grown:
            self._grown.wait_for(lambda: found() or self._ended, DEADLINE_S)
        line = found()
        assert line is not None, f"no {text!r} in {self.lines}"
        return line

    def wait_event(self, message: str) -> dict[str, object]:
        """The first JSON log line with that message."""
        event: dict[str, object] = json.loads(self.wait_line(f'"message": "{message}"'))
        return event

    def status(self) -> int:
        """Exit status, waited for."""
        status = self.child.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return status

    @property
    def stderr(self) -> str:
        return "\n".join(self.lines)


@contextlib.contextmanager
def process(*arguments: str, environ: dict[str, str] | None = None) -> Iterator[Process]:
    """`python ARGUMENTS` until the end of the block, where it is killed if it still runs."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        env=environment() if environ is None else environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield Process(child)
        finally:
            child.kill()


def config_file(folder: Path, extra: str = "") -> Path:
    """A configuration of a small daemon that lives below `folder` alone."""
    file = folder / "kvstored.toml"
    file.write_text(
        f"""
[daemon]
data_dir = "{folder}/data"
stop_timeout_s = 20
[listen]
unix = "{folder}/run/k.sock"
http = "127.0.0.1:0"
[ram]
cap_bytes = "64MiB"
[nvme]
cap_bytes = "128MiB"
[log]
format = "json"
{extra}
"""
    )
    return file


@contextlib.contextmanager
def serving(
    folder: Path, extra: str = "", *flags: str, environ: dict[str, str] | None = None
) -> Iterator[Process]:
    """`kvstored serve`, from its start on; ready once `wait_event("ready")` returns."""
    file = config_file(folder, extra)
    arguments = ("-m", "kvstored", "serve", "--config", str(file), *flags)
    with process(*arguments, environ=environ) as daemon:
        yield daemon


def fetch(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body of an HTTP request to host:port."""
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def fetch_unix(path: Path, target: str) -> str:
    """The whole answer of an HTTP/1.0 request to a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(DEADLINE_S)
        peer.connect(str(path))
        peer.sendall(f"GET {target} HTTP/1.0\r\n\r\n".encode())
        answer = bytearray()
        while part := peer.recv(65_536):
            answer += part
    return answer.decode()


def counters(metrics: str) -> dict[str, float]:
    """Every sample of /metrics, by its name and labels as they stand there."""
    rows = (line.rpartition(" ") for line in metrics.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}
