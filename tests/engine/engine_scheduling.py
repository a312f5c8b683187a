"""A model whose answers show whether every token's KV was in place, and a store moved by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool, BlockTable
from kvstored_client.engine.engine import Engine
from kvstored_client.engine.sampler import Sampling
from kvstored_client.engine.types import (
    EngineLimits,
    Loaded,
    Offer,
    Request,
    Segment,
    TakeBlocks,
    TokenEvent,
)

VOCAB = 97


@dataclass(frozen=True)
class SumConfig:
    layers: int = 2
    kv_heads: int = 1
    head_dim: int = 2
    vocab_size: int = VOCAB
    context_tokens: int = 4096


class SumModel:
    """A token's KV is the token; the next token is a sum over the KV of all before it, weighted by
    position. So a wrong, missing or misplaced block shows in the answer, and the right answer is
    known by arithmetic: `answer`. `offset` stands for the weights.
    """

    def __init__(self, offset: int = 0) -> None:
        self.config = SumConfig()
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.offset = offset
        self.calls: list[list[Segment]] = []

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor | None]:
        self.calls.append(list(segments))
        return [self._segment(segment) for segment in segments]

    def _segment(self, segment: Segment) -> torch.Tensor | None:
        stop = segment.start + len(segment.token_ids)
        assert segment.token_ids
        assert segment.start // CHUNK_TOKENS == (stop - 1) // CHUNK_TOKENS
        kv = torch.tensor(segment.token_ids, dtype=torch.float32) + self.offset
        kv = kv[:, None, None].expand(-1, 1, 2)
        for layer in range(self.config.layers):
            segment.table.write(layer, segment.start, kv, -kv)
        if not segment.wants_logits:
            return None
        keys, values = segment.table.read(1, -(-stop // CHUNK_TOKENS))
        assert torch.equal(keys[0, :stop], -values[0, :stop])
        tokens = [int(t) - self.offset for t in keys[0, :stop, 0]]
        logits = torch.zeros(VOCAB)
        logits[next_token(tokens, self.offset)] = 1.0
        return logits


def next_token(tokens: Sequence[int], offset: int = 0) -> int:
    return (sum(i * t for i, t in enumerate(tokens, 1)) + len(tokens) + offset) % VOCAB


def answer(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def numbers(tokens: int, seed: int = 0) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(0, VOCAB, tokens).tolist()
    return drawn


@dataclass(eq=False)
class HandLoad:
    """A load that ends when the test says so: `arrive`, or `expire` and later `land`."""

    hook: HandHook
    chunks: list[NDArray[np.uint8]]
    blocks: list[int]
    state: str = "under way"

    def ready(self) -> bool:
        return self.state in ("arrived", "late")

    def finish(self) -> Loaded:
        if self.state == "late":
            return Loaded(reason="deadline")
        self.hook.loads.remove(self)
        blocks, self.blocks = self.blocks, []
        return Loaded(blocks, {"ram": len(blocks)}, "")

    def cancel(self) -> None:
        if self.state == "arrived":
            self.land()
        self.state = "cancelled"

    def arrive(self) -> None:
        for block, data in zip(self.blocks, self.chunks, strict=True):
            self.hook.pool.view(block)[:] = data
        self.state = "arrived"
        self.hook.wake()

    def expire(self) -> None:
        self.state = "late"
        self.hook.wake()

    def land(self) -> None:
        """The last byte of a load that nobody waits for is written."""
        for block in self.blocks:
            self.hook.pool.view(block)[:] = 0xFF
        self.hook.pool.zero(self.blocks)
        blocks, self.blocks = self.blocks, []
        self.hook.loads.remove(self)
        self.hook.pool.drop(blocks)
        self.hook.wake()


@dataclass(eq=False)
class HandHook:
    """Keeps chunks in a dict. `loads`: those that hold blocks. `at_once`: loads arrive at once."""

    pool: BlockPool
    at_once: bool = False
    max_queued_chunks: int = 0
    epoch: int = 0
    kept: dict[tuple[int, bytes, tuple[int, ...]], NDArray[np.uint8]] = field(default_factory=dict)
    loads: list[HandLoad] = field(default_factory=list)
    offered: list[tuple[str, int, int]] = field(default_factory=list)
    offers: list[Offer] = field(default_factory=list)
    queue_chunks: int = 1000
    rates: list[float] = field(default_factory=list)
    wake: Callable[[], None] = lambda: None

    def begin_match(
        self,
        request: Request,
        token_ids: Sequence[int],
        start: int,
        take_blocks: TakeBlocks,
        tokens_per_s: float,
    ) -> HandLoad:
        self.rates.append(tokens_per_s)
        found = []
        for chunk in range(start, len(token_ids) // CHUNK_TOKENS):
            data = self.kept.get(self._key(request, token_ids, chunk))
            if data is None:
                break
            found.append(data)
        load = HandLoad(self, found, take_blocks(len(found)))
        self.loads.append(load)
        if self.at_once or not found:
            load.arrive()
        return load

    def store(
        self,
        request: Request,
        token_ids: Sequence[int],
        table: BlockTable,
        start: int,
        offer: Offer,
    ) -> int:
        stop = min(len(token_ids) // CHUNK_TOKENS, start + self.queue_chunks)
        self.offered.append((request.id, start, stop))
        self.offers.append(offer)
        for chunk in range(start, stop):
            key = self._key(request, token_ids, chunk)
            self.kept.setdefault(key, self.pool.copy_out(table.blocks[chunk]))
        return stop

    def on_change(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def set_epoch(self, weights_epoch: int) -> None:
        self.epoch = weights_epoch

    def drain(self, timeout_s: float) -> bool:
        return timeout_s >= 0

    def close(self, timeout_s: float) -> bool:
        return timeout_s >= 0

    def _key(
        self, request: Request, token_ids: Sequence[int], chunk: int
    ) -> tuple[int, bytes, tuple[int, ...]]:
        return self.epoch, request.request_salt, tuple(token_ids[: (chunk + 1) * CHUNK_TOKENS])


class Bench:
    """An engine on SumModel, stepped by the test; every step's blocks are counted."""

    def __init__(self, blocks: int = 40, hook: bool = False, **limits: int | bool) -> None:
        self.model = SumModel()
        self.pool = BlockPool(self.model.config, blocks)
        self.hook = HandHook(self.pool) if hook else None
        self.engine = Engine(self.model, self.pool, self.hook, EngineLimits(**limits))
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.events: dict[str, list[TokenEvent]] = {}
        self.ended: list[str] = []

    def add(self, name: str, prompt: list[int], count: int = 4, salt: bytes = b"") -> None:
        self.engine.add_request(Request(name, prompt, Sampling(max_tokens=count), salt))
        self.prompts[name] = prompt, count
        self.events[name] = []

    def step(self) -> list[TokenEvent]:
        events = self.engine.step()
        for event in events:
            self.events[event.request_id].append(event)
            if event.finish_reason is not None:
                self.ended.append(event.request_id)
        self.check_blocks()
        return events

    def finish(self, most: int = 400) -> None:
        """Step until nothing is under way."""
        for _ in range(most):
            if not self.engine.has_requests():
                return
            self.step()
        raise AssertionError(f"requests are under way after {most} steps")

    def tokens(self, name: str) -> list[int]:
        return [e.token_id for e in self.events[name] if e.token_id is not None]

    def right(self, name: str) -> bool:
        """Whether it ended with the answer that arithmetic gives."""
        prompt, count = self.prompts[name]
        ended = [e.finish_reason for e in self.events[name]]
        return self.tokens(name) == answer(prompt, count) and ended == [None] * (count - 1) + [
            "length"
        ]

    def check_blocks(self) -> None:
        """Every block is free, or held exactly as often as it is used."""
        pool, engine = self.pool, self.engine
        assert pool.free_blocks() + pool.used_blocks() == pool.blocks
        held = [0] * pool.blocks
        for node in engine.tree._order:
            held[node.block] += 1
        for sequence in engine._scheduler.running:
            for block in [*sequence.table.blocks, *sequence.reserved]:
                held[block] += 1
        for load in self.hook.loads if self.hook else []:
            for block in load.blocks:
                held[block] += 1
        assert held == [pool.references(block) for block in range(pool.blocks)]
        for sequence in engine._scheduler.waiting:
            assert not sequence.table.blocks
