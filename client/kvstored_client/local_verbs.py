"""acquire, reserve and a match that holds, as step generators. No I/O; see steps.Verb."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvstored_client.calling import MAX_TTL_MS, choice
from kvstored_client.config import CallOptions, checked_uint
from kvstored_client.errors import BufferCountError, BufferSizeError
from kvstored_client.failures import NOT_LOCAL, Failure, GarbageError
from kvstored_client.identity import Prefix
from kvstored_client.local.grants import Grant, Granted, Held, Reserved
from kvstored_client.local.lease import Hold, Lease
from kvstored_client.local.leasing import Leasing
from kvstored_client.objects import (
    Cut,
    ObjectTable,
    checked_parts,
    checked_prefix,
    checked_range,
    get_cuts,
    get_table,
    put_cuts,
    put_table,
)
from kvstored_client.payload_verbs import DURABILITIES, WHEN_FULL, PayloadVerbs
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods
from kvstored_client.results import MatchResult, PutResult
from kvstored_client.sending import PutReceipt, unconfirmed
from kvstored_client.session import Session
from kvstored_client.steps import Acquire, Answer, Commit, Reserve, Unary, Verb, remaining_ms
from kvstored_client.steps import Hold as HoldStep

_ALIGNMENT = 4096


class LocalVerbs(PayloadVerbs):
    """Verbs that need the daemon on this node."""

    # ---- acquire ---------------------------------------------------------------------------------

    def acquire(
        self,
        prefix: Prefix,
        start: int,
        stop: int | None,
        parts: Sequence[str] | None,
        options: CallOptions,
    ) -> Verb[Lease]:
        """See KVClient.acquire."""
        start, stop = checked_range(checked_prefix(prefix), start, stop)
        table = get_table(prefix, start, stop, checked_parts(prefix.family, parts))
        context, deadline = self.opening(options, self.timeouts.get_s)
        leasing = Leasing(table)
        if not len(table.want):
            return leasing.lease()

        def attempt(session: Session) -> Verb[Failure | None]:
            keys = prefix.keys(session.salt)
            for cut in get_cuts(table, session.limits.max_keys_per_call)[len(leasing.grants) :]:
                request = pb.AcquireRequest(ctx=context, run=table.run(cut, self.namespace, keys))
                answer = yield Acquire(request, deadline)
                if isinstance(answer, Granted):
                    failure = leasing.take(cut, answer)
                else:
                    failure = _failure(answer)
                if failure is not None:
                    return failure
            return None

        leasing.failure = yield from self.keeper.with_family(
            prefix.family, context, deadline, attempt
        )
        return leasing.lease()

    # ---- reserve and commit ----------------------------------------------------------------------

    def reserve(
        self,
        prefix: Prefix,
        start: int,
        stop: int | None,
        parts: Sequence[str] | None,
        lengths: Sequence[int] | None,
        when_full: str,
        ttl_ms: int,
        options: CallOptions,
    ) -> Verb[tuple[PutReceipt, NDArray[np.int64], list[tuple[Cut, Grant]], NDArray[np.int64]]]:
        """See KVClient.reserve. What Slots is made of."""
        start, stop = checked_range(checked_prefix(prefix), start, stop)
        table = put_table(prefix, start, stop, checked_parts(prefix.family, parts))
        sizes = _checked_lengths(table, lengths)
        full = choice("when_full", when_full, WHEN_FULL)
        checked_uint("ttl_ms", ttl_ms, MAX_TTL_MS)
        context, deadline = self.opening(options, self.timeouts.put_s)
        receipt = PutReceipt(table, np.zeros(len(sizes), np.uint8), sizes > 0)
        addresses = np.zeros(len(sizes), np.int64)
        reservations: list[tuple[Cut, Grant]] = []
        if not receipt.offered.any():
            return receipt, sizes, reservations, addresses
        width = len(table.parts)
        padded = -(-sizes // _ALIGNMENT) * _ALIGNMENT

        def attempt(session: Session) -> Verb[Failure | None]:
            keys = prefix.keys(session.salt)
            limits = session.limits
            for cut in put_cuts(table, padded, limits.max_keys_per_call, limits.max_put_bytes):
                a, b = (cut.start - start) * width, (cut.stop - start) * width
                if receipt.states[a:b].all():
                    continue  # settled before the daemon forgot the family
                request = pb.ReserveRequest(
                    ctx=context,
                    run=table.run(cut, self.namespace, keys),
                    lengths_bytes=sizes[a:b].tolist(),
                    when_full=full,
                    ttl_ms=ttl_ms,
                )
                request.ctx.deadline_ms = remaining_ms(deadline)
                answer = yield Reserve(request, deadline)
                if not isinstance(answer, Reserved):
                    return _failure(answer)
                receipt.states[a:b] = np.frombuffer(answer.states, np.uint8)
                addresses[a:b] = answer.addresses
                reservations.append((cut, answer.grant))
            return None

        receipt.failure = yield from self.keeper.with_family(
            prefix.family, context, deadline, attempt
        )
        return receipt, sizes, reservations, addresses

    def commit(
        self,
        receipt: PutReceipt,
        reservations: list[tuple[Cut, Grant]],
        wanted: NDArray[np.bool_],
        durability: str,
        options: CallOptions,
    ) -> Verb[PutResult]:
        """See Slots.commit. `wanted`: per object, whether it was written."""
        how = choice("durability", durability, DURABILITIES)
        context, deadline = self.opening(options, self.timeouts.put_s)
        table = receipt.table
        width = len(table.parts)
        states = receipt.states.copy()
        states[(states == int(pb.WANTED)) & ~wanted] = int(pb.NOT_OFFERED)
        failure = receipt.failure
        try:
            for cut, grant in reservations:
                a, b = (cut.start - table.start) * width, (cut.stop - table.start) * width
                indices = np.flatnonzero(wanted[a:b]).tolist()
                named = wanted[a:b].copy()
                if how == pb.DURABLE:  # also of what existed one wants to know
                    named |= states[a:b] == int(pb.EXISTED)
                    states[a:b] = unconfirmed(states[a:b])
                # No indices: all that was reserved.
                if not indices and (not named.any() or pb.WANTED in receipt.states[a:b]):
                    continue
                request = pb.CommitRequest(ctx=context, durability=how, indices=indices)
                request.ctx.deadline_ms = remaining_ms(deadline)
                answer = yield Commit(request, grant, deadline)
                problem = _committed(answer, states[a:b], named)
                failure = failure or problem
        finally:
            for _, grant in reservations:
                grant.end()
        self.keeper.noted(failure)
        return PutReceipt(table, states, receipt.offered, failure).result()

    # ---- a match that holds ----------------------------------------------------------------------

    def held_match(
        self,
        prefix: Prefix,
        parts: Sequence[str] | None,
        mode: str,
        depth: str,
        options: CallOptions,
    ) -> Verb[MatchResult]:
        """See KVClient.match with `hold`. Where there is no local session: without."""
        verb = self.match(prefix, parts, mode, depth, options)
        grants: list[Grant] = []
        answer: Answer
        try:
            step = next(verb)
            while True:
                if isinstance(step, Unary) and step.method == methods.MATCH:
                    request = step.request
                    assert isinstance(request, pb.MatchRequest)
                    answer = yield HoldStep(request, step.deadline)
                    if isinstance(answer, Held):
                        grants.append(answer.grant)
                        answer = answer.reply
                    elif isinstance(answer, Failure) and answer.kind is NOT_LOCAL.kind:
                        request.hold, request.hold_id = False, 0
                        answer = yield step
                else:
                    answer = yield step
                step = verb.send(answer)
        except StopIteration as end:
            result: MatchResult = end.value
        finally:
            verb.close()
        hold = Hold(grants)
        if not result.chunks:
            hold.release()
            return result
        return replace(result, hold=hold) if grants else result


def _failure(answer: Answer) -> Failure:
    if isinstance(answer, Failure):
        return answer
    return GarbageError("a step was answered by something else").failure()


def _committed(
    answer: Answer, states: NDArray[np.uint8], wanted: NDArray[np.bool_]
) -> Failure | None:
    """Write the final states of one commit's objects into `states`."""
    if not isinstance(answer, pb.PutReply):
        return _failure(answer)
    final = np.frombuffer(answer.states, np.uint8)
    if len(final) != len(states) or (final[wanted] == int(pb.WANTED)).any():
        return GarbageError(f"a commit of {len(states)} objects has {len(final)} states").failure()
    states[wanted] = final[wanted]
    return None


def _checked_lengths(table: ObjectTable, lengths: Sequence[int] | None) -> NDArray[np.int64]:
    want = table.want
    if lengths is None:
        return want.nbytes.copy()
    if len(lengths) != len(want):
        raise BufferCountError(f"{len(lengths)} lengths for {len(want)} objects")
    for number, length in enumerate(lengths):
        checked_uint("lengths", length, int(want.nbytes[number]) + 1)
        if want.exact[number] and length not in (0, int(want.nbytes[number])):
            raise BufferSizeError(
                f"{want.names[number]} has {want.nbytes[number]} bytes, not {length}"
            )
    return np.asarray(lengths, np.int64)
