"""Two processes for test_ram_seals.py: one owns a segment, the other has only its descriptor.

ram_seal_trial.py owner  SOCKET_FD UID SEALS    makes a segment with these seals, sends it
ram_seal_trial.py client SOCKET_FD UID          tries everything to change it, prints what went
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import socket
import sys
from collections.abc import Callable

from kvstored.tiers.ram import segment as segment_module

SIZE_BYTES = 3 * 4096
CONTENT = bytes(range(256)) * (SIZE_BYTES // 256)

F_SEAL_EXEC = 0x20  # came with MFD_NOEXEC_SEAL, where the kernel knows it
PUNCH_HOLE_KEEP_SIZE = 3
ZERO_RANGE = 0x10
COLLAPSE_RANGE = 0x08
MADV_REMOVE = 9

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
libc.read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
libc.read.restype = ctypes.c_ssize_t


def become(uid: int) -> None:
    """Drop every privilege, if that is another user."""
    if uid != os.getuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)


def own(channel: socket.socket, seals: int) -> dict[str, object]:
    """Make and send a segment; report whether it is unchanged when the client is done."""
    segment_module.SEALS = seals
    segment = segment_module.Segment(SIZE_BYTES, hugepages=False)
    segment.populate(0, SIZE_BYTES)
    segment.memory[:] = CONTENT
    segment.finish()
    mode = os.fstat(segment.fd).st_mode & 0o7777
    socket.send_fds(channel, [f"{os.getpid()} {segment.fd}".encode()], [segment.fd])
    channel.recv(1)
    segment.memory[:8] = b"still me"  # a truncated or punched segment would show it, or kill us
    held = os.fstat(segment.fd)
    return {
        "mode": mode,
        "content": bytes(segment.memory) == b"still me" + CONTENT[8:],
        "size": held.st_size,
        "allocated": held.st_blocks * 512,
        "seals": fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & ~F_SEAL_EXEC,
    }


def checked(result: int) -> int:
    """Raise OSError for a C call that failed."""
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def mapped(fd: int, protection: int) -> int:
    """Address of a shared mapping."""
    address = libc.mmap(None, SIZE_BYTES, protection, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap refused")
    return int(address)


def attempts(fd: int, owner_pid: int, owner_fd: int) -> dict[str, Callable[[], object]]:
    """By name: ways to change the segment. Each raises OSError when refused."""
    own_path = f"/proc/self/fd/{fd}"
    owners_path = f"/proc/{owner_pid}/fd/{owner_fd}"
    reading = mapped(fd, mmap.PROT_READ)

    def write_through(path: str, flags: int) -> None:
        again = os.open(path, flags)
        os.pwrite(again, b"evil", 0)

    def map_through(path: str) -> None:
        ctypes.memmove(mapped(os.open(path, os.O_RDWR), 3), b"evil", 4)

    def unprotect() -> None:
        checked(libc.mprotect(reading, SIZE_BYTES, 3))
        ctypes.memmove(reading, b"evil", 4)

    def through_memory_file() -> None:
        memory = os.open("/proc/self/mem", os.O_RDWR)
        os.pwrite(memory, b"evil", reading)

    def kernel_writes() -> None:
        source = os.memfd_create("evil")
        os.write(source, b"evil")
        os.lseek(source, 0, os.SEEK_SET)
        checked(libc.read(source, reading, 4))

    def send_file() -> None:
        source = os.memfd_create("evil")
        os.write(source, b"evil")
        os.lseek(fd, 0, os.SEEK_SET)
        os.sendfile(fd, source, 0, 4)

    def fallocate(mode: int, start: int, size: int) -> Callable[[], object]:
        return lambda: checked(libc.fallocate(fd, mode, start, size))

    def open_to_truncate(path: str) -> Callable[[], object]:
        return lambda: os.open(path, os.O_RDWR | os.O_TRUNC)

    return {
        "pwrite": lambda: os.pwrite(fd, b"evil", 0),
        "write beyond the end": lambda: os.pwrite(fd, b"evil", SIZE_BYTES),
        "sendfile": send_file,
        "map writable": lambda: ctypes.memmove(mapped(fd, 3), b"evil", 4),
        "mprotect": unprotect,
        "write by /proc/self/mem": through_memory_file,
        "read into the mapping": kernel_writes,
        "reopen and write": lambda: write_through(own_path, os.O_RDWR),
        "reopen write-only": lambda: write_through(own_path, os.O_WRONLY),
        "reopen and map": lambda: map_through(own_path),
        "owner's descriptor and write": lambda: write_through(owners_path, os.O_RDWR),
        "owner's descriptor and map": lambda: map_through(owners_path),
        "reopen truncating": open_to_truncate(own_path),
        "owner's descriptor, truncating": open_to_truncate(owners_path),
        "truncate": lambda: os.ftruncate(fd, 4096),
        "truncate by path": lambda: os.truncate(own_path, 4096),
        "grow": lambda: os.ftruncate(fd, SIZE_BYTES + 4096),
        "grow by fallocate": fallocate(0, SIZE_BYTES, 4096),
        "punch": fallocate(PUNCH_HOLE_KEEP_SIZE, 4096, 4096),
        "zero": fallocate(ZERO_RANGE, 4096, 4096),
        "collapse": fallocate(COLLAPSE_RANGE, 4096, 4096),
        "madvise remove": lambda: checked(libc.madvise(reading, SIZE_BYTES, MADV_REMOVE)),
        "add a seal": lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL),
        "set no seals": lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0),
    }


def attack(channel: socket.socket) -> dict[str, object]:
    """Try everything; report what was not refused, and whether reading works."""
    message, (fd,), *_ = socket.recv_fds(channel, 64, 1)
    owner_pid, owner_fd = map(int, message.split())
    with mmap.mmap(fd, SIZE_BYTES, prot=mmap.PROT_READ) as view:
        readable = view[:] == CONTENT
    done = []
    for name, attempt in attempts(fd, owner_pid, owner_fd).items():
        try:
            attempt()
        except OSError:
            continue
        done.append(name)
    channel.send(b".")
    return {"readable": readable, "done": done}


def main() -> None:
    role, channel_fd, uid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    channel = socket.socket(fileno=channel_fd)
    become(uid)
    report = own(channel, int(sys.argv[4])) if role == "owner" else attack(channel)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
