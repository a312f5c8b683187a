"""The processes that a benchmark starts, and ends."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvstored_client import KVClient
from kvstored_client.errors import ServiceError

START_S = 60.0
STOP_S = 30.0


class BenchError(Exception):
    """The benchmark could not be run; the message says why."""


@contextlib.contextmanager
def daemon(directory: Path, ram_cap_bytes: int, tcp: bool) -> Iterator[str]:
    """A daemon with a RAM tier alone, everything of it under `directory`; its target.

    Raises BenchError, with the daemon's log, when it does not become ready.
    """
    unix, log = directory / "kvstored.sock", directory / "log"
    port = _free_port() if tcp else 0
    config = directory / "kvstored.toml"
    config.write_text(
        f'[daemon]\ndata_dir = "{directory / "data"}"\n'
        f'[listen]\nunix = "{unix}"\nhttp = "{directory / "http.sock"}"\n'
        + (f'tcp = "127.0.0.1:{port}"\ninsecure = true\n' if tcp else "")
        + f"[ram]\ncap_bytes = {ram_cap_bytes}\n[nvme]\nenabled = false\n"
        "[limits]\n"
        f"max_put_bytes = {ram_cap_bytes // 2}\n"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORED_")}
    command = [sys.executable, "-m", "kvstored", "serve", "--config", str(config)]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, env=environ, stdout=stderr, stderr=stderr)
    target = f"dns:///127.0.0.1:{port}" if tcp else f"unix://{unix}"
    try:
        _wait_until_ready(process, target, log)
        yield target
    finally:
        _end(process)


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


@contextlib.contextmanager
def bare_server(directory: Path, payload_bytes: int, tcp: bool) -> Iterator[str]:
    """The bare server that a ceiling is measured with; its gRPC target."""
    address = "127.0.0.1:0" if tcp else f"unix:{directory / 'bare.sock'}"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstored.bench.bare", address, str(payload_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        word, _, port = process.stdout.readline().decode().partition(" ")
        if word != "ready":
            raise BenchError("the bare gRPC server did not start")
        yield f"dns:///127.0.0.1:{port.strip()}" if tcp else address
    finally:
        process.stdin.close()
        process.stdout.close()
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
