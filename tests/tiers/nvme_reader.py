"""The live objects in a volume's slots, by the reader that shares no code with the tier.

    python nvme_reader.py DIRECTORY

It looks at headers alone, so that the index may be damaged or gone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from kvstored.fsck import ondisk
from kvstored.fsck.device import DataFile, read_superblock
from kvstored.fsck.findings import Report
from kvstored.fsck.slots import Slots
from kvstored.fsck.table import read_table
from kvstored.io.base import RealFiles


@dataclass(frozen=True)
class Slot:
    """A live object."""

    region: int
    slot: int
    offset: int
    slot_bytes: int
    sequence: int
    namespace: str
    part: str
    tenant: str
    family: bytes
    key: bytes
    payload: bytes


def read_volume(directory: Path, torn: bool = False) -> list[Slot]:
    """All live objects in slots, the younger one of twins. Raises ValueError for bad payloads,
    unless there may be some that are `torn`: then they are left out.
    """
    report = Report(str(directory))
    volume = read_superblock(RealFiles(), directory, report)
    assert volume is not None
    data = DataFile(RealFiles(), directory / "data")
    slots = Slots(data, volume, report)
    best: dict[bytes, Slot] = {}
    try:
        for region in read_table(data, volume, report):
            for number in range(slots.count(region) if region.state == ondisk.DEDICATED else 0):
                offset = slots.offset(region, number)
                block = bytes(data.read(offset, ondisk.HEADER_BYTES))
                try:
                    header = ondisk.header(block, slots.spot(region, number))
                except ondisk.Damage:
                    continue
                if header is None:
                    continue
                other = best.get(header.identity)
                if other is None or other.sequence < header.sequence:
                    try:
                        found = _slot(directory, region, number, offset, header)
                    except ValueError:
                        if not torn:
                            raise
                        continue
                    best[header.identity] = found
    finally:
        data.close()
    return list(best.values())


def _slot(
    directory: Path, region: ondisk.Region, number: int, offset: int, header: ondisk.Header
) -> Slot:
    with (directory / "data").open("rb") as file:
        file.seek(offset + ondisk.HEADER_BYTES)
        payload = file.read(header.length_bytes)
    check = ondisk.PayloadCheck(header)
    check.take(payload)
    if check.fault():
        raise ValueError(f"region {region.number} slot {number}: {check.fault()}")
    return Slot(
        region.number, number, offset, region.slot_bytes, header.sequence, header.namespace,
        header.part, header.tenant, header.family, header.key, payload,
    )  # fmt: skip


if __name__ == "__main__":
    for one in read_volume(Path(sys.argv[1])):
        print(one.region, one.slot, one.namespace, one.part, one.key.hex(), len(one.payload))
