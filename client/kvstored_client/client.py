"""The blocking client."""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from kvstored_client import results
from kvstored_client.buffers import Buffers
from kvstored_client.config import (
    CallOptions,
    Timeouts,
    checked_namespace,
    checked_salt,
    checked_target,
    checked_timeout,
    checked_token,
    context_of,
)
from kvstored_client.errors import ClosedError
from kvstored_client.identity import Prefix
from kvstored_client.jobs import Job, Jobs
from kvstored_client.local import forking
from kvstored_client.local.grants import Grant
from kvstored_client.local.lease import Lease
from kvstored_client.local.slots import Slots
from kvstored_client.objects import Cut
from kvstored_client.session import SessionKeeper
from kvstored_client.steps import Verb
from kvstored_client.transports.auto import AutoTransport
from kvstored_client.verbs import Verbs

_Result = TypeVar("_Result")


class KVClient:
    """A client of one daemon and namespace. Thread-safe; connects with the first call.

    `target`: "unix:///path/to/kvstored.sock" or "dns:///host:port". `token`: the namespace's bearer
    token, where it needs one. `tenant`: label for accounting, which a call can replace. `salt`: the
    namespace's salt, 32 bytes; by default the daemon gives it. Raises OptionError.

    On the daemon's own node bytes move through shared memory; elsewhere, and where that cannot be
    had, by gRPC.

    Every verb takes `timeout_s`, `tenant`, `request_id` and `hints` (see CallOptions). A call that
    cannot be made as written raises a UsageError before anything is sent. Whatever else goes wrong
    (no daemon, a late, dying or broken one, overload, a wrong token) is a miss or a refusal with a
    reason, within the deadline, and is logged once; only `hello`, `check`, `list`, `usage` and
    `status` raise ServiceError for it. When a call has returned, nothing of the caller's memory is
    read or written any more. A client survives os.fork, in parent and child, and a restart of the
    daemon.
    """

    def __init__(
        self,
        target: str,
        namespace: str = "default",
        token: str | None = None,
        tenant: str = "",
        timeouts: Timeouts | None = None,
        salt: bytes | None = None,
    ) -> None:
        self.target = checked_target(target)
        self.namespace = checked_namespace(namespace)
        context_of({}, tenant)
        self._keeper = SessionKeeper(self.target, self.namespace, checked_salt(salt))
        self._transport = AutoTransport(self.target, self.namespace, checked_token(token))
        self._jobs = Jobs(self._transport)
        self._verbs = Verbs(self._keeper, self.namespace, tenant, timeouts or Timeouts())
        self._closed = False
        self._calls = 0
        self._idle = threading.Condition()
        forking.join(self)

    def __enter__(self) -> KVClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<KVClient {self.target} namespace={self.namespace!r}>"

    # ---- the hot verbs ---------------------------------------------------------------------------

    def match(
        self,
        prefix: Prefix,
        parts: Sequence[str] | None = None,
        mode: str = "prefix",
        depth: str = "node",
        *,
        hold: bool = False,
        **options: Unpack[CallOptions],
    ) -> results.MatchResult:
        """Which chunks of a prefix are held, and where. Moves no payload.

        `parts`: names of the parts that must be there; None: all of the family's. `mode`: "prefix"
        (the longest boundary at which every group's rule holds) or "each" (every chunk by itself).
        `depth`: how far to look: "ram", "node" or "pool". `hold`: protect what was found from
        eviction, until `MatchResult.hold` is released or dropped, or this client acquires it.
        """
        if hold:
            return self._run(self._verbs.held_match(prefix, parts, mode, depth, options))
        return self._run(self._verbs.match(prefix, parts, mode, depth, options))

    def get(
        self,
        prefix: Prefix,
        into: Buffers,
        start: int = 0,
        stop: int | None = None,
        parts: Sequence[str] | None = None,
        *,
        bypass_ram: bool = False,
        **options: Unpack[CallOptions],
    ) -> results.GetResult:
        """Read chunks [start, stop) into the caller's memory; every object is verified.

        `into` names the memory of the objects, chunk by chunk and within a chunk in the order of
        `parts`: one big buffer (objects back to back, each at a part's full size), a sequence of
        buffers, `Rows` or `Iov`. Where a group's rule needs only some chunks (`trailing`, `last`),
        only those are objects of the call, as resuming after `stop` chunks asks. `bypass_ram`: keep
        no copy in the daemon's RAM.

        Raises UsageError (RangeError, UnknownPartError, a BufferUsageError) and nothing else.
        """
        return self._run(self._verbs.get(prefix, into, start, stop, parts, bypass_ram, options))

    def put(
        self,
        prefix: Prefix,
        views: Buffers,
        start: int = 0,
        parts: Sequence[str] | None = None,
        durability: str = "accepted",
        when_full: str = "wait",
        ttl_ms: int = 0,
        **options: Unpack[CallOptions],
    ) -> results.PutResult:
        """Offer chunks from `start` on, as many as `views` hold, for keeping.

        `views` as `into` of get, for every part of every chunk; None in a sequence leaves an object
        out. What is held already is not sent. `durability`: "accepted" (readable, in RAM) or
        "durable" (on a persistent tier, synced). `when_full`: "wait" for room until the deadline,
        or "refuse". `ttl_ms` 0: the namespace's default.

        Raises UsageError and nothing else.
        """
        return self._run(
            self._verbs.put(prefix, views, start, parts, durability, when_full, ttl_ms, options)
        )

    # ---- in the daemon's own memory --------------------------------------------------------------

    def acquire(
        self,
        prefix: Prefix,
        start: int = 0,
        stop: int | None = None,
        parts: Sequence[str] | None = None,
        **options: Unpack[CallOptions],
    ) -> Lease:
        """Look at chunks [start, stop) where they lie; nothing is copied. See Lease.

        What is not in RAM is brought there first. Raises UsageError and nothing else.
        """
        return self._run(self._verbs.acquire(prefix, start, stop, parts, options))

    def reserve(
        self,
        prefix: Prefix,
        start: int = 0,
        stop: int | None = None,
        parts: Sequence[str] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        when_full: str = "wait",
        ttl_ms: int = 0,
        **options: Unpack[CallOptions],
    ) -> Slots:
        """Room for chunks [start, stop), to be written in place and committed. See Slots.

        `lengths`: bytes per object, in object order, 0 to leave one out; None: each part's full
        size. `when_full` and `ttl_ms` as for put. Raises UsageError and nothing else.
        """
        receipt, sizes, reservations, addresses = self._run(
            self._verbs.reserve(prefix, start, stop, parts, lengths, when_full, ttl_ms, options)
        )

        def commit(
            slots: Slots,
            taken: list[tuple[Cut, Grant]],
            wanted: NDArray[np.bool_],
            durability: str,
        ) -> results.PutResult:
            return self._run(self._verbs.commit(slots.receipt, taken, wanted, durability, options))

        return Slots(receipt, sizes, reservations, addresses, commit)

    # ---- behind the caller's back ----------------------------------------------------------------

    def submit_get(
        self,
        prefix: Prefix,
        into: Buffers,
        start: int = 0,
        stop: int | None = None,
        parts: Sequence[str] | None = None,
        *,
        bypass_ram: bool = False,
        **options: Unpack[CallOptions],
    ) -> Job[results.GetResult]:
        """`get`, without waiting for it. See Job. Raises as get does."""
        return self._jobs.submit(
            self._verbs.get(prefix, into, start, stop, parts, bypass_ram, options)
        )

    def submit_put(
        self,
        prefix: Prefix,
        views: Buffers,
        start: int = 0,
        parts: Sequence[str] | None = None,
        durability: str = "accepted",
        when_full: str = "wait",
        ttl_ms: int = 0,
        **options: Unpack[CallOptions],
    ) -> Job[results.PutResult]:
        """`put`, without waiting for it. See Job. Raises as put does."""
        return self._jobs.submit(
            self._verbs.put(prefix, views, start, parts, durability, when_full, ttl_ms, options)
        )

    @property
    def completion_fd(self) -> int:
        """See Jobs.completion_fd: readable while `completed` has something to tell."""
        return self._jobs.completion_fd

    def completed(self) -> builtins.list[Job[object]]:
        """Jobs that have ended since it was last asked. See Jobs.completed."""
        return self._jobs.completed()

    # ---- the small verbs -------------------------------------------------------------------------

    def touch(
        self,
        prefix: Prefix,
        start: int = 0,
        stop: int | None = None,
        parts: Sequence[str] | None = None,
        ttl_ms: int = 0,
        **options: Unpack[CallOptions],
    ) -> results.ChunksResult:
        """Mark chunks as just used; `ttl_ms` above 0 renews their time to live."""
        return self._run(self._verbs.touch(prefix, (start, stop), parts, ttl_ms, options))

    def prefetch(
        self,
        prefix: Prefix,
        start: int = 0,
        stop: int | None = None,
        parts: Sequence[str] | None = None,
        **options: Unpack[CallOptions],
    ) -> results.ChunksResult:
        """Bring chunks up into the daemon's RAM without sending them."""
        return self._run(self._verbs.prefetch(prefix, (start, stop), parts, options))

    def pin(
        self,
        prefix: Prefix,
        start: int = 0,
        stop: int | None = None,
        parts: Sequence[str] | None = None,
        ttl_ms: int = 0,
        **options: Unpack[CallOptions],
    ) -> results.ChunksResult:
        """Protect chunks from eviction until `unpin`, or `ttl_ms` (0: the daemon's limit)."""
        return self._run(self._verbs.pin(prefix, (start, stop), parts, ttl_ms, options))

    def unpin(
        self,
        prefix: Prefix,
        start: int = 0,
        stop: int | None = None,
        parts: Sequence[str] | None = None,
        **options: Unpack[CallOptions],
    ) -> results.CountResult:
        """End the protection that `pin` gave."""
        return self._run(self._verbs.unpin(prefix, (start, stop), parts, options))

    def delete(
        self,
        prefix: Prefix,
        start: int = 0,
        stop: int | None = None,
        parts: Sequence[str] | None = None,
        reason: str = "requested",
        **options: Unpack[CallOptions],
    ) -> results.CountResult:
        """Drop chunks for good. `reason` "corrupt" lets them be written again with other bytes."""
        return self._run(self._verbs.delete(prefix, (start, stop), parts, reason, options))

    # ---- verbs that answer or raise --------------------------------------------------------------

    def hello(self, **options: Unpack[CallOptions]) -> results.HelloResult:
        """Ask who answers there. Raises ServiceError, so it tells what a miss leaves unsaid."""
        return self._run(self._verbs.hello(options))

    def check(self, **options: Unpack[CallOptions]) -> None:
        """Raise a ServiceError unless a daemon answers that this client can use."""
        self.hello(**options)

    def list(
        self,
        family: bytes = b"",
        page_entries: int = 0,
        **options: Unpack[CallOptions],
    ) -> Iterator[results.ListEntry]:
        """The namespace's chunks, page by page while you iterate; each page has its own deadline.

        `family`: a fingerprint, or empty for all. `page_entries` 0: the daemon's default. Chunks
        that stay throughout are listed exactly once. Raises ServiceError.
        """
        cursor = b""
        while True:
            entries, cursor = self._run(
                self._verbs.list_page(family, cursor, page_entries, options)
            )
            yield from entries
            if not cursor:
                return

    def usage(self, **options: Unpack[CallOptions]) -> results.UsageResult:
        """What the namespace and its tenants hold, per tier. Raises ServiceError."""
        return self._run(self._verbs.usage(options))

    def status(self, **options: Unpack[CallOptions]) -> results.StatusResult:
        """One picture of the daemon, for operators. Raises ServiceError."""
        return self._run(self._verbs.status(options))

    # ---- life ------------------------------------------------------------------------------------

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Wait until no call and no job of this client is under way; whether that came within
        `timeout_s`.
        """
        end = time.monotonic() + checked_timeout("timeout_s", timeout_s)
        with self._idle:
            while self._calls:
                left = end - time.monotonic()
                if left <= 0 or not self._idle.wait(left):
                    return not self._calls
        return self._jobs.drain(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """End running calls and jobs (their results say "closed") and disconnect. Idempotent.

        Leases outlast it: the session ends when the last view of it is gone.
        """
        self._closed = True
        self._jobs.close()
        self._transport.close()

    def after_fork_in_child(self) -> None:
        """The parent's calls are not the child's, and its locks may be held for ever."""
        self._idle = threading.Condition()
        self._calls = 0
        self._keeper.after_fork_in_child()

    def _run(self, verb: Verb[_Result]) -> _Result:
        if self._closed:
            raise ClosedError("the client was closed", "make another one")
        with self._idle:
            self._calls += 1
        try:
            self._transport.nudge()
            step = next(verb)
            while True:
                step = verb.send(self._transport.run(step))
        except StopIteration as end:
            result: _Result = end.value
            return result
        finally:
            verb.close()
            with self._idle:
                self._calls -= 1
                if not self._calls:
                    self._idle.notify_all()
