"""Match over prefixes of any length. No I/O; see steps.Verb."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored_client.failures import Failure, GarbageError
from kvstored_client.identity import KVPart, Prefix, longest_boundary
from kvstored_client.objects import chunk_run, get_table, spans
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods
from kvstored_client.results import MatchResult, States
from kvstored_client.session import Session
from kvstored_client.steps import Verb, ask, remaining_ms


def unreachable_match(chunks: int, failure: Failure) -> MatchResult:
    """Nothing is held, as far as can be known."""
    states = States(bytes([failure.chunk_state()]) * chunks)
    return MatchResult(0, 0, states, 0, 0.0, failure.reason, failure.detail)


@dataclass(frozen=True, slots=True)
class Matcher:
    """One match; `mode` and `depth` are numbers of the wire."""

    prefix: Prefix
    parts: tuple[KVPart, ...]
    mode: pb.MatchMode
    depth: pb.Depth
    namespace: str

    def run(
        self, session: Session, context: pb.Context, deadline: float
    ) -> Verb[MatchResult | Failure]:
        """Ask, in as many requests as the limits demand."""
        keys = self.prefix.keys(session.salt)
        max_keys = session.limits.max_keys_per_call
        pieces = list(spans(0, len(self.prefix), len(self.parts), max_keys))
        groups = self.prefix.family.groups
        by_rule = any(groups[part.group].kind != "all" for part in self.parts)
        if self.mode == pb.PREFIX and by_rule and len(pieces) > 1:
            return (yield from self._by_rule(keys, pieces, context, deadline))
        return (yield from self._in_order(keys, pieces, context, deadline))

    def _ask(
        self,
        keys: bytes,
        piece: tuple[int, int],
        mode: pb.MatchMode,
        parts: Sequence[KVPart],
        context: pb.Context,
        deadline: float,
    ) -> Verb[pb.MatchReply | Failure]:
        names = [part.name for part in parts]
        request = pb.MatchRequest(
            ctx=context,
            run=chunk_run(self.prefix, *piece, self.namespace, keys, names),
            mode=mode,
            depth=self.depth,
        )
        request.ctx.deadline_ms = remaining_ms(deadline)
        reply = yield from ask(methods.MATCH, request, pb.MatchReply, deadline)
        if isinstance(reply, Failure):
            return reply
        count = piece[1] - piece[0]
        if len(reply.states) != count or reply.chunks > count:
            message = f"Match answered {len(reply.states)} states and {reply.chunks} chunks"
            return GarbageError(f"{message} for {count} keys").failure()
        return reply

    def _in_order(
        self,
        keys: bytes,
        pieces: list[tuple[int, int]],
        context: pb.Context,
        deadline: float,
    ) -> Verb[MatchResult | Failure]:
        """Piece after piece; under mode PREFIX up to the first that is not held whole."""
        chunks = tokens = nbytes = 0
        eta_ms = 0.0
        states = b""
        for piece in pieces:
            reply = yield from self._ask(keys, piece, self.mode, self.parts, context, deadline)
            if isinstance(reply, Failure):
                return reply
            chunks += reply.chunks
            tokens += reply.tokens
            nbytes += reply.payload_bytes
            eta_ms += reply.eta_ms
            states += reply.states
            if self.mode == pb.PREFIX and reply.chunks < piece[1] - piece[0]:
                break
        packed = States(states.ljust(len(self.prefix), bytes([pb.MISS_AFTER_GAP])))
        return MatchResult(chunks, tokens, packed, nbytes, eta_ms, packed.first_reason())

    def _by_rule(
        self,
        keys: bytes,
        pieces: list[tuple[int, int]],
        context: pb.Context,
        deadline: float,
    ) -> Verb[MatchResult | Failure]:
        """Rules that look back cannot be applied piece by piece: ask for each chunk and group, and
        apply them here.
        """
        family = self.prefix.family
        columns: dict[str, NDArray[np.uint8]] = {}
        eta_ms = 0.0
        for group in dict.fromkeys(part.group for part in self.parts):
            parts = [part for part in self.parts if part.group == group]
            raw = b""
            for piece in pieces:
                reply = yield from self._ask(keys, piece, pb.EACH, parts, context, deadline)
                if isinstance(reply, Failure):
                    return reply
                raw += reply.states
                eta_ms += reply.eta_ms
            columns[group] = np.frombuffer(raw, np.uint8)
        return self._combine(columns, eta_ms, family.chunk_tokens)

    def _combine(
        self, columns: dict[str, NDArray[np.uint8]], eta_ms: float, chunk_tokens: int
    ) -> MatchResult:
        prefix = self.prefix
        chunks = longest_boundary(
            {group: (c >= 1) & (c < pb.NOT_NEEDED) for group, c in columns.items()},
            prefix.family.groups,
            chunk_tokens,
            end_token=prefix.tokens,
        )
        table = get_table(prefix, 0, chunks, self.parts)
        states = np.full(len(prefix), int(pb.MISS_AFTER_GAP), np.uint8)
        states[:chunks] = int(pb.NOT_NEEDED)
        for group, column in columns.items():
            mine = [i for i, part in enumerate(self.parts) if part.group == group]
            needed = np.flatnonzero(table.needed[:, mine[0]])
            seen = states[needed]
            worse = np.maximum(np.where(seen == pb.NOT_NEEDED, 0, seen), column[needed])
            states[needed] = worse
        if chunks < len(prefix):
            worst = max(int(column[chunks]) for column in columns.values())
            states[chunks] = worst if worst > pb.NOT_NEEDED else int(pb.MISS_AFTER_GAP)
        packed = States(states.tobytes())
        return MatchResult(
            chunks=chunks,
            tokens=prefix.end_token(chunks - 1) if chunks else 0,
            states=packed,
            nbytes=int(table.want.nbytes.sum()),
            eta_ms=eta_ms,
            reason=packed.first_reason(),
        )
