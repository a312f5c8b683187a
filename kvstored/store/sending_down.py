"""Has what RAM alone has written to the tier below once more: for a durable put."""

from __future__ import annotations

from collections.abc import Iterable

from kvstored.store.index import NONE, ONE_OBJECT, TIER_BIT
from kvstored.store.metas import object_meta
from kvstored.store.namespace import Namespace
from kvstored.store.writer import Writer
from kvstored.tiers.base import TierKind, padded_bytes
from kvstored.tiers.ram.tier import RamTier

_ONLY_RAM = TIER_BIT[TierKind.RAM]


def above(ns: Namespace, chunk: int) -> list[int]:
    """Object rows that RAM alone has of the chunks above one, the root's first. Without them on
    the tier below, what is durable there is not found by its prefix after a restart.
    """
    index = ns.index
    ram, nvme = index.place[TierKind.RAM], index.place[TierKind.NVME]
    rows = [
        row
        for parent in index.ancestors(chunk)
        if index.tiers[parent] == _ONLY_RAM or not index.brief[parent] & ONE_OBJECT
        for row in index.object_rows(parent)
        if ram[row] != NONE and nvme[row] == NONE
    ]
    return rows[::-1]


def send_again(
    ns: Namespace, rows: Iterable[int], writer: Writer, ram: RamTier, max_dirty_bytes: int
) -> None:
    """Queue those of the objects that RAM alone has (the tier below evicted them, or took them
    badly) and that are not on their way, in order, as far as the bound on dirty bytes goes.
    """
    index = ns.index
    for row in rows:
        place = index.place[TierKind.RAM][row]
        below = index.place[TierKind.NVME][row] != NONE or writer.pending(ns, row) is not None
        nbytes = padded_bytes(index.object_length[row])
        held = writer.dirty_bytes + writer.claimed_bytes
        if place != NONE and not below and held + nbytes <= max_dirty_bytes:
            writer.submit(ns, row, object_meta(ns, row, ram.checksums(place)[1]), place)
