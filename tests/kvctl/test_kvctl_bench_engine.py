"""`kvctl bench engine`: one object of the agreed shape, a picture; what is wrong fails it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvstored.bench import engine, picture, workloads
from kvstored.bench.engine_report import CACHES, PERCENTILES, Answers, Cell
from kvstored.bench.processes import BenchError
from kvstored.bench.workloads import Shape, Workload
from kvstored.kvctl import main

VOCAB = 1000


def nothing(line: str) -> None:
    pass


def test_engine_prints_one_object_and_draws_a_picture(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("KVCTL_TARGET", "KVCTL_TOKEN", "KVCTL_TOKEN_FILE", "KVCTL_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    png = tmp_path / "engine.png"
    words = ["bench", "engine", "--json", "--quick", "--workloads", "chat,unique"]
    assert main([*words, "--concurrency", "3", "--png", str(png)]) == 0
    captured = capfd.readouterr()
    answer = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert "chat, 3 at once, fresh_warm, pass 2 of 2" in captured.err
    assert answer["bench"] == "engine"
    cases = answer["cases"]
    assert [c["op"] for c in cases[-2:]] == ["store_overhead", "load"]
    cells = {
        (c["params"]["workload"], c["params"]["concurrency"], c["params"]["cache"]): c
        for c in cases
        if c["op"] == "throughput"
    }
    assert set(cells) == {(w, n, c) for w in ("chat", "unique") for n in (3,) for c in CACHES}
    ttft = [c for c in cases if c["op"] == "ttft"]
    assert len(ttft) == len(PERCENTILES) * len(cells)
    assert all(c["value"] > 0 and c["ceiling"] > 0 and c["ratio"] > 0 for c in ttft)
    assert {c["unit"] for c in ttft} == {"ms"}
    # Two passes of three sessions, of chat with two turns; nothing is hit where everything is new.
    for (workload, _, cache), case in cells.items():
        params = case["params"]
        assert case["rounds"] == 2
        assert params["answers"] == (12 if workload == "chat" else 6)
        expected = 12 * 128 if workload == "chat" and cache != "off" else 0
        assert params["hit_tokens"] == expected
        if cache == "fresh_warm" and workload == "chat":
            # Each pass has a new engine, which loads both system prompts.
            assert params["loaded_tokens"] >= 2 * 2 * 128
            assert params["compared_chunks"] > 0
            assert case["verified_bytes"] > 0
    store, load = cases[-2:]
    assert (store["unit"], store["ratio"], load["unit"]) == ("fraction", None, "GB/s")
    assert load["value"] > 0
    assert load["verified_bytes"] > 0
    assert load["ceiling"] > 0
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert list(temporary.iterdir()) == []


def test_without_matplotlib_it_says_so_before_it_measures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "engine", "--quick", "--png", str(tmp_path / "p.png")]) == 1
    error = capsys.readouterr().err
    assert "pip install 'kvstored[bench]'" in error
    assert "starting" not in error


def test_a_picture_where_there_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="there is no directory"):
        picture.check(tmp_path / "no" / "p.png")


def test_kvctl_does_without_torch_and_matplotlib() -> None:
    code = (
        "import sys, kvstored.bench.engine, kvstored.bench.picture\n"
        "print({'torch', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--target", "unix:///nowhere"], 2, "its own daemons"),
        (["--concurrency", "one"], 2, "whole numbers"),
        (["--rounds", "4"], 2, "at least 5"),
        (["--workloads", "chat,poetry"], 1, "no workload poetry"),
        (["--concurrency", "0"], 1, "1 or more"),
    ],
)
def test_what_cannot_be_measured_is_said(
    words: list[str], status: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "engine", *words]) == status
    assert said in capfd.readouterr().err


def test_what_does_not_fit_into_memory_is_refused() -> None:
    facts = engine.Facts("model", "float32", VOCAB, 3 << 20, 1, 40)
    engine._check_memory(engine.Settings(concurrencies=(1,), workloads=("unique",)), facts)
    with pytest.raises(BenchError, match="leave out the highest"):
        engine._check_memory(engine.Settings(concurrencies=(1, 999_999)), facts)


class Puppet:
    """In place of the engine's process: every hit's answer, or its bits, are wrong."""

    def __init__(self, cache: str = "", mismatched: int = 0) -> None:
        self.cache = cache
        self.mismatched = mismatched

    def ask(self, line: str) -> str:
        asked = json.loads(line)
        if asked["do"] != "run":
            return "{}"
        token = 7 if asked["engine"] == self.cache else 6
        turn: dict[str, Any] = {"session": 0, "prompt_tokens": 9, "ttft_ms": 1.0}
        turn |= {"own_tokens": 0, "loaded_tokens": 0, "token_ids": [token]}
        return json.dumps(
            {
                "seconds": 1.0,
                "turns": [turn],
                "compared_chunks": 4,
                "mismatched_chunks": self.mismatched,
            }
        )


@pytest.mark.parametrize(
    ("puppet", "said"),
    [
        (Puppet(cache="fresh_warm"), "answers differ between cache off and fresh_warm"),
        (Puppet(mismatched=3), "3 of 4 chunks that were computed again differ"),
    ],
)
def test_wrong_answers_fail_the_bench(puppet: Puppet, said: str) -> None:
    facts = engine.Facts("puppet", "float32", VOCAB, 4096, 1, 40)
    engines = engine.Engines(puppet, facts)  # type: ignore[arg-type]
    settings = engine.Settings(quick=True, concurrencies=(1,))
    traffic = Workload(workloads.QUICK["chat"], VOCAB, 1)
    with pytest.raises(BenchError, match=said):
        engine._Measured(settings, engines, "", traffic, nothing).measure()


def test_sessions_share_what_they_should_and_nothing_else() -> None:
    traffic = Workload(Shape("chat", 2, 64, 2, 16), VOCAB, 5)
    sessions = traffic.sessions(0, 4, "a")
    assert sessions == Workload(traffic.shape, VOCAB, 5).sessions(0, 4, "a")
    assert sessions[2:] == traffic.sessions(2, 2, "a")
    assert [[len(turn) for turn in session] for session in sessions] == [[80, 16]] * 4
    begins = [session[0][:64] for session in sessions]
    assert begins[0] == begins[2] != begins[1] == begins[3]
    warming = traffic.warming()
    assert [session[0][:64] for session in warming] == begins[:2]
    others = [*sessions, *traffic.sessions(0, 4, "b"), *warming]
    tails = {tuple(session[0][64:]) for session in others}
    assert len(tails) == len(others)
    unique = Workload(Shape("unique", 0, 0, 1, 70), VOCAB, 5)
    assert len(unique.warming()) == 1
    assert unique.warming() != unique.sessions(0, 1, "a")


def test_percentiles_are_of_all_answers() -> None:
    off = Cell("chat", "off", 1, [10.0 * n for n in range(1, 101)], [1.0, 2.0, 3.0])
    warm = Cell("chat", "warm", 1, [float(n) for n in range(1, 101)], [2.0, 4.0, 6.0])
    *ttft, rate = (case.to_json() for case in warm.cases(off))
    assert [round(float(str(case["value"]))) for case in ttft] == [50, 90, 99]
    assert [case["ratio"] for case in ttft] == [0.1] * 3
    assert [case["rounds"] for case in ttft] == [3] * 3
    assert (rate["value"], rate["ratio"]) == (4.0, 2.0)
    assert isinstance(warm.cases(off)[0], Answers)
