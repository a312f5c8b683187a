"""touch, prefetch, pin, unpin and delete, as step generators. No I/O; see steps.Verb."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from google.protobuf.message import Message

from kvstored_client.calling import MAX_TTL_MS, Calling, choice
from kvstored_client.config import CallOptions, checked_uint
from kvstored_client.failures import Failure
from kvstored_client.identity import Prefix
from kvstored_client.objects import (
    checked_parts,
    checked_prefix,
    checked_range,
    chunk_run,
    spans,
)
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods
from kvstored_client.proto.methods import Method
from kvstored_client.results import ChunksResult, CountResult, States
from kvstored_client.session import Session
from kvstored_client.steps import Verb, ask, remaining_ms

_Reply = TypeVar("_Reply", bound=Message)
_REASONS = {"requested": pb.DeleteRequest.REQUESTED, "corrupt": pb.DeleteRequest.CORRUPT}


class SmallVerbs(Calling):
    """The verbs that move no payload. `span` is (start, stop), stop None for the prefix's end."""

    def over_chunks(
        self,
        prefix: Prefix,
        span: tuple[int, int | None],
        parts: Sequence[str] | None,
        options: CallOptions,
        call: tuple[Method, type[_Reply]],
        make: Callable[[pb.ChunkRun, pb.Context], Message],
        timeout_s: float,
    ) -> Verb[tuple[list[_Reply], int, Failure | None]]:
        """A unary verb over a run of chunks, cut as the limits ask.

        The replies, the chunks they are about, and what stopped it.
        """
        start, stop = checked_range(checked_prefix(prefix), *span)
        names = [part.name for part in checked_parts(prefix.family, parts)]
        context, deadline = self.opening(options, timeout_s)
        replies: list[_Reply] = []
        covered = start

        def attempt(session: Session) -> Verb[Failure | None]:
            nonlocal covered
            keys = prefix.keys(session.salt)
            pieces = spans(covered, stop, len(names), session.limits.max_keys_per_call)
            for a, b in pieces:
                context.deadline_ms = remaining_ms(deadline)
                message = make(chunk_run(prefix, a, b, self.namespace, keys, names), context)
                reply = yield from ask(call[0], message, call[1], deadline)
                if isinstance(reply, Failure):
                    return reply
                replies.append(reply)
                covered = b
            return None

        if start == stop:
            return replies, 0, None
        failure = yield from self.keeper.with_family(prefix.family, context, deadline, attempt)
        return replies, covered - start, failure

    def touch(
        self,
        prefix: Prefix,
        span: tuple[int, int | None],
        parts: Sequence[str] | None,
        ttl_ms: int,
        options: CallOptions,
    ) -> Verb[ChunksResult]:
        """See KVClient.touch."""
        checked_uint("ttl_ms", ttl_ms, MAX_TTL_MS)
        replies, _, failure = yield from self.over_chunks(
            prefix,
            span,
            parts,
            options,
            (methods.TOUCH, pb.TouchReply),
            lambda r, c: pb.TouchRequest(ctx=c, run=r, ttl_ms=ttl_ms),
            self.timeouts.match_s,
        )
        return _chunks_result(prefix, span, [r.states for r in replies], failure)

    def prefetch(
        self,
        prefix: Prefix,
        span: tuple[int, int | None],
        parts: Sequence[str] | None,
        options: CallOptions,
    ) -> Verb[ChunksResult]:
        """See KVClient.prefetch."""
        replies, _, failure = yield from self.over_chunks(
            prefix,
            span,
            parts,
            options,
            (methods.PREFETCH, pb.PrefetchReply),
            lambda r, c: pb.PrefetchRequest(ctx=c, run=r),
            self.timeouts.get_s,
        )
        return _chunks_result(prefix, span, [r.states for r in replies], failure)

    def pin(
        self,
        prefix: Prefix,
        span: tuple[int, int | None],
        parts: Sequence[str] | None,
        ttl_ms: int,
        options: CallOptions,
    ) -> Verb[ChunksResult]:
        """See KVClient.pin."""
        checked_uint("ttl_ms", ttl_ms, MAX_TTL_MS)
        replies, _, failure = yield from self.over_chunks(
            prefix,
            span,
            parts,
            options,
            (methods.PIN, pb.PinReply),
            lambda r, c: pb.PinRequest(ctx=c, run=r, ttl_ms=ttl_ms),
            self.timeouts.match_s,
        )
        return _chunks_result(prefix, span, [r.states for r in replies], failure)

    def unpin(
        self,
        prefix: Prefix,
        span: tuple[int, int | None],
        parts: Sequence[str] | None,
        options: CallOptions,
    ) -> Verb[CountResult]:
        """See KVClient.unpin."""
        replies, _, failure = yield from self.over_chunks(
            prefix,
            span,
            parts,
            options,
            (methods.UNPIN, pb.UnpinReply),
            lambda r, c: pb.UnpinRequest(ctx=c, run=r),
            self.timeouts.match_s,
        )
        return _count_result(sum(r.unpinned for r in replies), failure)

    def delete(
        self,
        prefix: Prefix,
        span: tuple[int, int | None],
        parts: Sequence[str] | None,
        reason: str,
        options: CallOptions,
    ) -> Verb[CountResult]:
        """See KVClient.delete."""
        why = choice("reason", reason, _REASONS)
        replies, _, failure = yield from self.over_chunks(
            prefix,
            span,
            parts,
            options,
            (methods.DELETE, pb.DeleteReply),
            lambda r, c: pb.DeleteRequest(ctx=c, run=r, reason=why),
            self.timeouts.admin_s,
        )
        return _count_result(sum(r.deleted for r in replies), failure)


def _chunks_result(
    prefix: Prefix, span: tuple[int, int | None], states: list[bytes], failure: Failure | None
) -> ChunksResult:
    start, stop = checked_range(prefix, *span)
    raw = b"".join(states)[: stop - start]
    missing = failure.chunk_state() if failure else int(pb.MISS_UNREACHABLE)
    packed = States(raw.ljust(stop - start, bytes([missing])))
    array = np.frombuffer(packed.raw, np.uint8)
    return ChunksResult(
        chunks=int(((array >= 1) & (array <= int(pb.NOT_NEEDED))).sum()),
        states=packed,
        reason=failure.reason if failure else packed.first_reason(),
        detail=failure.detail if failure else "",
    )


def _count_result(chunks: int, failure: Failure | None) -> CountResult:
    if failure is None:
        return CountResult(chunks)
    return CountResult(chunks, failure.reason, failure.detail)
