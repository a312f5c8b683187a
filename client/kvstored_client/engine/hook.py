"""How an engine uses kvstored: the one module that knows there is a store. Made to be copied.

    load = hook.begin_match(...)    when a prompt is admitted: look, and load behind its back
    load.ready(), load.finish()     before each step: compute what did not come
    hook.store(...)                 when the first token is out, and at the end: in the background

The rules, whatever the engine: ask for whole chunks only; give each load a deadline that is no
longer than computing would take; let nothing that comes late touch a block that is used again;
store a chunk once, or until the store has taken it, and only computed tokens; and whatever the
store does wrong is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool, BlockTable
from kvstored_client.engine.family import family_of
from kvstored_client.engine.prefix_store import Buffers, PrefixStore
from kvstored_client.engine.types import Loaded, Offer, Request, TakeBlocks
from kvstored_client.identity import KVFamily, Prefix

__all__ = ["HookStats", "KVStoreHook", "PrefixStore", "family_of"]

_log = logging.getLogger(__name__)

LEAST_DEADLINE_S = 0.05
"""However fast computing may be: a load is given as long as a busy machine takes to answer."""

REFUSED_FOR_GOOD = frozenset(("cap", "length", "too_large"))
"""Reasons of a put for which offering the same chunks again would come to the same."""


@dataclass(slots=True)
class HookStats:
    """Sums since the hook was made. `dropped_chunks` found the queue of puts full, `refused_chunks`
    were put and not taken, as all are while the store is away. `declined` loads would have taken
    longer than computing, `late` ones had not come by their deadline, `failures` are verbs of the
    store that raised.
    """

    loads: int = 0
    loaded_chunks: int = 0
    stored_chunks: int = 0
    dropped_chunks: int = 0
    refused_chunks: int = 0
    declined: int = 0
    late: int = 0
    failures: int = 0
    bytes_by_tier: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Put:
    prefix: Prefix
    blocks: list[int]
    start: int
    tenant: str
    offer: Offer


class _Load:
    """One prompt's load; see PendingLoad. `blocks` are its own until they are handed over."""

    def __init__(self, hook: KVStoreHook, start: int, blocks: list[int], budget_s: float) -> None:
        self._hook = hook
        self.start = start
        self.blocks = blocks
        self.until = time.monotonic() + budget_s
        self.loaded: Loaded | None = None
        self.over = False  # nobody waits for what still comes
        self.running = True  # the store may still write to the blocks

    def ready(self) -> bool:
        """See PendingLoad."""
        return self._hook.decide(self)

    def finish(self) -> Loaded:
        """See PendingLoad."""
        loaded = self.loaded
        assert loaded is not None, "finish comes after ready"
        self._hook.leave(self)
        return loaded

    def cancel(self) -> None:
        """See PendingLoad."""
        loaded, self.loaded = self.loaded, None
        if loaded is not None:
            self._hook.give_back(loaded.blocks)
        self._hook.leave(self)


class KVStoreHook:
    """A StoreHook over a KVClient. Methods are for the engine's thread, which never waits in them
    but in `drain` and `close`.
    """

    def __init__(
        self,
        store: PrefixStore,
        family: KVFamily,
        pool: BlockPool,
        max_queued_chunks: int = 64,
        *,
        tenant: str = "default",
        deadline_s: float = 1.0,
        threads: int = 4,
    ) -> None:
        """`max_queued_chunks`: bound on those that wait to be put or are being put; of a longer run
        the leading ones are kept, for a chunk without those before it is of no use. `tenant`: of
        requests that name none. `deadline_s`: longest that a prompt waits for its load. `threads`:
        loads under way at a time.
        """
        self.family = family
        self.stats = HookStats()
        self.max_queued_chunks = max_queued_chunks
        self._store = store
        self._pool = pool
        self._tenant = tenant
        self._deadline_s = deadline_s
        self._room = max_queued_chunks
        self._puts: deque[_Put] = deque()
        self._loads: set[_Load] = set()
        self._changed = threading.Condition()
        self._wake: Callable[[], None] = _nothing
        self._closing = False
        self._loaders = ThreadPoolExecutor(threads, "kvstored-load")
        self._putter = threading.Thread(target=self._put_all, name="kvstored-put", daemon=True)
        self._clock = threading.Thread(target=self._tell_late, name="kvstored-late", daemon=True)
        self._putter.start()
        self._clock.start()

    def on_change(self, wake: Callable[[], None]) -> None:
        """See StoreHook."""
        self._wake = wake

    def set_epoch(self, weights_epoch: int) -> None:
        """See StoreHook."""
        self.family = replace(self.family, weights_epoch=weights_epoch)

    # ---- loading ---------------------------------------------------------------------------------

    def begin_match(
        self,
        request: Request,
        token_ids: Sequence[int],
        start: int,
        take_blocks: TakeBlocks,
        tokens_per_s: float,
    ) -> _Load:
        """See StoreHook."""
        chunks = len(token_ids) // CHUNK_TOKENS
        blocks = take_blocks(chunks - start)
        compute_s = (chunks - start) * CHUNK_TOKENS / tokens_per_s if tokens_per_s else np.inf
        budget_s = max(LEAST_DEADLINE_S, min(self._deadline_s, compute_s))
        load = _Load(self, start, blocks, budget_s)
        with self._changed:
            self.stats.loads += 1
            self._loads.add(load)
            self._changed.notify_all()  # the clock has one deadline more to mind
        try:
            prefix = self.family.prefix(token_ids[: chunks * CHUNK_TOKENS], request.request_salt)
            self._loaders.submit(
                self._load, load, prefix, request.tenant or self._tenant, compute_s
            )
        except (ValueError, RuntimeError):  # a prompt that has no prefix; closed
            self._failed("load")
            self._came(load, 0, Loaded(reason="failed"))
        return load

    def _load(self, load: _Load, prefix: Prefix, tenant: str, compute_s: float) -> None:
        """On a loader's thread."""
        came, loaded = 0, Loaded(reason="failed")
        try:
            if not load.over:
                came, loaded = self._match_and_get(load, prefix, tenant, compute_s)
        except Exception as error:
            self._failed("load")
            loaded = Loaded(reason=type(error).__name__)
        self._came(load, came, loaded)

    def _match_and_get(
        self, load: _Load, prefix: Prefix, tenant: str, compute_s: float
    ) -> tuple[int, Loaded]:
        """How many chunks came, and what to say of them."""
        start, left_s = load.start, _left(load)
        matched = self._store.match(prefix, hold=True, timeout_s=left_s, tenant=tenant)
        try:
            found = matched.chunks - start
            if found <= 0:
                return 0, Loaded(reason=matched.reason)
            if matched.eta_ms > compute_s * 1e3 * found / len(load.blocks):
                with self._changed:
                    self.stats.declined += 1
                return 0, Loaded(reason="declined")
            into = self._memory_of(load.blocks[:found])
            stop, left_s = start + found, _left(load)
            got = self._store.get(prefix, into, start, stop, timeout_s=left_s, tenant=tenant)
        finally:
            if matched.hold is not None:
                matched.hold.release()
        if not self._pool.in_main_memory:
            for block, data in zip(load.blocks, into[: got.chunks], strict=False):
                self._pool.copy_in(block, data)
        self._pool.zero(load.blocks[got.chunks : found])  # what half a chunk left may read as NaN
        reason = got.reason or matched.reason
        return got.chunks, Loaded(load.blocks[: got.chunks], dict(got.bytes_by_tier), reason)

    def _memory_of(self, blocks: list[int]) -> Buffers:
        """Where a load of these is written."""
        if self._pool.in_main_memory:
            return [self._pool.view(block) for block in blocks]
        return [np.empty(self._pool.block_bytes, np.uint8) for _ in blocks]

    def _came(self, load: _Load, came: int, loaded: Loaded) -> None:
        """The store writes no more to the load's blocks: hand over those that came, the rest goes
        back. All of them do where nobody waits any more.
        """
        with self._changed:
            load.running = False
            wanted = not load.over
            back = load.blocks[came:] if wanted else load.blocks
            load.blocks = []
            if wanted:
                load.loaded = loaded
                self.stats.loaded_chunks += came
                self.stats.bytes_by_tier.update(loaded.bytes_by_tier)
        self.give_back(back)

    def give_back(self, blocks: list[int]) -> None:
        """Blocks of a load that nobody uses."""
        self._pool.drop(blocks)
        self._wake()

    def decide(self, load: _Load) -> bool:
        """Whether a load has come, or is too late: then its blocks stay its own until it ends."""
        with self._changed:
            if load.loaded is None and time.monotonic() >= load.until:
                load.over = True
                load.loaded = Loaded(reason="deadline")
                self.stats.late += 1
            return load.loaded is not None

    def leave(self, load: _Load) -> None:
        """Nobody waits for a load any more."""
        with self._changed:
            load.over = True
            self._loads.discard(load)
            self._changed.notify_all()

    def _tell_late(self) -> None:
        """Wake the engine when a deadline passes. On a thread of its own."""
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                waiting = [load.until for load in self._loads if load.loaded is None]
                if any(until <= now for until in waiting):
                    self._wake()
                ahead = [until - now for until in waiting if until > now]
                self._changed.wait(min(ahead, default=None))

    # ---- storing ---------------------------------------------------------------------------------

    def store(
        self,
        request: Request,
        token_ids: Sequence[int],
        table: BlockTable,
        start: int,
        offer: Offer,
    ) -> int:
        """See StoreHook."""
        full = len(token_ids) // CHUNK_TOKENS
        if full <= start:
            return start
        try:
            prefix = self.family.prefix(token_ids[: full * CHUNK_TOKENS], request.request_salt)
        except ValueError:
            self._failed("store")
            return start
        with self._changed:
            stop = start if self._closing else min(full, start + self._room)
            self.stats.dropped_chunks += full - stop
            if stop > start:
                blocks = table.blocks[start:stop]
                self._pool.hold(blocks)
                self._room -= len(blocks)
                tenant = request.tenant or self._tenant
                self._puts.append(_Put(prefix, blocks, start, tenant, offer))
                self._changed.notify_all()
        return stop

    def _put_all(self) -> None:
        """Put what is queued, for ever. On a thread of its own."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._puts) or self._closing)
                if not self._puts:
                    return
                put = self._puts.popleft()
            try:
                views = [self._readable(block) for block in put.blocks]
                done = self._store.put(put.prefix, views, put.start, tenant=put.tenant)
                self.stats.stored_chunks += done.stored
                self.stats.refused_chunks += done.refused
                put.offer.lost = done.refused > 0 and done.reason not in REFUSED_FOR_GOOD
            except Exception:
                self._failed("store")
                put.offer.lost = True
            finally:
                self._pool.drop(put.blocks)
                with self._changed:
                    self._room += len(put.blocks)
                    self._changed.notify_all()
                self._wake()

    def _readable(self, block: int) -> NDArray[np.uint8]:
        return self._pool.view(block) if self._pool.in_main_memory else self._pool.copy_out(block)

    # ---- the end ---------------------------------------------------------------------------------

    def drain(self, timeout_s: float) -> bool:
        """See StoreHook."""
        with self._changed:
            return self._changed.wait_for(lambda: self._room == self.max_queued_chunks, timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Put what is queued and end the hook's threads. False: a verb is stuck, its blocks stay in
        use.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            for load in self._loads:
                load.over = True
            self._changed.notify_all()
        self._loaders.shutdown(wait=False, cancel_futures=True)
        threads = [self._putter, self._clock, *self._loaders._threads]
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _failed(self, what: str) -> None:
        with self._changed:
            self.stats.failures += 1
            # Once is enough: a store that is away fails every time.
            level = logging.WARNING if self.stats.failures == 1 else logging.DEBUG
        _log.log(level, "kvstored: %s failed, the engine goes on without", what, exc_info=True)


def _left(load: _Load) -> float:
    return max(0.001, load.until - time.monotonic())


def _nothing() -> None:
    pass
