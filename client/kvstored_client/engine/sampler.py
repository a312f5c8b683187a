"""Chooses the next token from a row of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. `temperature` 0: always the likeliest (the lowest id of equals).
    Above 0: drawn from softmax(logits / temperature) by a generator seeded with `seed`.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; at least 1 token must be asked for")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; 0 or a positive number is right")


class Sampler:
    """Draws one sequence's tokens. The same logits and the same `Sampling` give the same tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self._temperature = sampling.temperature
        self._generator = torch.Generator(device="cpu").manual_seed(sampling.seed)

    def next_token(self, logits: torch.Tensor) -> int:
        """Token id chosen from `logits` [vocab], float32."""
        if self._temperature == 0.0:
            return int(torch.argmax(logits))
        # Exponential race: argmax of p / e with e ~ Exp(1) is distributed as p, and unlike a
        # cumulative sum it does not depend on the order in which terms are added.
        weights = torch.softmax(logits.cpu() / self._temperature, dim=-1)
        race = torch.empty_like(weights).exponential_(generator=self._generator)
        return int(torch.argmax(weights / race))
