"""Copies objects into and out of their padded extents, in a thread that is not the loop's."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import xxhash

from kvstored.tiers.base import PIECE_BYTES, ReadOutcome
from kvstored.tiers.ram.slabs import PIECE_CHECKSUM_BYTES

CopyJob = tuple[memoryview, memoryview, int, bytes]
"""A padded extent, where its bytes are wanted, the object's length in bytes, and the XXH3-64 of its
pieces back to back.
"""


def copy_in(jobs: Sequence[tuple[memoryview, memoryview]]) -> None:
    """Fill each extent from its payload, which is as long."""
    for extent, payload in jobs:
        _copy(extent, payload)


def copy_out(job: CopyJob, stop: threading.Event) -> ReadOutcome:
    """Copy one object and verify it. FAILED: it was stopped."""
    if not stop.is_set() and _copy_verified(*job, stop):
        return ReadOutcome.OK
    return ReadOutcome.FAILED if stop.is_set() else ReadOutcome.CORRUPT


def _copy_verified(
    extent: memoryview, into: memoryview, length_bytes: int, pieces: bytes, stop: threading.Event
) -> bool:
    """Copy a padded extent and check each piece as it arrived, while it is still in cache."""
    for i, start in enumerate(range(0, length_bytes, PIECE_BYTES)):
        stop_at = min(start + PIECE_BYTES, len(extent))
        _copy(into[start:stop_at], extent[start:stop_at])
        digest = xxhash.xxh3_64_intdigest(into[start : min(stop_at, length_bytes)])
        expected = pieces[i * PIECE_CHECKSUM_BYTES : (i + 1) * PIECE_CHECKSUM_BYTES]
        if digest.to_bytes(PIECE_CHECKSUM_BYTES, "little") != expected or stop.is_set():
            return False
    return True


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy with the GIL released."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
