"""Bytes of a volume in, values out, as docs/nvme-format.md has them. Pure.

What is not as the page says raises `Damage`, in words for the operator.
"""

from __future__ import annotations

import operator
import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from kvstored.tiers.nvme.format import BLOCK_BYTES, FORMAT_VERSION, SUPERBLOCK_MAGIC

ENTRY_BYTES = 64
HEADER_BYTES = 4096
SLOT_MAGIC = b"KVSTSLOT"
PIECE_BYTES = 1 << 20
MAX_PIECES = 256
SMALL_BASE = 1 << 55
SMALL_MAX_BYTES = 65_536
SMALL_HEADER_BYTES = 2056
SMALL_CHUNK_BYTES = 4080
RECORD_BYTES = 152
FREE, DEDICATED, ABANDONED = 0, 1, 2
LIVE, VOID = 1, 2


class Damage(Exception):
    """Bytes that are not what the format says."""


class Newer(Exception):
    """Whole, but of a version or with features that this reader does not know."""


@dataclass(frozen=True, slots=True)
class Superblock:
    """What the volume is; sizes and offsets in bytes."""

    volume: bytes
    region_bytes: int
    entries: int
    first_table: int
    second_table: int
    regions_offset: int
    created_ms: int

    @property
    def volume_id(self) -> int:
        """Seed of the volume's checksums."""
        return int.from_bytes(self.volume[:8], "little")


def superblock(block: bytes) -> Superblock:
    """Read a superblock. Raises Damage or Newer."""
    if len(block) < BLOCK_BYTES:
        raise Damage(f"only {len(block)} B of it are there")
    if block[:8] != SUPERBLOCK_MAGIC:
        raise Damage("no magic")
    if xxhash.xxh3_64_intdigest(block[:4088]) != int.from_bytes(block[4088:], "little"):
        raise Damage("its checksum differs")
    (version,) = struct.unpack_from("<I", block, 8)
    (incompatible,) = struct.unpack_from("<Q", block, 24)
    if version > FORMAT_VERSION or incompatible:
        raise Newer(
            f"format version {version} with incompatible features {incompatible:#x}; this reader "
            f"knows version {FORMAT_VERSION} and no such features"
        )
    region, entries, first, second, regions, created = struct.unpack_from("<6Q", block, 48)
    if not region or region % BLOCK_BYTES or not entries or entries % 64:
        raise Damage("its sizes are not whole blocks")
    expected = (BLOCK_BYTES, BLOCK_BYTES + 64 * entries, BLOCK_BYTES + 128 * entries)
    if (first, second, regions) != expected:
        raise Damage("its offsets do not follow from its sizes")
    return Superblock(block[32:48], region, entries, first, second, regions, created)


@dataclass(frozen=True, slots=True)
class Region:
    """A whole entry of the region table."""

    number: int
    state: int = FREE
    slot_bytes: int = 0
    dedication: int = 0
    sequence: int = 0


def region_entry(raw: bytes, number: int, volume: Superblock) -> Region:
    """Read the entry of a region. Raises Damage."""
    if not any(raw):
        return Region(number)
    named, state, slot_bytes, dedication, sequence = struct.unpack_from("<IIQQQ", raw)
    if xxhash.xxh3_64_intdigest(raw[:56], volume.volume_id) != int.from_bytes(raw[56:], "little"):
        raise Damage("its checksum differs")
    if named != number:
        raise Damage(f"it is region {named}'s")
    if state not in (FREE, DEDICATED, ABANDONED):
        raise Damage(f"its state is {state}")
    fits = slot_bytes % BLOCK_BYTES == 0 and HEADER_BYTES < slot_bytes <= volume.region_bytes
    if state == DEDICATED and not fits:
        raise Damage(f"its slots of {slot_bytes} B cannot be")
    return Region(number, state, slot_bytes, dedication, sequence)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a header is found, and so what it must say of itself."""

    volume_id: int
    dedication: int
    place: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A live header."""

    sequence: int
    length_bytes: int
    end_token: int
    expires_ms: int
    written_ms: int
    depth: int
    parent: bytes | None  # None: not known
    family: bytes
    key: bytes
    checksum: bytes
    pieces: tuple[int, ...]
    namespace: str
    part: str
    tenant: str

    @property
    def identity(self) -> bytes:
        """What two live headers never share: a hash of namespace, family, key and part."""
        names = (self.namespace.encode(), self.family, self.key, self.part.encode())
        joined = b"".join(len(name).to_bytes(4, "little") + name for name in names)
        return xxhash.xxh3_128_digest(joined)


def is_claimed(block: bytes, spot: Spot) -> bool:
    """Whether a block calls itself a header of this volume and dedication, damaged or not."""
    tied = struct.unpack_from("<QQ", block, 32)
    return block[:8] == SLOT_MAGIC and tied == (spot.volume_id, spot.dedication)


def header(block: bytes, spot: Spot) -> Header | None:
    """Read a block of 4096 bytes as the header of a slot; None for a void one. Raises Damage."""
    if block[:8] != SLOT_MAGIC:
        raise Damage("there is no header")
    bare = block[:2040] + bytes(8) + block[2048:]
    if xxhash.xxh3_64_intdigest(bare, spot.volume_id) != _u64(block, 2040):
        raise Damage("the header's checksum differs")
    if _u64(block, 32) != spot.volume_id:
        raise Damage("the header is another volume's")
    if _u64(block, 40) != spot.dedication:
        raise Damage("the header is of another dedication of the region")
    if _u64(block, 48) != spot.place:
        raise Damage(f"the header is that of place {_u64(block, 48):#x}")
    version, state = struct.unpack_from("<HH", block, 8)
    if version > 1 or _u64(block, 24):
        raise Damage("the header is of a newer version, or has features this reader does not know")
    if state == VOID:
        return None
    if state != LIVE:
        raise Damage(f"the header's state is {state}")
    return _live(block, spot)


def _live(block: bytes, spot: Spot) -> Header:
    """The fields of a live header whose checksum is right. Raises Damage."""
    sequence, _, length, slot_bytes, end_token, expires, written = struct.unpack_from(
        "<7Q", block, 56
    )
    depth, pieces, flags, codec = struct.unpack_from("<4I", block, 112)
    if codec or _u64(block, 240) != length:
        raise Damage(f"the payload is in codec {codec}")
    if slot_bytes != spot.slot_bytes:
        raise Damage(f"the header says the slot has {slot_bytes} B")
    if not length or pieces != -(-length // PIECE_BYTES) or pieces > MAX_PIECES:
        raise Damage(f"the header has {pieces} pieces for {length} B")
    lengths = struct.unpack_from("<5H", block, 256)
    if sum(lengths) > 1768:
        raise Damage("the header's strings are longer than their room")
    names = []
    at = 272
    for size in lengths:
        try:
            names.append(block[at : at + size].decode())
        except UnicodeDecodeError as error:
            raise Damage("the header's strings are not UTF-8") from error
        at += size
    return Header(
        sequence=sequence,
        length_bytes=length,
        end_token=end_token,
        expires_ms=expires,
        written_ms=written,
        depth=depth,
        parent=block[192:224] if flags & 1 else None,
        family=block[128:160],
        key=block[160:192],
        checksum=block[224:240],
        pieces=struct.unpack_from(f"<{pieces}Q", block, 2048),
        namespace=names[0],
        part=names[1],
        tenant=names[2],
    )


def _u64(block: bytes, at: int) -> int:
    return int.from_bytes(block[at : at + 8], "little")


def slot_bytes_for(length_bytes: int) -> int:
    """The slot size that an object of that length asks for."""
    padded = -(-length_bytes // 4096) * 4096
    below = 4096
    while below * 2 < padded:
        below *= 2
    step = max(4096, below // 16)
    return HEADER_BYTES + -(-padded // step) * step


class PayloadCheck:
    """Takes an object's bytes in order, and says which pieces are not as its header has them."""

    def __init__(self, found: Header) -> None:
        self._header = found
        self._whole = xxhash.xxh3_128()
        self._piece = xxhash.xxh3_64()
        self._taken = 0
        self._rotten: list[int] = []

    def take(self, data: bytes | memoryview) -> None:
        """The next bytes; nothing behind the object's end."""
        view = memoryview(data)
        self._whole.update(view)
        while view:
            room = PIECE_BYTES - self._taken % PIECE_BYTES
            part = view[:room]
            self._piece.update(part)
            self._taken += len(part)
            view = view[room:]
            if self._taken % PIECE_BYTES == 0 or self._taken == self._header.length_bytes:
                self._end_piece()

    def _end_piece(self) -> None:
        number = (self._taken - 1) // PIECE_BYTES
        if self._piece.intdigest() != self._header.pieces[number]:
            self._rotten.append(number)
        self._piece.reset()

    def fault(self) -> str | None:
        """After the last byte: what is wrong, or None."""
        if self._taken != self._header.length_bytes:
            return f"{self._taken} of {self._header.length_bytes} B are there"
        if self._rotten:
            return f"piece {', '.join(map(str, self._rotten))} of {len(self._header.pieces)} rotten"
        if self._whole.digest() != self._header.checksum:
            return "every piece is right, but not the whole"
        return None


RECORD = np.dtype(
    {
        "names": [
            "place", "sequence", "end_token", "expires_ms", "key", "parent", "checksum",
            "length_bytes", "depth", "namespace", "family", "part", "tenant", "dedication",
            "flags", "check",
        ],
        "formats": [
            ">u8", "<u8", "<u8", "<u8", "V32", "V32", "V16", "<u4", "<u4", "<u4", "<u4", "<u4",
            "<u4", "<u4", "<u4", "<u8",
        ],
        "offsets": [0, 8, 16, 24, 32, 64, 96, 112, 116, 120, 124, 128, 132, 136, 140, 144],
        "itemsize": RECORD_BYTES,
    }
)  # fmt: skip
"""A record of the index."""

Records = np.ndarray[tuple[int], np.dtype[np.void]]
"""One-dimensional array of RECORD."""


def _splitmix(i: int) -> int:
    mask = 2**64 - 1
    z = (i + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return (z ^ z >> 31) | 1


_FACTORS = tuple(_splitmix(i) for i in range(18))
_WORDS = struct.Struct("<19Q")


def record_whole(raw: bytes, volume_id: int) -> bool:
    """Whether a record carries the check it ought to."""
    *words, check = _WORDS.unpack(raw)
    found: int = (volume_id + sum(map(operator.mul, words, _FACTORS))) % 2**64
    return bool(found == check)


def records_whole(records: Records, volume_id: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """The same of many."""
    words = np.frombuffer(records.tobytes(), "<u8").reshape(-1, 19)
    total = np.full(len(words), volume_id, np.uint64)
    for i, factor in enumerate(_FACTORS):
        total += words[:, i] * np.uint64(factor)
    return np.asarray(total == words[:, 18])
