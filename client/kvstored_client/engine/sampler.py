"""Chooses the next token from a row of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen, and when to stop.

    `temperature` 0: always the likeliest (the lowest id of equals). Above 0: drawn from
    softmax(logits / temperature) by a generator seeded with `seed`, among the `top_k` likeliest
    (0: all) and among the fewest of those that have at least probability `top_p` together.
    A token in `stop_ids` ends the answer, as do the model's end tokens unless `ignore_eos`.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; at least 1 token must be asked for")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; 0 or a positive number is right")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; above 0 and at most 1 is right")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; 0 (all) or a positive number is right")
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise ValueError(f"seed is {self.seed}; -2**63 to 2**64 - 1 is right")


class Sampler:
    """Draws one sequence's tokens. The same logits and the same `Sampling` give the same tokens,
    whatever else runs beside it: every sequence has a generator of its own.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator(device="cpu").manual_seed(sampling.seed)

    def next_token(self, logits: torch.Tensor) -> int:
        """Token id chosen from `logits` [vocab]."""
        if self._sampling.temperature == 0.0:
            return int(torch.argmax(logits))
        scaled = logits.to("cpu", torch.float32) / self._sampling.temperature
        weights = torch.softmax(scaled, dim=-1)
        # Exponential race: argmax of p / e with e ~ Exp(1) is distributed as p, and unlike a
        # cumulative sum it does not depend on the order in which terms are added.
        race = torch.empty_like(weights).exponential_(generator=self._generator)
        return int(torch.argmax(self._restricted(weights) / race))

    def _restricted(self, weights: torch.Tensor) -> torch.Tensor:
        """`weights`, 0 for the tokens that top_k and top_p leave out."""
        top_k, top_p = self._sampling.top_k, self._sampling.top_p
        if top_k == 0 and top_p == 1.0:
            return weights
        # Stable, so that of equals the lower ids are kept.
        ordered, ids = torch.sort(weights, descending=True, stable=True)
        kept = ordered.clone()
        if 0 < top_k < kept.numel():
            kept[top_k:] = 0.0
        total = kept.sum()
        before = kept.cumsum(0) - kept
        kept[before >= top_p * total] = 0.0
        return torch.zeros_like(weights).scatter_(0, ids, kept)
