"""What is found in a volume: kinds of findings, and the report they make up.

A *note* is what an interrupted or failed operation leaves, and what the next start deals with; all
else is *damage*.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

MAX_LISTED = 10_000
"""Findings listed one by one; beyond it they are only counted."""

DAMAGE = {
    "superblock_damaged": "one copy of the superblock is not whole",
    "superblock_lost": "neither copy of the superblock is whole; nothing else can be checked",
    "superblock_differs": "both copies of the superblock are whole, and not the same",
    "data_short": "the data file ends before its region table does, or is not there",
    "region_copy_damaged": "one copy of a region's entry is not whole",
    "region_copy_ahead": "the second copy of a region's entry is newer than the first",
    "region_copy_behind": "a whole copy of the region table is older than the other",
    "region_lost": "neither copy of a region's entry is whole; what was in it is given up",
    "index_unreadable": "LMDB's index cannot be read; a start makes it anew from slot headers",
    "small_unreadable": "LMDB's small objects cannot be read; they are lost",
    "record_damaged": "a record is not whole",
    "record_misfiled": "a record lies under a key that is not its place's",
    "record_astray": "a record points to a slot that is not there, or is of another make",
    "record_twin": "two records share a place, or name one object",
    "name_missing": "a record has a number that has no name",
    "header_missing": "a record points to a slot without a header",
    "header_damaged": "a slot's header is not whole",
    "header_disagrees": "a record and the slot's header say different things",
    "unindexed_header": "a live header in a slot that is neither in the index nor open",
    "payload_rotten": "the bytes are not those that were written",
    "payload_missing": "a small object's bytes are not there, or not all",
    "payload_orphan": "bytes of a small object that has no record",
    "unreadable": "the device does not give the bytes",
}  # fmt: skip

NOTES = {
    "formatting": "the volume is being made: a start makes it anew, whatever is in it",
    "unknown_file": "a file that is none of the volume's",
    "leftover": "a file that an interrupted operation left; a start removes or replaces it",
    "set_aside": "the beginning of an LMDB file that was damaged earlier",
    "padding_not_zero": "bytes behind an object's end changed, which no checksum covers",
    "region_copies_differ": "the first copy of a region's entry is newer: an interrupted change",
    "region_abandoned": "a sync of the region failed; what is in it can be read",
    "unfinished_write": "an open slot holds a header that was never entered in the index",
    "unfinished_delete": "a record points to a voided header",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: a kind of DAMAGE or NOTES, where, and what exactly."""

    kind: str
    where: str
    detail: str
    place: int | None = None
    namespace: str | None = None
    key: bytes | None = None

    def answer(self) -> dict[str, bool | int | float | str | None]:
        """For JSON."""
        return {
            "kind": self.kind,
            "damage": self.kind in DAMAGE,
            "where": self.where,
            "detail": self.detail,
            "place": self.place,
            "namespace": self.namespace,
            "key": None if self.key is None else self.key.hex(),
        }


@dataclass(slots=True)
class Report:
    """What a check came to. `add` may be called from any thread."""

    directory: str
    volume: str = ""  # UUID in hex
    mode: str = ""  # how the data file was read
    locked: bool = False  # a daemon had it meanwhile
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    figures: Counter[str] = field(default_factory=Counter)
    _adding: threading.Lock = field(default_factory=threading.Lock)

    def add(self, finding: Finding) -> None:
        """Count a finding, and list it while there is room."""
        with self._adding:
            self.counts[finding.kind] += 1
            if len(self.findings) < MAX_LISTED:
                self.findings.append(finding)

    def add_unlisted(self, kind: str, number: int) -> None:
        """Count findings that are not listed."""
        with self._adding:
            self.counts[kind] += number

    def count(self, **figures: int) -> None:
        """Add to figures (objects, bytes, regions, …)."""
        with self._adding:
            self.figures.update(figures)

    @property
    def clean(self) -> bool:
        """Whether there is no damage."""
        return not any(kind in DAMAGE for kind in self.counts)
