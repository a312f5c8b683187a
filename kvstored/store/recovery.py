"""Loads what a persistent tier recovered into the namespaces' indexes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from kvstored.store.index import NONE
from kvstored.store.namespace import Namespace
from kvstored.store.residency import Residency, now_ms
from kvstored.tiers.base import Recovered, TierKind
from kvstored_client.proto import kvstore_pb2 as pb


def by_recency(found: Recovered) -> list[int]:
    """Row order in which recency is rebuilt: least recent first, a parent after its children.

    A chunk counts as used when the youngest object below it was written, as writing it touched
    everything above.
    """
    count = len(found.place)
    used = found.sequence.astype(np.uint64).copy()
    row_of = {found.keys[i].tobytes(): i for i in range(count)}
    for i in np.argsort(found.depth)[::-1]:
        parent = row_of.get(found.parents[i].tobytes())
        if parent is not None and used[parent] < used[i]:
            used[parent] = used[i]
    order = np.lexsort((-found.depth.astype(np.int64), used))
    return [int(i) for i in order]


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


def load(
    found: Recovered,
    tier: TierKind,
    namespace: Callable[[str], Namespace | None],
    residency: Residency,
) -> list[int]:
    """Enter every recovered object. Gives the places to delete: expired ones, duplicates, and
    those of namespaces that are no longer configured.
    """
    _declare_families(found, namespace)
    at_ms = now_ms()
    unwanted: list[int] = []
    for i in by_recency(found):
        ns = namespace(found.namespaces[found.namespace_id[i]])
        if ns is None or 0 < int(found.expires_ms[i]) <= at_ms:
            unwanted.append(int(found.place[i]))
            continue
        duplicate = _enter(ns, found, i, tier, residency)
        if duplicate != NONE:
            unwanted.append(duplicate)
    return unwanted


def _declare_families(found: Recovered, namespace: Callable[[str], Namespace | None]) -> None:
    for (name, fingerprint), serialised in found.family_specs.items():
        ns = namespace(name)
        if ns is None:
            continue
        spec = pb.FamilySpec.FromString(serialised)
        if spec.fingerprint == fingerprint:
            ns.families.declare(spec)


def _enter(ns: Namespace, found: Recovered, i: int, tier: TierKind, residency: Residency) -> int:
    """Enter one object. Gives a place that is not needed (an older copy's), or NONE."""
    index = ns.index
    family = ns.families.recovered(found.families[found.family_id[i]])
    part = ns.families.add_part_name(family, found.parts[found.part_id[i]])
    key = found.keys[i].tobytes()
    place = int(found.place[i])
    chunk = index.find(key)
    if chunk == NONE:
        parent = found.parents[i].tobytes()
        tenant = residency.accounts.tenant_label(ns.name, found.tenants[found.tenant_id[i]])
        chunk = index.add_chunk(
            key,
            parent if any(parent) else b"",
            family=ns.families.number(family.fingerprint),
            tenant=ns.tenant_number(tenant),
            depth=int(found.depth[i]),
            end_token=int(found.end_token[i]),
            expires_ms=int(found.expires_ms[i]),
        )
    row = index.find_object(chunk, part)
    if row != NONE:
        if index.place[tier][row] != NONE or not _same(ns, row, found, i):
            return place
        residency.place_object(ns, row, tier, place)  # a faster tier has it
        return NONE
    row = index.add_object(chunk, part, int(found.length_bytes[i]), found.checksums[i].tobytes())
    residency.place_object(ns, row, tier, place)
    residency.touch(ns, [chunk])
    return NONE


def _same(ns: Namespace, row: int, found: Recovered, i: int) -> bool:
    length = int(found.length_bytes[i])
    return (ns.index.object_length[row], ns.index.checksum(row)) == (
        length,
        found.checksums[i].tobytes(),
    )
