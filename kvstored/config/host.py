"""What the machine and the environment say: memory allowed, disk there is, where things go."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstored_client import target

_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True, slots=True)
class Host:
    """Facts that defaults and checks depend on. `memory_bytes`: the least of the machine's memory
    and every cgroup limit above this process; `memory_from` says which that was.
    """

    memory_bytes: int
    memory_from: str
    state_dir: Path
    runtime_dir: Path


def probe(environ: Mapping[str, str], proc: Path = Path("/proc")) -> Host:
    """Look at this machine. `proc` is /proc except in tests."""
    memory_bytes, memory_from = memory_allowed(proc)
    return Host(memory_bytes, memory_from, state_dir(environ), runtime_dir(environ))


def state_dir(environ: Mapping[str, str]) -> Path:
    """Where data goes by default: systemd's StateDirectory, else the user's state directory."""
    if given := environ.get("STATE_DIRECTORY"):
        return Path(given.split(":")[0])
    if given := environ.get("XDG_STATE_HOME"):
        return Path(given) / "kvstored"
    return Path(environ.get("HOME") or "~").expanduser() / ".local/state/kvstored"


def runtime_dir(environ: Mapping[str, str], uid: int | None = None) -> Path:
    """Where sockets go by default: systemd's RuntimeDirectory, else where clients of this user look
    (`kvstored_client.target`).
    """
    if given := environ.get("RUNTIME_DIRECTORY"):
        return Path(given.split(":")[0])
    return target.runtime_dir(environ, uid)


def memory_allowed(proc: Path = Path("/proc")) -> tuple[int, str]:
    """Bytes of memory this process may use, and what sets that bound."""
    machine = _mem_total(proc)
    limits = [(machine, "the machine's memory")]
    limits += [
        (limit, f"cgroup limit {path}")
        for path in _limit_files(proc)
        if (limit := _read_limit(path))
    ]
    return min(limits, key=lambda pair: pair[0])


def _mem_total(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return _NO_LIMIT_BYTES


def _read_limit(path: Path) -> int | None:
    """A limit file's value; None for "max", for v1's way of saying so, and where there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and 0 < int(text) < _NO_LIMIT_BYTES else None


def _limit_files(proc: Path) -> list[Path]:
    """Memory limit files of this process's cgroup and of all above it, in v1 and v2.

    Source: cgroups(7), proc(5). A path that is not below the mount, as seen from inside a
    container, falls back to the mount itself, which there is the container's own group.
    """
    try:
        groups = (proc / "self/cgroup").read_text().splitlines()
        mounts = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    files: list[Path] = []
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        for root, mount in _cgroup_mounts(mounts, v1=bool(controllers)):
            files += [folder / name for folder in _upwards(mount, root, path)]
    return files


def _cgroup_mounts(mounts: list[str], *, v1: bool) -> list[tuple[str, Path]]:
    """(root within the hierarchy, mount point) of each memory hierarchy of that version."""
    found: list[tuple[str, Path]] = []
    for line in mounts:
        head, _, tail = line.partition(" - ")
        fields, kind = head.split(), tail.split()
        memory_v1 = kind[0] == "cgroup" and "memory" in kind[-1].split(",")
        if memory_v1 if v1 else kind[0] == "cgroup2":
            found.append((fields[3], Path(fields[4])))
    return found


def _upwards(mount: Path, root: str, path: str) -> list[Path]:
    """The group's folder and every one above it, up to the mount."""
    below = os.path.relpath(path, root) if path.startswith(root) else "."
    folder = mount if below.startswith("..") else Path(os.path.normpath(mount / below))
    return [f for f in (folder, *folder.parents) if f == mount or mount in f.parents]


def existing_ancestor(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    while path != path.parent and not _exists(path):
        path = path.parent
    return path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a directory on the way may not be searched
        return False


def disk_for(path: Path) -> int:
    """Bytes that files below `path` may hold altogether: free space, and what they hold already.

    Raises OSError where the file system cannot be asked.
    """
    stat = os.statvfs(existing_ancestor(path))
    return stat.f_bavail * stat.f_frsize + held_bytes_below(path)


def held_bytes_below(path: Path) -> int:
    """Bytes on the disk that the files below `path` hold."""
    return sum(map(_held, _files_below(path)))


def _files_below(path: Path) -> list[Path]:
    return [Path(folder) / name for folder, _, names in os.walk(path) for name in names]


def _held(path: Path) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_blocks * 512
    except OSError:  # gone meanwhile
        return 0


def unusable_reason(path: Path) -> str:
    """Why a directory cannot be written (or made) by this process; "" where it can.

    Tries it, with a directory that is gone again at once: permissions alone do not tell what root
    may do on a read-only or virtual file system. A full disk is usable: deletes work there.
    """
    ancestor = existing_ancestor(path)
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".kvstored-probe-", dir=ancestor))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return "" if full else f"{ancestor}: {error.strerror}"
    return ""
