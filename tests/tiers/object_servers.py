"""A real S3 server for tests: SeaweedFS, one process for the whole session, a bucket per asker.

The fixture `s3_server` is registered by tests/conftest.py: ask for it by name, import nothing.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

ACCESS_KEY = "KVSTOREDTESTACCESS"
SECRET_KEY = "kvstored-test-secret-that-must-never-be-logged"
REGION = "us-east-1"
READY_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class S3Server:
    """A running server. Everything of one test goes below a prefix of its own: see `url`."""

    port: int
    bucket: str
    directory: Path
    pid: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self) -> str:
        """A prefix that nobody else has."""
        return f"s3://{self.bucket}/t-{secrets.token_hex(6)}"


def credentials() -> dict[str, str]:
    """The environment in which the server is opened and used."""
    return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(bucket: str = "kvbucket", port: int = 0) -> tuple[S3Server, subprocess.Popen[bytes]]:
    """Start a server in a directory of its own and wait until it answers for its bucket.

    One at a time on a machine: a server looks which of a dozen ports are free, and dies if another
    that starts takes one of them before it does.
    """
    lock = Path(tempfile.gettempdir()) / f"kvweed-{os.getuid()}.lock"
    with lock.open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        return _start(bucket, port)


def _start(bucket: str, port: int) -> tuple[S3Server, subprocess.Popen[bytes]]:
    directory = Path(tempfile.mkdtemp(prefix="kvweed"))
    port = port or free_port()
    command = [
        str(Path(sys.executable).parent / "weed"),
        "mini",
        f"-dir={directory}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-bucket={bucket}",
        f"-s3.port={port}",
        "-admin.ui=false",
        "-webdav=false",
    ]
    with (directory / "weed.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | credentials(), cwd=directory
        )
    server = S3Server(port, bucket, directory, process.pid)
    try:
        _wait_until_ready(server, process)
    except BaseException:
        stop(server, process)
        raise
    return server, process


def _wait_until_ready(server: S3Server, process: subprocess.Popen[bytes]) -> None:
    """The server has no signal for this but its answers: it makes its bucket after it listens."""
    store = S3Store(
        server.bucket,
        endpoint=server.endpoint,
        region=REGION,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        client_options={"allow_http": True, "timeout": timedelta(seconds=2)},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=2)},
    )
    until = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < until and process.poll() is None:
        try:
            store.list("nothing").collect()
        except (BaseError, OSError):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        else:
            return
    log = (server.directory / "weed.log").read_text(errors="replace")[-2000:]
    raise RuntimeError(f"SeaweedFS did not come up: {log}")


def stop(server: S3Server, process: subprocess.Popen[bytes]) -> None:
    """End a server and remove what it has; it writes until it is gone. Nothing of it is kept, so it
    need not tidy up, which takes seconds.
    """
    process.kill()
    process.wait()
    shutil.rmtree(server.directory, ignore_errors=True)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """The session's server; its credentials are in the environment while it runs."""
    server, process = start()
    before = {name: os.environ.get(name) for name in credentials()}
    os.environ.update(credentials())
    yield server
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    stop(server, process)
