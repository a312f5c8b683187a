"""The region table: both copies, entry by entry."""

from __future__ import annotations

from kvstored.fsck import ondisk
from kvstored.fsck.device import BUFFER_BYTES, DataFile
from kvstored.fsck.findings import Finding, Report
from kvstored.fsck.ondisk import Region, Superblock


def read_table(data: DataFile, volume: Superblock, report: Report) -> list[Region]:
    """The entry that counts for each region that exists.

    Nothing where the data file ends before the table.
    """
    beyond = data.size_bytes - volume.regions_offset
    if beyond < 0:
        report.add(
            Finding(
                "data_short",
                "data",
                f"{data.size_bytes} B are there, the regions begin at {volume.regions_offset}",
            )
        )
        return []
    count = min(volume.entries, beyond // volume.region_bytes)
    copies = [_copy(data, at, count, report) for at in (volume.first_table, volume.second_table)]
    table = []
    behind = used = 0
    for number in range(count):
        first, second = (_whole(raw, number, volume) for raw in copies)
        table.append(_choose(number, first, second, report))
        used += table[-1].sequence > 0
        behind += isinstance(first, Region) and isinstance(second, Region) and first != second
    if behind > 1 and behind == used:
        report.add(
            Finding("region_copy_behind", "data", f"none of {used} entries is as in the other copy")
        )
    return table


def _copy(data: DataFile, at: int, count: int, report: Report) -> bytes:
    """One copy of the table; zeros with a finding where it cannot be read."""
    length = -(-count * ondisk.ENTRY_BYTES // ondisk.HEADER_BYTES) * ondisk.HEADER_BYTES
    found = bytearray()
    while len(found) < length:
        some = min(BUFFER_BYTES, length - len(found))
        try:
            found += data.read(at + len(found), some)
        except OSError as error:
            report.add(
                Finding("unreadable", f"data, region table at {at + len(found)}", str(error))
            )
            found += b"\xff" * some  # no entry that could pass for whole
    return bytes(found)


def _whole(raw: bytes, number: int, volume: Superblock) -> Region | str:
    """A copy of an entry, or what is wrong with it."""
    at = number * ondisk.ENTRY_BYTES
    try:
        return ondisk.region_entry(raw[at : at + ondisk.ENTRY_BYTES], number, volume)
    except ondisk.Damage as damage:
        return str(damage)


def _choose(number: int, first: Region | str, second: Region | str, report: Report) -> Region:
    where = f"region {number}"
    if isinstance(first, Region) and isinstance(second, Region):
        if first != second:
            ahead = second.sequence >= first.sequence
            kind = "region_copy_ahead" if ahead else "region_copies_differ"
            detail = f"first copy of sequence {first.sequence}, second of {second.sequence}"
            report.add(Finding(kind, where, detail))
        return first if first.sequence >= second.sequence else second
    if isinstance(first, str) and isinstance(second, str):
        report.add(Finding("region_lost", where, f"first copy: {first}; second: {second}"))
        return Region(number)
    whole, fault, name = (
        (first, second, "second") if isinstance(first, Region) else (second, first, "first")
    )
    report.add(Finding("region_copy_damaged", where, f"{name} copy: {fault}"))
    assert isinstance(whole, Region)
    return whole
