"""What lies on the device: superblock, region table entries, places. See docs/nvme-format.md.

Pure: bytes in, values out. Everything is little-endian unless it says otherwise.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import xxhash

BLOCK_BYTES = 4096
FORMAT_VERSION = 1
KNOWN_COMPAT = 0
KNOWN_INCOMPAT = 0

SUPERBLOCK_MAGIC = b"KVSTVOL1"
_SUPERBLOCK = struct.Struct("<8sII QQ 16s QQQQQ Q")
_CHECKSUM = struct.Struct("<Q")

REGION_ENTRY_BYTES = 64
ENTRIES_PER_BLOCK = BLOCK_BYTES // REGION_ENTRY_BYTES
_REGION = struct.Struct("<II QQQ 24x Q")

SMALL_BIT = 1 << 55
"""Set in the places of objects that live in the small-object environment."""

_SLOT_MASK = (1 << 32) - 1
MAX_REGIONS = 1 << 23


class DamagedError(ValueError):
    """Bytes that are not what they ought to be: magic, checksum or a field out of range."""


class NewerFormatError(ValueError):
    """Whole, but of a version or with incompatible features that this reader does not know."""


def place_of(region: int, slot: int) -> int:
    """The place of a slot."""
    return region << 32 | slot


def small_place(number: int) -> int:
    """The place of a small object."""
    return SMALL_BIT | number


def is_small(place: int) -> bool:
    """Whether a place is in the small-object environment."""
    return bool(place & SMALL_BIT)


def region_of(place: int) -> int:
    """Region number of a slot's place."""
    return place >> 32


def slot_of(place: int) -> int:
    """Slot within the region, or number of the small object."""
    return place & _SLOT_MASK


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a volume is. Kept twice: in the file `superblock` and in block 0 of `data`."""

    volume: bytes  # UUID, 16 bytes
    region_bytes: int
    table_regions: int  # entries in the region table, a multiple of ENTRIES_PER_BLOCK
    created_ms: int
    version: int = FORMAT_VERSION
    compat: int = 0
    incompat: int = 0

    @property
    def volume_id(self) -> int:
        """First eight bytes of the UUID: seed of every checksum on the volume."""
        return int.from_bytes(self.volume[:8], "little")

    @property
    def table_bytes(self) -> int:
        """Size of one copy of the region table."""
        return self.table_regions * REGION_ENTRY_BYTES

    @property
    def table_offsets(self) -> tuple[int, int]:
        """Where the two copies of the region table begin in the data file."""
        return BLOCK_BYTES, BLOCK_BYTES + self.table_bytes

    @property
    def data_offset_bytes(self) -> int:
        """Where region 0 begins in the data file."""
        return BLOCK_BYTES + 2 * self.table_bytes

    def region_offset(self, region: int) -> int:
        """Where a region begins in the data file."""
        return self.data_offset_bytes + region * self.region_bytes

    def encode(self) -> bytes:
        """The 4 KiB block."""
        first, second = self.table_offsets
        head = _SUPERBLOCK.pack(
            SUPERBLOCK_MAGIC,
            self.version,
            0,
            self.compat,
            self.incompat,
            self.volume,
            self.region_bytes,
            self.table_regions,
            first,
            second,
            self.data_offset_bytes,
            self.created_ms,
        )
        body = head.ljust(BLOCK_BYTES - _CHECKSUM.size, b"\0")
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def decode(cls, block: bytes) -> Superblock:
        """Read a block. Raises DamagedError, or NewerFormatError if it is whole but newer."""
        if len(block) != BLOCK_BYTES or block[:8] != SUPERBLOCK_MAGIC:
            raise DamagedError("no superblock magic")
        body = block[: -_CHECKSUM.size]
        if _CHECKSUM.unpack(block[-_CHECKSUM.size :])[0] != xxhash.xxh3_64_intdigest(body):
            raise DamagedError("superblock checksum differs")
        (_, version, _, compat, incompat, volume, region, entries, first, second, data, made) = (
            _SUPERBLOCK.unpack_from(body)
        )
        if version > FORMAT_VERSION or incompat & ~KNOWN_INCOMPAT:
            raise NewerFormatError(
                f"format version {version}, incompatible features {incompat:#x}; this version of "
                f"kvstored reads versions up to {FORMAT_VERSION}, features {KNOWN_INCOMPAT:#x}"
            )
        found = cls(volume, region, entries, made, version, compat, incompat)
        if (first, second, data) != (*found.table_offsets, found.data_offset_bytes):
            raise DamagedError("superblock describes an unknown arrangement")
        if region % BLOCK_BYTES or not region or entries % ENTRIES_PER_BLOCK or not entries:
            raise DamagedError("superblock sizes are not whole blocks")
        return found


class RegionState(enum.IntEnum):
    """What a region is used for."""

    FREE = 0
    DEDICATED = 1
    ABANDONED = 2  # a sync of it failed; never written again, not scanned in a rebuild


@dataclass(frozen=True, slots=True)
class RegionEntry:
    """One entry of the region table. All zeros on the device means FREE and never used.

    `dedication` is drawn at random each time the region is given a slot size, and every slot header
    repeats it: whatever lay in the region before is thereby no header any more.
    """

    region: int
    state: RegionState = RegionState.FREE
    slot_bytes: int = 0
    dedication: int = 0
    sequence: int = 0

    def encode(self, volume_id: int) -> bytes:
        """The 64 bytes of the entry."""
        packed = _REGION.pack(
            self.region, self.state, self.slot_bytes, self.dedication, self.sequence, 0
        )
        body = packed[: -_CHECKSUM.size]
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body, volume_id))

    @classmethod
    def decode(cls, raw: bytes, region: int, volume_id: int) -> RegionEntry:
        """Read the entry of a region. Raises DamagedError."""
        if not any(raw):
            return cls(region)
        number, state, slot_bytes, dedication, sequence, check = _REGION.unpack(raw)
        if check != xxhash.xxh3_64_intdigest(raw[: -_CHECKSUM.size], volume_id):
            raise DamagedError("region entry checksum differs")
        if number != region or state not in RegionState.__members__.values():
            raise DamagedError("region entry is another's or of unknown state")
        return cls(region, RegionState(state), slot_bytes, dedication, sequence)
