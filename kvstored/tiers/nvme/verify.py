"""Whether bytes that came from the device are the object that was asked for. Pure.

A header is whole by its own checksum, names the object's checksum, which the index knows too, and
carries the checksums of the pieces. So bytes whose pieces match are the object, and each byte is
hashed once.
"""

from __future__ import annotations

import ctypes

import xxhash

from kvstored.tiers.base import PIECE_BYTES, ObjectMeta, ObjectRead, padded_bytes

DIGEST_BYTES = 8


def is_expected(meta: ObjectMeta, namespace: str, item: ObjectRead) -> bool:
    """Whether a header describes the object that a reader expects."""
    return (
        meta.namespace == namespace
        and meta.key == item.key
        and meta.part == item.part
        and meta.length_bytes == item.length_bytes
        and meta.checksum == item.checksum
    )


def hash_pieces(
    payload: memoryview, length_bytes: int, start_bytes: int, stop_bytes: int, digests: bytearray
) -> None:
    """Put the checksums of the pieces from `start_bytes` on where they belong among `digests`.

    `payload` is the whole object's memory, `length_bytes` of it count; start is a piece's.
    """
    for at in range(start_bytes, min(stop_bytes, length_bytes), PIECE_BYTES):
        piece = payload[at : min(at + PIECE_BYTES, length_bytes)]
        place = at // PIECE_BYTES * DIGEST_BYTES
        digest = xxhash.xxh3_64_intdigest(piece)
        digests[place : place + DIGEST_BYTES] = digest.to_bytes(DIGEST_BYTES, "little")


def clear_padding(into: memoryview, length_bytes: int) -> None:
    """Zero what lies between an object's end and its padded end."""
    count = padded_bytes(length_bytes) - length_bytes
    if count:
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(into, length_bytes)), 0, count)
