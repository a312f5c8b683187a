"""What a stored object looks like: a header block of 4 KiB, then the payload. Pure.

See docs/object-tier.md. Fields and offsets are those of a slot header on NVMe (docs/nvme-format.md)
under a magic of its own, with zeros where that ties a slot to its volume.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from kvstored.tiers.base import MAX_OBJECT_BYTES, ObjectMeta, piece_count
from kvstored.tiers.object.api import ObjectName

HEADER_BYTES: Final = 4096
HEADER_VERSION: Final = 1
KNOWN_INCOMPAT: Final = 0
MAGIC: Final = b"KVSTOBJ1"

_FIXED = struct.Struct("<8sHHI QQ 32x QQ8xQQQ IIII 32s32s32s 16s QQ 5H6x")
_STRINGS_OFFSET = 272
_CHECK_OFFSET = 2040
_CHECK = struct.Struct("<Q")
_PIECES_OFFSET = 2048
_MAX_PIECES = (HEADER_BYTES - _PIECES_OFFSET) // 8
_MAX_STRINGS_BYTES = _CHECK_OFFSET - _STRINGS_OFFSET
_LIVE = 1
_PARENT_KNOWN = 1


class HeaderError(ValueError):
    """A block that is no header, is damaged, or is one that this version does not know."""


class NewerHeader(HeaderError):
    """A whole header, but one that this version does not know: not to be dropped."""


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """A header, decoded. `written_ms`: Unix time by the clock of the node that wrote it."""

    meta: ObjectMeta
    written_ms: int
    writer: str = ""


def stored_bytes(length_bytes: int) -> int:
    """Length of the stored object that holds an object of that length."""
    return HEADER_BYTES + length_bytes


def object_bytes(stored_length_bytes: int) -> int:
    """Length of the object in a stored object of that length; below 0 if there can be none."""
    return stored_length_bytes - HEADER_BYTES


def is_named(meta: ObjectMeta, name: ObjectName) -> bool:
    """Whether a header describes the object that was asked for."""
    return (meta.namespace, meta.family, meta.key, meta.part) == (
        name.namespace,
        name.family,
        name.key,
        name.part,
    )


def encode(meta: ObjectMeta, written_ms: int, writer: str = "") -> bytes:
    """The header block. Raises ValueError for a meta that no header can hold."""
    names = [text.encode() for text in (meta.namespace, meta.part, meta.tenant, writer, "")]
    joined, pieces = b"".join(names), meta.piece_checksums
    _validate(meta, len(joined))
    block = bytearray(HEADER_BYTES)
    _FIXED.pack_into(
        block,
        0,
        MAGIC,
        HEADER_VERSION,
        _LIVE,
        0,
        0,  # compat
        0,  # incompat
        0,  # namespace epoch
        meta.length_bytes,
        meta.end_token,
        meta.expires_ms,
        written_ms,
        meta.depth,
        len(pieces) // 8,
        _PARENT_KNOWN if meta.parent else 0,
        0,  # codec: none
        meta.family,
        meta.key,
        meta.parent,
        meta.checksum,
        meta.length_bytes,  # stored; differs from the object's under a codec
        0,  # encryption key version
        *map(len, names),
    )
    block[_STRINGS_OFFSET : _STRINGS_OFFSET + len(joined)] = joined
    block[_PIECES_OFFSET : _PIECES_OFFSET + len(pieces)] = pieces
    _CHECK.pack_into(block, _CHECK_OFFSET, xxhash.xxh3_64_intdigest(block))
    return bytes(block)


def _validate(meta: ObjectMeta, names_bytes: int) -> None:
    pieces = len(meta.piece_checksums)
    if pieces != 8 * piece_count(meta.length_bytes) or meta.length_bytes > MAX_OBJECT_BYTES:
        raise ValueError(f"{pieces} B of piece checksums for {meta.length_bytes} B of object")
    if names_bytes > _MAX_STRINGS_BYTES:
        raise ValueError(f"namespace, part and tenant exceed {_MAX_STRINGS_BYTES} B together")
    sizes = (len(meta.family), len(meta.key), len(meta.checksum))
    if sizes != (32, 32, 16) or len(meta.parent) not in (0, 32):
        raise ValueError(f"family, key, checksum of {sizes} B, parent of {len(meta.parent)} B")


def decode(block: bytes | bytearray | memoryview) -> ObjectHeader:
    """Read a header block. Raises HeaderError unless it is whole and known to this version."""
    raw = bytes(block)
    if len(raw) != HEADER_BYTES or raw[:8] != MAGIC:
        raise HeaderError("no header magic")
    (check,) = _CHECK.unpack_from(raw, _CHECK_OFFSET)
    if check != xxhash.xxh3_64_intdigest(raw[:_CHECK_OFFSET] + bytes(8) + raw[_PIECES_OFFSET:]):
        raise HeaderError("header checksum differs")
    fields = _FIXED.unpack_from(raw)
    (_, version, state, _, _, incompat, _, length, end_token, expires_ms, written_ms) = fields[:11]
    (depth, pieces, flags, codec, family, key, parent, checksum, stored, _) = fields[11:21]
    if version > HEADER_VERSION or incompat & ~KNOWN_INCOMPAT:
        raise NewerHeader("header of a newer version")
    if state != _LIVE or codec or stored != length:
        raise NewerHeader("header of unknown state or codec")
    if not length or pieces != piece_count(length) or pieces > _MAX_PIECES:
        raise HeaderError("header with a wrong number of pieces")
    namespace, part, tenant, writer, _ = _strings(raw, fields[21:])
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
        piece_checksums=raw[_PIECES_OFFSET : _PIECES_OFFSET + 8 * pieces],
    )
    return ObjectHeader(meta, written_ms, writer)


def _strings(raw: bytes, lengths: tuple[int, ...]) -> list[str]:
    """The strings of a header. Raises HeaderError."""
    if sum(lengths) > _MAX_STRINGS_BYTES:
        raise HeaderError("header names overflow")
    found, at = [], _STRINGS_OFFSET
    for length in lengths:
        try:
            found.append(raw[at : at + length].decode())
        except UnicodeDecodeError as error:
            raise HeaderError("header names are not UTF-8") from error
        at += length
    return found
