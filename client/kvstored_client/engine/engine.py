"""The engine: requests go in, `step` computes one batch, tokens come out.

`Engine.generate` runs one prompt to its end and is all that a script needs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

import torch

from kvstored_client.engine.admission import Admission
from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool, BlockTable
from kvstored_client.engine.generate import Completion, run_to_end
from kvstored_client.engine.hook import KVStoreHook, PrefixStore, family_of
from kvstored_client.engine.model import Model
from kvstored_client.engine.sampler import Sampler, Sampling
from kvstored_client.engine.scheduler import Planned, Scheduler
from kvstored_client.engine.sequence import Sequence as RunningSequence
from kvstored_client.engine.shadow import ShadowedHook
from kvstored_client.engine.types import (
    EngineLimits,
    EngineStats,
    FinishReason,
    Request,
    StepModel,
    StoreHook,
    TokenEvent,
)

__all__ = ["Completion", "Engine", "PromptError", "PromptTooLong", "QueueFullError", "make_engine"]

ONE_PROMPT = EngineLimits(
    max_running=1, max_waiting=1, prefill_tokens=CHUNK_TOKENS, own_prefixes=False
)
"""Limits of an engine that answers one prompt at a time and keeps nothing of its own."""


class PromptError(ValueError):
    """A prompt that cannot be run: empty, too long for the model or the pool, or with ids outside
    the vocabulary.
    """


class PromptTooLong(PromptError):
    """A prompt that, with the tokens asked for, is more than the model or the pool has room for."""


class QueueFullError(RuntimeError):
    """As many requests wait as may; try again when some have ended."""


class Engine:
    """Computes many requests at a time, on the thread that calls `step`.

    `add_request`, `abort`, `wake` and `wait` are for any thread; all else is for that one.
    """

    def __init__(
        self,
        model: StepModel,
        pool: BlockPool,
        hook: StoreHook | None = None,
        limits: EngineLimits | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:
        self.model = model
        self.pool = pool
        self.hook = hook
        self.limits = limits or EngineLimits()
        self.stats = EngineStats()
        self.on_progress: Callable[[str, int], None] | None = None
        """Told (request id, tokens that have KV) of a prompt when it is admitted and computed."""
        self._eos_ids = frozenset(eos_ids)
        self._face = hook
        self._admission = Admission(
            pool, self._face, self.stats, own_prefixes=self.limits.own_prefixes
        )
        self._scheduler = Scheduler(self._admission, self._face, self.limits, self.stats)
        self.tree = self._admission.tree
        # What puts under way may hold is not counted on, so that a slow store never makes a prompt
        # fail; one block is for the private copy.
        queued = 0 if self._face is None else self._face.max_queued_chunks
        room_tokens = (pool.blocks - queued - 1) * CHUNK_TOKENS
        self.limit_tokens = min(model.config.context_tokens, room_tokens)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._sequences: dict[str, RunningSequence] = {}
        self._arrived: list[RunningSequence] = []
        self._aborted: list[str] = []
        if self._face is not None:
            self._face.on_change(self._wake.set)

    # ---- for any thread --------------------------------------------------------------------------

    def add_request(self, request: Request) -> str:
        """Queue a request; its events come from `step`. Returns its id.

        Raises PromptError and ValueError (an id that is under way) before anything is queued, and
        QueueFullError.
        """
        self._check(request)
        with self._lock:
            if request.id in self._sequences:
                raise ValueError(f"a request {request.id!r} is under way; ids are used once")
            waiting = len(self._arrived) + len(self._scheduler.waiting)
            if waiting >= self.limits.max_waiting:
                self.stats.refused += 1
                raise QueueFullError(f"{waiting} requests wait already; try again later")
            sequence = RunningSequence(
                request,
                Sampler(request.sampling),
                BlockTable(self.pool),
                list(request.prompt),
                self.tree.root(request.request_salt),
                arrival=self.stats.requests,
            )
            self.stats.requests += 1
            self._sequences[request.id] = sequence
            self._arrived.append(sequence)
        self._wake.set()
        return request.id

    def abort(self, request_id: str) -> None:
        """End a request at the next step, which gives its last event. Unknown ids are passed over:
        it may just have ended.
        """
        with self._lock:
            if request_id in self._sequences:
                self._aborted.append(request_id)
        self._wake.set()

    def wake(self) -> None:
        """Let `wait` return."""
        self._wake.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until `step` has something to do, or until `wake`. False: `timeout_s` is over."""
        return self._can_compute() or self._wake.wait(timeout_s)

    def has_requests(self) -> bool:
        """Whether any request is under way."""
        with self._lock:
            return bool(self._sequences)

    # ---- for the engine's thread -----------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Compute one batch: one token of every answer under way, and some of the prompts.

        Returns the tokens sampled and the requests that ended; nothing where all there is to do is
        to wait, for a load or for a request. What the model raises leaves the requests as they are.
        """
        self._wake.clear()
        events = self._take_arrivals()
        for sequence in self._scheduler.admit():
            self._tell_progress(sequence)
        planned = self._scheduler.plan()
        if planned:
            events += self._compute(planned)
        if self._scheduler.waiting and (planned or events):
            self._wake.set()  # there may be room now for who waits
        return events

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        request_salt: bytes = b"",
        tenant: str = "",
        on_prefill: Callable[[int, int], None] | None = None,
        on_token: Callable[[int], None] | None = None,
        keep_logits: bool = False,
    ) -> Completion:
        """Run one prompt to its end. For an engine without other requests.

        `request_salt` keeps its chunks apart from those of other salts. `on_prefill` is told
        (tokens of the prompt in place, tokens of the prompt) after loading and after every step of
        prefill, `on_token` every token. Raises PromptError before any work; never an error of the
        store.
        """
        request = Request("generate", prompt, sampling, request_salt, tenant, keep_logits)
        return run_to_end(self, request, on_prefill, on_token)

    def end(self, request_id: str) -> None:
        """End a request at once, without an event. Unknown ids are passed
        over.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence)

    def update_weights(self, model: StepModel, weights_epoch: int) -> None:
        """Go on with other weights of the same shapes, dtype and device; raises ValueError for
        others. Nothing that was computed with the old ones
        is used any more: own prefixes are forgotten, the store is asked for the new epoch's chunks,
        and requests under way compute what they have so far once more.
        """
        if model.config != self.model.config:
            raise ValueError("other weights must have the same config as the present ones")
        kv = self.pool.kv
        if (model.dtype, model.device) != (kv.dtype, kv.device):
            raise ValueError(
                f"other weights must be {kv.dtype} on {kv.device} as the present ones, not "
                f"{model.dtype} on {model.device}"
            )
        self._scheduler.preempt_all()
        self.tree.clear()
        for sequence in self._scheduler.waiting:
            sequence.stored = 0
            sequence.node = self.tree.root(sequence.request.request_salt)
        if self._face is not None:
            self._face.set_epoch(weights_epoch)
        self.model = model

    def waiting_requests(self) -> int:
        """Requests that were not admitted yet, or were preempted."""
        return len(self._arrived) + len(self._scheduler.waiting)

    def running_requests(self) -> int:
        """Requests that hold blocks: they load, or are computed."""
        return len(self._scheduler.running)

    def loading_requests(self) -> int:
        """Those of them that wait for the store."""
        return sum(1 for s in list(self._scheduler.running) if s.pending is not None)

    def close(self, timeout_s: float = 10.0) -> bool:
        """End all requests, without events, and finish what is queued for the store. False: not all
        of it within `timeout_s`.
        """
        for sequence in list(self._sequences.values()):
            self._end(sequence)
        self.tree.clear()
        return self._face is None or self._face.close(timeout_s)

    # ---- parts of it -----------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        prompt, vocab = request.prompt, self.model.config.vocab_size
        if not prompt:
            raise PromptError("the prompt is empty; give at least one token")
        if len(prompt) + request.sampling.max_tokens > self.limit_tokens:
            raise PromptTooLong(
                f"{len(prompt)} prompt tokens and {request.sampling.max_tokens} more do not fit "
                f"into {self.limit_tokens}; shorten the prompt or ask for fewer tokens"
            )
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise PromptError(f"the prompt has token ids outside 0 to {vocab - 1}")

    def _can_compute(self) -> bool:
        return any(s.pending is None for s in list(self._scheduler.running))

    def _take_arrivals(self) -> list[TokenEvent]:
        """Queue what was added and end what was aborted since the last step."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            aborted, self._aborted = self._aborted, []
            self._scheduler.waiting.extend(arrived)
            ending = [self._sequences[i] for i in dict.fromkeys(aborted) if i in self._sequences]
        for sequence in ending:
            self.stats.aborted += 1
            self._end(sequence)
        return [_event(sequence, None, "abort", None) for sequence in ending]

    def _compute(self, planned: list[Planned]) -> list[TokenEvent]:
        started = time.perf_counter()
        logits = self.model.forward([segment for _, segment in planned])
        self._count(planned, time.perf_counter() - started)
        events = []
        for (sequence, segment), row in zip(planned, logits, strict=True):
            sequence.computed = segment.start + len(segment.token_ids)
            self._admission.settle(sequence)
            if sequence.sampled == 0:
                self._tell_progress(sequence)
            if row is not None:
                events.append(self._sample(sequence, row))
        return events

    def _sample(self, sequence: RunningSequence, logits: torch.Tensor) -> TokenEvent:
        token = sequence.sampler.next_token(logits)
        sequence.tokens.append(token)
        sampling = sequence.request.sampling
        reason: FinishReason | None = None
        if token in sampling.stop_ids or (token in self._eos_ids and not sampling.ignore_eos):
            reason = "stop"
        elif sequence.sampled >= sampling.max_tokens:
            reason = "length"
        if sequence.sampled == 1:
            self.stats.prompt_tokens += sequence.prompt_tokens
            self.stats.own_hit_tokens += sequence.cache.own_tokens
            self.stats.loaded_tokens += sequence.cache.loaded_tokens
        if sequence.sampled == 1 or reason is not None:
            # The first token is out; from here on what was computed can be stored.
            self._scheduler.offer(sequence)
        if reason is not None:
            self.stats.finished += 1
            self._end(sequence)
        return _event(sequence, token, reason, logits)

    def _end(self, sequence: RunningSequence) -> None:
        with self._lock:
            del self._sequences[sequence.request.id]
            if sequence in self._arrived:
                self._arrived.remove(sequence)
                return
        self._scheduler.remove(sequence)

    def _tell_progress(self, sequence: RunningSequence) -> None:
        if self.on_progress is not None:
            self.on_progress(sequence.request.id, sequence.computed)

    def _count(self, planned: list[Planned], took_s: float) -> None:
        tokens = sum(len(segment.token_ids) for _, segment in planned)
        decoded = sum(1 for sequence, _ in planned if sequence.sampled > 0 and sequence.decodes)
        self.stats.steps += 1
        self.stats.decode_tokens += decoded
        self.stats.prefill_tokens += tokens - decoded
        if tokens - decoded >= CHUNK_TOKENS:
            rate, before = (tokens - decoded) / took_s, self.stats.prefill_tokens_per_s
            self.stats.prefill_tokens_per_s = rate if before == 0.0 else 0.8 * before + 0.2 * rate


def make_engine(
    model: Model,
    eos_ids: int | Collection[int],
    *,
    store: PrefixStore | None = None,
    weights: str = "",
    context_tokens: int = 4096,
    max_queued_chunks: int = 64,
    limits: EngineLimits = ONE_PROMPT,
    blocks: int = 0,
    shadow_fraction: float = 0.0,
) -> Engine:
    """An engine with blocks of its own: `blocks` of them, or 0: as many as one sequence of
    `context_tokens`, prompt and answer, needs.

    With a `store`, also blocks for the puts under way, and a hook; `weights` is then the
    fingerprint of the weights. `Engine.close` ends the hook. `shadow_fraction` of the hits are
    computed again and compared with what the store gave; `Engine.hook` is then a ShadowedHook.
    """
    queued = 0 if store is None else max_queued_chunks
    wanted = blocks or -(-context_tokens // CHUNK_TOKENS)
    pool = BlockPool(model.config, wanted + queued + 1, model.dtype, model.device)
    stops = (eos_ids,) if isinstance(eos_ids, int) else eos_ids
    if store is None:
        return Engine(model, pool, None, limits, stops)
    family = family_of(model.config, weights, dtype=model.dtype)
    hook = KVStoreHook(store, family, pool, max_queued_chunks)
    if shadow_fraction == 0.0:
        return Engine(model, pool, hook, limits, stops)
    shadow = ShadowedHook(hook, pool, lambda: engine.model, shadow_fraction)
    engine = Engine(model, pool, shadow, limits, stops)
    return engine


def _event(
    sequence: RunningSequence,
    token_id: int | None,
    reason: FinishReason | None,
    logits: torch.Tensor | None,
) -> TokenEvent:
    return TokenEvent(
        sequence.request.id,
        token_id,
        reason,
        sequence.prompt_tokens,
        sequence.cache,
        logits if sequence.request.keep_logits else None,
    )
