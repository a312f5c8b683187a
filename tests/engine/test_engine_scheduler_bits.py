"""Requests computed together, preempted or drawing on shared blocks: the bits they have alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_support import NO_EOS, TINY, random_tensors, tiny_prompt

from kvstored_client.engine.checkpoint import Checkpoint, TokenizerSpec
from kvstored_client.engine.engine import Engine, make_engine
from kvstored_client.engine.model import Model
from kvstored_client.engine.sampler import Sampling
from kvstored_client.engine.types import EngineLimits, Request, TokenEvent

SHARED = tiny_prompt(140, seed=50)
PROMPTS = [
    *(tiny_prompt(n, seed=n) for n in (1, 31, 64, 90, 200)),
    *([*SHARED, *tiny_prompt(n, seed=60 + n)] for n in (0, 1, 40, 52)),
]
SAMPLINGS = [
    Sampling(max_tokens=20 + 9 * (n % 4), temperature=0.9 * (n % 2), seed=n, ignore_eos=True)
    for n in range(len(PROMPTS))
]


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def tiny(request: pytest.FixtureRequest) -> Model:
    dtype = getattr(torch, request.param)
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(TINY).items()}
    tokenizer = TokenizerSpec([], [], [], NO_EOS, "")
    return Model(Checkpoint(Path("tiny"), 0, TINY, tokenizer, tensors))


@pytest.fixture(scope="module")
def alone(tiny: Model) -> list[list[torch.Tensor]]:
    engine = make_engine(tiny, NO_EOS, context_tokens=512)
    return [
        engine.generate(prompt, sampling, keep_logits=True).logits
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]


def together(
    engine: Engine, prompts: list[list[int]] = PROMPTS, samplings: list[Sampling] = SAMPLINGS
) -> list[list[torch.Tensor]]:
    """Logits of every prompt, all of them computed at a time."""
    logits: dict[str, list[torch.Tensor]] = {f"{n}": [] for n in range(len(prompts))}
    for n, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        engine.add_request(Request(f"{n}", prompt, sampling, keep_logits=True))
    while engine.has_requests():
        events: list[TokenEvent] = engine.step()
        for event in events:
            assert event.logits is not None
            logits[event.request_id].append(event.logits)
        assert engine.pool.free_blocks() + engine.pool.used_blocks() == engine.pool.blocks
    return list(logits.values())


def equal(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> list[bool]:
    return [
        len(x) == len(y) and all(torch.equal(p, q) for p, q in zip(x, y, strict=True))
        for x, y in zip(a, b, strict=True)
    ]


@pytest.mark.parametrize("own_prefixes", [True, False])
def test_together_as_alone(
    tiny: Model, alone: list[list[torch.Tensor]], own_prefixes: bool
) -> None:
    limits = EngineLimits(own_prefixes=own_prefixes, prefill_tokens=128)
    engine = make_engine(tiny, NO_EOS, limits=limits, blocks=40)
    for _ in range(2):
        assert all(equal(together(engine), alone))
    assert engine.stats.preemptions == 0
    assert (engine.stats.own_hit_tokens > 0) == own_prefixes


def test_preempted_as_alone(tiny: Model) -> None:
    prompts = [tiny_prompt(60 + n, seed=n) for n in range(4)]
    samplings = [Sampling(max_tokens=75, temperature=0.5 * (n % 2), seed=n) for n in range(4)]
    engine = make_engine(tiny, NO_EOS, context_tokens=512)
    expected = [
        engine.generate(prompt, sampling, keep_logits=True).logits
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    engine = make_engine(tiny, NO_EOS, limits=EngineLimits(own_prefixes=False), blocks=6)
    assert all(equal(together(engine, prompts, samplings), expected))
    assert engine.stats.preemptions > 0


def test_a_wrong_shared_block_shows(tiny: Model, alone: list[list[torch.Tensor]]) -> None:
    engine = make_engine(tiny, NO_EOS, limits=EngineLimits(), blocks=40)
    together(engine)
    first = next(n for n in engine.tree.root(b"").children.values() if n.children)
    engine.pool.kv[first.block] += 0.5
    same = equal(together(engine), alone)
    assert not all(same)
    assert any(same)
