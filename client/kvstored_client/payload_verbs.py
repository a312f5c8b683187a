"""match, get and put, as step generators. No I/O; see steps.Verb.

Each checks everything that can be checked before its first step: from then on nothing raises, and
what goes wrong is in the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstored_client.buffers import Buffers, Regions, chunks_offered, destinations, sources
from kvstored_client.calling import MAX_TTL_MS, Calling, choice
from kvstored_client.config import CallOptions, checked_uint
from kvstored_client.errors import BufferCountError
from kvstored_client.failures import Failure
from kvstored_client.identity import KVPart, Prefix
from kvstored_client.matching import Matcher, unreachable_match
from kvstored_client.memory import checksum
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
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.receiving import GetReceiver, Receipt
from kvstored_client.results import GetResult, MatchResult, PutResult, States
from kvstored_client.sending import PutReceipt, PutSender, unconfirmed
from kvstored_client.session import Session
from kvstored_client.steps import Download, Upload, Verb, remaining_ms, run

_MODES = {"prefix": pb.PREFIX, "each": pb.EACH}
_DEPTHS = {"ram": pb.DEPTH_RAM, "node": pb.DEPTH_NODE, "pool": pb.DEPTH_POOL}
DURABILITIES = {"accepted": pb.ACCEPTED, "durable": pb.DURABLE}
WHEN_FULL = {"wait": pb.WAIT, "refuse": pb.REFUSE}
_NO_CHECKSUM = bytes(16)


class PayloadVerbs(Calling):
    """The verbs that an engine's hot path consists of."""

    # ---- match -----------------------------------------------------------------------------------

    def match(
        self,
        prefix: Prefix,
        parts: Sequence[str] | None,
        mode: str,
        depth: str,
        options: CallOptions,
    ) -> Verb[MatchResult]:
        """See KVClient.match."""
        checked_prefix(prefix)
        matcher = Matcher(
            prefix,
            checked_parts(prefix.family, parts),
            choice("mode", mode, _MODES),
            choice("depth", depth, _DEPTHS),
            self.namespace,
        )
        context, deadline = self.opening(options, self.timeouts.match_s)
        if not len(prefix):
            return MatchResult(0, 0, States(b""), 0, 0.0)
        answer = yield from self.keeper.with_family(
            prefix.family, context, deadline, lambda s: matcher.run(s, context, deadline)
        )
        if isinstance(answer, Failure):
            return unreachable_match(len(prefix), answer)
        return answer

    # ---- get -------------------------------------------------------------------------------------

    def get(
        self,
        prefix: Prefix,
        into: Buffers,
        start: int,
        stop: int | None,
        parts: Sequence[str] | None,
        bypass_ram: bool,
        options: CallOptions,
    ) -> Verb[GetResult]:
        """See KVClient.get."""
        start, stop = checked_range(checked_prefix(prefix), start, stop)
        table = get_table(prefix, start, stop, checked_parts(prefix.family, parts))
        receipt = Receipt.empty(table, destinations(into, table.want))
        context, deadline = self.opening(options, self.timeouts.get_s)
        if not len(table.want):
            return receipt.result()

        def attempt(session: Session) -> Verb[Failure | None]:
            keys = prefix.keys(session.salt)
            for cut in get_cuts(table, session.limits.max_keys_per_call):
                request = pb.GetRequest(
                    ctx=context,
                    run=table.run(cut, self.namespace, keys),
                    bypass_ram=bypass_ram,
                )
                request.ctx.deadline_ms = remaining_ms(deadline)
                step = Download(
                    request, GetReceiver(receipt, cut), deadline, _divisible_bytes(table, cut)
                )
                failure = yield from run(step)
                if failure is not None:
                    return failure
            return None

        outcome = yield from self.keeper.with_family(prefix.family, context, deadline, attempt)
        receipt.failure = outcome
        return receipt.result()

    # ---- put -------------------------------------------------------------------------------------

    def put(
        self,
        prefix: Prefix,
        views: Buffers,
        start: int,
        parts: Sequence[str] | None,
        durability: str,
        when_full: str,
        ttl_ms: int,
        options: CallOptions,
    ) -> Verb[PutResult]:
        """See KVClient.put."""
        checked_prefix(prefix)
        chosen = checked_parts(prefix.family, parts)
        start, stop = _put_range(prefix, views, start, chosen)
        table = put_table(prefix, start, stop, chosen)
        regions = sources(views, table.want)
        prototype = pb.PutHeader(
            durability=choice("durability", durability, DURABILITIES),
            when_full=choice("when_full", when_full, WHEN_FULL),
            ttl_ms=checked_uint("ttl_ms", ttl_ms, MAX_TTL_MS),
        )
        context, deadline = self.opening(options, self.timeouts.put_s)
        objects = len(table.want)
        receipt = PutReceipt(table, np.zeros(objects, np.uint8), regions.sizes > 0)
        if not receipt.offered.any():
            return receipt.result()
        checksums = _Checksums(regions)

        def attempt(session: Session) -> Verb[Failure | None]:
            keys = prefix.keys(session.salt)
            limits = session.limits
            cuts = put_cuts(table, regions.sizes, limits.max_keys_per_call, limits.max_put_bytes)
            for cut in cuts:
                a, b = _object_span(table, cut)
                if receipt.states[a:b].all():
                    continue  # settled before the daemon forgot the family

                def header(announce: bool, cut: Cut = cut, a: int = a, b: int = b) -> pb.PutHeader:
                    message = pb.PutHeader(
                        ctx=context,
                        run=table.run(cut, self.namespace, keys),
                        lengths_bytes=regions.sizes[a:b].tolist(),
                        checksums=checksums.of(a, b) if announce else b"",
                    )
                    message.MergeFrom(prototype)
                    message.ctx.deadline_ms = remaining_ms(deadline)
                    return message

                sender = PutSender(regions, a, regions.sizes[a:b], header)
                failure = yield from run(Upload(sender, deadline))
                settled = np.frombuffer(sender.states or sender.planned, np.uint8)
                if not sender.states and prototype.durability == pb.DURABLE:
                    settled = unconfirmed(settled)
                if len(settled):
                    receipt.states[a:b] = settled
                if failure is not None:
                    return failure
            return None

        receipt.failure = yield from self.keeper.with_family(
            prefix.family, context, deadline, attempt
        )
        return receipt.result()


def _put_range(
    prefix: Prefix, views: Buffers, start: int, parts: tuple[KVPart, ...]
) -> tuple[int, int]:
    """As many chunks from `start` on as the views have objects for."""
    start, end = checked_range(prefix, start, None)
    exact = [part.nbytes for part in parts if part.nbytes is not None]
    chunk_bytes = sum(exact) if len(exact) == len(parts) else None
    chunks = chunks_offered(views, len(parts), chunk_bytes)
    if start + chunks > end:
        raise BufferCountError(
            f"the views hold {chunks} chunks", f"the prefix has {end - start} from {start} on"
        )
    return start, start + chunks


def _divisible_bytes(table: ObjectTable, cut: Cut) -> int:
    """Most that a chunk of the cut has; 0 if by a group's rule it matters where a request ends."""
    parts = [table.parts[p] for p in cut.parts]
    groups = table.prefix.family.groups
    if any(groups[part.group].kind != "all" for part in parts):
        return 0
    return sum(part.nbytes or part.max_nbytes or 0 for part in parts)


def _object_span(table: ObjectTable, cut: Cut) -> tuple[int, int]:
    width = len(table.parts)
    return (cut.start - table.start) * width, (cut.stop - table.start) * width


class _Checksums:
    """Of a put's objects, from the caller's memory: when they are asked for, and once only."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._known: dict[int, bytes] = {}

    def of(self, begin: int, end: int) -> bytes:
        """Those of objects [begin, end), back to back; zeroes for one that is not offered."""
        for number in range(begin, end):
            if number not in self._known:
                offered = self._regions.sizes[number] > 0
                self._known[number] = checksum(self._regions, number) if offered else _NO_CHECKSUM
        return b"".join(self._known[number] for number in range(begin, end))
