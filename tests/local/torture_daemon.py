"""A small real daemon, and everything that would show a leak in it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support_daemon import Daemon

MIB = 1 << 20
_RAM = "/memfd:kvstored-ram"
_STAGING = "/memfd:kvstored-staging"


@dataclass
class SmallDaemon(Daemon):
    """As Daemon, with caps of its own. `nvme_bytes` 0: no NVMe tier."""

    ram_bytes: int = 48 * MIB
    nvme_bytes: int = 0
    leased_percent: int = 75

    def _config(self) -> str:
        nvme = f"cap_bytes = {self.nvme_bytes}" if self.nvme_bytes else "enabled = false"
        file = self.folder / "kvstored.toml"
        file.write_text(
            f"""
[daemon]
data_dir = "{self.folder}/data"
stop_timeout_s = 20
[listen]
unix = "{self.folder}/k.sock"
http = "{self.folder}/h.sock"
[ram]
cap_bytes = {self.ram_bytes}
[local]
max_leased_percent_namespace = {self.leased_percent}
max_total_staging_bytes = "64MiB"
[nvme]
{nvme}
"""
        )
        return str(file)

    @property
    def pid(self) -> int:
        assert self.child is not None
        return self.child.pid

    def metrics(self) -> dict[str, float]:
        """Name, with the labels' values after colons, to value."""
        with socket.socket(socket.AF_UNIX) as end:
            end.settimeout(30)
            end.connect(str(self.folder / "h.sock"))
            end.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            reply = b"".join(iter(lambda: end.recv(1 << 16), b""))
        head, _, body = reply.partition(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0], head
        return {
            ":".join([name, *re.findall(r'="([^"]*)"', labels)]): float(value)
            for name, labels, value in re.findall(r"(?m)^(\w+)(\S*) (\S+)$", body.decode())
        }

    def figures(self) -> Figures:
        """How it stands, by its own account and by the kernel's."""
        told = self.metrics()
        fds = Counter(_links(self.pid))
        maps = Path(f"/proc/{self.pid}/maps").read_text()
        status = Path(f"/proc/{self.pid}/status").read_text()
        (shmem,) = [line for line in status.splitlines() if line.startswith("RssShmem")]
        return Figures(
            sessions=int(told["kvstored_local_sessions"]),
            quarantined=int(told["kvstored_local_quarantined_sessions"]),
            local_leased_bytes=int(told["kvstored_local_leased_bytes"]),
            leased_bytes=int(told["kvstored_leased_bytes"]),
            staging_bytes=int(told["kvstored_local_staging_bytes"]),
            dirty_bytes=int(told["kvstored_dirty_bytes"]),
            descriptors=sum(n for name, n in fds.items() if name != _RAM),
            staging_maps=maps.count(_STAGING),
            # Segments are kept for the next objects: as many as it says, and no byte more.
            stray_segments=max(0, fds[_RAM] - int(told["kvstored_ram_segments"])),
            stray_shmem_mib=max(
                0,
                int(shmem.split()[1]) * 1024
                - int(told["kvstored_tier_footprint_bytes:ram"])
                - int(told["kvstored_local_staging_bytes"]),
            )
            // MIB,  # a few pages are others'
            charged_bytes=int(told["kvstored_tier_charged_bytes:ram"]),
            nvme_objects=int(told.get("kvstored_tier_objects:nvme", 0)),
        )


@dataclass(frozen=True)
class Figures:
    """What must be as before once clients are gone. `descriptors`: but for those of segments."""

    sessions: int
    quarantined: int
    local_leased_bytes: int
    leased_bytes: int
    staging_bytes: int
    dirty_bytes: int
    descriptors: int
    staging_maps: int
    stray_segments: int
    stray_shmem_mib: int
    charged_bytes: int
    nvme_objects: int

    def differences(self, other: Figures) -> dict[str, tuple[int, int]]:
        """Names of what differs, with the values here and there."""
        mine, theirs = vars(self), vars(other)
        return {k: (v, theirs[k]) for k, v in mine.items() if v != theirs[k]}


def _links(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"{folder}/{name}").removesuffix(" (deleted)")


@contextlib.contextmanager
def small_daemon(ram_bytes: int = 48 * MIB, nvme_bytes: int = 0) -> Iterator[SmallDaemon]:
    """A started one; nothing is left of it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="kv"))
    daemon = SmallDaemon(folder, ram_bytes=ram_bytes, nvme_bytes=nvme_bytes)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.kill()
        shutil.rmtree(folder)


class Deadline:
    """When to give up. Nothing asserts that anything is fast: `over` is long after that."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end
