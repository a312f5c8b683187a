"""How big things are: slot sizes, and how a volume's cap is divided. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstored.tiers.base import MAX_OBJECT_BYTES, padded_bytes
from kvstored.tiers.nvme.format import (
    BLOCK_BYTES,
    ENTRIES_PER_BLOCK,
    MAX_REGIONS,
    REGION_ENTRY_BYTES,
    is_small,
)
from kvstored.tiers.nvme.header import HEADER_BYTES, PIECES_OFFSET
from kvstored.tiers.nvme.index_wire import CHUNK_BYTES
from kvstored.tiers.nvme.record import RECORD_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

SMALL_MAX_BYTES = 64 * KIB
"""Objects up to this length live in LMDB."""

"""Payload of one LMDB overflow page: small objects are cut so, and never need adjacent pages."""

SMALL_HEADER_BYTES = PIECES_OFFSET + 8
"""A small object's header: a slot header cut off after its only piece checksum."""

MIN_SLOT_BYTES = HEADER_BYTES + SMALL_MAX_BYTES + BLOCK_BYTES
SIZES_PER_OCTAVE = 16

_TREE_ENTRY_BYTES = 2 * (RECORD_BYTES + 18)  # a record in an LMDB tree of half-full pages
_SMALL_CHUNK_TREE_BYTES = 64  # one chunk's share of branch and leaf pages
_NAMES_BYTES = 512 * KIB
_MIN_LMDB_BYTES = 256 * KIB

COMMIT_RECORDS = 256
"""Most records changed by one LMDB commit; bounds the pages that a commit leaves behind."""


def slot_bytes(length_bytes: int) -> int:
    """Slot size for an object: header, and payload rounded up to 1/16 of its power of two.

    At most 6.25 % (4 KiB for the smallest) is lost to rounding; powers of two and their
    sixteenths lose nothing.
    """
    padded = padded_bytes(length_bytes)
    octave = 1 << (padded - 1).bit_length() - 1
    step = max(BLOCK_BYTES, octave // SIZES_PER_OCTAVE)
    return HEADER_BYTES + -(-padded // step) * step


def slot_sizes(lengths_bytes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`slot_bytes` of many lengths at once."""
    block = np.uint64(BLOCK_BYTES)
    padded = (np.maximum(lengths_bytes, np.uint64(1)) + block - np.uint64(1)) // block * block
    # Exact: below 2**53 a float has the very exponent of its integer.
    exponent = np.frexp((padded - np.uint64(1)).astype(np.float64))[1].astype(np.uint64)
    step = np.left_shift(np.uint64(1), exponent - np.uint64(1)) // np.uint64(SIZES_PER_OCTAVE)
    step = np.maximum(step, block)
    sizes: NDArray[np.uint64] = (
        np.uint64(HEADER_BYTES) + (padded + step - np.uint64(1)) // step * step
    )
    return sizes


def small_chunks(length_bytes: int) -> int:
    """Number of LMDB values that a small object is cut into."""
    return -(-(SMALL_HEADER_BYTES + length_bytes) // CHUNK_BYTES)


def charge_bytes(length_bytes: int) -> int:
    """What an object occupies: its slot, or its pages and its share of the trees."""
    if length_bytes > SMALL_MAX_BYTES:
        return slot_bytes(length_bytes)
    chunks = small_chunks(length_bytes)
    return chunks * (BLOCK_BYTES + _SMALL_CHUNK_TREE_BYTES) + _TREE_ENTRY_BYTES


def charge_at(place: int, length_bytes: int) -> int:
    """What an object occupies where it is: a small one may be in a slot, too."""
    return charge_bytes(length_bytes) if is_small(place) else slot_bytes(length_bytes)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a cap is divided. `total_bytes` is what all files together may come to hold."""

    cap_bytes: int
    region_bytes: int
    regions: int
    table_regions: int
    index_bytes: int  # size of the LMDB index file
    small_bytes: int  # size of the small-object LMDB file
    aside_bytes: int  # for damaged LMDB files that are kept to be looked at
    slack_bytes: int  # superblock, locks, directories, the file system's extent trees

    @property
    def data_bytes(self) -> int:
        """Length of the data file."""
        table = 2 * self.table_regions * REGION_ENTRY_BYTES
        return BLOCK_BYTES + table + self.regions * self.region_bytes

    @property
    def total_bytes(self) -> int:
        """Sum of all parts; at most the cap."""
        lmdb = self.index_bytes + self.small_bytes
        return self.data_bytes + lmdb + self.aside_bytes + self.slack_bytes

    @property
    def small_commit_bytes(self) -> int:
        """Most payload of small objects changed by one commit."""
        return max(SMALL_MAX_BYTES * 2, min(4 * MIB, self.small_bytes // 16))

    @property
    def small_capacity_bytes(self) -> int:
        """Sum of charges that the small-object environment takes.

        The rest is headroom: pages freed by one commit serve again only after the next two, and a
        delete copies the tree pages it touches.
        """
        return max(0, self.small_bytes - 4 * self.small_commit_bytes - _NAMES_BYTES)


def default_region_bytes(cap_bytes: int) -> int:
    """A power of two near 1/32 of the cap, between 8 MiB and 1 GiB, and 1/64 more for headers.

    As long as the largest object does not fit into one, near 1/16: from a cap of 4 GiB on it does.
    """
    power = _power_of_two(cap_bytes // 32)
    power = max(power, min(_power_of_two(cap_bytes // 16), MAX_OBJECT_BYTES))
    power = min(max(power, 8 * MIB), GIB)
    return power + power // 64


def _power_of_two(most: int) -> int:
    return 1 << max(0, most.bit_length() - 1)


def default_small_bytes(cap_bytes: int) -> int:
    """1/32 of the cap, between 3 MiB and 16 GiB."""
    return min(max(cap_bytes // 32, 3 * MIB), 16 * GIB) // BLOCK_BYTES * BLOCK_BYTES


def index_bytes(slots: int) -> int:
    """File size of an index of at most that many records, with headroom for deletes."""
    tree = slots * _TREE_ENTRY_BYTES
    copied = min(3 * tree, 3 * 2 * COMMIT_RECORDS * BLOCK_BYTES)
    return (_MIN_LMDB_BYTES + _NAMES_BYTES + tree + copied) // BLOCK_BYTES * BLOCK_BYTES


def make_plan(
    cap_bytes: int,
    region_bytes: int,
    small_bytes: int,
    *,
    table_regions: int = 0,
    index_at_least_bytes: int = 0,
) -> Plan:
    """Divide a cap: as many regions as fit beside everything else.

    `table_regions` is that of an existing volume, or 0 for a new one, whose table gets room for 16
    times the regions. The plan of a cap that is too small has no regions.
    """
    aside = cap_bytes // 256 // BLOCK_BYTES * BLOCK_BYTES
    slack = 128 * KIB + cap_bytes // 8192
    slots_per_region = region_bytes // MIN_SLOT_BYTES

    def plan(regions: int) -> Plan:
        entries = table_regions or min(
            MAX_REGIONS, -(-16 * max(1, regions) // ENTRIES_PER_BLOCK) * ENTRIES_PER_BLOCK
        )
        lmdb = max(index_bytes(regions * slots_per_region), index_at_least_bytes)
        return Plan(cap_bytes, region_bytes, regions, entries, lmdb, small_bytes, aside, slack)

    regions = max(0, cap_bytes // region_bytes)
    regions = min(regions, table_regions or MAX_REGIONS)
    while regions and plan(regions).total_bytes > cap_bytes:
        over = plan(regions).total_bytes - cap_bytes
        regions -= max(1, over // (2 * region_bytes))
    return plan(max(0, regions))
