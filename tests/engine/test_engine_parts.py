"""Sampler and fingerprint, each by itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kvstored_client.engine import fingerprint
from kvstored_client.engine.fingerprint import BLOCK_BYTES, sampled_offsets, weights_fingerprint
from kvstored_client.engine.sampler import Sampler, Sampling


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


def test_top_k_and_top_p_leave_out_the_unlikely() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1]).log()

    def drawn(**options: float) -> set[int]:
        sampler = Sampler(Sampling(temperature=1.0, **options))  # type: ignore[arg-type]
        return {sampler.next_token(logits) for _ in range(400)}

    assert drawn() == {0, 1, 2, 3, 4}
    assert drawn(top_k=1) == {1}
    assert drawn(top_k=2) == {1, 2}  # of equals the lower id
    assert drawn(top_k=9) == {0, 1, 2, 3, 4}
    assert drawn(top_p=0.39) == {1}
    assert drawn(top_p=0.5) == {1, 2}
    assert drawn(top_p=0.75) == {1, 2, 3}
    assert drawn(top_k=3, top_p=0.6) == {1, 2}  # 0.4 of 0.8 is not enough


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"seed": 1 << 64}, "seed is"),
    ],
)
def test_unusable_restrictions_are_refused(options: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Sampling(**options)  # type: ignore[arg-type]


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

    def counted(part: fingerprint._Part, size: int) -> str:
        reads.append(part.path)
        return compute(part, size)

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
