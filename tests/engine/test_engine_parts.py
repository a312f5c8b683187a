"""Blocks, sampler and fingerprint, each by itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from engine_support import TINY
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored_client.engine import fingerprint
from kvstored_client.engine.blocks import CHUNK_TOKENS, BlockPool, BlockTable, OutOfBlocks
from kvstored_client.engine.fingerprint import BLOCK_BYTES, sampled_offsets, weights_fingerprint
from kvstored_client.engine.sampler import Sampler, Sampling


def rows(tokens: int, value: float) -> torch.Tensor:
    return torch.full((tokens, TINY.kv_heads, TINY.head_dim), value)


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 5), max_size=12))
def test_free_and_used_blocks_add_up(counts: list[int]) -> None:
    pool = BlockPool(TINY, 6)
    held: list[list[int]] = []
    for count in counts:
        if count > pool.free_blocks():
            with pytest.raises(OutOfBlocks, match=f"{count} blocks of 64 tokens wanted"):
                pool.take(count)
            pool.drop(held.pop(0))
            continue
        held.append(pool.take(count))
        assert pool.free_blocks() + pool.used_blocks() == 6
        assert pool.used_blocks() == len({block for blocks in held for block in blocks})
    for blocks in held:
        pool.drop(blocks)
    assert pool.free_blocks() == 6


def test_a_held_block_stays_in_use_until_the_last_holder_drops_it() -> None:
    pool = BlockPool(TINY, 2)
    blocks = pool.take(1)
    pool.hold(blocks)
    pool.drop(blocks)
    assert pool.used_blocks() == 1
    pool.drop(blocks)
    assert pool.used_blocks() == 0
    with pytest.raises(ValueError, match="once too often"):
        pool.drop(blocks)
    with pytest.raises(ValueError, match="is free"):
        pool.hold(blocks)


def test_a_blocks_bytes_are_its_memory() -> None:
    pool = BlockPool(TINY, 3)
    table = BlockTable(pool, 2 * CHUNK_TOKENS)
    table.write(1, CHUNK_TOKENS + 5, rows(1, 2.0), rows(1, 3.0))
    view = pool.view(table.blocks[1])
    assert view.nbytes == pool.block_bytes == 3 * 2 * 64 * 2 * 16 * 4
    assert view.view("<f4").reshape(3, 2, 64, 2, 16)[1, :, 5, 0, 0].tolist() == [2.0, 3.0]
    view[:] = 0
    keys, values = table.read(1, 2)
    assert keys.shape == (TINY.kv_heads, 2 * CHUNK_TOKENS, TINY.head_dim)
    assert not keys.any()
    assert not values.any()


def test_sealed_blocks_are_never_written() -> None:
    table = BlockTable(BlockPool(TINY, 3), 2 * CHUNK_TOKENS, spare=1)
    table.write(0, CHUNK_TOKENS, rows(1, 1.0), rows(1, 1.0))
    loaded = table.blocks[1]
    with pytest.raises(ValueError, match="no sealed block"):
        table.unseal_last()
    table.sealed = 2
    with pytest.raises(ValueError, match="block 1 was loaded"):
        table.write(0, 2 * CHUNK_TOKENS - 1, rows(1, 9.0), rows(1, 9.0))
    table.unseal_last()
    table.write(0, 2 * CHUNK_TOKENS - 1, rows(1, 9.0), rows(1, 9.0))
    keys, _ = table.read(0, 2)
    assert keys[0, CHUNK_TOKENS].eq(1.0).all()
    assert keys[0, 2 * CHUNK_TOKENS - 1].eq(9.0).all()
    assert loaded not in table.blocks
    assert not table.pool.kv[loaded, :, :, -1].any()
    with pytest.raises(ValueError, match="block 0 was loaded"):
        table.write(0, 0, rows(1, 9.0), rows(1, 9.0))


def test_greedy_takes_the_first_of_equals() -> None:
    sampler = Sampler(Sampling())
    assert sampler.next_token(torch.tensor([0.0, 5.0, 5.0, 1.0])) == 1


def test_sampling_follows_the_seed_and_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf])

    def draws(seed: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=0.5, seed=seed))
        return [sampler.next_token(logits) for _ in range(3000)]

    drawn = draws(1)
    assert drawn == draws(1)
    assert drawn != draws(2)
    expected = torch.softmax(logits / 0.5, dim=-1)
    counts = torch.bincount(torch.tensor(drawn), minlength=4)
    deviation = (3000 * expected * (1 - expected)).sqrt()
    assert ((counts - 3000 * expected).abs() <= 5 * deviation).all()


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_unusable_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature is"):
        Sampling(temperature=temperature)


def test_asking_for_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        Sampling(max_tokens=0)


def weights_file(folder: Path, data_bytes: int = 3 * BLOCK_BYTES + 11) -> Path:
    path = folder / "weights.gguf"
    path.write_bytes(b"header" + bytes(i % 251 for i in range(data_bytes)))
    return path


@pytest.mark.parametrize("place", [0, 5, 6, 6 + BLOCK_BYTES, -1])
def test_any_changed_byte_gives_another_fingerprint(tmp_path: Path, place: int) -> None:
    path = weights_file(tmp_path)
    before = weights_fingerprint(path, 6, tmp_path / "cache")
    assert len(before) == 64
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    os.utime(path, (1, 1))
    assert weights_fingerprint(path, 6, tmp_path / "cache") != before


def test_a_header_is_told_from_data(tmp_path: Path) -> None:
    path = weights_file(tmp_path)
    assert weights_fingerprint(path, 6, tmp_path / "a") != weights_fingerprint(
        path, 7, tmp_path / "a"
    )


def test_a_known_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = weights_file(tmp_path)
    cache = tmp_path / "cache"
    before = weights_fingerprint(path, 6, cache)
    reads: list[Path] = []
    compute = fingerprint._compute

    def counted(file: Path, offset: int, size: int) -> str:
        reads.append(file)
        return compute(file, offset, size)

    monkeypatch.setattr(fingerprint, "_compute", counted)
    assert weights_fingerprint(path, 6, cache) == before
    assert reads == []
    for damage in (b"{", b"[]", b'{"x": "short"}'):
        (cache / "fingerprints.json").write_bytes(damage)
        assert weights_fingerprint(path, 6, cache) == before
    assert reads == [path] * 3
    unwritable = path / "no-directory"
    assert weights_fingerprint(path, 6, unwritable) == before


def test_a_large_file_is_sampled_evenly_with_both_ends() -> None:
    offsets = list(sampled_offsets(100, 100 + 1000 * BLOCK_BYTES, 10 * BLOCK_BYTES))
    blocks = [(offset - 100) // BLOCK_BYTES for offset in offsets]
    assert blocks == [0, 111, 222, 333, 444, 555, 666, 777, 888, 999]
    assert list(sampled_offsets(0, 2 * BLOCK_BYTES + 1, 1 << 30)) == [
        0,
        BLOCK_BYTES,
        2 * BLOCK_BYTES,
    ]
