"""One prompt to its end, on an engine that has nothing else to do: for scripts, demo and tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from kvstored_client.engine.types import Request, TokenEvent

if TYPE_CHECKING:
    from kvstored_client.engine.engine import Engine

_WAIT_S = 0.2
"""How long to wait for a load to say that it is ready, before looking at it all the same."""


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


def run_to_end(
    engine: Engine,
    request: Request,
    on_prefill: Callable[[int, int], None] | None,
    on_token: Callable[[int], None] | None,
) -> Completion:
    """What `Engine.generate` does."""
    if engine.has_requests():
        raise ValueError("other requests are under way; use add_request and step")
    started = time.perf_counter()
    if on_prefill is not None:
        engine.on_progress = lambda _, tokens: on_prefill(tokens, len(request.prompt))
    events: list[TokenEvent] = []
    ttft_ms = 0.0
    try:
        engine.add_request(request)
        while not events or events[-1].finish_reason is None:
            engine.wait(_WAIT_S)
            for event in engine.step():
                ttft_ms = ttft_ms or _ms_since(started)
                events.append(event)
                if on_token is not None and event.token_id is not None:
                    on_token(event.token_id)
    finally:
        engine.on_progress = None
        engine.end(request.id)
    return _completion(events, ttft_ms, _ms_since(started))


def _completion(events: list[TokenEvent], ttft_ms: float, total_ms: float) -> Completion:
    first, last = events[0], events[-1]
    return Completion(
        prompt_tokens=first.prompt_tokens,
        token_ids=[e.token_id for e in events if e.token_id is not None],
        finish_reason="stop" if last.finish_reason == "stop" else "length",
        cached_tokens=first.cached_tokens,
        bytes_by_tier=first.cache.bytes_by_tier,
        miss_reason=first.cache.miss_reason,
        ttft_ms=ttft_ms,
        load_ms=first.cache.load_ms,
        total_ms=total_ms,
        logits=[e.logits for e in events if e.logits is not None],
    )


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
