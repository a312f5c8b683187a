"""Match: which chunks of a run are held, in which tier, and up to where that is of use. No I/O."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstored.store.api import MatchAnswer, Run
from kvstored.store.index import (
    EXPIRES,
    NONE,
    ONE_OBJECT,
    PART_SHIFT,
    TIER_BIT,
    TIERS,
    TIERS_SHIFT,
)
from kvstored.store.namespace import Namespace
from kvstored.store.residency import now_ms
from kvstored.store.walk import column, objects_of
from kvstored.tiers.base import TierKind
from kvstored_client.identity import KEY_BYTES, longest_boundary
from kvstored_client.proto import kvstore_pb2 as pb

FIRST_MISS = int(pb.MISS_NEVER_STORED)

_LENGTH = np.uint64(0xFFFF_FFFF)
_ONE_OF_PART = np.uint64(ONE_OBJECT | 0xFFFF << PART_SHIFT)
_ALL_IN_RAM = _ONE_OF_PART | np.uint64(EXPIRES | TIER_BIT[TierKind.RAM] << TIERS_SHIFT)
_IN_RAM = bytes([TierKind.RAM])


def _states_of_tiers(deepest: TierKind) -> NDArray[np.uint8]:
    """By an object's tier bits: the fastest tier that has it, down to `deepest`; 0 if none has."""
    states = np.zeros(256, np.uint8)
    bits = np.arange(256)
    for tier in reversed(TIERS):
        if tier <= deepest:
            states[bits & TIER_BIT[tier] != 0] = tier
    return states


_STATES = {True: _states_of_tiers(TierKind.RAM), False: _states_of_tiers(TierKind.OBJECT)}


def object_state(ns: Namespace, row: int, depth: int) -> int:
    """Fastest tier that holds an object, within the depth asked for; 0 if none does."""
    if ns.index.place[TierKind.RAM][row] != NONE:
        return int(TierKind.RAM)
    if depth != pb.DEPTH_RAM and ns.index.place[TierKind.NVME][row] != NONE:
        return int(TierKind.NVME)
    return 0


def needed_chunks(run: Run, boundary: int) -> dict[str, range]:
    """Per group, the chunks of the run that a boundary after `boundary` chunks of it needs."""
    family = run.family
    first = run.start
    end_token = run.end_token if boundary == len(run) else 0
    needed = {}
    for group, rule in family.rules.items():
        chunks = rule.chunks_needed(first + boundary, family.chunk_tokens, end_token)
        needed[group] = range(max(chunks.start - first, 0), max(chunks.stop - first, 0))
    return needed


class Lookup:
    """One match over one namespace's index."""

    def __init__(self, ns: Namespace, run: Run, depth: int) -> None:
        self._ns = ns
        self._run = run
        self._depth = depth
        self._now_ms = now_ms()
        self.states = bytearray(len(run))
        self.payload_bytes = 0
        self.bytes_by_tier = dict.fromkeys(TierKind, 0)

    def each(self) -> int:
        """Every chunk on its own: held when all parts asked for are. Gives how many are."""
        states = self._states(0, len(self._run), self._run.parts)
        self.states[:] = states.tobytes()
        return int((states < FIRST_MISS).sum())

    def missing(self) -> list[int]:
        """Chunks of the run that lack a part that was asked for."""
        states = self._states(0, len(self._run), self._run.parts, count=False)
        return np.flatnonzero(states >= FIRST_MISS).tolist()

    def prefix(self) -> int:
        """The longest boundary at which every group's rule holds, as chunks of the run."""
        rules = {self._run.family.parts[p].group for p in self._run.parts}
        if all(self._run.family.rules[group].kind == "all" for group in rules):
            return self._leading()
        return self._boundary(rules)

    def _leading(self) -> int:
        run, parts = self._run, self._run.parts
        if len(parts) == 1:
            done = self._leading_of_one_part(parts[0])
        else:
            done = self._leading_of_parts(parts)
        for i in range(done, len(run)):
            self.states[i] = state = self._chunk_state(run.keys[i], parts)
            if state >= FIRST_MISS:
                self._after_gap(i + 1)
                return i
        return len(run)

    def _leading_of_one_part(self, part: int) -> int:
        """The usual case, without a Python step per chunk: leading chunks that are held, have not
        expired, and whose only object is of the part. Gives how many it settled; the caller goes
        on, chunk by chunk, with the rest.
        """
        index = self._ns.index
        chunks = self._leading_chunks()
        brief = np.frombuffer(index.brief, np.uint64).take(chunks)
        wanted = np.uint64(ONE_OBJECT | part << PART_SHIFT | TIER_BIT[TierKind.RAM] << TIERS_SHIFT)
        if ((brief ^ wanted) & _ALL_IN_RAM).any():
            if not (brief & np.uint64(ONE_OBJECT)).all():
                return self._leading_of_parts((part,))
            return self._settle(chunks, brief, part)
        nbytes = int((brief & _LENGTH).sum())
        self.bytes_by_tier[TierKind.RAM] += nbytes
        self.payload_bytes += nbytes
        self.states[: len(chunks)] = _IN_RAM * len(chunks)
        return len(chunks)

    def _leading_chunks(self) -> NDArray[np.int32]:
        """Rows of the run's leading keys that are in the index."""
        chunks = self._ns.index.find_many(self._run.packed)
        missing = (chunks < 0).nonzero()[0]
        return chunks[: missing[0]] if missing.size else chunks

    def _leading_of_parts(self, parts: tuple[int, ...]) -> int:
        """As `_leading_of_one_part`, of chunks that have all the parts; a step per object of the
        fullest chunk.
        """
        index, deepest = self._ns.index, _STATES[self._depth == pb.DEPTH_RAM]
        chunks = self._leading_chunks()
        wanted = np.zeros(len(self._run.family.parts), np.uint8)
        wanted[list(parts)] = 1
        found, slowest = np.zeros(len(chunks), np.int64), np.zeros(len(chunks), np.uint8)
        nbytes = {tier: np.zeros(len(chunks), np.int64) for tier in TIERS}
        at, objects = np.arange(len(chunks)), column(index.first_object, np.int32)[chunks]
        while (more := objects != NONE).any():
            at, objects = at[more], objects[more]
            bits = np.zeros(len(at), np.uint8)
            for tier in TIERS:
                there = column(index.place[tier], np.int64)[objects] != NONE
                bits[there] |= TIER_BIT[tier]
            states = deepest[bits] * wanted[column(index.object_part, np.uint16)[objects]]
            found[at] += states != 0
            slowest[at] = np.maximum(slowest[at], states)
            lengths = column(index.object_length, np.uint32)[objects]
            for tier in TIERS:
                nbytes[tier][at] += lengths * (states == tier)
            objects = column(index.object_next, np.int32)[objects]
        usable = (found == len(set(parts))) & ~self._ns.expired_many(chunks, self._now_ms)
        count = len(chunks) if usable.all() else int(np.argmin(usable))
        for tier in TIERS:
            self.bytes_by_tier[tier] += int(nbytes[tier][:count].sum())
            self.payload_bytes += int(nbytes[tier][:count].sum())
        self.states[:count] = slowest[:count].tobytes()
        return count

    def _settle(self, chunks: NDArray[np.int32], brief: NDArray[np.uint64], part: int) -> int:
        """`_leading_of_one_part` where they are not all in RAM for good."""
        usable = brief & _ONE_OF_PART == np.uint64(ONE_OBJECT | part << PART_SHIFT)
        tiers = (brief >> np.uint64(TIERS_SHIFT)).astype(np.uint8)
        states = _STATES[self._depth == pb.DEPTH_RAM].take(tiers)
        usable &= states != 0
        usable &= ~self._ns.expired_many(chunks, self._now_ms)
        count = len(chunks) if usable.all() else int(np.argmin(usable))
        states = states[:count]
        lengths = (brief[:count] & _LENGTH).view(np.int64)
        for tier in TIERS:
            self.bytes_by_tier[tier] += int(lengths[states == tier].sum())
        self.payload_bytes += int(lengths.sum())
        self.states[:count] = states.tobytes()
        return count

    def _boundary(self, groups: set[str]) -> int:
        run = self._run
        by_group = {
            g: tuple(p for p in run.parts if run.family.parts[p].group == g) for g in groups
        }
        states = {
            group: self._states(0, len(run), parts, count=False)
            for group, parts in by_group.items()
        }
        boundary = longest_boundary(
            {group: row < FIRST_MISS for group, row in states.items()},
            {group: run.family.rules[group] for group in groups},
            run.family.chunk_tokens,
            start=run.start,
            end_token=run.end_token,
        )
        needed = needed_chunks(run, boundary)
        slowest = np.zeros(boundary, np.uint8)
        for group, chunks in needed.items():
            if group in groups and (chunks := range(chunks.start, min(chunks.stop, boundary))):
                found = self._states(chunks.start, chunks.stop, by_group[group])
                part = slowest[chunks.start : chunks.stop]
                np.maximum(part, found, out=part)
        slowest[slowest == 0] = pb.NOT_NEEDED
        self.states[:boundary] = slowest.tobytes()
        if boundary < len(run):
            worst = max(int(row[boundary]) for row in states.values())
            self.states[boundary] = worst if worst >= FIRST_MISS else int(pb.MISS_AFTER_GAP)
            self._after_gap(boundary + 1)
        return boundary

    def _after_gap(self, i: int) -> None:
        rest = len(self.states) - i
        if rest > 0:
            self.states[i:] = bytes([pb.MISS_AFTER_GAP]) * rest

    def _states(
        self, first: int, stop: int, parts: tuple[int, ...], *, count: bool = True
    ) -> NDArray[np.uint8]:
        """`_chunk_state` of the run's chunks from `first` to before `stop`."""
        ns = self._ns
        packed = self._run.packed[first * KEY_BYTES : stop * KEY_BYTES]
        chunks = ns.index.find_many(packed)
        states = np.full(len(chunks), pb.MISS_EXPIRED, np.uint8)
        missing = chunks == NONE
        if missing.all():
            states[:] = ns.ghosts.reasons(packed)
            return states
        if missing.any():
            states[missing] = np.array(ns.ghosts.reasons(packed), np.uint8)[missing]
        usable = ~(missing | ns.expired_many(chunks, self._now_ms))
        states[usable] = self._states_of(chunks[usable], parts, count)
        return states

    def _states_of(
        self, chunks: NDArray[np.int32], parts: tuple[int, ...], count: bool
    ) -> NDArray[np.uint8]:
        """The same of chunks that are held: a step per object of the fullest, and per part."""
        index, deepest = self._ns.index, _STATES[self._depth == pb.DEPTH_RAM]
        at, objects = objects_of(index, chunks)
        part_of = column(index.object_part, np.uint16)[objects]
        whole = np.ones(len(chunks), np.bool_)
        slowest = np.zeros(len(chunks), np.uint8)
        for part in parts:
            mine = part_of == part
            rows = np.full(len(chunks), NONE, np.int32)
            rows[at[mine]] = objects[mine]
            bits = np.zeros(len(chunks), np.uint8)
            for tier in TIERS:
                there = column(index.place[tier], np.int64).take(rows, mode="clip") != NONE
                bits[there & (rows != NONE)] |= TIER_BIT[tier]
            states = deepest[bits]
            whole &= states != 0
            slowest = np.maximum(slowest, states)
            if count:
                self._count(states[whole], rows[whole])
        slowest[~whole] = pb.MISS_NEVER_STORED
        if len(self._ns.ghosts):  # of an object that was lost with its volume, it says so
            for i in np.flatnonzero(~whole).tolist():
                slowest[i] = self._ns.ghosts.reason(index.key(int(chunks[i])))
        return slowest

    def _count(self, states: NDArray[np.uint8], rows: NDArray[np.int32]) -> None:
        lengths = column(self._ns.index.object_length, np.uint32)[rows].astype(np.int64)
        for tier in TIERS:
            nbytes = int(lengths[states == tier].sum())
            self.bytes_by_tier[tier] += nbytes
            self.payload_bytes += nbytes

    def _chunk_state(self, key: bytes, parts: tuple[int, ...]) -> int:
        ns, index = self._ns, self._ns.index
        chunk = index.find(key)
        if chunk == NONE:
            return ns.ghosts.reason(key)
        if ns.expired(chunk, self._now_ms):
            return int(pb.MISS_EXPIRED)
        slowest = 0
        for part in parts:
            row = index.find_object(chunk, part)
            state = object_state(ns, row, self._depth) if row != NONE else 0
            if not state:
                return ns.ghosts.reason(key)
            slowest = max(slowest, state)
            length = index.object_length[row]
            self.payload_bytes += length
            self.bytes_by_tier[TierKind(state)] += length
        return slowest


def match(
    ns: Namespace, run: Run, mode: int, depth: int, eta_ms: Callable[[dict[TierKind, int]], float]
) -> MatchAnswer:
    """Answer a match. `eta_ms` estimates the time to deliver so many bytes of each tier."""
    return answer(Lookup(ns, run, depth), run, mode, eta_ms)


def answer(
    lookup: Lookup, run: Run, mode: int, eta_ms: Callable[[dict[TierKind, int]], float]
) -> MatchAnswer:
    """What a fresh look-up of a run has to say."""
    chunks = lookup.each() if mode == pb.EACH else lookup.prefix()
    if mode == pb.EACH:
        tokens = chunks * run.family.chunk_tokens
        if lookup.states and lookup.states[-1] < FIRST_MISS:  # the last one may be shorter
            tokens -= run.family.chunk_tokens - run.chunk_tokens(len(run) - 1)
    else:
        tokens = (
            run.chunk_end_token(chunks - 1) - run.start * run.family.chunk_tokens if chunks else 0
        )
    return MatchAnswer(
        chunks, tokens, bytes(lookup.states), lookup.payload_bytes, eta_ms(lookup.bytes_by_tier)
    )
