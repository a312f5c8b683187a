"""The few calls on pages that Python lacks, or does with the GIL held, through ctypes.

All addresses and sizes are multiples of the page size. OSError carries the kernel's errno.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20

# linux/mman.h and asm-generic/mman-common.h; the same on x86-64 and arm64.
MAP_NORESERVE = 0x4000
MADV_DONTNEED = 4
MADV_HUGEPAGE = 14
MADV_NOHUGEPAGE = 15
MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MFD_NOEXEC_SEAL = 0x0008  # linux/memfd.h
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_madvise = _libc.madvise
_madvise.restype = ctypes.c_int
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_over(address: int, size_bytes: int, descriptor: int) -> None:
    """Map a descriptor, shared and writable, over a range that the caller owns."""
    got = _mmap(
        address,
        size_bytes,
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_SHARED | _MAP_FIXED,
        descriptor,
        0,
    )
    if got == _MAP_FAILED:
        raise _failure("mmap")


def advise(address: int, size_bytes: int, advice: int) -> bool:
    """madvise(2); False when the kernel does not take the advice."""
    return size_bytes == 0 or _madvise(address, size_bytes, advice) == 0


def populate(address: int, size_bytes: int) -> None:
    """Make every page present and writable, with the GIL released.

    Kernels before 5.14 do not know the advice; there the pages are written to, so they must be
    fresh (zero).
    """
    while size_bytes and _madvise(address, size_bytes, MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == 22:  # EINVAL
            ctypes.memset(address, 0, size_bytes)
            return
        if code not in (4, 11):  # EINTR, EAGAIN
            raise _failure("madvise(MADV_POPULATE_WRITE)")


def address_of(owner: mmap.mmap) -> int:
    """Address at which a mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(owner))


def sealable(name: str, size_bytes: int) -> int:
    """A new memfd of that size that can be sealed, mode 0600; the caller closes it."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # before Linux 6.3
            raise
        descriptor = os.memfd_create(name, flags)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, size_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _failure(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")
