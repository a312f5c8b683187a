"""`kvctl bench local`: one object of the agreed shape, all verified, nothing left."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from kvstored.bench import local, payloads, processes
from kvstored.bench.memory import Reading, Written
from kvstored.bench.processes import BenchError
from kvstored.kvctl import main
from kvstored_client import KVClient, Prefix

MIB = 1 << 20


def test_local_prints_one_object(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("KVCTL_TARGET", "KVCTL_TOKEN", "KVCTL_TOKEN_FILE", "KVCTL_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    words = ["bench", "local", "--json", "--rounds", "5", "--chunks", "3", "--object-mib", "1,2"]
    assert main(words) == 0
    captured = capfd.readouterr()
    answer = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert answer["bench"] == "local"
    assert set(answer["host"]) == {"cores", "memory_bytes", "kernel"}
    cases = answer["cases"]
    shape = [
        (c["op"], c["params"]["object_bytes"], c["params"].get("percentile"), c["unit"])
        for c in cases
    ]
    expected = [
        (op, size, percentile, unit)
        for size in (MIB, 2 * MIB)
        for op, percentile, unit in [
            ("get_copy", None, "GB/s"),
            ("put", None, "GB/s"),
            ("acquire", 50, "us"),
            ("acquire", 99, "us"),
        ]
    ]
    assert shape == expected
    for case in cases:
        assert case["rounds"] == 5
        assert case["params"]["transport"] == "local"
        assert case["params"]["prefix_chunks"] == 3
        assert case["params"]["prefixes"] >= 2
        assert case["verified_bytes"] == 15 * case["params"]["object_bytes"]
        assert min(case["value"], case["ceiling"], case["ratio"]) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", ["get", "copy"])
def test_wrong_bytes_fail_the_local_bench(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    get, copy = payloads.get, local._copy

    def get_badly(client: KVClient, prefix: Prefix, into: payloads.Bytes) -> None:
        get(client, prefix, into)
        into[-1] ^= 1

    def copy_badly(target: int, source: int, shape: local.Shape) -> None:
        copy(target, source + 1, shape)

    if wrong == "get":
        monkeypatch.setattr(payloads, "get", get_badly)
    else:
        monkeypatch.setattr(local, "_copy", copy_badly)
    settings = local.Settings(object_bytes=(MIB,), prefix_chunks=2, rounds=5)
    with pytest.raises(BenchError, match="bytes came back wrong"):
        local.run(settings, lambda line: None)


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    """Over gRPC (a link has no local session beside it) nothing is called local."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        folder = Path(name)
        with processes.daemon(folder, 128 * MIB) as daemon:
            link = tmp_path / "kvstored.sock"
            link.symlink_to(daemon.target.removeprefix("unix://"))
            said: list[str] = []
            settings = local.Settings(
                target=f"unix://{link}", object_bytes=(MIB,), prefix_chunks=2, rounds=5
            )
            cases = local.run(settings, said.append)
    assert [case.op for case in cases] == ["get_copy", "put"]
    assert {case.params["transport"] for case in cases} == {"unix"}
    assert any("acquire is left out" in line for line in said)


def test_bare_memory_is_read_only_and_another_process_s() -> None:
    size = 3 * MIB
    with processes.child("kvstored.bench.memory", size, 7) as (bare, (fd,)):
        reading = Reading(bare.pid, int(fd), size)
        line = next(
            line
            for line in Path("/proc/self/maps").read_text().splitlines()
            if line.startswith(f"{reading.address:x}-")
        )
        assert "r--s" in line
        assert "memfd:kvstored-ram" in line
        into = np.empty(size, np.uint8)
        shape = local.Shape(MIB, 3, 1)
        local._copy(into.ctypes.data, reading.address, shape)
        assert payloads.compare(into, payloads.random_bytes(size, 7)) == size
        reading.close()
        with pytest.raises(BenchError, match="came back wrong"):
            payloads.compare(into, payloads.random_bytes(size, 8))


def test_written_memory_is_sealed() -> None:
    written = Written(MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(written.fd, 0)
    written.close()


def test_prefixes_outgrow_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "cache_bytes", lambda: 100 * MIB)
    monkeypatch.setattr(payloads, "memory_allowed", lambda: (16 << 30, "a test"))
    settings = local.Settings()
    assert local.Shape.of(settings, MIB).prefixes == 4  # 256 MiB, twice the cache
    assert local.Shape.of(settings, 4 * MIB).prefixes == 2
    monkeypatch.setattr(payloads, "memory_allowed", lambda: (320 * MIB, "a test"))
    assert local.Shape.of(settings, 4 * MIB).chunks == 4
