"""The asyncio client."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import TypeVar, Unpack, cast

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
from kvstored_client.local.grants import Grant
from kvstored_client.local.lease import Lease
from kvstored_client.local.slots import Slots
from kvstored_client.objects import Cut
from kvstored_client.results import PutResult
from kvstored_client.sending import PutReceipt
from kvstored_client.session import SessionKeeper
from kvstored_client.steps import Verb
from kvstored_client.transports.auto_async import AsyncAutoTransport
from kvstored_client.verbs import Verbs

_Result = TypeVar("_Result")


_Commit = Callable[[Slots, list[tuple[Cut, Grant]], NDArray[np.bool_], str], Awaitable[PutResult]]


class AsyncSlots(Slots):
    """Slots whose `commit` is awaited."""

    def __init__(
        self,
        receipt: PutReceipt,
        lengths: NDArray[np.int64],
        reservations: list[tuple[Cut, Grant]],
        addresses: NDArray[np.int64],
        commit: _Commit,
    ) -> None:
        super().__init__(
            receipt, lengths, reservations, addresses, cast("Callable[..., PutResult]", commit)
        )

    async def commit(  # type: ignore[override]  # as the whole client is to the blocking one
        self, indices: Sequence[int] | None = None, durability: str = "accepted"
    ) -> PutResult:
        """See Slots.commit."""
        return await cast("Awaitable[PutResult]", super().commit(indices, durability))


class AsyncKVClient:
    """KVClient for asyncio: the same arguments, verbs and promises.

    On the daemon's own node steps run on threads, through shared memory; elsewhere, and where that
    cannot be had, on grpc.aio. Belongs to one event loop at a time. A verb that is cancelled has
    stopped touching the caller's memory when CancelledError leaves it. Does not survive a fork:
    make another one in the child.
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
        keeper = SessionKeeper(self.target, self.namespace, checked_salt(salt))
        self._transport = AsyncAutoTransport(self.target, self.namespace, checked_token(token))
        self._verbs = Verbs(keeper, self.namespace, tenant, timeouts or Timeouts())
        self._closed = False
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> AsyncKVClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncKVClient {self.target} namespace={self.namespace!r}>"

    # ---- the hot verbs ---------------------------------------------------------------------------

    async def match(
        self,
        prefix: Prefix,
        parts: Sequence[str] | None = None,
        mode: str = "prefix",
        depth: str = "node",
        *,
        hold: bool = False,
        **options: Unpack[CallOptions],
    ) -> results.MatchResult:
        """See KVClient.match."""
        if hold:
            return await self._run(self._verbs.held_match(prefix, parts, mode, depth, options))
        return await self._run(self._verbs.match(prefix, parts, mode, depth, options))

    async def get(
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
        """See KVClient.get."""
        return await self._run(
            self._verbs.get(prefix, into, start, stop, parts, bypass_ram, options)
        )

    async def put(
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
        """See KVClient.put."""
        return await self._run(
            self._verbs.put(prefix, views, start, parts, durability, when_full, ttl_ms, options)
        )

    # ---- in the daemon's own memory --------------------------------------------------------------

    async def acquire(
        self,
        prefix: Prefix,
        start: int = 0,
        stop: int | None = None,
        parts: Sequence[str] | None = None,
        **options: Unpack[CallOptions],
    ) -> Lease:
        """See KVClient.acquire."""
        return await self._run(self._verbs.acquire(prefix, start, stop, parts, options))

    async def reserve(
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
    ) -> AsyncSlots:
        """See KVClient.reserve."""
        receipt, sizes, reservations, addresses = await self._run(
            self._verbs.reserve(prefix, start, stop, parts, lengths, when_full, ttl_ms, options)
        )

        async def commit(
            slots: Slots,
            taken: builtins.list[tuple[Cut, Grant]],
            wanted: NDArray[np.bool_],
            durability: str,
        ) -> results.PutResult:
            return await self._run(
                self._verbs.commit(slots.receipt, taken, wanted, durability, options)
            )

        return AsyncSlots(receipt, sizes, reservations, addresses, commit)

    # ---- the small verbs -------------------------------------------------------------------------

    async def touch(
        self,
        prefix: Prefix,
        start: int = 0,
        stop: int | None = None,
        parts: Sequence[str] | None = None,
        ttl_ms: int = 0,
        **options: Unpack[CallOptions],
    ) -> results.ChunksResult:
        """See KVClient.touch."""
        return await self._run(self._verbs.touch(prefix, (start, stop), parts, ttl_ms, options))

    async def prefetch(
        self,
        prefix: Prefix,
        start: int = 0,
        stop: int | None = None,
        parts: Sequence[str] | None = None,
        **options: Unpack[CallOptions],
    ) -> results.ChunksResult:
        """See KVClient.prefetch."""
        return await self._run(self._verbs.prefetch(prefix, (start, stop), parts, options))

    async def pin(
        self,
        prefix: Prefix,
        start: int = 0,
        stop: int | None = None,
        parts: Sequence[str] | None = None,
        ttl_ms: int = 0,
        **options: Unpack[CallOptions],
    ) -> results.ChunksResult:
        """See KVClient.pin."""
        return await self._run(self._verbs.pin(prefix, (start, stop), parts, ttl_ms, options))

    async def unpin(
        self,
        prefix: Prefix,
        start: int = 0,
        stop: int | None = None,
        parts: Sequence[str] | None = None,
        **options: Unpack[CallOptions],
    ) -> results.CountResult:
        """See KVClient.unpin."""
        return await self._run(self._verbs.unpin(prefix, (start, stop), parts, options))

    async def delete(
        self,
        prefix: Prefix,
        start: int = 0,
        stop: int | None = None,
        parts: Sequence[str] | None = None,
        reason: str = "requested",
        **options: Unpack[CallOptions],
    ) -> results.CountResult:
        """See KVClient.delete."""
        return await self._run(self._verbs.delete(prefix, (start, stop), parts, reason, options))

    # ---- verbs that answer or raise --------------------------------------------------------------

    async def hello(self, **options: Unpack[CallOptions]) -> results.HelloResult:
        """See KVClient.hello."""
        return await self._run(self._verbs.hello(options))

    async def check(self, **options: Unpack[CallOptions]) -> None:
        """See KVClient.check."""
        await self.hello(**options)

    async def list(
        self,
        family: bytes = b"",
        page_entries: int = 0,
        **options: Unpack[CallOptions],
    ) -> AsyncIterator[results.ListEntry]:
        """See KVClient.list."""
        cursor = b""
        while True:
            entries, cursor = await self._run(
                self._verbs.list_page(family, cursor, page_entries, options)
            )
            for entry in entries:
                yield entry
            if not cursor:
                return

    async def usage(self, **options: Unpack[CallOptions]) -> results.UsageResult:
        """See KVClient.usage."""
        return await self._run(self._verbs.usage(options))

    async def status(self, **options: Unpack[CallOptions]) -> results.StatusResult:
        """See KVClient.status."""
        return await self._run(self._verbs.status(options))

    # ---- life ------------------------------------------------------------------------------------

    async def drain(self, timeout_s: float = 30.0) -> bool:
        """See KVClient.drain."""
        try:
            async with asyncio.timeout(checked_timeout("timeout_s", timeout_s)):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """See KVClient.close."""
        self._closed = True
        await self._transport.close()

    async def _run(self, verb: Verb[_Result]) -> _Result:
        if self._closed:
            raise ClosedError("the client was closed", "make another one")
        self._calls += 1
        self._idle.clear()
        try:
            step = next(verb)
            while True:
                step = verb.send(await self._transport.run(step))
        except StopIteration as end:
            result: _Result = end.value
            return result
        finally:
            verb.close()
            self._calls -= 1
            if not self._calls:
                self._idle.set()
