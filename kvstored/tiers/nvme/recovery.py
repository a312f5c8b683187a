"""What a volume holds when it is opened.

The index is taken from LMDB if a child process could walk it and every record agrees with the
region table; otherwise it is set aside and made again from the slot headers, which are the truth.
Everything blocks and is meant for a thread. See docs/nvme-format.md for the rules.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvstored.tiers.base import MAX_OBJECT_BYTES
from kvstored.tiers.nvme import header, layout, record
from kvstored.tiers.nvme.format import (
    BLOCK_BYTES,
    SMALL_BIT,
    DamagedError,
    RegionEntry,
    RegionState,
    place_of,
)
from kvstored.tiers.nvme.index import Entry, Environment
from kvstored.tiers.nvme.volume import INDEX, SMALL, Volume, remove_tree
from kvstored.tiers.nvme.walker import Loaded, WalkError, walk

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)

_ENTRIES_PER_COMMIT = 20_000
_PAYLOAD_BYTES_PER_S = 50e6  # of a device that is slow, to be waited for
_TOO_LARGE = "is larger than the present cap allows"


@dataclass(slots=True)
class Recovery:
    """Open environments and what they hold."""

    table: list[RegionEntry]
    index_env: Environment
    small_env: Environment
    index: Loaded
    small: Loaded
    sequence: int  # of the next object written
    table_sequence: int  # of the next change to the region table
    dropped: Counter[str] = field(default_factory=Counter)


def recover(volume: Volume) -> Recovery:
    """Find out what an open volume holds, making anew what is damaged.

    Raises OSError or lmdb.Error when the device does not let it.
    """
    table, lost = volume.data.read_table(volume.regions)
    if lost:
        volume.problems.append(f"{lost} regions given up: both copies of their entry are damaged")
    index_found, small_found = _walk_both(volume)
    dropped: Counter[str] = Counter()
    index, index_env = _index(volume, table, index_found, dropped)
    small, small_env = _small(volume, small_found, dropped)
    _void_unfinished(volume, table, index)
    last = max(
        (int(r["sequence"].max()) for r in (index.records, small.records) if len(r)), default=0
    )
    return Recovery(
        table=table,
        index_env=index_env,
        small_env=small_env,
        index=index,
        small=small,
        sequence=last + 1,
        table_sequence=max((entry.sequence for entry in table), default=0) + 1,
        dropped=dropped,
    )


def _walk_both(volume: Volume) -> tuple[Loaded | str, Loaded | str]:
    """What the environments hold, or why one cannot be trusted.

    One child reads both; only if that fails does each get a child of its own.
    """
    if volume.fresh:
        return Loaded(), Loaded()
    if volume.settings.given_up:
        return _walk_alone(volume, INDEX), _walk_alone(volume, SMALL)
    try:
        index, small = _walk(volume, (INDEX, SMALL))
    except (WalkError, OSError):
        return _walk_alone(volume, INDEX), _walk_alone(volume, SMALL)
    return index, small


def _walk_alone(volume: Volume, name: str) -> Loaded | str:
    if name == volume.settings.given_up:
        return "it was read in full, and yet what works with it dies"
    try:
        return _walk(volume, (name,))[0]
    except (WalkError, OSError) as error:
        return str(error)


def _walk(volume: Volume, names: Sequence[str]) -> list[Loaded]:
    """Have environments walked. Raises WalkError or OSError."""
    environments = []
    timeout_s = volume.settings.walk_timeout_s
    payload = volume.settings.read_payload
    for name in names:
        held = volume.files.stat(volume.directory / name / "data.mdb").st_size
        if name == SMALL and held > volume.plan.small_bytes:
            raise WalkError(_TOO_LARGE)
        environments.append((volume.directory / name, held // record.RECORD_BYTES))
        timeout_s += held / _PAYLOAD_BYTES_PER_S if payload else 0
    return walk(volume.superblock.volume, environments, timeout_s, payload=payload)


# ---- objects in slots ---------------------------------------------------------------------------


def _index(
    volume: Volume, table: Sequence[RegionEntry], found: Loaded | str, dropped: Counter[str]
) -> tuple[Loaded, Environment]:
    """The index as it was, if all of it holds; else one made from the headers."""
    if isinstance(found, str):
        rebuilt, env = _rebuild(volume, table, found, dropped)
        return rebuilt, env
    faults = misfits(found.records, table, volume.superblock.region_bytes)
    bad = np.zeros(len(found.records), np.bool_)
    for mask in faults.values():
        bad |= mask
    held = _index_file_bytes(volume)
    fits = held <= volume.plan.index_bytes
    if fits and not bad.any() and not found.damaged:
        env = volume.environment(INDEX)
        env.names = found.names
        return found, env
    why = f"{int(bad.sum()) + found.damaged} records do not hold" if fits else _TOO_LARGE
    rebuilt, env = _rebuild(volume, table, why, dropped, found)
    _count_missing(found, faults, bad, rebuilt, dropped)
    return rebuilt, env


def _index_file_bytes(volume: Volume) -> int:
    try:
        return volume.files.stat(volume.directory / INDEX / "data.mdb").st_size
    except FileNotFoundError:
        return 0


def _count_missing(
    found: Loaded,
    faults: dict[str, NDArray[np.bool_]],
    bad: NDArray[np.bool_],
    rebuilt: Loaded,
    dropped: Counter[str],
) -> None:
    """Count, by the first reason that holds, the bad records that no header made good for."""
    again = np.isin(found.records["place"], rebuilt.records["place"])
    left = bad & ~again
    for reason, mask in faults.items():
        count = int((left & mask).sum())
        left &= ~mask
        if count:
            dropped[reason] += count
    appeared = len(rebuilt.records) - int(again.sum())
    missing = found.damaged - appeared
    if missing > 0:
        dropped["index_record_damaged"] += missing


def misfits(
    records: record.Table, table: Sequence[RegionEntry], region_bytes: int
) -> dict[str, NDArray[np.bool_]]:
    """For each reason, which records of slots do not fit the region table or one another."""
    places = records["place"].astype(np.uint64)
    regions, slots = places >> np.uint64(32), places & np.uint64(0xFFFFFFFF)
    outside = regions >= len(table)
    safe = np.where(outside, 0, regions).astype(np.int64)
    sizes = np.array([e.slot_bytes for e in table], np.uint64)
    used = np.array([e.state is not RegionState.FREE for e in table], np.bool_)
    nonces = np.array([e.dedication & 0xFFFFFFFF for e in table], np.uint32)
    counts = np.where(sizes > 0, region_bytes // np.maximum(sizes, 1), 0)
    outside |= slots >= counts[safe]
    other = ~outside & (~used[safe] | (nonces[safe] != records["dedication"]))
    lengths = np.array([lengths_of(e.slot_bytes) for e in table] or [(1, 0)], np.uint32)
    size = records["length_bytes"] < lengths[safe, 0]
    size |= records["length_bytes"] > lengths[safe, 1]
    size &= ~outside & ~other
    return {
        "region_unknown": outside,
        "region_rededicated": other,
        "slot_size": size,
        "overlap": _later_twins(places, records["sequence"]),
        "twin": _later_twins(record.identities(records), records["sequence"]),
    }


@functools.cache
def lengths_of(slot_bytes: int) -> tuple[int, int]:
    """Lengths of the shortest and the longest object that slots of this size are for; (1, 0) if
    they are for none.
    """
    most = slot_bytes - header.HEADER_BYTES
    if not 0 < most <= MAX_OBJECT_BYTES or layout.slot_bytes(most) != slot_bytes:
        return 1, 0
    least = most - BLOCK_BYTES + 1
    while least > BLOCK_BYTES and layout.slot_bytes(least - 1) == slot_bytes:
        least -= BLOCK_BYTES
    return least, most


def _later_twins(values: NDArray[np.uint64], sequence: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Marks all rows but the one of highest sequence among those of equal value."""
    marked = np.zeros(len(values), np.bool_)
    if (values[1:] > values[:-1]).all():  # places come sorted
        return marked
    in_order = np.sort(values)
    if not (in_order[1:] == in_order[:-1]).any():
        return marked
    order = np.lexsort((sequence, values))
    ordered = values[order]
    marked[order[:-1]] = ordered[:-1] == ordered[1:]
    return marked


def _rebuild(
    volume: Volume,
    table: Sequence[RegionEntry],
    why: str,
    dropped: Counter[str],
    old: Loaded | None = None,
) -> tuple[Loaded, Environment]:
    """Make the index again from the slot headers. Families are kept if the old one was readable."""
    entries = scan(volume, table, dropped)
    volume.set_aside(INDEX, why)
    fresh = INDEX + ".new"
    remove_tree(volume.files, volume.directory / fresh)
    env = volume.environment(fresh)
    env.commit(families=old.families if old else None)
    for at in range(0, len(entries), _ENTRIES_PER_COMMIT):
        env.commit(entries[at : at + _ENTRIES_PER_COMMIT])
    names = env.names
    env.close()
    volume.files.rename(volume.directory / fresh, volume.directory / INDEX)
    volume.files.sync_directory(volume.directory)
    env = volume.environment(INDEX)
    env.names = names
    packed = [
        record.pack(e.meta, e.place, e.sequence, names.numbers(e.meta), e.dedication)
        for e in entries
    ]
    records = record.seal(packed, volume.superblock.volume_id)
    _log.warning("%s: index made again from %d headers", volume.directory, len(entries))
    families = dict(old.families) if old else {}
    return Loaded(record.Table.of(records), names, families), env


def scan(volume: Volume, table: Sequence[RegionEntry], dropped: Counter[str]) -> list[Entry]:
    """Every live object by its header; of twins the one written last, the others are voided."""
    dedicated = [entry for entry in table if entry.state is RegionState.DEDICATED]
    best: dict[tuple[str, bytes, bytes, str], Entry] = {}
    losers: list[Entry] = []
    with ThreadPoolExecutor(volume.settings.threads, thread_name_prefix="nvme-scan") as pool:
        for found, counts in pool.map(lambda entry: _scan_region(volume, entry), dedicated):
            dropped.update(counts)
            for entry in found:
                identity = (
                    entry.meta.namespace,
                    entry.meta.family,
                    entry.meta.key,
                    entry.meta.part,
                )
                other = best.get(identity)
                if other is not None and other.sequence > entry.sequence:
                    losers.append(entry)
                else:
                    best[identity] = entry
                    losers += [other] if other else []
    _void(volume, table, [entry.place for entry in losers])
    return sorted(best.values(), key=lambda entry: entry.place)


def _scan_region(volume: Volume, entry: RegionEntry) -> tuple[list[Entry], Counter[str]]:
    """Live headers of one region, and what could not be read."""
    found: list[Entry] = []
    counts: Counter[str] = Counter()
    for slot in range(volume.superblock.region_bytes // entry.slot_bytes):
        place = place_of(entry.region, slot)
        where = volume.data.where(entry, place)
        try:
            block = volume.data.read_header(entry, place)
        except OSError:
            counts["header_unreadable"] += 1
            continue
        try:
            live = header.decode(block, where)
        except DamagedError:
            if header.claims(block, where):
                counts["header_damaged"] += 1
            continue
        if live is None:
            continue
        if layout.slot_bytes(live.meta.length_bytes) == entry.slot_bytes:
            found.append(Entry(place, live.meta, live.sequence, entry.dedication))
    return found, counts


def _void_unfinished(volume: Volume, table: Sequence[RegionEntry], index: Loaded) -> None:
    """Void the headers of writes that never came into the index.

    Only slots that the index says were open for writing can carry one. Left alone, it would come
    back as an object if the index were lost later, after a newer copy was written and deleted.
    """
    stale = []
    places = index.records["place"]
    if not (places[1:] > places[:-1]).all():  # LMDB has them so, if nobody meddled with it
        places = np.sort(places)
    for region, bitmap in index.opened.items():
        if region >= len(table) or table[region].state is not RegionState.DEDICATED:
            continue
        entry = table[region]
        count = volume.superblock.region_bytes // entry.slot_bytes
        slots = opened_slots(bitmap, count)
        held = slots_held(places, region)
        for slot in slots[~np.isin(slots, held)].tolist():
            place = place_of(region, slot)
            try:
                if _may_count(volume, entry, place):
                    stale.append(place)
            except OSError as error:
                volume.problems.append(f"slot {place:#x}: header unreadable: {error}")
    _void(volume, table, stale)


def slots_held(places: NDArray[np.uint64], region: int) -> NDArray[np.uint64]:
    """Slots of a region among places in ascending order."""
    first, stop = np.searchsorted(places, np.array([region << 32, region + 1 << 32], np.uint64))
    return places[first:stop] & np.uint64(0xFFFFFFFF)


def _may_count(volume: Volume, entry: RegionEntry, place: int) -> bool:
    """Whether a scan could take what is at a place for an object, or for a damaged one."""
    where = volume.data.where(entry, place)
    block = volume.data.read_header(entry, place)
    try:
        return header.decode(block, where) is not None
    except DamagedError:
        return header.claims(block, where)


def opened_slots(bitmap: bytes, count: int) -> NDArray[np.intp]:
    """Numbers of the set bits of a bitmap, at most `count` of them looked at."""
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")[:count]
    return np.flatnonzero(bits)


def _void(volume: Volume, table: Sequence[RegionEntry], places: Sequence[int]) -> None:
    """Overwrite headers so that no scan takes them for objects; durable on return."""
    for place in places:
        entry = table[place >> 32]
        block = header.encode_void(volume.data.where(entry, place), 0)
        volume.data.write_header(entry, place, block)
    if places:
        volume.data.sync()


# ---- small objects ------------------------------------------------------------------------------


def _small(
    volume: Volume, found: Loaded | str, dropped: Counter[str]
) -> tuple[Loaded, Environment]:
    """The small-object environment; if it is damaged, its objects are lost."""
    if isinstance(found, str):
        volume.set_aside(SMALL, found)
        dropped["small_environment_lost"] += 1
        env = volume.environment(SMALL)
        env.commit()
        return Loaded(), env
    faults = small_misfits(found.records)
    env = volume.environment(SMALL)
    env.names = found.names
    good = found.records.where(~faults)
    if found.damaged or faults.any():
        dropped["small_record_damaged"] += found.damaged + int(faults.sum())
        env.commit(removed=[int(p) for p in found.records["place"][faults]])
        env.discard(found.rejected, [int(p) for p in good["place"]])
    found.records = good
    return found, env


def small_misfits(records: record.Table) -> NDArray[np.bool_]:
    """Which records of small objects are not what one can be."""
    places = records["place"].astype(np.uint64)
    wrong: NDArray[np.bool_] = (places >> np.uint64(32)) != SMALL_BIT >> 32
    wrong |= (records["length_bytes"] == 0) | (records["length_bytes"] > layout.SMALL_MAX_BYTES)
    return wrong | _later_twins(places, records["sequence"])
