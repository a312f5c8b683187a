"""Whether bytes that came from the device are the object that was asked for. Pure."""

from __future__ import annotations

import ctypes
import struct

import xxhash

from kvstored.tiers.base import PIECE_BYTES, ObjectMeta, ObjectRead, padded_bytes


def is_expected(meta: ObjectMeta, namespace: str, item: ObjectRead) -> bool:
    """Whether a header describes the object that a reader expects."""
    return (
        meta.namespace == namespace
        and meta.key == item.key
        and meta.part == item.part
        and meta.length_bytes == item.length_bytes
        and meta.checksum == item.checksum
    )


def payload_matches(meta: ObjectMeta, payload: memoryview) -> bool:
    """Check a payload piece by piece, and as a whole, in one pass through memory."""
    whole = xxhash.xxh3_128()
    expected = struct.unpack(f"<{len(meta.piece_checksums) // 8}Q", meta.piece_checksums)
    for i, piece_checksum in enumerate(expected):
        piece = payload[i * PIECE_BYTES : min((i + 1) * PIECE_BYTES, meta.length_bytes)]
        if xxhash.xxh3_64_intdigest(piece) != piece_checksum:
            return False
        whole.update(piece)
    return whole.digest() == meta.checksum


def clear_padding(into: memoryview, length_bytes: int) -> None:
    """Zero what lies between an object's end and its padded end."""
    count = padded_bytes(length_bytes) - length_bytes
    if count:
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(into, length_bytes)), 0, count)
