"""The verbs, apart from any transport. Everything here runs on the verbs' loop.

Small verbs take (request, caller) and give the reply; Get, Put and Acquire are in `payload_calls`.
Those that need not wait have a twin, `..._now`, that is no coroutine: the local session answers a
request without a task.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Coroutine, Iterator, Mapping
from typing import TypeVar

from kvstored import __version__
from kvstored.errors import BadRequest, Draining, KvstoredError
from kvstored.server import validation as check
from kvstored.server.auth import Auth, Caller
from kvstored.server.limits import KEY_BYTES, Limits
from kvstored.server.operators import Operators
from kvstored.server.ports import CallObserver, HoldSink, StorePort, VolumesPort
from kvstored.server.shares import Shares
from kvstored.store.api import Leased, MatchAnswer, Run
from kvstored_client.proto import admin_pb2 as admin
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.methods import PROTOCOL_VERSION

_log = logging.getLogger(__name__)
_REPLY_MARGIN_S = 0.020
MAX_POOL_MATCH_S = 5.0
"""What a match that asks a bucket may take, for callers that give it longer."""

_T = TypeVar("_T")


class Dispatcher:
    """Serves the verbs from an opened store.

    `salts` maps each namespace to its 32-byte salt. `durable` says that a persistent tier is
    configured, `local` that local sessions are served. `volumes` are those of the NVMe tier, where
    there is one. `observer` hears of every call that ended.
    """

    def __init__(
        self,
        store: StorePort,
        auth: Auth,
        salts: Mapping[str, bytes],
        *,
        limits: Limits | None = None,
        durable: bool = False,
        local: bool = False,
        volumes: VolumesPort | None = None,
        observer: CallObserver | None = None,
    ) -> None:
        missing = [n for n in auth.namespaces if len(salts.get(n, b"")) != KEY_BYTES]
        if missing:
            msg = f"no 32-byte salt for namespaces {missing}"
            raise ValueError(msg)
        self.store = store
        self.auth = auth
        self.operators = Operators(self, volumes)
        self.limits = limits or Limits()
        retry_ms = self.limits.retry_after_ms
        self.calls = Shares(self.limits.max_running_calls, "calls", retry_ms)
        self.streams = Shares(self.limits.max_running_streams, "payload streams", retry_ms)
        self._salts = dict(salts)
        self._features = [pb.FEATURE_PREFETCH, pb.FEATURE_PIN, pb.FEATURE_USAGE]
        if durable:
            self._features.append(pb.FEATURE_DURABLE)
        if local:
            self._features.append(pb.FEATURE_LOCAL)
        self._observer = observer
        self._born = time.monotonic()
        self._draining = False
        self._finishing: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.open_payload_calls = 0

    # ---- life ------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether new calls are refused. May be read from any thread."""
        return self._draining

    def start_draining(self) -> None:
        """Refuse new calls from now on. May be called from any thread."""
        self._draining = True

    async def idle(self) -> None:
        """Return when no payload call is open and no commit or delete under way."""
        await self._idle.wait()

    def payload_call_began(self) -> None:
        """Count a payload call that may hold leases or a ticket."""
        self.open_payload_calls += 1
        self._note_idle()

    def payload_call_ended(self) -> None:
        """The twin of `payload_call_began`."""
        self.open_payload_calls -= 1
        self._note_idle()

    def _note_idle(self) -> None:
        if self.open_payload_calls or self._finishing:
            self._idle.clear()
        else:
            self._idle.set()

    async def finish(self, work: Coroutine[object, object, _T]) -> _T:
        """Run work that must reach its end although the caller may be cancelled meanwhile."""
        task = asyncio.ensure_future(work)
        self._finishing.add(task)
        self._note_idle()
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    def _finished(self, task: asyncio.Task[object]) -> None:
        self._finishing.discard(task)
        self._note_idle()
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, KvstoredError):
            _log.error("work in the store failed", exc_info=error)

    # ---- common steps ----------------------------------------------------------------------------

    def admit(self, caller: Caller, namespace: str) -> None:
        """Raise Draining or Unauthenticated, in that order."""
        if self._draining:
            raise Draining("the daemon is stopping", "call another node, or again after a restart")
        self.auth.require_namespace(namespace, caller.token, caller.transport)

    def deadlines(self, caller: Caller, context: pb.Context) -> tuple[float, float]:
        """(transport's, store's) deadlines, time.monotonic(): the earliest of all, and a little
        before it, so that an answer that says "too late" still arrives in time.
        """
        end = min(caller.deadline, caller.started + self.limits.max_call_s)
        if context.deadline_ms:
            end = min(end, caller.started + context.deadline_ms / 1000)
        left = max(0.0, end - caller.started)
        return end, end - min(_REPLY_MARGIN_S, left / 10)

    def run_of(self, message: pb.ChunkRun, context: pb.Context) -> Run:
        """Validate a run. The caller must have been admitted to its namespace."""
        check.check_context(context, self.limits)
        check.check_run(message, self.limits)
        family = self.store.family(message.namespace, message.family)
        run = check.build_run(message, context, family, self.limits)
        # What is accounted under it lives for ever: beyond the bound it becomes "other".
        tenant = self.store.accounts.tenant_label(run.namespace, run.tenant)
        return run if tenant == run.tenant else dataclasses.replace(run, tenant=tenant)

    @contextlib.contextmanager
    def observed(self, verb: str, caller: Caller) -> Iterator[None]:
        """Report the call's outcome to the observer."""
        outcome = "ok"
        try:
            yield
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            self.report(verb, outcome, caller, "")

    @contextlib.contextmanager
    def serving(self, verb: str, caller: Caller, namespace: str) -> Iterator[None]:
        """Serve a small verb: report it, admit its caller, hold its share of the namespace's."""
        with self.observed(verb, caller):
            self.admit(caller, namespace)
            with self.calls.taken(namespace):
                yield

    def report(self, verb: str, outcome: str, caller: Caller, tier: str) -> None:
        """Tell the observer that a call has ended."""
        if self._observer is not None:
            seconds = time.monotonic() - caller.started
            self._observer.call_ended(verb, outcome, seconds, tier)

    # ---- small verbs -----------------------------------------------------------------------------

    async def hello(self, request: pb.HelloRequest, caller: Caller) -> pb.HelloReply:
        """Versions, features, salt and limits; declares families."""
        with self.serving("hello", caller, request.namespace):
            check.check_hello(request, self.limits)
            for spec in request.families:
                await self.store.declare(request.namespace, spec)
            return pb.HelloReply(
                protocol_version=min(request.protocol_version, PROTOCOL_VERSION),
                min_protocol_version=check.MIN_PROTOCOL_VERSION,
                server=f"kvstored/{__version__}",
                boot_epoch=self.store.boot_epoch,
                features=self._features,
                namespace_salt=self._salts[request.namespace],
                limits=self.limits.to_proto(),
            )

    async def match(
        self, request: pb.MatchRequest, caller: Caller, holds: HoldSink | None = None
    ) -> pb.MatchReply:
        """Which chunks are held, and where. `holds` takes what the request asks to hold; None:
        holds are refused.
        """
        if request.depth != pb.DEPTH_POOL:
            return self.match_now(request, caller, holds)
        with self.serving("match", caller, request.run.namespace):
            run = self.run_of(request.run, request.ctx)
            check.check_match(request, holdable=holds is not None)
            _, deadline = self.deadlines(caller, request.ctx)
            deadline = min(deadline, caller.started + MAX_POOL_MATCH_S)
            answer = await self.store.match_pool(run, request.mode, deadline)
            return self._matched(request, run, answer, holds)

    def match_now(
        self, request: pb.MatchRequest, caller: Caller, holds: HoldSink | None = None
    ) -> pb.MatchReply:
        """The same, of this node alone."""
        with self.serving("match", caller, request.run.namespace):
            run = self.run_of(request.run, request.ctx)
            check.check_match(request, holdable=holds is not None)
            answer = self.store.match(run, request.mode, request.depth)
            return self._matched(request, run, answer, holds)

    def _matched(
        self, request: pb.MatchRequest, run: Run, answer: MatchAnswer, holds: HoldSink | None
    ) -> pb.MatchReply:
        if request.hold and holds is not None:
            self._hold(run, answer.states, request.hold_id, holds)
        return pb.MatchReply(
            chunks=answer.chunks,
            tokens=answer.tokens,
            states=answer.states,
            payload_bytes=answer.payload_bytes,
            eta_ms=answer.eta_ms,
        )

    def _hold(self, run: Run, states: bytes, hold_id: int, holds: HoldSink) -> None:
        keys, charged_bytes = self.store.hold(run, states)
        try:
            holds.add_hold(hold_id, keys, charged_bytes)
        except BaseException:
            self.store.unhold(run.namespace, keys)
            raise

    def acquire_now(
        self, request: pb.AcquireRequest, caller: Caller, max_bytes: int
    ) -> tuple[Leased, bytes] | None:
        """What the request asks for, leased, and the ChunkStates, if all of it is in RAM and within
        `max_bytes`, padded; else None, and nothing is leased or counted: see AcquireCall.
        """
        self.admit(caller, request.run.namespace)
        if not request.lease_id:
            raise BadRequest("lease_id is 0", "choose an id that the session does not use yet")
        with self.calls.taken(request.run.namespace):
            run = self.run_of(request.run, request.ctx)
            answer = self.store.acquire_now(run, max_bytes)
        if answer is not None:
            self.report("acquire", "ok", caller, "ram")
        return answer

    async def touch(self, request: pb.TouchRequest, caller: Caller) -> pb.TouchReply:
        """Mark chunks as used, and renew their time to live."""
        return self.touch_now(request, caller)

    def touch_now(self, request: pb.TouchRequest, caller: Caller) -> pb.TouchReply:
        """The same."""
        with self.serving("touch", caller, request.run.namespace):
            run = self.run_of(request.run, request.ctx)
            ttl_ms = check.check_ttl("ttl_ms", request.ttl_ms, self.limits)
            return pb.TouchReply(states=self.store.touch(run, ttl_ms))

    async def delete(self, request: pb.DeleteRequest, caller: Caller) -> pb.DeleteReply:
        """Drop chunks. Runs to its end once begun."""
        with self.serving("delete", caller, request.run.namespace):
            run = self.run_of(request.run, request.ctx)
            check.check_delete(request)
            corrupt = request.reason == pb.DeleteRequest.CORRUPT
            _, deadline = self.deadlines(caller, request.ctx)
            work = self.store.delete(run, corrupt, deadline)
            return pb.DeleteReply(deleted=await self.finish(work))

    async def prefetch(self, request: pb.PrefetchRequest, caller: Caller) -> pb.PrefetchReply:
        """Bring chunks into RAM."""
        with self.serving("prefetch", caller, request.run.namespace):
            run = self.run_of(request.run, request.ctx)
            _, deadline = self.deadlines(caller, request.ctx)
            return pb.PrefetchReply(states=await self.store.prefetch(run, deadline))

    async def pin(self, request: pb.PinRequest, caller: Caller) -> pb.PinReply:
        """Protect chunks from eviction."""
        return self.pin_now(request, caller)

    def pin_now(self, request: pb.PinRequest, caller: Caller) -> pb.PinReply:
        """The same."""
        with self.serving("pin", caller, request.run.namespace):
            run = self.run_of(request.run, request.ctx)
            ttl_ms = check.check_ttl("ttl_ms", request.ttl_ms, self.limits)
            states = self.store.pin(run, ttl_ms)
            return pb.PinReply(states=states, pinned=sum(s < pb.NOT_NEEDED for s in states))

    async def unpin(self, request: pb.UnpinRequest, caller: Caller) -> pb.UnpinReply:
        """End protection."""
        return self.unpin_now(request, caller)

    def unpin_now(self, request: pb.UnpinRequest, caller: Caller) -> pb.UnpinReply:
        """The same."""
        with self.serving("unpin", caller, request.run.namespace):
            return pb.UnpinReply(unpinned=self.store.unpin(self.run_of(request.run, request.ctx)))

    async def list(self, request: pb.ListRequest, caller: Caller) -> pb.ListReply:
        """One page of a namespace's keys."""
        return self.list_now(request, caller)

    def list_now(self, request: pb.ListRequest, caller: Caller) -> pb.ListReply:
        """The same."""
        with self.serving("list", caller, request.namespace):
            check.check_context(request.ctx, self.limits)
            limit = check.check_list(request, self.limits)
            return self.store.list(request.namespace, request.family, request.cursor, limit)

    async def usage(self, request: pb.UsageRequest, caller: Caller) -> pb.UsageReply:
        """What a namespace and its tenants hold."""
        return self.usage_now(request, caller)

    def usage_now(self, request: pb.UsageRequest, caller: Caller) -> pb.UsageReply:
        """The same."""
        with self.serving("usage", caller, request.namespace):
            check.check_context(request.ctx, self.limits)
            return self.store.usage(request.namespace)

    async def status(self, _request: admin.StatusRequest, caller: Caller) -> admin.StatusReply:
        """One picture of the daemon, also while it drains. Operators only."""
        with self.observed("status", caller):
            self.auth.require_admin(caller.token, caller.transport)
            reply = self.store.status()
            reply.version = __version__
            reply.boot_epoch = self.store.boot_epoch
            reply.uptime_ms = int((time.monotonic() - self._born) * 1000)
            reply.phase = "draining" if self._draining else "ready"
            return reply


def outcome_of(error: BaseException) -> str:
    """An exception as the observer names it."""
    if isinstance(error, KvstoredError):
        return pb.ErrorCode.Name(error.code)
    return "CANCELLED" if isinstance(error, asyncio.CancelledError) else "INTERNAL"
