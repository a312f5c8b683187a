"""Match as far as the bucket: what no local tier has is asked for there, under a deadline.

A prefix is asked for by a search that takes a few rounds; chunks on their own, and groups whose
rule is not "all", one by one. What is not known in time is a miss.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstored.store.api import MatchAnswer, Run
from kvstored.store.index import NONE
from kvstored.store.lookup import FIRST_MISS, Lookup, answer, match, object_state
from kvstored.store.namespace import Namespace
from kvstored.store.residency import now_ms
from kvstored.tiers.base import TierKind
from kvstored.tiers.object.api import ObjectName, Pool
from kvstored_client.proto import kvstore_pb2 as pb

SLICE_CHUNKS = 1024
"""Chunks that are asked for in one go; others have their turn in between."""

Found = Mapping[tuple[int, int], int]
"""(chunk of the run, index of the part) -> length in bytes of an object that the bucket has; the
longest that it may have, where the search did not ask for it."""

Seen = Callable[[ObjectName, int], None]


class PoolLookup(Lookup):
    """A match over one namespace's index and what the bucket was found to have."""

    def __init__(self, ns: Namespace, run: Run, found: Found) -> None:
        super().__init__(ns, run, pb.DEPTH_POOL)
        self._found = found
        self._chunks = {i for i, _ in found}

    def _leading(self) -> int:
        run = self._run
        states = self._states(0, len(run), run.parts, count=False)
        missing = np.flatnonzero(states >= FIRST_MISS)
        stop = int(missing[0]) if len(missing) else len(run)
        self._states(0, stop, run.parts)
        self.states[:stop] = states[:stop].tobytes()
        if stop < len(run):
            self.states[stop] = int(states[stop])
            self._after_gap(stop + 1)
        return stop

    def _states(
        self, first: int, stop: int, parts: tuple[int, ...], *, count: bool = True
    ) -> NDArray[np.uint8]:
        # Only with one part does the look-up count what is whole and nothing else.
        alone = len(parts) == 1
        states = super()._states(first, stop, parts, count=count and alone)
        missing = np.flatnonzero(states >= FIRST_MISS) + first
        found = [i for i in missing.tolist() if i in self._chunks]
        for i in found:
            held = [self._state_of(i, part)[0] for part in parts]
            if all(held):
                states[i - first] = max(held)
        if count:
            held_now = found if alone else range(first, stop)
            for i in held_now:
                if states[i - first] < FIRST_MISS:
                    self._count_chunk(i, parts)
        return states

    def _count_chunk(self, i: int, parts: tuple[int, ...]) -> None:
        for state, length_bytes in (self._state_of(i, part) for part in parts):
            self.payload_bytes += length_bytes
            self.bytes_by_tier[TierKind(state)] += length_bytes

    def _state_of(self, i: int, part: int) -> tuple[int, int]:
        """Fastest tier of an object, and its length; zeros where there is none."""
        row = _row(self._ns, self._run.keys[i], part, self._now_ms)
        if row != NONE and (state := object_state(self._ns, row, pb.DEPTH_NODE)):
            return state, self._ns.index.object_length[row]
        length_bytes = self._found.get((i, part), 0)
        return (int(TierKind.OBJECT), length_bytes) if length_bytes else (0, 0)


async def match_pool(
    ns: Namespace,
    run: Run,
    mode: int,
    pool: Pool,
    deadline: float,
    seen: Seen,
    eta_ms: Callable[[dict[TierKind, int]], float],
) -> MatchAnswer:
    """Answer a match as far as the bucket by the deadline (time.monotonic()). `seen` is told of
    each object that the bucket has.
    """
    local = match(ns, run, mode, pb.DEPTH_NODE, eta_ms)
    if max(local.states, default=0) < FIRST_MISS:
        return local
    rules = run.family.rules
    chain = mode == pb.PREFIX and all(
        rules[run.family.parts[p].group].kind == "all" for p in run.parts
    )
    found: dict[tuple[int, int], int] = {}
    lacking = Lookup(ns, run, pb.DEPTH_NODE).missing()
    for first in range(0, len(lacking), SLICE_CHUNKS):
        ask = _Slice(ns, run, lacking[first : first + SLICE_CHUNKS], chain=chain)
        whole = await ask.of(pool, deadline, found, seen)
        if (chain and not whole) or time.monotonic() >= deadline:
            break
        await asyncio.sleep(0)
    reply = answer(PoolLookup(ns, run, found), run, mode, eta_ms)
    return _with_reason(reply, pool, deadline)


class _Slice:
    """Some chunks of a run, of which parts are lacking here."""

    def __init__(self, ns: Namespace, run: Run, chunks: Sequence[int], *, chain: bool) -> None:
        """`chain`: a chunk is of use with all of its parts, and after those before it."""
        self._run = run
        self._chain = chain
        absent = [(i, _absent_parts(ns, run, i)) for i in chunks]
        if not chain:
            absent = [(i, [part]) for i, parts in absent for part in parts]
        self._absent = [(i, parts) for i, parts in absent if parts]
        self._names = [[_name(run, i, part) for part in parts] for i, parts in self._absent]

    async def of(
        self, pool: Pool, deadline: float, found: dict[tuple[int, int], int], seen: Seen
    ) -> bool:
        """Ask the bucket; add what it has to `found`. Whether that is all of it."""
        told: Sequence[Sequence[int] | None]
        if self._chain:
            told = await pool.leading(self._names, deadline)
        else:
            told = await pool.each(self._names, deadline)
        whole = len(told) == len(self._names) and None not in told
        run = self._run
        for (i, parts), names, lengths in zip(self._absent, self._names, told, strict=False):
            for part, name, length_bytes in zip(parts, names, lengths or (), strict=False):
                info = run.family.parts[part]
                found[i, part] = length_bytes or info.bytes or info.max_bytes
                seen(name, length_bytes)
        return whole


def _with_reason(reply: MatchAnswer, pool: Pool, deadline: float) -> MatchAnswer:
    """A miss is of the bucket's making where that could not be asked, or not in time."""
    if all(state < FIRST_MISS for state in reply.states):
        return reply
    if pool.status().health != "ok":
        reason = pb.MISS_TIER_DOWN
    elif time.monotonic() >= deadline:
        reason = pb.MISS_DEADLINE
    else:
        return reply
    states = bytes(
        int(reason) if state in (pb.MISS_NEVER_STORED, pb.MISS_EVICTED) else state
        for state in reply.states
    )
    return MatchAnswer(reply.chunks, reply.tokens, states, reply.payload_bytes, reply.eta_ms)


def _row(ns: Namespace, key: bytes, part: int, at_ms: int) -> int:
    chunk = ns.find(key, at_ms)
    return ns.index.find_object(chunk, part) if chunk != NONE else NONE


def _absent_parts(ns: Namespace, run: Run, i: int) -> list[int]:
    """Parts of a chunk that no local tier has."""
    rows = [(part, _row(ns, run.keys[i], part, now_ms())) for part in run.parts]
    return [p for p, row in rows if row == NONE or not object_state(ns, row, pb.DEPTH_NODE)]


def _name(run: Run, i: int, part: int) -> ObjectName:
    family = run.family
    return ObjectName(run.namespace, family.fingerprint, run.keys[i], family.parts[part].name)
