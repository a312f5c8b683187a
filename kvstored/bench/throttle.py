"""Disks of chosen speeds: loop devices in a mount namespace of our own, throttled by a cgroup.

Linux alone, and root alone. All of it but the cgroup's directory goes with the process that made
it and those it started.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstored.bench.processes import BenchError

_LOOP_CTL_GET_FREE = 0x4C82  # linux/loop.h
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
_LO_FLAGS_DIRECT_IO = 16
# fd, block size, loop_info64 (five u64, four u32, name, crypt name, key, two u64), eight u64
_LOOP_CONFIG = struct.Struct("=II5Q4I64s64s32s2Q64x")
_BLOCK_BYTES = 4096
_CLONE_NEWNS = 0x00020000
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18
_TRIES = 16  # somebody else may take the free device that the kernel names


@dataclass(frozen=True, slots=True)
class Disk:
    """A loop device with an empty ext4 on it. `fd` keeps it; `number` is "major:minor"."""

    fd: int
    number: str
    mounted: Path


def own_mounts() -> None:
    """Let nothing that is mounted from now on be seen outside, or outlive, this process and its
    children. Before threads start. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        code = ctypes.get_errno()
        raise OSError(code, f"no mount namespace of our own: {os.strerror(code)}")


def disk(directory: Path, name: str, size_bytes: int) -> Disk:
    """A disk of that size, mounted at `directory`/`name`; `directory` holds what is written to it.

    Raises OSError, BenchError.
    """
    flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
    backing = os.open(directory, flags, 0o600)
    try:
        os.ftruncate(backing, size_bytes)
        fd, path = _loop(backing)
    finally:
        os.close(backing)  # the device keeps it
    mounted = directory / name
    mounted.mkdir()
    # Everything is laid out now: nothing is to be written behind our back later.
    options = ["-E", "lazy_itable_init=0,lazy_journal_init=0", "-N", "1024"]
    _run(["mkfs.ext4", "-q", "-F", *options, path])
    _run(["mount", "-t", "ext4", path, str(mounted)])
    device = os.fstat(fd).st_rdev
    return Disk(fd, f"{os.major(device)}:{os.minor(device)}", mounted)


def _loop(backing: int) -> tuple[int, str]:
    """A loop device over a file, that goes when nobody has it open any longer."""
    flags = _LO_FLAGS_AUTOCLEAR | _LO_FLAGS_DIRECT_IO
    numbers = (0, 0, 0, 0, 0, 0, 0, 0, flags)
    config = _LOOP_CONFIG.pack(backing, _BLOCK_BYTES, *numbers, b"kvstored-bench", b"", b"", 0, 0)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            path = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(fd, _LOOP_CONFIGURE, config)
            except OSError:
                os.close(fd)
            else:
                return fd, path
    finally:
        os.close(control)
    raise BenchError("no loop device is to be had: is the module `loop` there?")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BenchError(f"{command[0]} is not installed: apt-get install e2fsprogs mount") from (
            error
        )
    if done.returncode:
        raise BenchError(f"{' '.join(command)}: {done.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class Throttle:
    """A control group. `version`: of the cgroup interface, 1 or 2."""

    path: Path
    version: int

    def make(self) -> None:
        """Make the group. Raises OSError."""
        if self.version == 2:
            control = self.path.parent / "cgroup.subtree_control"
            if "io" not in control.read_text().split():
                control.write_text("+io")
        self.path.mkdir()

    def join(self) -> None:
        """Put this process, and what it will start, into the group. Raises OSError."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, disks: Sequence[Disk], bytes_per_s: Sequence[int]) -> None:
        """Reads and writes of each disk, each at most so much. Raises OSError."""
        for each, limit in zip(disks, bytes_per_s, strict=True):
            if self.version == 2:
                (self.path / "io.max").write_text(f"{each.number} rbps={limit} wbps={limit}")
                continue
            for way in ("read", "write"):
                rule = self.path / f"blkio.throttle.{way}_bps_device"
                rule.write_text(f"{each.number} {limit}")


def throttle(name: str) -> Throttle:
    """The group that is to be made, by version 1 where it has the block devices, else by 2.

    Raises BenchError where neither has.
    """
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, rest = line.partition(" - ")
        at = Path(mount.split()[4])
        kind, _, options = rest.split(maxsplit=2)
        if kind == "cgroup" and "blkio" in options.split(","):
            if (at / "blkio.throttle.read_bps_device").exists():
                return Throttle(at / name, 1)
        elif kind == "cgroup2" and "io" in (at / "cgroup.controllers").read_text().split():
            return Throttle(at / name, 2)
    raise BenchError("the kernel's block throttle is not there: neither cgroup blkio nor io")
