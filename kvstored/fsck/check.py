"""The whole check of a volume, step by step."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstored.errors import DataDirectoryError
from kvstored.fsck.device import DataFile, read_superblock, take_lock
from kvstored.fsck.environment import Environment, read_environment
from kvstored.fsck.findings import Finding, Report
from kvstored.fsck.ondisk import FREE, Records, Region, Superblock
from kvstored.fsck.records import check_slot_records, check_small_records
from kvstored.fsck.slots import Known, Slots
from kvstored.fsck.table import read_table
from kvstored.io.base import Files, RealFiles

_OURS = {"LOCK", "superblock", "data", "index", "small", "lost+found"}
_LEFT_BEHIND = {"index.new", "superblock.new"}
_SAY_EVERY_S = 2.0
_MOST_LOOKED_AT = 64

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """How to check. `threads`: regions read at a time."""

    ignore_lock: bool = False
    threads: int = 4


def check_volume(directory: Path, options: Options, say: Say, files: Files | None = None) -> Report:
    """Read everything there is and say what is wrong. Never writes.

    Raises DataDirectoryError where there is nothing to check: no volume, one of a later format, or
    one that a daemon has locked.
    """
    files = files or RealFiles()
    report = Report(str(directory))
    try:
        names = set(files.listdir(directory))
    except OSError as error:
        raise DataDirectoryError(
            f"{directory}: {error.strerror or error}", "name a volume's directory"
        ) from error
    if not any(_is_file(files, directory / name) for name in ("superblock", "data")):
        below = ", ".join(map(str, _volumes_below(files, directory)))
        raise DataDirectoryError(
            f"{directory} holds no volume",
            f"name a directory with the file `superblock`: {below}"
            if below
            else "name the directory with the file `superblock`: data_dir/nvme, or the path of a "
            "volume",
        )
    lock = take_lock(files, directory, needed=not options.ignore_lock)
    report.locked = lock is None and "LOCK" in names
    try:
        _look_around(names, report)
        volume = read_superblock(files, directory, report)
        if volume is not None:
            report.volume = volume.volume.hex()
            _check(directory, volume, files, options, say, report)
    finally:
        if lock is not None:
            files.close(lock)
    return report


def _is_file(files: Files, path: Path) -> bool:
    """Whether it is a file, or may be one: where that cannot be said the check says what is."""
    try:
        return stat.S_ISREG(files.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _volumes_below(files: Files, directory: Path, deep: int = 2) -> list[Path]:
    """Directories within a directory, at most so deep, that look like volumes."""
    found: list[Path] = []
    try:
        names = sorted(files.listdir(directory)) if deep else []
    except OSError:
        names = []
    for path in (directory / name for name in names[:_MOST_LOOKED_AT]):
        if _is_file(files, path / "superblock"):
            found.append(path)
        else:
            found += _volumes_below(files, path, deep - 1)
    return found


def _look_around(names: set[str], report: Report) -> None:
    """Files that are not always there."""
    for name in sorted(names - _OURS):
        if name == "formatting":
            report.add(Finding("formatting", name, "a start begins with an empty volume"))
        elif name in _LEFT_BEHIND:
            report.add(Finding("leftover", name, ""))
        elif ".damaged-" in name:
            report.add(Finding("set_aside", name, "not looked at"))
        else:
            report.add(Finding("unknown_file", name, ""))


def _check(
    directory: Path,
    volume: Superblock,
    files: Files,
    options: Options,
    say: Say,
    report: Report,
) -> None:
    say("reading index/ and small/, with every object in it")
    with ThreadPoolExecutor(2, thread_name_prefix="fsck-lmdb") as pool:
        index, small = pool.map(
            lambda name: read_environment(directory, name, volume.volume, report),
            ("index", "small"),
        )
    if small is not None:
        check_small_records(small, volume, report)
        report.count(records=len(small.rows))
    try:
        data = DataFile(files, directory / "data")
    except OSError as error:
        report.add(Finding("data_short", "data", error.strerror or str(error)))
        return
    try:
        report.mode = data.mode
        table = read_table(data, volume, report)
        records = None if index is None else check_slot_records(index, table, volume, report)
        if index is not None:
            report.count(records=len(index.rows))
        _check_slots(Slots(data, volume, report), table, records, index, options, say, report)
    finally:
        data.close()


def _check_slots(
    slots: Slots,
    table: Sequence[Region],
    records: Records | None,
    index: Environment | None,
    options: Options,
    say: Say,
    report: Report,
) -> None:
    """All regions in use, some at a time."""
    used = [region for region in table if region.state != FREE]
    report.count(regions=len(table), regions_used=len(used))
    pool = ThreadPoolExecutor(options.threads, thread_name_prefix="fsck")
    try:
        work = [pool.submit(_check_region, slots, region, records, index) for region in used]
        said = time.monotonic()
        for done, future in enumerate(as_completed(work), start=1):
            future.result()
            if time.monotonic() - said >= _SAY_EVERY_S or done == len(work):
                said = time.monotonic()
                read = report.figures["bytes_read"] / 1e9
                say(f"{done} of {len(work)} regions, {read:.1f} GB of payload")
    finally:
        slots.stop.set()
        pool.shutdown(cancel_futures=True)


def _check_region(
    slots: Slots, region: Region, records: Records | None, index: Environment | None
) -> None:
    slots.check(region, _known(region, records, index))


def _known(region: Region, records: Records | None, index: Environment | None) -> Known | None:
    if records is None or index is None:
        return None
    first, last = np.searchsorted(
        records["place"].astype(np.uint64),
        np.array([region.number << 32, (region.number + 1) << 32], np.uint64),
    )
    rows = {int(row["place"]) & 0xFFFFFFFF: row for row in records[first:last]}
    return Known(rows, index.opened.get(region.number, b""), index.names)
