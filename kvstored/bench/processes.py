"""The processes that a benchmark starts, and ends."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstored_client import KVClient
from kvstored_client.errors import ServiceError

START_S = 60.0
STOP_S = 30.0


class BenchError(Exception):
    """The benchmark could not be run; the message says why."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon of the benchmark's own. `http`: its metrics' Unix socket."""

    target: str
    pid: int
    http: Path


@dataclass(frozen=True, slots=True)
class Volume:
    """A directory for the daemon's NVMe tier, and its cap."""

    directory: Path
    cap_bytes: int


@contextlib.contextmanager
def daemon(
    directory: Path,
    ram_cap_bytes: int,
    tcp: bool = False,
    *,
    data_dir: Path | None = None,
    volumes: Sequence[Volume] = (),
    keep: Sequence[int] = (),
    more: str = "",
    variables: Mapping[str, str] | None = None,
) -> Iterator[Daemon]:
    """A daemon with a RAM tier, and with an NVMe tier where there are `volumes`; everything else of
    it under `directory`, but for its data where `data_dir` is given. It ends with this process, and
    inherits the descriptors `keep`. `more` is added to its configuration, `variables` to its
    environment.

    Raises BenchError, with the daemon's log, when it does not become ready.
    """
    unix, http, log = directory / "kvstored.sock", directory / "http.sock", directory / "log"
    port = _free_port() if tcp else 0
    config = directory / "kvstored.toml"
    config.write_text(
        f'[daemon]\ndata_dir = "{data_dir or directory / "data"}"\n'
        f'[listen]\nunix = "{unix}"\nhttp = "{http}"\n'
        + (f'tcp = "127.0.0.1:{port}"\ninsecure = true\n' if tcp else "")
        + f"[ram]\ncap_bytes = {ram_cap_bytes}\n"
        "[limits]\n"
        f"max_put_bytes = {ram_cap_bytes // 2}\n" + _nvme(volumes) + more
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORED_")}
    environ |= variables or {}
    command = tied([sys.executable, "-m", "kvstored", "serve", "--config", str(config)])
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command, env=environ, stdout=stderr, stderr=stderr, pass_fds=tuple(keep)
        )
    target = f"dns:///127.0.0.1:{port}" if tcp else f"unix://{unix}"
    try:
        _wait_until_ready(process, target, log)
        yield Daemon(target, process.pid, http)
    finally:
        _end(process)


# PR_SET_PDEATHSIG with SIGTERM; what becomes of the parent before that is seen as well.
_TIED = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 15)\n"
    "if os.getppid() == int(sys.argv[1]): os.execvp(sys.argv[2], sys.argv[2:])\n"
)


def tied(command: Sequence[str]) -> list[str]:
    """The command for a child of this process's main thread that gets SIGTERM when this ends."""
    return [sys.executable, "-c", _TIED, str(os.getpid()), *command]


def _nvme(volumes: Sequence[Volume]) -> str:
    if not volumes:
        return "[nvme]\nenabled = false\n"
    return "".join(
        f'[[nvme.volumes]]\nname = "v{number}"\npath = "{volume.directory}"\n'
        f"cap_bytes = {volume.cap_bytes}\n"
        for number, volume in enumerate(volumes)
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(process: subprocess.Popen[bytes], target: str, log: Path) -> None:
    end = time.monotonic() + START_S
    with KVClient(target) as client:
        while True:
            try:
                client.check(timeout_s=1.0)
            except ServiceError as error:
                if process.poll() is not None or time.monotonic() > end:
                    tail = log.read_text(errors="replace")[-2000:]
                    raise BenchError(f"the daemon did not start: {error}\n{tail}") from error
                time.sleep(0.05)  # nothing tells that a socket will appear
            else:
                return


class Child:
    """A process of the benchmark that speaks in lines and ends with its standard input."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._name = name
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def line(self) -> str:
        """Its next line. Raises BenchError when it has ended instead."""
        line = self._stdout.readline().decode().strip()
        if not line:
            raise BenchError(f"{self._name} ended early; what it said stands above")
        return line

    def ask(self, line: str) -> str:
        """Send a line; its answer. Raises BenchError."""
        try:
            self._stdin.write(line.encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError as error:
            raise BenchError(f"{self._name} ended early; what it said stands above") from error
        return self.line()

    def finish(self) -> str:
        """Close its standard input; the line it ends with. Raises BenchError."""
        self._stdin.close()
        return self.line()

    def end(self) -> None:
        """Close its standard input and wait for it; kill it if that takes too long."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._stdout.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            _end(self._process)


@contextlib.contextmanager
def child(
    module: str, *arguments: object, environ: Mapping[str, str] | None = None
) -> Iterator[tuple[Child, list[str]]]:
    """`python -m module arguments`, which prints "ready WORD..."; the process and the words.

    Raises BenchError when it does not get that far.
    """
    name = f"`python -m {module}`"
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **(environ or {})},
    )
    it = Child(name, process)
    try:
        word, *rest = it.line().split()
        if word != "ready":
            raise BenchError(f"{name} did not start: {word} {' '.join(rest)}")
        yield it, rest
    finally:
        it.end()


@contextlib.contextmanager
def bare_server(directory: Path, payload_bytes: int, tcp: bool) -> Iterator[str]:
    """The bare gRPC server that a ceiling is measured with; its target."""
    address = "127.0.0.1:0" if tcp else f"unix:{directory / 'bare.sock'}"
    with child("kvstored.bench.bare", address, payload_bytes) as (_, (port,)):
        yield f"dns:///127.0.0.1:{port}" if tcp else address


def private_bytes(pid: int) -> int:
    """Memory of a process that is its own: anonymous pages that are present, and page tables."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return sum(int(sizes[name][0]) * 1024 for name in ("RssAnon", "VmPTE"))


def connect(path: str) -> socket.socket:
    """A blocking Unix socket that gives up, with OSError, when nothing comes for a long time."""
    it = socket.socket(socket.AF_UNIX)
    # Python's own time-outs would make it poll before every call.
    it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(STOP_S), 0))
    try:
        it.connect(path)
    except OSError:
        it.close()
        raise
    return it


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
