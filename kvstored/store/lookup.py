"""Match: which chunks of a run are held, in which tier, and up to where that is of use. No I/O."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstored.store.api import MatchAnswer, Run
from kvstored.store.index import NONE
from kvstored.store.namespace import Namespace
from kvstored.store.residency import now_ms
from kvstored.tiers.base import TierKind
from kvstored_client.identity import longest_boundary
from kvstored_client.proto import kvstore_pb2 as pb

FIRST_MISS = int(pb.MISS_NEVER_STORED)


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
    end_token = run.end_token if boundary == len(run.keys) else 0
    needed = {}
    for group, rule in family.rules.items():
        chunks = rule.chunks_needed(first + boundary, family.chunk_tokens, end_token)
        needed[group] = range(max(chunks.start - first, 0), max(chunks.stop - first, 0))
    return needed


def _leading_rows(rows: dict[bytes, int], keys: list[bytes]) -> list[int]:
    """Chunk rows of the leading keys that are in the index."""
    found = []
    get = rows.get
    for key in keys:
        row = get(key, NONE)
        if row == NONE:
            break
        found.append(row)
    return found


class Lookup:
    """One match over one namespace's index."""

    def __init__(self, ns: Namespace, run: Run, depth: int) -> None:
        self._ns = ns
        self._run = run
        self._depth = depth
        self._now_ms = now_ms()
        self.states = bytearray(len(run.keys))
        self.payload_bytes = 0
        self.bytes_by_tier = dict.fromkeys(TierKind, 0)

    def each(self) -> int:
        """Every chunk on its own: held when all parts asked for are. Gives how many are."""
        held = 0
        for i, key in enumerate(self._run.keys):
            self.states[i] = state = self._chunk_state(key, self._run.parts)
            held += state < FIRST_MISS
        return held

    def prefix(self) -> int:
        """The longest boundary at which every group's rule holds, as chunks of the run."""
        rules = {self._run.family.parts[p].group for p in self._run.parts}
        if all(self._run.family.rules[group].kind == "all" for group in rules):
            return self._leading()
        return self._boundary(rules)

    def _leading(self) -> int:
        run, parts = self._run, self._run.parts
        done = self._leading_of_one_part(parts[0]) if len(parts) == 1 else 0
        for i in range(done, len(run.keys)):
            self.states[i] = state = self._chunk_state(run.keys[i], parts)
            if state >= FIRST_MISS:
                self._after_gap(i + 1)
                return i
        return len(run.keys)

    def _leading_of_one_part(self, part: int) -> int:
        """The usual case, without a Python step per chunk beyond the dict: leading chunks that are
        held, have not expired and whose first object is of the part. Gives how many it settled;
        the caller goes on, chunk by chunk, with the rest.
        """
        index = self._ns.index
        rows = _leading_rows(index.rows, self._run.keys)
        if not rows:
            return 0
        chunks = np.array(rows, np.int32)
        objects = np.frombuffer(index.first_object, np.int32)[chunks]
        expires = np.frombuffer(index.expires_ms, np.uint64)[chunks]
        usable = (expires == 0) | (expires > self._now_ms)
        usable &= np.frombuffer(index.object_part, np.uint16)[objects] == part
        states = np.zeros(len(rows), np.uint8)
        if self._depth != pb.DEPTH_RAM:
            on_nvme = np.frombuffer(index.place[TierKind.NVME], np.int64)[objects] != NONE
            states[on_nvme] = TierKind.NVME
        in_ram = np.frombuffer(index.place[TierKind.RAM], np.int64)[objects] != NONE
        states[in_ram] = TierKind.RAM
        usable &= states != 0
        count = len(rows) if usable.all() else int(np.argmin(usable))
        lengths = np.frombuffer(index.object_length, np.uint32)[objects[:count]]
        for tier in (TierKind.RAM, TierKind.NVME):
            self.bytes_by_tier[tier] += int(lengths[states[:count] == tier].sum(dtype=np.int64))
        self.payload_bytes += int(lengths.sum(dtype=np.int64))
        self.states[:count] = states[:count].tobytes()
        return count

    def _boundary(self, groups: set[str]) -> int:
        run = self._run
        by_group = {
            g: tuple(p for p in run.parts if run.family.parts[p].group == g) for g in groups
        }
        states = {
            group: np.array(
                [self._chunk_state(key, parts, count=False) for key in run.keys], np.uint8
            )
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
        for i in range(boundary):
            parts = tuple(p for g in groups if i in needed[g] for p in by_group[g])
            self.states[i] = self._chunk_state(run.keys[i], parts) if parts else int(pb.NOT_NEEDED)
        if boundary < len(run.keys):
            worst = max(int(row[boundary]) for row in states.values())
            self.states[boundary] = worst if worst >= FIRST_MISS else int(pb.MISS_AFTER_GAP)
            self._after_gap(boundary + 1)
        return boundary

    def _after_gap(self, i: int) -> None:
        rest = len(self.states) - i
        if rest > 0:
            self.states[i:] = bytes([pb.MISS_AFTER_GAP]) * rest

    def _chunk_state(self, key: bytes, parts: tuple[int, ...], *, count: bool = True) -> int:
        ns, index = self._ns, self._ns.index
        chunk = index.rows.get(key, NONE)
        if chunk == NONE:
            return ns.ghosts.reason(key)
        if ns.expired(chunk, self._now_ms):
            return int(pb.MISS_EXPIRED)
        slowest = 0
        for part in parts:
            row = index.find_object(chunk, part)
            state = object_state(ns, row, self._depth) if row != NONE else 0
            if not state:
                return int(pb.MISS_NEVER_STORED)
            slowest = max(slowest, state)
            if count:
                length = index.object_length[row]
                self.payload_bytes += length
                self.bytes_by_tier[TierKind(state)] += length
        return slowest


def match(
    ns: Namespace, run: Run, mode: int, depth: int, eta_ms: Callable[[dict[TierKind, int]], float]
) -> MatchAnswer:
    """Answer a match. `eta_ms` estimates the time to deliver so many bytes of each tier."""
    lookup = Lookup(ns, run, depth)
    chunks = lookup.each() if mode == pb.EACH else lookup.prefix()
    if mode == pb.EACH:
        tokens = sum(run.chunk_tokens(i) for i, s in enumerate(lookup.states) if s < FIRST_MISS)
    else:
        tokens = (
            run.chunk_end_token(chunks - 1) - run.start * run.family.chunk_tokens if chunks else 0
        )
    return MatchAnswer(
        chunks, tokens, bytes(lookup.states), lookup.payload_bytes, eta_ms(lookup.bytes_by_tier)
    )
