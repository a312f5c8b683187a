"""`kvctl bench remote --json`: one object of the agreed shape, all verified, nothing left."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from kvstored.bench import payloads, remote
from kvstored.bench.processes import BenchError
from kvstored.bench.report import Case, table
from kvstored.kvctl import main
from kvstored_client import KVClient, Prefix

MIB = 1 << 20


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_remote_prints_one_object(
    transport: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("KVCTL_TARGET", "KVCTL_TOKEN", "KVCTL_TOKEN_FILE", "KVCTL_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    words = ["bench", "remote", "--json", "--rounds", "5", "--chunks", "3", "--object-mib", "1,2"]
    assert main([*words, "--transport", transport]) == 0
    captured = capfd.readouterr()
    answer = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert captured.err
    assert answer["bench"] == "remote"
    assert set(answer["host"]) == {"cores", "memory_bytes", "kernel"}
    cases = answer["cases"]
    shape = [(c["op"], c["params"]["object_bytes"], c["verified_bytes"]) for c in cases]
    assert shape == [
        ("get", MIB, 15 * MIB),
        ("put", MIB, 15 * MIB),
        ("get", 2 * MIB, 30 * MIB),
        ("put", 2 * MIB, 30 * MIB),
    ]
    for case in cases:
        assert (case["unit"], case["rounds"]) == ("GB/s", 5)
        assert case["params"]["prefix_chunks"] == 3
        assert case["params"]["transport"] == transport
        assert case["value"] > 0
        assert case["ceiling"] > 0
        assert case["ratio"] > 0
    assert list(tmp_path.iterdir()) == []


def test_wrong_bytes_fail_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    get = payloads.get

    def get_badly(client: KVClient, prefix: Prefix, into: payloads.Bytes) -> None:
        get(client, prefix, into)
        into[-1] ^= 1

    monkeypatch.setattr(payloads, "get", get_badly)
    settings = remote.Settings(object_bytes=(MIB,), prefix_chunks=1, rounds=5)
    with pytest.raises(BenchError, match="bytes came back wrong"):
        remote.run(settings, lambda line: None)


def test_medians_and_ratio() -> None:
    case = Case("get", {}, "GB/s")
    for value, ceiling in [(1.0, 2.0), (3.0, 3.0), (2.0, 8.0)]:
        case.add(value, ceiling)
    row = case.to_json()
    assert (row["value"], row["ceiling"], row["ratio"], row["rounds"]) == (2.0, 3.0, 0.5, 3)


def test_no_ratio_to_nothing() -> None:
    case = Case("loop_lag", {}, "us")
    case.add(1.0, 0.0)
    assert case.to_json()["ratio"] is None
    assert "loop_lag" in table([case])
