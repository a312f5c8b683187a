"""Loads what a persistent tier recovered into the namespaces' indexes, all of it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstored.store import bulk
from kvstored.store.index import NONE
from kvstored.store.namespace import Namespace
from kvstored.store.residency import Residency, now_ms
from kvstored.store.walk import column
from kvstored.tiers.base import Recovered, TierKind
from kvstored_client.proto import kvstore_pb2 as pb

_TABLE = 1 << 20  # numbers up to there are translated by a table

Item = TypeVar("Item", bound=np.generic)
Rows = NDArray[np.int64]
"""Numbers of objects in a `Recovered`, ascending."""


def load(
    found: Recovered,
    tier: TierKind,
    namespace: Callable[[str], Namespace | None],
    residency: Residency,
) -> list[int]:
    """Enter every recovered object. Gives the places to delete: expired ones, duplicates, and
    those of namespaces that are no longer configured.

    A chunk has family, tenant, parent and time to live from the first object of it. Chunks count
    as used in the order in which they, or what lies below them, were written last, and after all
    that was used before.
    """
    _declare_families(found, namespace)
    living = (found.expires_ms == 0) | (found.expires_ms > now_ms())
    unwanted = [found.place[~living]]
    loads = []
    for number, name in enumerate(found.namespaces):
        rows = np.flatnonzero(living & (found.namespace_id == number))
        ns = namespace(name)
        if ns is None or not len(rows):
            unwanted.append(found.place[rows])
            continue
        one = _Load(ns, found, rows, tier)
        one.enter_chunks(residency)
        unwanted.append(found.place[one.enter_objects()])
        loads.append(one)
    _order(loads, residency)
    for one in loads:
        places = _taken(found.place, one.rows).view(np.int64)
        residency.place_many(one.ns, one.objects, tier, places)
    return [place for places in unwanted for place in places.tolist()]


class _Load:
    """What is recovered of one namespace.

    `rows`: what is entered, and `objects` the index's rows of it. `chunk`: the index's row of each
    chunk that they are of, and `written` when the last of its objects was; shapes [chunks].
    """

    def __init__(self, ns: Namespace, found: Recovered, rows: Rows, tier: TierKind) -> None:
        self.ns = ns
        self.rows = rows
        self._found = found
        self._tier = tier

    def enter_chunks(self, residency: Residency) -> None:
        """Find or enter the chunk of every object."""
        found, index = self._found, self.ns.index
        keys = _taken(found.keys, self.rows)
        groups = bulk.group(keys, index.hashes(keys))
        first = self.rows[groups.first]
        leading = _taken(keys, groups.first)
        del keys
        if index.chunk_count:
            self.chunk = index.find_all(leading)
            new = np.flatnonzero(self.chunk == NONE)
            order = None
        else:
            self.chunk = np.full(len(first), NONE, np.int32)
            new, order = np.arange(len(first)), groups.order
        source = first[new]
        self.chunk[new] = index.add_chunks(
            bulk.Chunks(
                keys=_taken(leading, new),
                parents=_taken(found.parents, source),
                family=self._families(source),
                tenant=self._tenants(source, residency),
                depth=_taken(found.depth, source),
                end_token=_taken(found.end_token, source),
                expires_ms=_taken(found.expires_ms, source),
            ),
            order,
        )
        self._of = groups.of

    def _families(self, rows: Rows) -> NDArray[np.uint32]:
        def number(family: int) -> int:
            fingerprint = self._found.families[family]
            self.ns.families.recovered(fingerprint)
            return self.ns.families.number(fingerprint)

        return _translated(self._found.family_id[rows], number).astype(np.uint32)

    def _tenants(self, rows: Rows, residency: Residency) -> NDArray[np.uint32]:
        def number(tenant: int) -> int:
            name = self._found.tenants[tenant]
            return self.ns.tenant_number(residency.accounts.tenant_label(self.ns.name, name))

        return _translated(self._found.tenant_id[rows], number).astype(np.uint32)

    def _parts(self, rows: Rows) -> NDArray[np.uint16]:
        found, families = self._found, self.ns.families
        count = max(1, len(found.parts))

        def number(pair: int) -> int:
            family = families.recovered(found.families[pair // count])
            return families.add_part_name(family, found.parts[pair % count])

        pairs = found.family_id[rows].astype(np.int64) * count + found.part_id[rows]
        return _translated(pairs, number).astype(np.uint16)

    def enter_objects(self) -> Rows:
        """Enter every object, or find that it is held. Gives the rows of those not needed."""
        found, index = self._found, self.ns.index
        chunk, parts = self.chunk[self._of], self._parts(self.rows)
        held = index.find_objects(chunk, parts)
        known = held != NONE
        needed = ~known
        if known.any():  # in a faster tier: that it is here as well is news, if it is the same
            there = held[known]
            needed[known] = column(index.place[self._tier], np.int64)[there] == NONE
            lengths = found.length_bytes[self.rows[known]].astype(np.uint32)
            needed[known] &= index.same(there, lengths, found.checksums[self.rows[known]])
        single = len(self.chunk) == len(self.rows)
        if not single:
            needed[needed] = _first_of_each(chunk[needed], parts[needed])
        new = needed & ~known
        source = self.rows[new]
        held[new] = index.add_objects(
            bulk.Objects(
                chunk=chunk[new],
                part=parts[new],
                length=found.length_bytes[source].astype(np.uint32),
                checksums=_taken(found.checksums, source),
            )
        )
        duplicates: Rows = self.rows[~needed]
        if not needed.all():
            self.rows, held, self._of = self.rows[needed], held[needed], self._of[needed]
        self.objects = held
        self.written = np.zeros(len(self.chunk), np.uint64)
        self.changed = np.zeros(len(self.chunk), np.bool_)
        if single:
            self.written[self._of] = found.sequence[self.rows]
        else:
            np.maximum.at(self.written, self._of, found.sequence[self.rows])
        self.changed[self._of] = True
        del self._of
        return duplicates

    def used(self) -> NDArray[np.uint64]:
        """When each chunk, or what lies below it, was written last."""
        index = self.ns.index
        number = np.full(index.chunk_rows, NONE, np.int32)
        number[self.chunk] = np.arange(len(self.chunk), dtype=np.int32)
        parents = column(index.parent, np.int32)[self.chunk]
        above = np.where(parents == NONE, NONE, number[parents])
        return bulk.hand_up(self.written, above, self.depth)

    @property
    def depth(self) -> NDArray[np.uint32]:
        """Depth of each chunk."""
        return column(self.ns.index.depth, np.uint32)[self.chunk]


def _order(loads: list[_Load], residency: Residency) -> None:
    """Let the chunks count as used, the least recent first and a parent after its children."""
    chosen = [np.flatnonzero(one.changed) for one in loads]
    if not chosen:
        return
    used = np.concatenate([one.used()[c] for one, c in zip(loads, chosen, strict=True)])
    depth = np.concatenate([one.depth[c] for one, c in zip(loads, chosen, strict=True)])
    order = bulk.by_recency(used, depth)
    ticks = np.empty(len(order), np.uint64)
    ticks[order] = residency.next_ticks(len(order))
    at = 0
    for one, some in zip(loads, chosen, strict=True):
        column(one.ns.index.tick, np.uint64)[one.chunk[some]] = ticks[at : at + len(some)]
        at += len(some)


def _taken(values: NDArray[Item], rows: Rows) -> NDArray[Item]:
    """``values[rows]``, without a copy where that is all of them."""
    return values if len(rows) == len(values) else values[rows]


def _declare_families(found: Recovered, namespace: Callable[[str], Namespace | None]) -> None:
    for (name, fingerprint), serialised in found.family_specs.items():
        ns = namespace(name)
        if ns is None:
            continue
        spec = pb.FamilySpec.FromString(serialised)
        if spec.fingerprint == fingerprint:
            ns.families.declare(spec)


def _first_of_each(chunk: NDArray[np.int32], part: NDArray[np.uint16]) -> NDArray[np.bool_]:
    """Marks the first of all objects that are of the same chunk and part; shapes [n]."""
    first = np.ones(len(chunk), np.bool_)
    pairs = chunk.astype(np.int64) << 16 | part
    in_order = np.sort(pairs)
    if (in_order[1:] == in_order[:-1]).any():
        order = np.argsort(pairs, kind="stable")
        first[order[1:]] = pairs[order[1:]] != pairs[order[:-1]]
    return first


def _translated(values: NDArray[Any], number: Callable[[int], int]) -> NDArray[np.int64]:
    """`number` of each value, which is asked once for each, in the order in which they come."""
    if not len(values):
        return np.zeros(0, np.int64)
    low, high = int(values.min()), int(values.max())
    if low == high:
        return np.full(len(values), number(low))
    if high - low < _TABLE:
        distinct, places = np.arange(low, high + 1), values.astype(np.int64) - low
    else:
        distinct, places = np.unique(values, return_inverse=True)
    first = np.full(len(distinct), len(values))
    first[places[::-1]] = np.arange(len(values))[::-1]  # of equal ones, the last assigned stays
    numbers = np.zeros(len(distinct), np.int64)
    for i in np.argsort(first)[: np.count_nonzero(first < len(values))].tolist():
        numbers[i] = number(int(distinct[i]))
    return numbers[places]


# ---- parts of it --------------------------------------------------------------------------------

_COLUMNS = [
    f.name for f in fields(Recovered) if isinstance(getattr(Recovered(), f.name), np.ndarray)
]


def _some(found: Recovered, rows: NDArray[np.int64]) -> Recovered:
    part = replace(found)
    for name in _COLUMNS:
        setattr(part, name, getattr(found, name)[rows])
    return part


def slices(found: Recovered, rows: int) -> Iterator[Recovered]:
    """The same in parts of so many objects, parents before their children."""
    order = np.argsort(found.depth, kind="stable")
    for first in range(0, len(order), rows):
        yield _some(found, order[first : first + rows])


def without(found: Recovered, deleted: set[tuple[str, bytes]]) -> tuple[Recovered, list[int]]:
    """What is left of `slices`, and the places of what is not, when chunks (namespace, key) are
    deleted with all below them. Those below that come in a later slice are added to `deleted`.
    """
    gone = np.zeros(len(found.place), np.bool_)
    for i in range(len(gone)):
        name = found.namespaces[found.namespace_id[i]]
        key, parent = found.keys[i].tobytes(), found.parents[i].tobytes()
        if (name, key) in deleted or (name, parent) in deleted:
            gone[i] = True
            deleted.add((name, key))
    return _some(found, (~gone).nonzero()[0]), [int(p) for p in found.place[gone]]
