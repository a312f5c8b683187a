"""What `kvstored.store.recovery.load` does, object by object: the model it is compared with."""

from __future__ import annotations

from collections.abc import Mapping

from kvstored.store.index import NONE
from kvstored.store.namespace import Namespace
from kvstored.store.residency import Residency, now_ms
from kvstored.tiers.base import Recovered, TierKind


def slow_load(
    found: Recovered, tier: TierKind, namespaces: Mapping[str, Namespace], residency: Residency
) -> list[int]:
    """Enter every object, in order; the places to delete."""
    unwanted: list[int] = []
    written: dict[tuple[str, int], int] = {}  # (namespace, chunk) -> sequence of the last, or 0
    at_ms = now_ms()
    for i in range(len(found.place)):
        ns = namespaces.get(found.namespaces[found.namespace_id[i]])
        place = int(found.place[i])
        if ns is None or 0 < int(found.expires_ms[i]) <= at_ms:
            unwanted.append(place)
            continue
        chunk, needed = _enter(ns, found, i, tier, residency)
        sequence = int(found.sequence[i]) if needed else 0
        written[ns.name, chunk] = max(written.get((ns.name, chunk), 0), sequence)
        if not needed:
            unwanted.append(place)
    _touch(written, namespaces, residency)
    return unwanted


def _enter(
    ns: Namespace, found: Recovered, i: int, tier: TierKind, residency: Residency
) -> tuple[int, bool]:
    """The object's chunk, and whether the object is needed."""
    index = ns.index
    family = ns.families.recovered(found.families[found.family_id[i]])
    part = ns.families.add_part_name(family, found.parts[found.part_id[i]])
    key, parent = found.keys[i].tobytes(), found.parents[i].tobytes()
    length, checksum = int(found.length_bytes[i]), found.checksums[i].tobytes()
    chunk = index.find(key)
    if chunk == NONE:
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
    if row == NONE:
        row = index.add_object(chunk, part, length, checksum)
    elif index.place[tier][row] != NONE or (
        (index.object_length[row], index.checksum(row)) != (length, checksum)
    ):
        return chunk, False
    residency.place_object(ns, row, tier, int(found.place[i]))
    return chunk, True


def _touch(
    written: Mapping[tuple[str, int], int],
    namespaces: Mapping[str, Namespace],
    residency: Residency,
) -> None:
    """Least recent first; a chunk is as recent as what lies below it, a parent after its child."""
    used = dict(written)
    for (name, chunk), sequence in written.items():
        for above in namespaces[name].index.ancestors(chunk):
            if (name, above) not in written:
                break
            used[name, above] = max(used[name, above], sequence)
    depths = {(name, row): namespaces[name].index.depth[row] for name, row in used}
    changed = [which for which, sequence in written.items() if sequence]
    for name, row in sorted(changed, key=lambda which: (used[which], -depths[which])):
        residency.touch(namespaces[name], [row])
