"""The slot header: 4 KiB that say everything about the payload behind them.

See docs/nvme-format.md for the offsets. The header alone is enough to rebuild the index, so it is
never trusted without its checksum, its volume, its place and the region's dedication agreeing.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import xxhash

from kvstored.tiers.base import ObjectMeta, piece_count
from kvstored.tiers.nvme.format import BLOCK_BYTES, DamagedError

HEADER_BYTES = BLOCK_BYTES
HEADER_VERSION = 1
KNOWN_INCOMPAT = 0
MAGIC: Final = b"KVSTSLOT"
PIECES_OFFSET = 2048
MAX_PIECES = (HEADER_BYTES - PIECES_OFFSET) // 8

_FIXED = struct.Struct("<8sHHI QQ QQQQQ QQQQQ IIII 32s32s32s 16s QQ 5H6x")
_STRINGS_OFFSET = 272
_CHECK_OFFSET = 2040
_CHECK = struct.Struct("<Q")
_PARENT_KNOWN = 1
MAX_NAMES_BYTES = _CHECK_OFFSET - _STRINGS_OFFSET


class HeaderState(enum.IntEnum):
    """Whether the payload counts."""

    LIVE = 1
    VOID = 2


@dataclass(frozen=True, slots=True)
class Where:
    """What ties a header to one place of one volume at one time."""

    volume_id: int
    dedication: int  # of the region; 0 in the small-object environment
    place: int
    slot_bytes: int  # 0 in the small-object environment


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """A decoded live header."""

    meta: ObjectMeta
    sequence: int
    written_ms: int
    writer: str = ""


def validate(meta: ObjectMeta, writer: str = "") -> None:
    """Raise ValueError for a meta that no header can hold."""
    joined, _ = _encoded_names(meta.namespace, meta.part, meta.tenant, writer)
    pieces = meta.piece_checksums
    if len(pieces) != 8 * piece_count(meta.length_bytes) or len(pieces) > 8 * MAX_PIECES:
        raise ValueError(f"{len(pieces)} B of piece checksums for {meta.length_bytes} B of object")
    if len(joined) > MAX_NAMES_BYTES:
        raise ValueError(f"namespace, part and tenant exceed {MAX_NAMES_BYTES} B together")
    sizes = (len(meta.family), len(meta.key), len(meta.checksum))
    if sizes != (32, 32, 16) or len(meta.parent) not in (0, 32):
        raise ValueError(f"family, key, checksum of {sizes} B, parent of {len(meta.parent)} B")


def encode(
    where: Where, meta: ObjectMeta, sequence: int, written_ms: int, writer: str = ""
) -> bytes:
    """The 4 KiB of a live header. Raises ValueError for a meta that no header can hold."""
    block = bytearray(HEADER_BYTES)
    encode_into(block, where, meta, sequence, written_ms, writer)
    return bytes(block)


def encode_into(
    block: bytearray | memoryview,
    where: Where,
    meta: ObjectMeta,
    sequence: int,
    written_ms: int,
    writer: str = "",
) -> None:
    """`encode` into HEADER_BYTES of memory that are all zero."""
    validate(meta, writer)
    joined, lengths = _encoded_names(meta.namespace, meta.part, meta.tenant, writer)
    pieces = meta.piece_checksums
    _FIXED.pack_into(
        block,
        0,
        MAGIC,
        HEADER_VERSION,
        HeaderState.LIVE,
        0,
        0,  # compat
        0,  # incompat
        where.volume_id,
        where.dedication,
        where.place,
        sequence,
        0,  # namespace epoch
        meta.length_bytes,
        where.slot_bytes,
        meta.end_token,
        meta.expires_ms,
        written_ms,
        meta.depth,
        len(pieces) // 8,
        _PARENT_KNOWN if meta.parent else 0,
        0,  # codec: raw
        meta.family,
        meta.key,
        meta.parent,
        meta.checksum,
        meta.length_bytes,  # stored length; differs from the object's under a codec
        0,
        *lengths,
    )
    block[_STRINGS_OFFSET : _STRINGS_OFFSET + len(joined)] = joined
    block[PIECES_OFFSET : PIECES_OFFSET + len(pieces)] = pieces
    _seal(block, where.volume_id)


@lru_cache(maxsize=1024)
def _encoded_names(
    namespace: str, part: str, tenant: str, writer: str
) -> tuple[bytes, tuple[int, ...]]:
    """The strings of a header (that of the encryption key is empty), and their lengths."""
    names = [name.encode() for name in (namespace, part, tenant, writer, "")]
    return b"".join(names), tuple(map(len, names))


def encode_void(where: Where, sequence: int) -> bytes:
    """The 4 KiB that stand where a deleted object's header stood."""
    block = bytearray(HEADER_BYTES)
    struct.pack_into("<8sHHI", block, 0, MAGIC, HEADER_VERSION, HeaderState.VOID, 0)
    struct.pack_into("<QQQQ", block, 32, where.volume_id, where.dedication, where.place, sequence)
    _seal(block, where.volume_id)
    return bytes(block)


def _seal(block: bytearray | memoryview, volume_id: int) -> None:
    """Put the checksum of a block, taken with the field zero, into its field."""
    _CHECK.pack_into(block, _CHECK_OFFSET, xxhash.xxh3_64_intdigest(block, volume_id))


def claims(block: bytes | memoryview, where: Where) -> bool:
    """Whether a block says it is a header of this volume and dedication, whole or not."""
    return bytes(block[:8]) == MAGIC and struct.unpack_from("<QQ", block, 32) == (
        where.volume_id,
        where.dedication,
    )


def decode(block: bytes | bytearray | memoryview, where: Where) -> SlotHeader | None:
    """Read a block found at a place; None for a void one.

    Raises DamagedError unless it is a whole header that belongs exactly there.
    """
    raw = bytes(block)
    if len(raw) != HEADER_BYTES or raw[:8] != MAGIC:
        raise DamagedError("no header magic")
    (check,) = _CHECK.unpack_from(raw, _CHECK_OFFSET)
    zeroed = raw[:_CHECK_OFFSET] + bytes(8) + raw[_CHECK_OFFSET + 8 :]
    if check != xxhash.xxh3_64_intdigest(zeroed, where.volume_id):
        raise DamagedError("header checksum differs")
    fields = _FIXED.unpack_from(raw)
    (_, version, state, _, _, incompat, volume_id, dedication, place, sequence, _) = fields[:11]
    (length, slot_bytes, end_token, expires_ms, written_ms) = fields[11:16]
    (depth, pieces, flags, codec, family, key, parent, checksum, stored, _) = fields[16:26]
    if (volume_id, dedication, place) != (where.volume_id, where.dedication, where.place):
        raise DamagedError("header belongs to another place")
    if version > HEADER_VERSION or incompat & ~KNOWN_INCOMPAT:
        raise DamagedError("header of a newer version")
    if state == HeaderState.VOID:
        return None
    if state != HeaderState.LIVE or codec or stored != length or slot_bytes != where.slot_bytes:
        raise DamagedError("header of unknown state, codec or slot size")
    if pieces != piece_count(length) or pieces > MAX_PIECES:
        raise DamagedError("header with a wrong number of pieces")
    namespace, part, tenant, writer, _ = _names(raw, fields[26:])
    meta = ObjectMeta(
        namespace=namespace,
        family=family,
        key=key,
        part=part,
        tenant=tenant,
        parent=parent if flags & _PARENT_KNOWN else b"",
        depth=depth,
        end_token=end_token,
        expires_ms=expires_ms,
        length_bytes=length,
        checksum=checksum,
        piece_checksums=raw[PIECES_OFFSET : PIECES_OFFSET + 8 * pieces],
    )
    return SlotHeader(meta, sequence, written_ms, writer)


def _names(raw: bytes, lengths: tuple[int, ...]) -> list[str]:
    """The strings of a header. Raises DamagedError."""
    if sum(lengths) > MAX_NAMES_BYTES:
        raise DamagedError("header names overflow")
    found = []
    at = _STRINGS_OFFSET
    for length in lengths:
        try:
            found.append(raw[at : at + length].decode())
        except UnicodeDecodeError as error:
            raise DamagedError("header names are not UTF-8") from error
        at += length
    return found
