"""Acquire: leases that outlive the call, for clients that map the segments.

`lease_run` is the usual case, a whole prefix in RAM, in a few steps over arrays; `AcquireStream`
is every other, object by object over the machinery of Get. Belongs to the verbs' loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstored.store.api import Grant, Leased, Run
from kvstored.store.index import EXPIRES, NONE, ONE_OBJECT, PART_SHIFT
from kvstored.store.namespace import Namespace
from kvstored.store.reading import GetStream
from kvstored.store.residency import Residency, now_ms
from kvstored.store.walk import column, objects_of, padded
from kvstored.tiers.base import ALIGNMENT_BYTES, TierKind, padded_bytes
from kvstored.tiers.ram.places import Locations
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.identity import KEY_BYTES

_EXPIRES = np.uint64(EXPIRES)
_ONE_OF_PART = np.uint64(ONE_OBJECT | 0xFFFF << PART_SHIFT)

Rows = NDArray[np.int32]


def lease_run(
    ns: Namespace, run: Run, ram: RamTier, residency: Residency, max_bytes: int
) -> tuple[Leased, bytes] | None:
    """Lease every object of the run, if all of them are in RAM and `max_bytes` holds them, padded.

    None, and nothing leased, otherwise; also where a group's rule is not "all", as then not every
    chunk is needed. With it, one ChunkState per key.
    """
    if not len(run) or any(
        run.family.rules[run.family.parts[p].group].kind != "all" for p in run.parts
    ):
        return None
    chunks = ns.index.find_many(run.packed)
    if (chunks == NONE).any() or _expired(ns, chunks):
        return None
    objects = _objects(ns, chunks, run.parts)
    if objects is None:
        return None
    index = ns.index
    places = np.frombuffer(index.place[TierKind.RAM], np.int64)[objects]
    lengths = np.frombuffer(index.object_length, np.uint32)[objects].astype(np.int64)
    charged = int((-(-lengths // ALIGNMENT_BYTES)).sum()) * ALIGNMENT_BYTES
    if (places == NONE).any() or charged > max_bytes:
        return None
    tiers = bytes([TierKind.RAM]) * len(places)
    where = ram.lease_located(places)
    leased = _leased(where, list(range(len(places))), places, tiers, charged)
    residency.touch(ns, chunks)
    return leased, bytes([TierKind.RAM]) * len(chunks)


def _leased(
    where: Locations, indices: list[int], places: NDArray[np.int64], tiers: bytes, charged: int
) -> Leased:
    return Leased(
        indices=indices,
        segment_ids=where.segment_ids.tolist(),
        offsets_bytes=where.offsets.tolist(),
        lengths_bytes=where.lengths.tolist(),
        checksums=where.checksums,
        tiers=tiers,
        places=places,
        charged_bytes=charged,
    )


def _expired(ns: Namespace, chunks: Rows) -> bool:
    """Whether the time to live of one of them is over."""
    limited = chunks[np.frombuffer(ns.index.brief, np.uint64).take(chunks) & _EXPIRES != 0]
    if not len(limited):
        return False
    return bool((np.frombuffer(ns.index.expires_ms, np.uint64)[limited] <= now_ms()).any())


def _objects(ns: Namespace, chunks: Rows, parts: Sequence[int]) -> Rows | None:
    """Object rows, chunk by chunk in the order of `parts`; None if the index lacks one."""
    index = ns.index
    if len(parts) == 1:
        # The usual case, seen at a glance: every chunk has one object, and it is of the part.
        brief = np.frombuffer(index.brief, np.uint64).take(chunks)
        wanted = np.uint64(ONE_OBJECT | parts[0] << PART_SHIFT)
        if not ((brief ^ wanted) & _ONE_OF_PART).any():
            return np.frombuffer(index.first_object, np.int32).take(chunks)
    following = np.frombuffer(index.object_next, np.int32)
    part_of = np.frombuffer(index.object_part, np.uint16)
    columns = {part: column for column, part in enumerate(parts)}
    table = np.full((len(chunks), len(parts)), NONE, np.int32)
    row = np.frombuffer(index.first_object, np.int32)[chunks]
    if (row == NONE).any():  # what is left of a chunk whose volume is away
        return None
    at = np.arange(len(chunks))
    while len(at):
        for part in np.unique(part_of[row]).tolist():
            if (column := columns.get(part)) is not None:
                mine = part_of[row] == part
                table[at[mine], column] = row[mine]
        row = following[row]
        at, row = at[row != NONE], row[row != NONE]
    return None if (table == NONE).any() else table.reshape(-1)


class AcquireStream:
    """The objects of one Acquire, in order as they come to RAM; ended by `close`."""

    def __init__(self, stream: GetStream, ram: RamTier, room: Callable[[int], bool]) -> None:
        """`stream`: a fresh one. `room(charged_bytes)`: whether the caller may hold so much more;
        asked for each object, and never again after a no.
        """
        self._stream = stream
        self._ram = ram
        self._room = room

    async def next(self) -> Leased | None:
        """What is ready next, leased until the caller has the store release it; None at the end.

        Cancelled, it hands nothing out and keeps nothing that `close` does not end.
        """
        while (grants := await self._stream.next()) is not None:
            taken = self._taken(grants)
            if len(taken) < len(grants):
                self._stream.decline(grants[len(taken) :])
            if taken:
                places = np.array(self._stream.kept(taken), np.int64)
                charged = sum(padded_bytes(grant.length_bytes) for grant in taken)
                tiers = bytes(grant.tier for grant in taken)
                where = self._ram.locate_many(places)
                return _leased(where, [g.index for g in taken], places, tiers, charged)
        return None

    def _taken(self, grants: list[Grant]) -> list[Grant]:
        for i, grant in enumerate(grants):
            if not self._room(padded_bytes(grant.length_bytes)):
                return grants[:i]
        return grants

    @property
    def states(self) -> bytes:
        """One ChunkState per key; final once `next` gave None."""
        return self._stream.outcome

    async def close(self) -> None:
        """Give up what was not handed out, and count hits and misses. Idempotent."""
        await self._stream.close()


def hold_run(ns: Namespace, run: Run, states: bytes) -> tuple[list[bytes], int]:
    """Hold the keys of the run that `states` says are there. Gives them, and what their chunks take
    up in RAM (padded bytes).
    """
    index = ns.index
    rows = index.find_many(run.packed[: len(states) * KEY_BYTES])
    fastest = np.frombuffer(states, np.uint8)[: len(rows)]
    there = (rows != NONE) & (fastest >= TierKind.RAM) & (fastest <= TierKind.OBJECT)
    held = there.nonzero()[0]
    if not len(held):
        return [], 0
    at, objects = objects_of(index, rows[held])
    resident = column(index.place[TierKind.RAM], np.int64)[objects] != NONE
    in_ram = np.zeros(len(held), np.bool_)
    in_ram[at[resident]] = True
    keys = [run.keys[i] for i in held.tolist()]
    ns.holds.add(keys, [run.keys[i] for i in held[in_ram].tolist()])
    return keys, int(padded(index, objects[resident]).sum())
