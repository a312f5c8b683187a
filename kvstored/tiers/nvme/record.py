"""Index records: fixed-size, so that a million of them are one numpy array.

A record checks itself with a sum that numpy can take over a million rows at once:
``check = volume_id + sum(word[i] * WEIGHTS[i])  (mod 2**64)`` over its first 18 little-endian
64-bit words. The weights are odd, so a change of any one word always changes the sum.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstored.tiers.base import ObjectMeta

if TYPE_CHECKING:
    from numpy.typing import NDArray

RECORD = np.dtype(
    [
        ("place", ">u8"),  # big-endian and first: LMDB sorts the records of a region by it
        ("sequence", "<u8"),
        ("end_token", "<u8"),
        ("expires_ms", "<u8"),
        ("key", "u1", 32),
        ("parent", "u1", 32),
        ("checksum", "u1", 16),
        ("length_bytes", "<u4"),
        ("depth", "<u4"),
        ("namespace", "<u4"),
        ("family", "<u4"),
        ("part", "<u4"),
        ("tenant", "<u4"),
        ("dedication", "<u4"),  # low half of the region's
        ("flags", "<u4"),
        ("check", "<u8"),
    ]
)
RECORD_BYTES = RECORD.itemsize
PARENT_KNOWN = 1

Records = np.ndarray[tuple[int], np.dtype[np.void]]
"""One-dimensional array of RECORD."""

COLUMNS = {name: RECORD[name].newbyteorder("=") for name in RECORD.names or () if name != "check"}
"""What each column of `Table` is."""

_WORDS = RECORD_BYTES // 8 - 1
_ALIGNMENT = 4096
_REST = struct.Struct("<QQQ 32s32s16s IIIIIIII Q")


def _weights() -> NDArray[np.uint64]:
    """The first 18 outputs of SplitMix64 from seed 0, made odd (Steele et al., OOPSLA 2014)."""
    mask = (1 << 64) - 1
    found = []
    for i in range(1, _WORDS + 1):
        z = i * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        found.append(z ^ z >> 31 | 1)
    return np.array(found, np.uint64)


WEIGHTS = _weights()


class Table:
    """Records column by column: ``table["place"]`` is shape [records], ``table["key"]``
    [records, 32]. Nothing says that a column is memory of its own.
    """

    def __init__(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """`columns`: all of COLUMNS, of equal length."""
        self._columns = columns

    @classmethod
    def of(cls, records: Records) -> Table:
        """The columns of records."""
        return cls({name: records[name].astype(kind.base) for name, kind in COLUMNS.items()})

    def __len__(self) -> int:
        return len(self._columns["place"])

    def __getitem__(self, column: str) -> NDArray[Any]:
        return self._columns[column]

    def where(self, chosen: NDArray[np.bool_]) -> Table:
        """The records chosen."""
        return Table({name: values[chosen] for name, values in self._columns.items()})


def layout(count: int) -> tuple[dict[str, int], int]:
    """Where each column of `count` records begins in memory that holds them all, one after the
    other, and how long that is; in bytes.
    """
    begins, at = {}, 0
    for name, kind in COLUMNS.items():
        begins[name] = at
        at += -(-count * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
    return begins, at


def table_over(memory: memoryview, capacity: int, count: int) -> Table:
    """The first `count` records in memory laid out for `capacity` of them, without a copy."""
    begins, _ = layout(capacity)
    return Table(
        {
            name: np.frombuffer(
                memory, kind.base, count * (kind.itemsize // kind.base.itemsize), at
            ).reshape(count, *kind.shape)
            for name, kind in COLUMNS.items()
            for at in [begins[name]]
        }
    )


def from_bytes(raw: bytes | bytearray | memoryview) -> Records:
    """Records over a buffer, without a copy."""
    return np.frombuffer(raw, RECORD) if len(raw) else np.zeros(0, RECORD)


def checks(records: Records, volume_id: int) -> NDArray[np.uint64]:
    """The check each record ought to carry."""
    words = np.ascontiguousarray(records).view("<u8").reshape(-1, _WORDS + 1)
    total = np.full(len(records), volume_id, np.uint64)
    for i in range(_WORDS):
        total += words[:, i] * WEIGHTS[i]
    return total


def whole(records: Records, volume_id: int) -> NDArray[np.bool_]:
    """Which records carry the check they ought to."""
    good: NDArray[np.bool_] = records["check"] == checks(records, volume_id)
    return good


def pack(meta: ObjectMeta, place: int, sequence: int, ids: Sequence[int], dedication: int) -> bytes:
    """A record without its check; `ids` are those of namespace, family, part and tenant."""
    return place.to_bytes(8, "big") + _REST.pack(
        sequence,
        meta.end_token,
        meta.expires_ms,
        meta.key,
        meta.parent,
        meta.checksum,
        meta.length_bytes,
        meta.depth,
        *ids,
        dedication & 0xFFFFFFFF,
        PARENT_KNOWN if meta.parent else 0,
        0,
    )


def seal(packed: Sequence[bytes], volume_id: int) -> Records:
    """Records from packed ones, with their checks."""
    records = np.frombuffer(bytearray(b"".join(packed)), RECORD)
    records["check"] = checks(records, volume_id)
    return records


def identities(records: Table) -> NDArray[np.uint64]:
    """A 64-bit hash of (namespace, family, key, part) for each record, to find twins with."""
    keys = np.ascontiguousarray(records["key"]).view("<u8").reshape(-1, 4)
    total = np.zeros(len(records), np.uint64)
    for i in range(4):
        total += keys[:, i] * WEIGHTS[i]
    for i, column in enumerate(("namespace", "family", "part"), start=4):
        total += records[column].astype(np.uint64) * WEIGHTS[i]
    return total
