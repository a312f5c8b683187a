"""A shadow check: some of what the store gives is computed again, and the bits are compared.

It wraps a hook, so any engine that uses one can have it. A difference means that a chunk holds what
this engine would not compute: wrong bytes, or a right chunk of another processor, torch or number
of threads, whose last bits differ (docs/engine.md). Answers are not changed by it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool, BlockTable
from kvstored_client.engine.types import (
    Loaded,
    Offer,
    PendingLoad,
    Request,
    Segment,
    StepModel,
    StoreHook,
    TakeBlocks,
)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ShadowStats:
    """Sums since the check was made. `hits` were seen, `checks` of them computed again: `chunks` in
    `compared_bytes`, of which `mismatched_chunks` differ, by `largest_difference` at most.
    `failures`: checks that could not be made.
    """

    hits: int = 0
    checks: int = 0
    chunks: int = 0
    compared_bytes: int = 0
    mismatched_chunks: int = 0
    largest_difference: float = 0.0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class _Hit:
    """Blocks that hold chunks from `start` on of a prompt, and the tokens up to their end."""

    token_ids: list[int]
    start: int
    blocks: list[int] = field(default_factory=list)


class _Watched:
    """A load whose blocks the check sees before the engine does. See PendingLoad."""

    def __init__(
        self, shadow: ShadowedHook, load: PendingLoad, token_ids: Sequence[int], start: int
    ) -> None:
        self._shadow = shadow
        self._load = load
        self._token_ids = token_ids
        self._start = start

    def ready(self) -> bool:
        """See PendingLoad."""
        return self._load.ready()

    def finish(self) -> Loaded:
        """See PendingLoad."""
        loaded = self._load.finish()
        if loaded.blocks:
            self._shadow.saw(self._token_ids, self._start, loaded.blocks)
        return loaded

    def cancel(self) -> None:
        """See PendingLoad."""
        self._load.cancel()


class ShadowedHook:
    """A StoreHook that checks what another one loads. For the engine's thread.

    A sampled hit is computed again from its first token on, up to `max_chunks`, in blocks apart
    from the engine's. With `at_once` that happens before the request goes on, which then takes as
    long as a miss; else `check` does it, and one hit at a time is kept for it: its blocks stay in
    use, and are counted among `max_queued_chunks`.
    """

    def __init__(
        self,
        hook: StoreHook,
        pool: BlockPool,
        model: Callable[[], StepModel],
        fraction: float,
        *,
        at_once: bool = True,
        max_chunks: int = 32,
        seed: int = 0,
    ) -> None:
        """`model`: the one that the engine has now. `fraction`: of the hits, 0 to 1. Raises
        ValueError for another.
        """
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"the fraction of hits to check is {fraction}; 0 to 1 is right")
        if max_chunks < 1:
            raise ValueError(f"max_chunks is {max_chunks}; at least 1 is needed")
        self.hook = hook
        self.checked = ShadowStats()
        self._pool = pool
        self._model = model
        self._fraction = fraction
        self._at_once = at_once
        self._max_chunks = max_chunks
        self._random = random.Random(seed)  # noqa: S311 (a sample, no secret)
        self._kept: _Hit | None = None
        self._scratch: BlockPool | None = None

    # ---- the check -------------------------------------------------------------------------------

    def saw(self, token_ids: Sequence[int], start: int, blocks: Sequence[int]) -> None:
        """Chunks from `start` on of these tokens were loaded into `blocks`, which are held."""
        self.checked.hits += 1
        stop = min(start + len(blocks), self._max_chunks)
        if start >= stop or self._random.random() >= self._fraction:
            return
        hit = _Hit(list(token_ids[: stop * CHUNK_TOKENS]), start, list(blocks[: stop - start]))
        if self._at_once:
            self._compare(hit)
        elif self._kept is None:
            self._pool.hold(hit.blocks)
            self._kept = hit

    def check(self) -> None:
        """Compute the hit that is kept for it, if any. Not while a step is computed."""
        hit = self._kept
        if hit is not None:
            try:
                self._compare(hit)
            finally:
                self._forget()

    def _compare(self, hit: _Hit) -> None:
        try:
            self._compute_and_compare(hit)
        except Exception:  # the engine goes on, whatever becomes of a check
            self.checked.failures += 1
            _log.exception("kvstored: a hit could not be checked")

    def _compute_and_compare(self, hit: _Hit) -> None:
        scratch = self._scratch_pool()
        table = BlockTable(scratch, len(hit.token_ids))
        try:
            for at in range(0, len(hit.token_ids), CHUNK_TOKENS):
                tokens = hit.token_ids[at : at + CHUNK_TOKENS]
                self._model().forward([Segment(table, tokens, at, wants_logits=False)])
            for chunk, block in enumerate(hit.blocks, hit.start):
                self._compare_block(chunk, scratch.kv[table.blocks[chunk]], self._pool.kv[block])
        finally:
            table.release()
        self.checked.checks += 1

    def _compare_block(self, chunk: int, computed: torch.Tensor, loaded: torch.Tensor) -> None:
        self.checked.chunks += 1
        self.checked.compared_bytes += loaded.nbytes
        # As bytes: of floats, -0 equals 0, and NaN does not equal itself.
        if torch.equal(computed.flatten().view(torch.uint8), loaded.flatten().view(torch.uint8)):
            return
        difference = float((computed.float() - loaded.float()).abs().nan_to_num(torch.inf).max())
        self.checked.mismatched_chunks += 1
        self.checked.largest_difference = max(self.checked.largest_difference, difference)
        _log.log(
            logging.ERROR if self.checked.mismatched_chunks == 1 else logging.DEBUG,
            "kvstored: chunk %d of a hit differs from what this engine computes, by %g at most",
            chunk,
            difference,
        )

    def _scratch_pool(self) -> BlockPool:
        if self._scratch is None:
            kv = self._pool.kv
            self._scratch = BlockPool(self._model().config, self._max_chunks, kv.dtype, kv.device)
        return self._scratch

    def _forget(self) -> None:
        hit, self._kept = self._kept, None
        if hit is not None:
            self._pool.drop(hit.blocks)

    # ---- what a StoreHook has --------------------------------------------------------------------

    @property
    def stats(self) -> object:
        """The other hook's, None where it keeps none. This one's own are `checked`."""
        return getattr(self.hook, "stats", None)

    @property
    def max_queued_chunks(self) -> int:
        """See StoreHook."""
        return self.hook.max_queued_chunks + (0 if self._at_once else self._max_chunks)

    def begin_match(
        self,
        request: Request,
        token_ids: Sequence[int],
        start: int,
        take_blocks: TakeBlocks,
        tokens_per_s: float,
    ) -> _Watched:
        """See StoreHook."""
        load = self.hook.begin_match(request, token_ids, start, take_blocks, tokens_per_s)
        return _Watched(self, load, token_ids, start)

    def store(
        self,
        request: Request,
        token_ids: Sequence[int],
        table: BlockTable,
        start: int,
        offer: Offer,
    ) -> int:
        """See StoreHook."""
        return self.hook.store(request, token_ids, table, start, offer)

    def on_change(self, wake: Callable[[], None]) -> None:
        """See StoreHook."""
        self.hook.on_change(wake)

    def set_epoch(self, weights_epoch: int) -> None:
        """See StoreHook. A hit that is kept was of the weights before."""
        self._forget()
        self.hook.set_epoch(weights_epoch)

    def drain(self, timeout_s: float) -> bool:
        """See StoreHook."""
        return self.hook.drain(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """See StoreHook."""
        self._forget()
        return self.hook.close(timeout_s)
