"""What becomes of an object whose bytes on the NVMe tier are found not to be its own, or gone."""

from __future__ import annotations

from collections.abc import Iterable

from kvstored.store.index import NONE, TIERS
from kvstored.store.namespace import Namespace
from kvstored.store.residency import Residency
from kvstored.store.trash import Trash
from kvstored.tiers.base import TierKind
from kvstored_client.proto import kvstore_pb2 as pb


def drop_rotten(
    namespaces: Iterable[Namespace],
    residency: Residency,
    trash: Trash,
    place: int,
    gone: bool = False,
) -> bool:
    """Drop the copy at a place of the NVMe tier and count it; a copy that RAM has stays of use.

    `gone`: it was deleted or evicted, which is no damage, and not counted as such.

    False: no object that is held lies there, and nothing was done.
    """
    kind = TierKind.NVME
    state, reason = (pb.MISS_EVICTED, "deleted") if gone else (pb.MISS_CORRUPT, "corrupt")
    for ns in namespaces:
        for row in ns.index.placed_within(kind, place, place + 1).tolist():
            residency.accounts.checksum_failures["nvme"] += not gone
            if any(ns.index.place[tier][row] != NONE for tier in TIERS if tier is not kind):
                trash.discard(kind, [residency.unplace_object(ns, row, kind, reason)])
            else:
                residency.drop_object(ns, row, state, reason)
            return True
    return False
