"""Keeps freed frames for the next frame.

A frame of 1 MiB is a fresh bytes object, and so is gRPC's own copy of it. By default glibc maps
such blocks anew or gives the heap's top back after each, and every one then costs 256 page faults
per copy: measured, half of the throughput of a stream. Constants: glibc's malloc.h.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_BYTES = 16 << 20
_KEEP_BYTES = 64 << 20


def keep_freed_frames() -> bool:
    """Let malloc keep up to 64 MiB per arena, and serve blocks under 16 MiB from it.

    False where the C library has no such switch; then nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    taken: int = mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
    return bool(taken)
