"""Columns of recovered objects: put together, picked from, renumbered. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np

from kvstored.tiers.base import VOLUME_SHIFT, Recovered
from kvstored.tiers.nvme.registry import Tombstone

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TABLES = {
    "namespaces": "namespace_id",
    "families": "family_id",
    "parts": "part_id",
    "tenants": "tenant_id",
}
_COLUMNS = [
    f.name for f in fields(Recovered) if isinstance(getattr(Recovered(), f.name), np.ndarray)
]


def numbered(found: Recovered, number: int) -> Recovered:
    """The same with a volume's number in its places."""
    place = found.place.astype(np.uint64) | np.uint64(number << VOLUME_SHIFT)
    return replace(found, place=place)


def rows(found: Recovered, which: NDArray[np.generic]) -> Recovered:
    """Some of the rows, by number or by mask; tables stay as they are."""
    return replace(found, **{name: getattr(found, name)[which] for name in _COLUMNS})


def slices(found: Recovered, count: int) -> Iterator[Recovered]:
    """All rows, so many at a time."""
    for at in range(0, len(found.place), count):
        yield rows(found, np.arange(at, min(at + count, len(found.place))))


def merged(parts: Sequence[Recovered]) -> Recovered:
    """Several volumes' objects as one table.

    Each volume counts sequences by itself. As writes are spread over all of them, a like fraction
    of each one's objects was written in a like time; the common sequence goes by that.
    """
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Recovered()
    columns: dict[str, object] = {}
    for table, ids in _TABLES.items():
        common: dict[object, int] = {}
        renumbered = []
        for part in parts:
            numbers = [common.setdefault(name, len(common)) for name in getattr(part, table)]
            translate = np.array(numbers or [0], np.uint32)
            renumbered.append(translate[getattr(part, ids)])
        columns[table] = list(common)
        columns[ids] = np.concatenate(renumbered)
    for name in _COLUMNS:
        if name not in columns:
            columns[name] = np.concatenate([getattr(part, name) for part in parts])
    columns["sequence"] = _common_sequence([part.sequence for part in parts])
    specs: dict[tuple[str, bytes], bytes] = {}
    dropped: dict[str, int] = {}
    for part in parts:
        specs |= part.family_specs
        for reason, count in part.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    return Recovered(**columns, family_specs=specs, dropped=dropped)  # type: ignore[arg-type]


def _common_sequence(sequences: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    ages = [s.astype(np.float64) / max(1, int(s.max()) if len(s) else 1) for s in sequences]
    order = np.argsort(np.concatenate(ages), kind="stable")
    ranks = np.empty(len(order), np.uint64)
    ranks[order] = np.arange(1, len(order) + 1, dtype=np.uint64)
    return ranks


def doomed(found: Recovered, tombstones: Collection[Tombstone]) -> NDArray[np.bool_]:
    """Which rows are copies of deleted chunks."""
    marked = np.zeros(len(found.place), np.bool_)
    if not len(marked) or not tombstones:
        return marked
    through: dict[tuple[str, bytes, bytes], int] = {}
    for t in tombstones:
        identity = (t.namespace, t.family, t.key)
        through[identity] = max(through.get(identity, 0), t.through)
    keys = np.ascontiguousarray(found.keys).view("V32").reshape(-1)
    wanted = np.frombuffer(b"".join({t.key for t in tombstones}), np.uint8).view("V32")
    for i in np.flatnonzero(_among(keys, wanted)).tolist():
        name = found.namespaces[found.namespace_id[i]]
        family = found.families[found.family_id[i]]
        last = through.get((name, family, found.keys[i].tobytes()))
        marked[i] = last is not None and int(found.sequence[i]) <= last
    return marked


def _among(keys: NDArray[np.void], wanted: NDArray[np.void]) -> NDArray[np.bool_]:
    """A superset of the rows whose key is wanted: those with the first 8 bytes of one."""
    first = keys.view(np.uint64).reshape(-1, 4)[:, 0]
    some = wanted.view(np.uint64).reshape(-1, 4)[:, 0]
    found: NDArray[np.bool_] = np.isin(first, some)
    return found
