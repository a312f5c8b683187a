"""The engine: one sequence at a time through prefill and decode, with or without a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool, BlockTable
from kvstored_client.engine.hook import KVStoreHook, Loaded, PrefixStore, family_of
from kvstored_client.engine.model import LlamaModel
from kvstored_client.engine.sampler import Sampler, Sampling
from kvstored_client.engine.types import Segment


class PromptError(ValueError):
    """A prompt that cannot be run: empty, too long for the model or the pool, or with ids outside
    the vocabulary.
    """


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of one prompt.

    `cached_tokens` of the prompt were not computed, and `miss_reason` says why not more ("" where
    all full chunks came, or no store is used). `ttft_ms` is the time from the call to the
    first token, loading included; `load_ms` is the part of it spent on the store.
    `logits` has one row [vocab_size] for each token, where asked for.
    """

    prompt_tokens: int
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    cached_tokens: int
    bytes_by_tier: Mapping[str, int]
    miss_reason: str
    ttft_ms: float
    load_ms: float
    total_ms: float
    logits: list[torch.Tensor] = field(default_factory=list)


class Engine:
    """Generates from token ids. Not thread-safe: one request at a time."""

    def __init__(
        self, model: LlamaModel, eos_id: int, pool: BlockPool, hook: KVStoreHook | None = None
    ) -> None:
        self.model = model
        self.pool = pool
        self.hook = hook
        self._eos_id = eos_id
        # What puts under way may hold is not counted on, so that a slow store never makes a prompt
        # fail; one block is for the private copy.
        queued = 0 if hook is None else hook.max_queued_chunks
        room_tokens = (pool.blocks - queued - 1) * CHUNK_TOKENS
        self.limit_tokens = min(model.config.context_tokens, room_tokens)

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        request_salt: bytes = b"",
        on_prefill: Callable[[int, int], None] | None = None,
        on_token: Callable[[int], None] | None = None,
        keep_logits: bool = False,
    ) -> Completion:
        """Run one prompt to its end.

        `request_salt` keeps its chunks apart in the store. `on_prefill` is told (tokens of the
        prompt in place, tokens of the prompt) after loading and after every step of prefill,
        `on_token` every token. Raises PromptError before any work; never an error of the store.
        """
        self._check(prompt, sampling)
        started = time.perf_counter()
        # The last token sampled is never computed: n sampled tokens have n - 1 rows of KV.
        aligned = len(prompt) % CHUNK_TOKENS == 0
        table = BlockTable(self.pool, len(prompt) + sampling.max_tokens - 1, spare=int(aligned))
        try:
            loaded = self._load(prompt, table, request_salt)
            load_ms = _ms_since(started)
            cached = min(loaded.chunks * CHUNK_TOKENS, len(prompt) - 1)
            logits = self._prefill(prompt, cached, table, on_prefill)
            sampler = Sampler(sampling)
            token_ids = [sampler.next_token(logits)]
            ttft_ms = _ms_since(started)
            kept = [logits] if keep_logits else []
            stored = self._store(prompt, table, loaded.chunks, request_salt)
            if on_token is not None:
                on_token(token_ids[0])
            while not self._finished(token_ids, sampling):
                position = len(prompt) + len(token_ids) - 1
                logits = self._step(token_ids[-1:], position, table)
                token_ids.append(sampler.next_token(logits))
                if keep_logits:
                    kept.append(logits)
                if on_token is not None:
                    on_token(token_ids[-1])
            self._store([*prompt, *token_ids[:-1]], table, stored, request_salt)
        finally:
            table.release()
        return Completion(
            prompt_tokens=len(prompt),
            token_ids=token_ids,
            finish_reason="stop" if self._stops(token_ids, sampling) else "length",
            cached_tokens=cached,
            bytes_by_tier=loaded.bytes_by_tier,
            miss_reason=loaded.reason,
            ttft_ms=ttft_ms,
            load_ms=load_ms,
            total_ms=_ms_since(started),
            logits=kept,
        )

    def close(self, timeout_s: float = 10.0) -> bool:
        """Finish what is queued for the store. False: not all of it within `timeout_s`."""
        return self.hook is None or self.hook.close(timeout_s)

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        vocab = self.model.config.vocab_size
        if not prompt:
            raise PromptError("the prompt is empty; give at least one token")
        if len(prompt) + sampling.max_tokens > self.limit_tokens:
            raise PromptError(
                f"{len(prompt)} prompt tokens and {sampling.max_tokens} more do not fit into "
                f"{self.limit_tokens}; shorten the prompt or ask for fewer tokens"
            )
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise PromptError(f"the prompt has token ids outside 0 to {vocab - 1}")

    def _load(self, prompt: Sequence[int], table: BlockTable, request_salt: bytes) -> Loaded:
        if self.hook is None:
            return Loaded()
        loaded = self.hook.load(prompt, table, request_salt)
        if loaded.chunks * CHUNK_TOKENS == len(prompt):
            # All of it was held. Logits are not stored, so the last token is computed again, and
            # its KV goes to a copy: a loaded block is never written.
            table.unseal_last()
        return loaded

    def _prefill(
        self,
        prompt: Sequence[int],
        cached: int,
        table: BlockTable,
        on_prefill: Callable[[int, int], None] | None,
    ) -> torch.Tensor:
        """Compute the prompt from token `cached` on, chunk by chunk, and return the logits after
        its last token.
        """
        start = cached
        while True:
            if on_prefill is not None:
                on_prefill(start, len(prompt))
            stop = min(len(prompt), (start // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
            if stop == len(prompt):
                break
            self.model.forward([Segment(table, prompt[start:stop], start, wants_logits=False)])
            start = stop
        logits = self._step(prompt[start:stop], start, table)
        if on_prefill is not None:
            on_prefill(stop, len(prompt))
        return logits

    def _step(self, token_ids: Sequence[int], start: int, table: BlockTable) -> torch.Tensor:
        (logits,) = self.model.forward([Segment(table, token_ids, start, wants_logits=True)])
        if logits is None:
            raise RuntimeError("the model gave no logits where they were wanted")
        return logits

    def _store(
        self, token_ids: Sequence[int], table: BlockTable, start: int, request_salt: bytes
    ) -> int:
        if self.hook is None:
            return start
        return self.hook.store(token_ids, table, start, request_salt)

    def _stops(self, token_ids: Sequence[int], sampling: Sampling) -> bool:
        return token_ids[-1] == self._eos_id and not sampling.ignore_eos

    def _finished(self, token_ids: Sequence[int], sampling: Sampling) -> bool:
        return len(token_ids) >= sampling.max_tokens or self._stops(token_ids, sampling)


def make_engine(
    model: LlamaModel,
    eos_id: int,
    *,
    store: PrefixStore | None = None,
    weights: str = "",
    context_tokens: int = 4096,
    max_queued_chunks: int = 64,
) -> Engine:
    """An engine with blocks of its own for one sequence of `context_tokens`, prompt and answer.

    With a `store`, also blocks for the puts under way, and a hook; `weights` is then the
    fingerprint of the weights. `Engine.close` ends the hook.
    """
    queued = 0 if store is None else max_queued_chunks
    pool = BlockPool(model.config, -(-context_tokens // CHUNK_TOKENS) + queued + 1)
    if store is None:
        return Engine(model, eos_id, pool)
    family = family_of(model.config, weights)
    return Engine(model, eos_id, pool, KVStoreHook(store, family, pool, max_queued_chunks))


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
