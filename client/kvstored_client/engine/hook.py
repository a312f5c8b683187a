"""The hook between an engine and kvstored: load before prefill, store behind the request's back.

Whatever goes wrong with the store is a miss here, or a chunk that is not stored: it is counted and
logged, and the request goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool, BlockTable
from kvstored_client.engine.checkpoint import LlamaConfig
from kvstored_client.identity import KVFamily, KVPart, Prefix

_log = logging.getLogger(__name__)

ENGINE_FORMAT = "kvstored-engine/1"
"""Raised when the same weights and tokens come to give other bytes."""

Buffers = Sequence[NDArray[np.uint8]]


class Matched(Protocol):
    """What the hook reads of KVClient.match's answer."""

    @property
    def chunks(self) -> int:
        """Leading chunks that are held."""

    @property
    def reason(self) -> str:
        """Why not more of them are; "" where all are."""


class Got(Protocol):
    """What the hook reads of KVClient.get's answer."""

    @property
    def chunks(self) -> int:
        """Leading chunks that came whole, counted from `start`."""

    @property
    def bytes_by_tier(self) -> Mapping[str, int]:
        """Where they came from, in bytes."""

    @property
    def reason(self) -> str:
        """Why not more of them came; "" where all did."""


class PutDone(Protocol):
    """What the hook reads of KVClient.put's answer."""

    @property
    def stored(self) -> int:
        """Chunks that are now held and were not before."""


class PrefixStore(Protocol):
    """The three verbs of KVClient that an engine needs. Buffers are one block each."""

    def match(self, prefix: Prefix) -> Matched:
        """Say how many leading chunks of `prefix` are held."""

    def get(self, prefix: Prefix, into: Buffers, start: int, stop: int) -> Got:
        """Write chunks [start, stop) into the buffers, one each."""

    def put(self, prefix: Prefix, views: Buffers, start: int) -> PutDone:
        """Offer chunks from `start` on, one buffer each."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the store gave for one prompt: its leading chunks, in the first blocks of its table.
    `reason`: why not more of its full chunks; "" where all came.
    """

    chunks: int = 0
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""


@dataclass(slots=True)
class HookStats:
    """Sums since the hook was made. `dropped_chunks` found the queue full; `failures` counts verbs
    of the store that raised.
    """

    loaded_chunks: int = 0
    stored_chunks: int = 0
    dropped_chunks: int = 0
    failures: int = 0
    bytes_by_tier: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Job:
    prefix: Prefix
    blocks: list[int]
    start: int


def family_of(config: LlamaConfig, weights: str, weights_epoch: int = 0) -> KVFamily:
    """The family of this engine's KV. `weights` is `fingerprint.weights_fingerprint`'s result."""
    shape = f"{config.layers},2,{CHUNK_TOKENS},{config.kv_heads},{config.head_dim}"
    nbytes = config.layers * 2 * CHUNK_TOKENS * config.kv_heads * config.head_dim * 4
    return KVFamily(
        model=config.name,
        weights=weights,
        kv_dtype="float32",
        chunk_tokens=CHUNK_TOKENS,
        parts=(KVPart("kv", nbytes=nbytes, layers=(0, config.layers)),),
        weights_epoch=weights_epoch,
        position_encoding=(
            f"rope:default:halves theta={config.rope_theta!r} dim={config.head_dim} applied-to-k"
        ),
        memory_order=f"layer,kv,token,head,dim={shape}:little-endian",
        engine_format=ENGINE_FORMAT,
    )


class KVStoreHook:
    """Loads and stores the KV of one engine's sequences.

    `load` and `store` are called on the engine's thread; puts run on one thread of the hook's own.
    At most `max_queued_chunks` wait or are under way; of a longer run the leading ones are kept,
    for a chunk without those before it is of no use.
    """

    def __init__(
        self, store: PrefixStore, family: KVFamily, pool: BlockPool, max_queued_chunks: int = 64
    ) -> None:
        self.family = family
        self.stats = HookStats()
        self._store = store
        self._pool = pool
        self.max_queued_chunks = max_queued_chunks
        self._room = max_queued_chunks
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._worker = threading.Thread(target=self._put_jobs, name="kvstored-put", daemon=True)
        self._worker.start()

    def load(self, token_ids: Sequence[int], table: BlockTable, request_salt: bytes) -> Loaded:
        """Fill leading blocks of `table` with what the store holds of a prompt's full chunks.

        Marks them sealed. Never raises for the store's sake; then it is a miss.
        """
        full = len(token_ids) // CHUNK_TOKENS
        if full == 0:
            return Loaded()
        touched = 0
        try:
            prefix = self.family.prefix(token_ids[: full * CHUNK_TOKENS], request_salt)
            matched = self._store.match(prefix)
            touched = matched.chunks
            if touched:
                into = [self._pool.view(block) for block in table.blocks[:touched]]
                got = self._store.get(prefix, into, start=0, stop=touched)
                loaded = Loaded(got.chunks, dict(got.bytes_by_tier), got.reason or matched.reason)
            else:
                loaded = Loaded(reason=matched.reason)
        except Exception as error:
            self._failed("load")
            loaded = Loaded(reason=type(error).__name__)
        table.clear(loaded.chunks, touched)
        table.sealed = loaded.chunks
        self.stats.loaded_chunks += loaded.chunks
        self.stats.bytes_by_tier.update(loaded.bytes_by_tier)
        return loaded

    def store(
        self, token_ids: Sequence[int], table: BlockTable, start: int, request_salt: bytes
    ) -> int:
        """Queue the full chunks of `token_ids` from chunk `start` on for a put. All their KV is in
        `table`, which may be released at once: the queue holds references of its own. Returns the
        number of the first chunk that is neither stored nor queued.
        """
        full = len(token_ids) // CHUNK_TOKENS
        if full <= start:
            return start
        try:
            prefix = self.family.prefix(token_ids[: full * CHUNK_TOKENS], request_salt)
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
                self._jobs.append(_Job(prefix, blocks, start))
                self._changed.notify_all()
        return stop

    def drain(self, timeout_s: float) -> bool:
        """Wait until every queued chunk is put or refused. False: some are still under way."""
        with self._changed:
            return self._changed.wait_for(self._idle, timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Drain, then end the hook's thread. False: a put is stuck, its blocks stay in use."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._worker.join(timeout_s)
        return not self._worker.is_alive()

    def _idle(self) -> bool:
        return self._room == self.max_queued_chunks

    def _put_jobs(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                views = [self._pool.view(block) for block in job.blocks]
                self.stats.stored_chunks += self._store.put(
                    job.prefix, views, start=job.start
                ).stored
            except Exception:
                self._failed("store")
            finally:
                self._pool.drop(job.blocks)
                with self._changed:
                    self._room += len(job.blocks)
                    self._changed.notify_all()

    def _failed(self, what: str) -> None:
        with self._changed:
            self.stats.failures += 1
            # Once is enough: a store that is away fails every time.
            level = logging.WARNING if self.stats.failures == 1 else logging.DEBUG
        _log.log(level, "kvstored: %s failed, the engine goes on without", what, exc_info=True)
