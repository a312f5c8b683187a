"""`kvctl bench lookup`: one object of the agreed shape; a chunk that is not found fails it."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstored.bench import lookup, processes
from kvstored.bench.echo import Echo
from kvstored.bench.payloads import random_bytes
from kvstored.bench.processes import BenchError
from kvstored.kvctl import main

SMALL = lookup.Settings(
    indexed_objects=640, keys=64, rounds=5, samples=5, busy_s=0.0, busy_chunks=1
)


def test_lookup_prints_one_object(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    words = ["bench", "lookup", "--json", "--indexed-objects", "2000", "--rounds", "5"]
    assert main([*words, "--samples", "20", "--busy-s", "0", "--chunks", "2"]) == 0
    captured = capfd.readouterr()
    answer = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert answer["bench"] == "lookup"
    cases = answer["cases"]
    shape = [
        (c["op"], c["params"].get("busy_sessions"), c["params"].get("percentile"), c["unit"])
        for c in cases
    ]
    assert shape == [
        ("match", 0, 50, "us"),
        ("match", 0, 99, "us"),
        ("match", 4, 50, "us"),
        ("match", 4, 99, "us"),
        ("loop_lag", 4, 99, "us"),
        ("index_memory", None, None, "B/object"),
    ]
    for case in cases[:4]:
        assert case["params"]["keys"] == 512
        assert case["params"]["indexed_objects"] == 2000
        assert case["params"]["transport"] == "local"
        assert case["rounds"] == 5
        assert min(case["value"], case["ceiling"], case["ratio"]) > 0
    for case in cases[2:5]:
        assert case["params"]["busy_gb_per_s"] > 0
        assert case["verified_bytes"] >= 4 * 2 << 20  # each session's last prefix at least
    assert cases[4]["rounds"] >= 5
    assert cases[5]["ceiling"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_chunk_that_is_not_found_fails_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    index = lookup.Objects.index

    def index_and_lose_one(self: lookup.Objects, say: Callable[[str], None]) -> None:
        index(self, say)
        self._client.delete(self._foreign(self.hashes[-1:]))

    monkeypatch.setattr(lookup.Objects, "index", index_and_lose_one)
    with pytest.raises(BenchError, match="chunks that are held: deleted"):
        lookup.run(SMALL, lambda line: None)


def test_fewer_objects_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(lookup, "memory_allowed", lambda: (180 << 20, "a test"))
    count = lookup._objects_that_fit(SMALL, said.append)
    assert count == SMALL.indexed_objects
    assert said == []
    monkeypatch.setattr(lookup, "memory_allowed", lambda: (161 << 20, "a test"))
    count = lookup._objects_that_fit(SMALL, said.append)
    assert count == (1 << 19) // (lookup.OBJECT_BYTES + lookup.OVERHEAD_BYTES)
    assert said == [f"{count} objects instead of 640: half of 161 MiB (a test) does not hold more"]
    monkeypatch.setattr(lookup, "memory_allowed", lambda: (160 << 20, "a test"))
    with pytest.raises(BenchError, match="too few"):
        lookup._objects_that_fit(SMALL, said.append)


def test_the_bare_server_looks_up_and_echoes() -> None:
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        path = str(Path(name) / "echo.sock")
        with processes.child("kvstored.bench.echo", path, 1000, 3) as (_, (per_key,)):
            assert float(per_key) > 0
            echo = Echo(path)
            keys = random_bytes(32_000, 3).tobytes()
            unknown = os.urandom(32)
            assert echo.look_up(keys[:96] + unknown + keys[-32:]) == b"\1\1\1\0\1"
            assert echo.look_up(keys) == bytes([1]) * 1000
            echo.call(b"no answer", 0)
            assert echo.call(bytes(100_000), 70_000) == bytes(70_000)
            echo.close()


def test_private_memory_is_counted() -> None:
    block = os.urandom(1 << 20)
    before = processes.private_bytes(os.getpid())
    # A mapping of its own: the heap may have freed memory to give out again.
    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        for at in range(0, len(held), len(block)):
            held[at : at + len(block)] = block
        grown = processes.private_bytes(os.getpid()) - before
    assert 31 << 20 < grown < 40 << 20


def test_a_child_that_ends_early_is_reported() -> None:
    with (
        pytest.raises(BenchError, match=r"kvstored\.bench\.memory` ended early"),
        processes.child("kvstored.bench.memory", -1, 0),
    ):
        pass


def test_lookup_takes_no_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "lookup", "--target", "unix:///nowhere"]) == 2
    assert "starts its own" in capsys.readouterr().err
    assert main(["bench", "lookup", "--keys", "10", "--indexed-objects", "9"]) == 2
