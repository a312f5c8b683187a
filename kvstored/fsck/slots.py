"""Slots of a region: every header, and every byte of what is live."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstored.fsck import compare, ondisk
from kvstored.fsck.device import BUFFER_BYTES, DataFile
from kvstored.fsck.findings import Finding, Report
from kvstored.fsck.ondisk import ABANDONED, HEADER_BYTES, Header, Region, Spot, Superblock


@dataclass(frozen=True, slots=True)
class Known:
    """What the index says of a region's slots."""

    rows: Mapping[int, np.void]  # records by slot
    opened: bytes  # bitmap
    names: compare.Names

    def is_open(self, slot: int) -> bool:
        """Whether a write may have been under way there."""
        return slot // 8 < len(self.opened) and bool(self.opened[slot // 8] >> slot % 8 & 1)


class Stopped(Exception):
    """The check was given up."""


class Slots:
    """Reads a volume's regions; `check` may be called from several threads at once.

    Without an index (`known` is None) nothing is said of what it ought to hold.
    """

    def __init__(self, data: DataFile, volume: Superblock, report: Report) -> None:
        self._data = data
        self._volume = volume
        self._report = report
        self.stop = threading.Event()

    def spot(self, region: Region, slot: int) -> Spot:
        """What a header in a slot must agree with."""
        place = region.number << 32 | slot
        return Spot(self._volume.volume_id, region.dedication, place, region.slot_bytes)

    def offset(self, region: Region, slot: int) -> int:
        """Where in the data file a slot begins."""
        start = self._volume.regions_offset + region.number * self._volume.region_bytes
        return start + slot * region.slot_bytes

    def count(self, region: Region) -> int:
        """Number of slots of a region."""
        return self._volume.region_bytes // region.slot_bytes if region.slot_bytes else 0

    def check(self, region: Region, known: Known | None) -> None:
        """All slots of one region in use."""
        if region.state == ABANDONED:
            held = len(known.rows) if known else 0
            detail = f"it holds {held} objects" if known else "it is not scanned without the index"
            self._report.add(Finding("region_abandoned", f"region {region.number}", detail))
        for slot in range(self.count(region)):
            if self.stop.is_set():
                raise Stopped
            row = known.rows.get(slot) if known else None
            if region.state == ABANDONED and row is None:
                continue  # deletes hold there by the index alone
            try:
                self._check_slot(region, slot, row, known)
            except OSError as error:
                self._find("unreadable", region, slot, error.strerror or str(error), row, known)
        self._report.count(regions_checked=1, slots_checked=self.count(region))

    def _check_slot(
        self, region: Region, slot: int, row: np.void | None, known: Known | None
    ) -> None:
        spot = self.spot(region, slot)
        block = bytes(self._data.read(self.offset(region, slot), HEADER_BYTES))
        try:
            header = ondisk.header(block, spot)
            if header and ondisk.slot_bytes_for(header.length_bytes) != region.slot_bytes:
                raise ondisk.Damage(f"{header.length_bytes} B do not belong to slots of that size")
        except ondisk.Damage as damage:
            self._no_header(region, slot, row, known, str(damage), ondisk.is_claimed(block, spot))
            return
        if header is None:
            if row is not None:
                self._find("unfinished_delete", region, slot, "the header is void", row, known)
            return
        if row is None and known is not None:
            kind = "unfinished_write" if known.is_open(slot) else "unindexed_header"
            self._find(kind, region, slot, f"of sequence {header.sequence}", None, known, header)
            return
        if row is not None and known is not None:
            different = compare.differences(row, header, known.names, region.dedication)
            if different:
                detail = f"they differ in {', '.join(different)}"
                self._find("header_disagrees", region, slot, detail, row, known)
                return
        self._check_payload(region, slot, header)

    def _no_header(
        self,
        region: Region,
        slot: int,
        row: np.void | None,
        known: Known | None,
        detail: str,
        claimed: bool,
    ) -> None:
        if row is None and not claimed:
            return  # whatever was there before
        if row is None and known is not None and known.is_open(slot):
            self._find("unfinished_write", region, slot, detail, None, known)
            return
        kind = "header_damaged" if claimed else "header_missing"
        self._find(kind, region, slot, detail, row, known)

    def _check_payload(self, region: Region, slot: int, header: Header) -> None:
        check = ondisk.PayloadCheck(header)
        at = self.offset(region, slot) + HEADER_BYTES
        left = header.length_bytes
        padding = b""
        while left > 0:
            blocks = min(BUFFER_BYTES, -(-left // HEADER_BYTES) * HEADER_BYTES)
            found = self._data.read(at, blocks)
            check.take(found[: min(left, blocks)])
            padding = bytes(found[left:]) if left < blocks else b""
            at += blocks
            left -= blocks
        fault = check.fault()
        self._report.count(bytes_read=header.length_bytes)
        if fault:
            self._find("payload_rotten", region, slot, fault, None, None, header)
            return
        if any(padding):
            self._find("padding_not_zero", region, slot, "", None, None, header)
        self._report.count(objects_good=1, bytes_good=header.length_bytes)

    def _find(
        self,
        kind: str,
        region: Region,
        slot: int,
        detail: str,
        row: np.void | None,
        known: Known | None,
        header: Header | None = None,
    ) -> None:
        namespace = key = None
        if header is not None:
            namespace, key = header.namespace, header.key
        elif row is not None and known is not None:
            namespace, key = compare.namespace_of(row, known.names), row["key"].tobytes()
        place = region.number << 32 | slot
        where = f"region {region.number}, slot {slot}"
        self._report.add(Finding(kind, where, detail, place, namespace, key))
