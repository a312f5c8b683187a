"""Nouns that the engine's modules share: segments, requests, events, limits, the hook's face.

Nothing here computes. model.py reads segments; engine.py and the server exchange requests and
events; hook.py is the only real `StoreHook`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch

from kvstored_client.engine.blocks import BlockTable, KVShape
from kvstored_client.engine.sampler import Sampling

FinishReason = Literal["stop", "length", "abort"]

TakeBlocks = Callable[[int], list[int]]
"""Takes that many of the blocks that are reserved for a prompt, with one reference each. Raises
OutOfBlocks, taking none, where it is asked for more than the prompt has. For the engine's thread.
"""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence that one step computes; all lie in one chunk.

    `token_ids` are at positions from `start` on. The KV of all positions before `start` is in
    `table`, or is placed there by segments before this one in the same call: one sequence may have
    several, in order. `wants_logits`: those after its last token are asked for.
    """

    table: BlockTable
    token_ids: Sequence[int]
    start: int
    wants_logits: bool


class ModelShape(KVShape, Protocol):
    """What the engine reads of a model's config."""

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 to one less."""

    @property
    def context_tokens(self) -> int:
        """Tokens of a sequence at most."""


class StepModel(Protocol):
    """What the engine asks of a model. It holds no state of any sequence."""

    @property
    def config(self) -> ModelShape:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its KV."""

    @property
    def device(self) -> torch.device:
        """Where its KV is."""

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor | None]:
        """Compute the segments and place their KV in their tables. Returns, for each, the logits
        [vocab_size] after its last token, None where they are not wanted.
        """


@dataclass(frozen=True, slots=True)
class Request:
    """What `Engine.add_request` takes.

    `id` is the caller's, unique among the requests under way. `request_salt` keeps the prompt's
    chunks apart from those of other salts, in the store and in the engine's own tree. `tenant` is
    the label under which the store accounts for it; "" for none. `keep_logits`: events carry them.
    """

    id: str
    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    request_salt: bytes = b""
    tenant: str = ""
    keep_logits: bool = False


@dataclass(frozen=True, slots=True)
class CacheUse:
    """How much of one prompt was not computed, and where it came from.

    `own_tokens` were in the engine's own blocks, `loaded_tokens` came from the store, in
    `bytes_by_tier`. `miss_reason`: why not more of its full chunks were loaded; "" where all were,
    or no store is used. `load_ms`: from admission until the load was decided.
    """

    own_tokens: int = 0
    loaded_tokens: int = 0
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    miss_reason: str = ""
    load_ms: float = 0.0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.own_tokens + self.loaded_tokens


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of one request, or its end.

    `token_id` None: it ended without a further one, because it was aborted. `finish_reason` is set
    in a request's last event, and only there. `logits` [vocab]: those the token was chosen from,
    where the request keeps them.
    """

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None
    prompt_tokens: int
    cache: CacheUse
    logits: torch.Tensor | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.cache.cached_tokens


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of one engine.

    `max_running` sequences hold blocks at a time, `max_waiting` more may be queued. A step computes
    one token of each sequence that decodes and `prefill_tokens` of those that don't yet, but
    at least one chunk's. `own_prefixes`: keep blocks of finished sequences for prompts that begin
    alike.
    """

    max_running: int = 16
    max_waiting: int = 256
    prefill_tokens: int = 128
    own_prefixes: bool = True

    def __post_init__(self) -> None:
        for name in ("max_running", "max_waiting", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least 1 is needed")


@dataclass(slots=True)
class EngineStats:
    """Sums since the engine was made; `prefill_tokens_per_s` is the recent rate, 0 while unknown.

    Of the prompts' tokens (`prompt_tokens`, counted at the first token of each answer)
    `own_hit_tokens` were in own blocks and `loaded_tokens` came from the store. `prefill_tokens`
    and `decode_tokens` were computed, those computed again after a preemption included.
    `deferred`: times a prompt waited for another's load of the same chunks.
    """

    steps: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    preemptions: int = 0
    deferred: int = 0
    prompt_tokens: int = 0
    own_hit_tokens: int = 0
    loaded_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the store gave of one prompt: `blocks` hold its chunks from the load's `start` on, each
    with one reference, which is now the engine's. `reason`: why not more; "" where all came.
    """

    blocks: list[int] = field(default_factory=list)
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""


@dataclass(eq=False, slots=True)
class Offer:
    """Chunks that were offered to the store together. `lost`: it did not take all of them, and may
    another time. The hook sets it, on any thread; the engine offers them again when it sees it.
    """

    lost: bool = False


class PendingLoad(Protocol):
    """A load under way. Called on the engine's thread; nothing here waits."""

    def ready(self) -> bool:
        """Whether it is decided: the blocks are there, or it was a miss, declined, or too late."""

    def finish(self) -> Loaded:
        """Hand over what came. Once, after `ready`."""

    def cancel(self) -> None:
        """The request is gone. Blocks go back when not one more byte is written to them."""


@runtime_checkable
class StoreHook(Protocol):
    """What the engine asks of its hook, on its own thread. Only `drain` and `close` wait."""

    @property
    def max_queued_chunks(self) -> int:
        """Blocks that puts under way may hold at most."""

    def begin_match(
        self,
        request: Request,
        token_ids: Sequence[int],
        start: int,
        take_blocks: TakeBlocks,
        tokens_per_s: float,
    ) -> PendingLoad:
        """Look for the full chunks of `token_ids` from chunk `start` on, and load what is held.

        `token_ids`: the request's prompt, and what was generated before a preemption. Chunks before
        `start` are in the engine's own blocks. The hook takes the blocks it loads into by
        `take_blocks`, within this call or within `ready`. `tokens_per_s`: rate at which the engine
        computes prompts, 0 while unknown; a load that takes longer than computing is declined.
        """

    def store(
        self,
        request: Request,
        token_ids: Sequence[int],
        table: BlockTable,
        start: int,
        offer: Offer,
    ) -> int:
        """Queue the full chunks of `token_ids` from chunk `start` on. All their KV is in `table`,
        which may be released at once: the hook holds references of its own. Returns the number
        of the first chunk that was not queued. `offer` is told what becomes of those that were.
        """

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, whenever a load may have become ready (its deadline passed,
        too) or blocks came back to the pool.
        """

    def set_epoch(self, weights_epoch: int) -> None:
        """From now on chunks are of other weights. No load is under way."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until every queued chunk is put or refused. False: some are still under way. Not
        called by the engine itself.
        """

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued. False: not all of it within `timeout_s`."""
