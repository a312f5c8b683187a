"""A token's KV and logits have the same bits however it came: in a long prefill, decoded, alone or
packed among others. First the premises, kernel by kernel; then the model, in steps drawn at random.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from engine_support import NO_EOS, TINY, random_tensors, tiny_prompt
from torch.nn import functional

from kvstored_client.engine.batch import Shape
from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool, BlockTable
from kvstored_client.engine.checkpoint import Checkpoint, TokenizerSpec
from kvstored_client.engine.model import TILE_ROWS, Model, subtile_rows
from kvstored_client.engine.types import Segment

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# (in, out) of SmolLM2-135M's products, of the small model's, and odd ones.
PRODUCTS = [(576, 960), (576, 576), (576, 3072), (1536, 576), (96, 160), (160, 96), (70, 100)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "out"), PRODUCTS)
def test_a_products_rows_depend_on_nothing_but_themselves(
    columns: int, out: int, dtype: torch.dtype, device: str
) -> None:
    """Not on which row it is, nor on what the others hold."""
    weight = torch.randn(out, columns).to(device, dtype)
    rows = torch.randn(TILE_ROWS, columns).to(device, dtype)
    expected = functional.linear(rows, weight)
    for shift in range(1, TILE_ROWS):
        moved = functional.linear(rows.roll(shift, 0), weight).roll(-shift, 0)
        assert torch.equal(moved, expected)
    for row in range(0, TILE_ROWS, 5):
        others = torch.randn(TILE_ROWS, columns).to(device, dtype)
        others[row] = rows[row]
        assert torch.equal(functional.linear(others, weight)[row], expected[row])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "chunks"), [(3, 3, 1), (3, 3, 9), (1, 6, 3)])
def test_a_subtile_attends_alike_alone_and_among_others(
    kv_heads: int, group: int, chunks: int, dtype: torch.dtype, device: str
) -> None:
    size, keys = subtile_rows(group), chunks * CHUNK_TOKENS
    starts = [keys - CHUNK_TOKENS + size * i for i in (0, 3, 5, CHUNK_TOKENS // size - 1)]
    bias = Shape(TILE_ROWS, size, group, dtype).bias(starts).to(device)
    query = torch.randn(4, kv_heads, group * size, 64).to(device, dtype)
    k, v = (torch.randn(4, kv_heads, keys, 64).to(device, dtype) for _ in "kv")
    together = functional.scaled_dot_product_attention(query, k, v, attn_mask=bias)
    for i in range(4):
        one = slice(i, i + 1)
        alone = query[one].clone()
        alone[:, :, 1::size] = 0  # padding in the place of another row
        alone = functional.scaled_dot_product_attention(alone, k[one], v[one], attn_mask=bias[one])
        assert torch.equal(alone[0, :, ::size], together[i, :, ::size])
        beyond = k[one].clone()
        beyond[:, :, starts[i] + size :] = torch.randn_like(beyond[:, :, starts[i] + size :])
        seen = functional.scaled_dot_product_attention(
            query[one], beyond, v[one], attn_mask=bias[one]
        )
        assert torch.equal(seen[0], together[i])


Piece = tuple[int, int, int]  # sequence, first position, position after the last


@dataclass(frozen=True)
class Computed:
    """KV of each sequence [token, layer, 2, kv_head, head_dim], and logits by (sequence, position)
    after which they were asked for.
    """

    kv: list[torch.Tensor]
    logits: dict[tuple[int, int], torch.Tensor]


def compute(model: Model, prompts: Sequence[list[int]], steps: list[list[Piece]]) -> Computed:
    pool = BlockPool(model.config, 16, model.dtype, model.device)
    tables = [BlockTable(pool, len(prompt)) for prompt in prompts]
    logits = {}
    for step in steps:
        segments = [
            Segment(tables[i], prompts[i][a:b], a, wants_logits=b - a == 1 or bool(a % 3))
            for i, a, b in step
        ]
        for (i, _, b), segment, row in zip(step, segments, model.forward(segments), strict=True):
            assert (row is not None) == segment.wants_logits
            if row is not None:
                assert row.shape == (model.config.vocab_size,)
                assert row.dtype == torch.float32
                logits[i, b - 1] = row
    kv = []
    for table, prompt in zip(tables, prompts, strict=True):
        blocks = pool.kv[table.index].permute(0, 3, 1, 2, 4, 5)
        kv.append(blocks.flatten(0, 1)[: len(prompt)].clone())
    return Computed(kv, logits)


def random_steps(lengths: Sequence[int], seed: int) -> list[list[Piece]]:
    """Every sequence cut at random, pieces of several per step; some have two in one."""
    drawn = random.Random(seed)
    done = [0] * len(lengths)
    steps = []
    while any(a < length for a, length in zip(done, lengths, strict=True)):
        step: list[Piece] = []
        for i in drawn.sample(range(len(lengths)), drawn.randint(1, len(lengths))):
            for _ in range(drawn.choice((1, 1, 2))):
                a = done[i]
                end = min(lengths[i], (a // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
                b = min(end, a + drawn.choice((1, 1, 5, 17, 64)))
                if b > a:
                    step.append((i, a, b))
                    done[i] = b
        if step:
            steps.append(step)
    return steps


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changes",
    [{}, {"kv_heads": 1}, {"kv_heads": 6}, {"qk_norm": True, "qkv_bias": True, "head_dim": 24}],
)
def test_random_steps_of_many_sequences_give_the_bits_of_each_alone(
    changes: dict[str, int], dtype: torch.dtype, device: str
) -> None:
    config = replace(TINY, layers=2, **changes)
    tensors = {name: t.to(device, dtype) for name, t in random_tensors(config).items()}
    spec = TokenizerSpec([], [], [], NO_EOS, "")
    model = Model(Checkpoint(Path("tiny"), 0, config, spec, tensors))
    prompts = [tiny_prompt(n, seed=n) for n in (130, 64, 67, 1)]
    lengths = [len(prompt) for prompt in prompts]
    alone = []
    for prompt, n in zip(prompts, lengths, strict=True):
        starts = range(0, n, CHUNK_TOKENS)
        alone.append(compute(model, [prompt], [[(0, a, min(a + CHUNK_TOKENS, n))] for a in starts]))
    decoded = compute(model, prompts[2:3], [[(0, a, a + 1)] for a in range(lengths[2])])
    assert torch.equal(decoded.kv[0], alone[2].kv[0])
    compared = 0
    for seed in (1, 2):
        got = compute(model, prompts, random_steps(lengths, seed))
        for i, kv in enumerate(got.kv):
            assert torch.equal(kv, alone[i].kv[0])
        for (i, position), row in got.logits.items():
            if i == 2:
                assert torch.equal(row, decoded.logits[0, position])
                compared += 1
    assert compared > 5


def test_what_cannot_be_computed_is_refused_before_anything_is_written() -> None:
    spec = TokenizerSpec([], [], [], NO_EOS, "")
    model = Model(Checkpoint(Path("tiny"), 0, TINY, spec, random_tensors(TINY)))
    table = BlockTable(BlockPool(TINY, 3), 2 * CHUNK_TOKENS)
    good = Segment(table, [1, 2], 0, wants_logits=True)
    for segment, message in [
        (Segment(table, [1] * 3, 62, wants_logits=False), "62 to 65 do not lie in one chunk"),
        (Segment(table, [], 5, wants_logits=False), "5 to 5 do not lie in one chunk"),
        (Segment(table, [1], 128, wants_logits=False), "position 128 is beyond its table of 2"),
        (
            Segment(BlockTable(BlockPool(TINY, 1), 1), [1], 0, wants_logits=False),
            "in different pools",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            model.forward([good, segment])
    table.seal(1)
    with pytest.raises(ValueError, match="block 0 is shared and must not be written"):
        model.forward([good])
    other = BlockTable(BlockPool(TINY, 1, torch.float16), 1)
    with pytest.raises(ValueError, match="the pool holds torch"):
        model.forward([Segment(other, [1], 0, wants_logits=False)])
    assert not table.pool.kv.any()
    assert model.forward([]) == []
