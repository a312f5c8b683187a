"""Which chunk is in which tier, kept consistent: index, recency, accounts and ghosts move together.

Every change of residency goes through here, so the counters cannot drift from the index. No I/O:
places that became free are handed to `discard`, which gives them back to their tier.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstored.store.accounting import Accounts
from kvstored.store.index import NONE, TIER_BIT, TIERS
from kvstored.store.namespace import Namespace
from kvstored.tiers.base import Tier, TierKind
from kvstored_client.proto import kvstore_pb2 as pb

_log = logging.getLogger("kvstored.decisions")
"""Each object that leaves a tier, at level debug, before its place is free: a handler that writes
at once has written down whatever is not held any more, unless it was lost.
"""

_DURABLE = TIER_BIT[TierKind.NVME]
_FIRST_TO_GO = 1  # the least tick; 0 is none
_FEW = 8  # chunks touched faster one by one than by an array
TIER_LABEL = {TierKind.RAM: "ram", TierKind.NVME: "nvme", TierKind.OBJECT: "object"}


def now_ms() -> int:
    """Unix time in ms, the clock of time to live."""
    return time.time_ns() // 1_000_000


class Residency:
    """The one place where objects come to tiers and leave them."""

    def __init__(
        self,
        accounts: Accounts,
        tiers: Mapping[TierKind, Tier],
        discard: Callable[[TierKind, list[int]], None],
    ) -> None:
        """`discard(tier, places)` must free the places; for a persistent tier, durably."""
        self.accounts = accounts
        self.tiers = tiers
        self._discard = discard
        self._tick = 0

    # -- recency -------------------------------------------------------------------------------

    def touch(self, ns: Namespace, chunks: NDArray[np.int32] | Sequence[int]) -> None:
        """Mark a run of chunks (rows in prefix order) as just used. What is above them counts as
        used when they leave.
        """
        count = len(chunks)
        self._tick += count
        if count < _FEW:
            for n, chunk in enumerate(chunks):
                ns.index.tick[chunk] = self._tick - n
        else:
            ticks = np.frombuffer(ns.index.tick, np.uint64)
            ticks[chunks] = np.arange(self._tick - count + 1, self._tick + 1, dtype=np.uint64)[::-1]

    def next_ticks(self, count: int) -> NDArray[np.uint64]:
        """Ticks of as many uses, one after the other, that come after all there were."""
        self._tick += count
        return np.arange(self._tick - count + 1, self._tick + 1, dtype=np.uint64)

    # -- coming and going ----------------------------------------------------------------------

    def place_object(self, ns: Namespace, row: int, tier: TierKind, place: int) -> None:
        """The object is readable in a tier at a place from now on."""
        index = ns.index
        if index.place[tier][row] != NONE:  # a volume with a copy of it has come back meanwhile
            self._discard(tier, [place])
            return
        chunk = index.object_chunk[row]
        bit = TIER_BIT[tier]
        if not index.tick[chunk] or (tier is TierKind.RAM and not index.tiers[chunk] & bit):
            self._tick += 1  # who brings a chunk into RAM is about to use it
            index.tick[chunk] = self._tick
        index.set_place(row, tier, place)
        self._charge(ns, row, tier, 1)

    def place_chain(
        self,
        ns: Namespace,
        chunks: NDArray[np.int32],
        objects: NDArray[np.int32],
        places: list[int],
    ) -> None:
        """`place_object` in RAM for what `ChunkIndex.add_chain` gave."""
        index = ns.index
        self._tick += len(chunks)
        ticks = np.arange(self._tick - len(chunks) + 1, self._tick + 1, dtype=np.uint64)
        np.asarray(index.tick)[chunks] = ticks
        index.set_places(chunks, objects, TierKind.RAM, places)
        lengths = np.asarray(index.object_length)[objects].tolist()
        tier = self.tiers[TierKind.RAM]
        label = TIER_LABEL[TierKind.RAM]
        tenant = ns.tenants[index.tenant[int(chunks[0])]]
        charged = sum(map(tier.charge_bytes, lengths))
        self.accounts.charge(ns.name, tenant, label, charged, len(lengths))
        self.accounts.stored[ns.name, tenant, label].add(len(lengths), 0, sum(lengths))

    def place_many(
        self,
        ns: Namespace,
        objects: NDArray[np.int32],
        tier: TierKind,
        places: NDArray[np.int64],
    ) -> None:
        """`place_object` of many that have no place in the tier, in chunks whose tick is set."""
        ns.index.place_many(objects, tier, places)
        for tenant, length, charged, count in self._kinds(ns, objects, tier):
            self.accounts.charge(ns.name, tenant, TIER_LABEL[tier], charged, count)
            stored = self.accounts.stored[ns.name, tenant, TIER_LABEL[tier]]
            stored.add(count, 0, count * length)

    def _kinds(
        self, ns: Namespace, objects: NDArray[np.int32], tier: TierKind
    ) -> list[tuple[str, int, int, int]]:
        """Tenant, length of each in bytes, what they are charged together, and how many of the
        objects, which are in the tier, these are.
        """
        index, where = ns.index, self.tiers[tier]
        chunks = np.frombuffer(index.object_chunk, np.int32)[objects]
        kinds = np.frombuffer(index.tenant, np.uint32)[chunks].astype(np.uint64) << np.uint64(32)
        kinds |= np.frombuffer(index.object_length, np.uint32)[objects]
        marks = np.frombuffer(index.place[tier], np.int64)[objects] & where.charge_mask
        found = []
        for mark in np.unique(marks).tolist():
            distinct, counts = np.unique(kinds[marks == mark], return_counts=True)
            for kind, count in zip(distinct.tolist(), counts.tolist(), strict=True):
                length = kind & 0xFFFF_FFFF
                charged = count * where.charge_at(mark, length)
                found.append((ns.tenants[kind >> 32], length, charged, count))
        return found

    def lose_many(
        self, ns: Namespace, objects: NDArray[np.int32], tier: TierKind, reason: str
    ) -> NDArray[np.int32]:
        """The objects are no longer readable in a tier, which has given up their places by itself;
        forget those that no other tier has. Gives the chunks (rows) that are left without objects.
        """
        gone = self.accounts.evicted[ns.name, TIER_LABEL[tier], reason]
        for tenant, length, charged, count in self._kinds(ns, objects, tier):
            self.accounts.charge(ns.name, tenant, TIER_LABEL[tier], -charged, -count)
            gone.add(count, 0, count * length)
        ns.index.unplace_many(objects, tier)
        if _log.isEnabledFor(logging.DEBUG):
            for row in objects.tolist():
                self._say_left(ns, row, tier, reason)
        homeless = np.ones(len(objects), np.bool_)
        for other in TIERS:
            homeless &= np.frombuffer(ns.index.place[other], np.int64)[objects] == NONE
        return ns.index.remove_objects(objects[homeless])

    def unplace_object(self, ns: Namespace, row: int, tier: TierKind, reason: str) -> int:
        """The object is no longer readable in a tier. Gives the place, now the caller's."""
        index = ns.index
        place = index.place[tier][row]
        self._charge(ns, row, tier, -1)
        index.set_place(row, tier, NONE)
        gone = self.accounts.evicted[ns.name, TIER_LABEL[tier], reason]
        gone.add(1, 0, index.object_length[row])
        if _log.isEnabledFor(logging.DEBUG):
            self._say_left(ns, row, tier, reason)
        return place

    def _say_left(self, ns: Namespace, row: int, tier: TierKind, reason: str) -> None:
        """`kept`: the tiers that still have the object, "" if it is held no more."""
        index = ns.index
        chunk = index.object_chunk[row]
        family = ns.families.by_number[index.family[chunk]]
        kept = ",".join(TIER_LABEL[t] for t in TIERS if index.place[t][row] != NONE)
        fields = {
            "namespace": ns.name,
            "key": index.key(chunk).hex(),
            "part": family.parts[index.object_part[row]].name,
            "tier": TIER_LABEL[tier],
            "reason": reason,
            "kept": kept,
        }
        _log.debug("left", extra={"fields": fields})

    def _charge(self, ns: Namespace, row: int, tier: TierKind, sign: int) -> None:
        length = ns.index.object_length[row]
        tenant = ns.tenants[ns.index.tenant[ns.index.object_chunk[row]]]
        label = TIER_LABEL[tier]
        nbytes = self.tiers[tier].charge_at(ns.index.place[tier][row], length)
        self.accounts.charge(ns.name, tenant, label, sign * nbytes, sign)
        if sign > 0:
            self.accounts.stored[ns.name, tenant, label].add(1, 0, length)

    def evict_chunk(self, ns: Namespace, chunk: int, tier: TierKind) -> int:
        """Take a chunk out of one tier, for room. Gives the bytes freed there.

        If no other tier has it, what lies below it is found by no prefix any more; see `_cut_off`.
        """
        index = ns.index
        places = []
        freed = 0
        for row in list(index.object_rows(chunk)):
            if index.place[tier][row] != NONE:
                freed += self.tiers[tier].charge_at(
                    index.place[tier][row], index.object_length[row]
                )
                places.append(self.unplace_object(ns, row, tier, "capacity"))
        self._discard(tier, places)
        if not index.tiers[chunk]:
            self._cut_off(ns, chunk)
        else:
            self._forget_homeless(ns, chunk)
        return freed

    def _cut_off(self, ns: Namespace, chunk: int) -> None:
        """A chunk has left its last tier. What lies below it and is durable stays, and goes first
        where room is needed; what RAM alone has of it goes now.

        As in `drop_object`, chunks stay without objects while something lies below them. Where
        there was one already, all below it has been through this.
        """
        index = ns.index
        below = [chunk]
        for row in below:
            below.extend(c for c in index.child_rows(row) if index.first_object[c] != NONE)
        for row in reversed(below):
            if index.tiers[row] & _DURABLE:
                index.tick[row] = _FIRST_TO_GO
                for tier in TIERS:
                    if index.tiers[row] & TIER_BIT[tier] and not index.children[tier][row]:
                        index.on_leaf[tier](row)
            else:
                for obj in list(index.object_rows(row)):
                    self.drop_object(ns, obj, pb.MISS_EVICTED, "unreachable")

    def _forget_homeless(self, ns: Namespace, chunk: int) -> None:
        """Forget objects of the chunk that no tier has (another part of it is still held)."""
        index = ns.index
        for row in list(index.object_rows(chunk)):
            if all(index.place[tier][row] == NONE for tier in TIERS):
                index.remove_object(row)

    def drop_object(self, ns: Namespace, row: int, state: pb.ChunkState, reason: str) -> None:
        """Drop one object from every tier; its chunk too, if it was the last.

        What lies below stays: it may be durable, and is of use again once the chunk is put again.
        Until then the chunk stays as well, without objects, so that a delete of it reaches below.
        """
        index = ns.index
        chunk = index.object_chunk[row]
        for tier in TIERS:
            if index.place[tier][row] != NONE:
                self._discard(tier, [self.unplace_object(ns, row, tier, reason)])
        index.remove_object(row)
        if index.first_object[chunk] != NONE:
            return
        if index.first_child[chunk] == NONE:
            self.drop_subtree(ns, chunk, state, reason)
        else:
            ns.ghosts.remember(index.key(chunk), state)

    def drop_subtree(
        self, ns: Namespace, chunk: int, state: pb.ChunkState, reason: str
    ) -> list[bytes]:
        """Drop a chunk and all below it from every tier, and discard the places. Gives the keys."""
        index = ns.index
        rows = index.subtree(chunk)
        keys = [index.key(row) for row in rows]
        freed: dict[TierKind, list[int]] = {tier: [] for tier in TIERS}
        for row, key in zip(reversed(rows), reversed(keys), strict=True):
            for obj in list(index.object_rows(row)):
                for tier in TIERS:
                    if index.place[tier][obj] != NONE:
                        freed[tier].append(self.unplace_object(ns, obj, tier, reason))
                index.remove_object(obj)
            why = state if row == chunk else pb.MISS_EVICTED
            ns.ghosts.remember(key, why)
            ns.pins.pop(row, None)
            index.remove_chunk(row)
        for tier, places in freed.items():
            if places:
                self._discard(tier, places)
        return keys

    def expire(self, ns: Namespace, chunks: Iterable[int], at_ms: int) -> int:
        """Drop those of the rows that are chunks whose time is over. Gives how many were."""
        count = 0
        for chunk in chunks:
            if ns.index.held(chunk) and ns.expired(chunk, at_ms):
                self.drop_subtree(ns, chunk, pb.MISS_EXPIRED, "expired")
                count += 1
        return count
