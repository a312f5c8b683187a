"""Rotary position embedding, and the ways of stretching it that depend on the position alone.

RoPE: https://arxiv.org/abs/2104.09864; linear: https://arxiv.org/abs/2306.15595; YaRN:
https://arxiv.org/abs/2309.00071; llama3: Llama 3.1's model card and reference code. Kinds whose
angles depend on the length of the prompt (dynamic, longrope) are refused where a checkpoint is
read: the K of a token would change as the prompt grows, and could not be stored.
"""

from __future__ import annotations

import math

import torch

from kvstored_client.engine.config import ModelConfig, RopeScaling

_STEP_TOKENS = 64
"""Positions per step of the tables: the same shapes always, hence the same bits."""


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position of each rotated pair, float32 [head_dim / 2]."""
    dim, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    if scaling.kind == "yarn":
        return _yarn(plain, dim, theta, scaling)
    return plain


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies cos and sin by, so that attention stays as sharp as it was."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def position_encoding(config: ModelConfig) -> str:
    """Everything that decides how K is rotated, for the family: K is stored rotated."""
    scaling = config.rope_scaling
    text = f"rope:{scaling.kind}:halves theta={config.rope_theta!r} dim={config.head_dim}"
    if scaling.kind != "default":
        values = {name: getattr(scaling, name) for name in RopeScaling.__slots__ if name != "kind"}
        text += "".join(f" {name}={value!r}" for name, value in values.items())
    return f"{text} applied-to-k"


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + head_dim / 2) of x [tokens, heads, head_dim] by their angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class RopeTable:
    """cos and sin by position, computed as far as positions have been asked for."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self._frequencies = inverse_frequencies(config)
        self._factor = config.rope_scaling.attention_factor
        self._dtype, self._device = dtype, device
        self._cos = self._sin = torch.empty(0, 1, config.head_dim, dtype=dtype, device=device)

    def rows(self, positions: torch.Tensor, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin, each [positions, 1, head_dim], of positions that are all below `stop`."""
        if stop > len(self._cos):
            self._grow(max(stop, 2 * len(self._cos)))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _grow(self, stop: int) -> None:
        """Add whole steps up to `stop`. In float32 on the CPU, so that every device has the same
        angles.
        """
        cos, sin = [self._cos], [self._sin]
        for first in range(len(self._cos), stop, _STEP_TOKENS):
            positions = torch.arange(first, first + _STEP_TOKENS, dtype=torch.float32)
            angles = (positions[:, None] * self._frequencies).repeat(1, 2).unsqueeze(1)
            for table, values in ((cos, angles.cos()), (sin, angles.sin())):
                table.append((values * self._factor).to(self._device, self._dtype))
        self._cos, self._sin = torch.cat(cos), torch.cat(sin)


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long waves are stretched, short ones are not, those between are blended."""
    context = scaling.original_context_tokens
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > context / low, plain / scaling.factor, plain)
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    between = ~(wavelength < context / high) & ~(wavelength > context / low)
    return torch.where(between, blended, stretched)


def _yarn(plain: torch.Tensor, dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Pairs that turn more than `fast_turns` times within the original context stay, those that
    turn less than `slow_turns` times are stretched, those between are blended.
    """

    def pair_with(turns: float) -> float:
        context = scaling.original_context_tokens
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.fast_turns), pair_with(scaling.slow_turns)
    if scaling.whole_dimensions:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no ramp, but a step
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    stretched = 1.0 / (scaling.factor * (1.0 / plain))
    return stretched * (1 - keep) + plain * keep
