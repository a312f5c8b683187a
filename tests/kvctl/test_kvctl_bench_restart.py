"""`kvctl bench restart`: one object of the agreed shape; a daemon that lost something fails it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from kvstored.bench import report, restart, restart_volume
from kvstored.bench.processes import BenchError
from kvstored.bench.restart_volume import CHAIN_CHUNKS, OBJECT_BYTES
from kvstored.kvctl import main


def test_restart_prints_one_object(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for module in (restart, report):
        monkeypatch.setattr(module, "MIN_ROUNDS", 1)
    words = ["bench", "restart", "--json", "--indexed-objects", "3000", "--rounds", "1"]
    assert main([*words, "--directory", str(tmp_path)]) == 0
    captured = capfd.readouterr()
    answer = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert answer["bench"] == "restart"
    cases = answer["cases"]
    shape = [(c["op"], c["params"].get("page_cache"), c["unit"], c["rounds"]) for c in cases]
    assert shape == [
        ("ready", "warm", "s", 1),
        ("ready", "cold", "s", 1),
        ("index_memory", None, "B/object", 1),
    ]
    for case in cases:
        assert case["params"]["indexed_objects"] == 3000
        assert case["ceiling"] > 0
    for case in cases[:2]:
        assert case["value"] > 0
        assert case["verified_bytes"] == CHAIN_CHUNKS * OBJECT_BYTES
    assert list(tmp_path.iterdir()) == []


def test_a_daemon_that_does_not_hold_all_of_it_fails_the_bench(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fill = restart_volume.fill

    def fill_less(files, directory, objects, seed) -> None:  # type: ignore[no-untyped-def]
        fill(files, directory, objects - 1, seed)

    monkeypatch.setattr(restart_volume, "fill", fill_less)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(BenchError, match="holds 199 objects, not 200"):
        restart.run(restart.Settings(objects=200, directory=tmp_path), lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_restart_takes_no_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "restart", "--target", "unix:///nowhere"]) == 2
    assert "its own daemon" in capsys.readouterr().err
    assert main(["bench", "restart", "--indexed-objects", "64"]) == 1
    assert "more than 64" in capsys.readouterr().err
