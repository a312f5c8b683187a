"""Mapping what the daemon lends: raw mmap, checked before, undone by the last who looks.

Python's own mmap neither aligns nor keeps a child from unmapping what is not its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import time
from collections.abc import Callable

from kvstored_client.local.wake import Outbox, Unmapped

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 1, 2, 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_DONTFORK, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 10, 22, 23
_F_GET_SEALS, _F_SEAL_SHRINK = 1034, 2

HUGE_PAGE_BYTES = 2 << 20
MAX_MAPPING_BYTES = 1 << 46
_POPULATE_STEP_BYTES = 64 << 20


class MapError(Exception):
    """What was lent cannot be mapped, or not safely."""


class Mapping:
    """Memory of the daemon's at `address`, `nbytes` long.

    Unmapped when the last reference goes, in the process that mapped it; in a forked child the
    range is not mapped (MADV_DONTFORK), and may be something else by then.
    """

    __slots__ = ("__weakref__", "_outbox", "_pid", "address", "nbytes", "retiring")

    def __init__(self, address: int, nbytes: int, outbox: Outbox) -> None:
        self.address = address
        self.nbytes = nbytes
        self.retiring: Unmapped | None = None  # what to say once it is unmapped
        self._outbox = outbox
        self._pid = os.getpid()

    def __del__(
        self,
        getpid: Callable[[], int] = os.getpid,
        munmap: Callable[[int, int], int] = _munmap,
    ) -> None:
        # Defaults, because a module's globals may be gone when the interpreter ends.
        if getpid() != self._pid:
            return
        munmap(self.address, self.nbytes)
        if self.retiring is not None:
            self._outbox.post(self.retiring)


def map_memory(fd: int, nbytes: int, outbox: Outbox, deadline: float, *, writable: bool) -> Mapping:
    """Map the first `nbytes` of a descriptor that came from the daemon, which stays open.

    Page tables are filled beforehand as far as the deadline (time.monotonic()) allows. Raises
    MapError: also for memory that could shrink, since touching what was cut off kills the process.
    """
    _check(fd, nbytes)
    address = _reserve(nbytes)
    protection = _PROT_READ | _PROT_WRITE if writable else _PROT_READ
    flags = _MAP_SHARED | _MAP_FIXED
    if _mmap(address, nbytes, protection, flags, fd, 0) == _MAP_FAILED:
        number = ctypes.get_errno()
        _munmap(address, nbytes)
        raise MapError(f"{nbytes} bytes of shared memory: {os.strerror(number)}")
    mapping = Mapping(address, nbytes, outbox)
    if _madvise(address, nbytes, _MADV_DONTFORK):
        raise MapError("MADV_DONTFORK is refused")
    advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
    for at in range(0, nbytes, _POPULATE_STEP_BYTES):
        count = min(_POPULATE_STEP_BYTES, nbytes - at)
        # Kernels before 5.14 do not know it; then pages are mapped as they are touched.
        if time.monotonic() >= deadline or _madvise(address + at, count, advice):
            break
    return mapping


def _check(fd: int, nbytes: int) -> None:
    if not 0 < nbytes <= MAX_MAPPING_BYTES:
        raise MapError(f"shared memory of {nbytes} bytes")
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
        size = os.fstat(fd).st_size
    except OSError as error:
        raise MapError(f"what came is not shared memory: {error.strerror}") from error
    if not seals & _F_SEAL_SHRINK:
        raise MapError("the shared memory could be cut short by somebody")
    if size < nbytes:
        raise MapError(f"shared memory of {size} bytes was announced as {nbytes}")


def _reserve(nbytes: int) -> int:
    """A free range of addresses, aligned for huge pages."""
    whole = nbytes + HUGE_PAGE_BYTES
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    start = _mmap(None, whole, _PROT_NONE, flags, -1, 0)
    if start is None or start == _MAP_FAILED:
        raise MapError(f"{nbytes} bytes of addresses: {os.strerror(ctypes.get_errno())}")
    address = -(-int(start) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    page = 4096
    end = address + -(-nbytes // page) * page
    if address > start:
        _munmap(start, address - start)
    if start + whole > end:
        _munmap(end, start + whole - end)
    return address
