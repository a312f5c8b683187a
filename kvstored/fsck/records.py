"""Records of the index against the region table and one another, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstored.fsck import compare, ondisk
from kvstored.fsck.environment import Environment
from kvstored.fsck.findings import MAX_LISTED, Finding, Report
from kvstored.fsck.ondisk import FREE, Records, Region, Superblock

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Mask = NDArray[np.bool_]


class _Sieve:
    """Takes records out one reason after the other, and says why."""

    def __init__(self, env: Environment, report: Report) -> None:
        self.rows: Records = np.ascontiguousarray(env.rows["row"])
        self.keys = env.rows["key"].astype(np.uint64)
        self.good = np.ones(len(self.rows), np.bool_)
        self._names = env.names
        self._report = report

    def drop(self, wrong: Mask, kind: str, detail: str) -> None:
        """Take out what is still in and wrong."""
        found = np.flatnonzero(wrong & self.good)
        self.good[found] = False
        self.tell(found, kind, detail)

    def tell(self, found: NDArray[np.intp], kind: str, detail: str) -> None:
        """Report records without taking them out."""
        for i in found[:MAX_LISTED]:
            row = self.rows[i]
            trusted = kind != "record_damaged"
            place = int(row["place"])
            finding = Finding(
                kind,
                f"record of place {place:#x}",
                detail,
                place,
                compare.namespace_of(row, self._names) if trusted else None,
                row["key"].tobytes() if trusted else None,
            )
            self._report.add(finding)
        if len(found) > MAX_LISTED:
            self._report.add_unlisted(kind, len(found) - MAX_LISTED)

    def twins(self) -> None:
        """Of records that share a place, or an object's name, all but the youngest go."""
        numbers = ("namespace", "family", "part")
        identity = np.zeros(len(self.rows), np.dtype("V44"))
        raw = identity.view(np.uint8).reshape(-1, 44)
        raw[:, :32] = np.frombuffer(self.rows["key"].tobytes(), np.uint8).reshape(-1, 32)
        for i, column in enumerate(numbers):
            raw[:, 32 + 4 * i : 36 + 4 * i] = np.frombuffer(
                self.rows[column].tobytes(), np.uint8
            ).reshape(-1, 4)
        for values, detail in ((self.rows["place"], "one place"), (identity, "one object")):
            self.drop(self._older(values), "record_twin", f"another one is newer, and of {detail}")

    def _older(self, values: np.ndarray[tuple[int], np.dtype[np.generic]]) -> Mask:
        _, group = np.unique(values, return_inverse=True)
        rank = np.where(self.good, self.rows["sequence"].astype(np.uint64) + np.uint64(1), 0)
        order = np.lexsort((rank, group))
        older = np.zeros(len(values), np.bool_)
        same = group[order[1:]] == group[order[:-1]]
        older[order[:-1][same]] = True
        return older


def check_slot_records(
    env: Environment, table: Sequence[Region], volume: Superblock, report: Report
) -> Records:
    """Report records of slots that cannot be right; those that may be, by place."""
    sieve = _Sieve(env, report)
    rows = sieve.rows
    sieve.drop(~ondisk.records_whole(rows, volume.volume_id), "record_damaged", "its check differs")
    places = rows["place"].astype(np.uint64)
    regions, slots = places >> np.uint64(32), places & np.uint64(0xFFFFFFFF)
    sieve.drop(regions != sieve.keys, "record_misfiled", "its key is not its region")
    sieve.drop(regions >= len(table), "record_astray", "its region does not exist")
    # A region that does not exist has an entry to be looked up all the same.
    at = np.where(regions < len(table), regions, len(table)).astype(np.intp)
    entries = [*table, Region(len(table))]
    state = np.array([entry.state for entry in entries], np.uint8)[at]
    sizes = np.array([entry.slot_bytes for entry in entries], np.uint64)[at]
    halves = np.array([entry.dedication & 0xFFFFFFFF for entry in entries], np.uint64)[at]
    sieve.drop(state == FREE, "record_astray", "its region is free")
    counts = np.uint64(volume.region_bytes) // np.maximum(sizes, np.uint64(4096))
    sieve.drop(slots >= counts, "record_astray", "its region does not have that slot")
    sieve.drop(halves != rows["dedication"], "record_astray", "its region was dedicated anew")
    lengths, inverse = np.unique(rows["length_bytes"], return_inverse=True)
    asked = np.array([ondisk.slot_bytes_for(int(n)) for n in lengths], np.uint64)
    wrong = asked[inverse] != sizes if len(rows) else np.zeros(0, np.bool_)
    sieve.drop(wrong, "record_astray", "its length does not belong to the slots of its region")
    sieve.twins()
    _check_names(sieve, env)
    kept: Records = rows[sieve.good]
    return kept[np.argsort(kept["place"], kind="stable")]


def check_small_records(env: Environment, volume: Superblock, report: Report) -> None:
    """Report records of small objects that cannot be right."""
    sieve = _Sieve(env, report)
    rows = sieve.rows
    sieve.drop(~ondisk.records_whole(rows, volume.volume_id), "record_damaged", "its check differs")
    places = rows["place"].astype(np.uint64)
    numbers = places & np.uint64(0xFFFFFFFF)
    outside = places >> np.uint64(32) != ondisk.SMALL_BASE >> 32
    sieve.drop(outside, "record_astray", "it is not the place of a small object")
    sieve.drop(numbers // np.uint64(1024) != sieve.keys, "record_misfiled", "its key is another's")
    lengths = rows["length_bytes"]
    wrong = (lengths == 0) | (lengths > ondisk.SMALL_MAX_BYTES)
    sieve.drop(wrong, "record_astray", "a small object has no such length")
    sieve.twins()
    _check_names(sieve, env)


def _check_names(sieve: _Sieve, env: Environment) -> None:
    """Report numbers without names. The record stays: its header knows the names."""
    for kind, column in (("n", "namespace"), ("f", "family"), ("p", "part"), ("t", "tenant")):
        known = np.array(sorted(env.names[kind]), np.uint64)
        missing = ~np.isin(sieve.rows[column], known) & sieve.good
        sieve.tell(
            np.flatnonzero(missing), "name_missing", f"its {column} has a number without a name"
        )
