"""`make bench-peers`: paired with redis-server where there is one, a message where not."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from kvstored.bench import peers, redis
from kvstored.bench.processes import BenchError

needs_redis = pytest.mark.skipif(not redis.installed(), reason="redis-server is not installed")


def test_without_a_peer_it_says_how_to_get_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert peers.main(["--json"]) == 0
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "apt-get install redis-server" in captured.err


@needs_redis
def test_peers_print_one_object(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    words = ["--json", "--rounds", "5", "--chunks", "2", "--object-mib", "1"]
    assert peers.main([*words, "--indexed-objects", "1000", "--samples", "20"]) == 0
    captured = capfd.readouterr()
    answer = json.loads(captured.out)
    assert answer["bench"] == "peers"
    cases = answer["cases"]
    assert [(c["op"], c["params"].get("percentile")) for c in cases] == [
        ("get_copy", None),
        ("put", None),
        ("match", 50),
        ("match", 99),
    ]
    for case in cases:
        assert (case["params"]["peer"], case["params"]["transport"]) == ("redis", "local")
        assert case["rounds"] == 5
        assert min(case["value"], case["ceiling"], case["ratio"]) > 0
    assert [case["verified_bytes"] for case in cases[:2]] == [10 << 20] * 2
    assert list(tmp_path.iterdir()) == []


@needs_redis
def test_the_least_client_moves_bytes_and_notices_what_is_missing() -> None:
    keys = [os.urandom(32) for _ in range(3)]
    objects = np.random.default_rng().integers(0, 256, (3, 1 << 20), np.uint8)
    into = np.zeros_like(objects)
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv"))
        path = stack.enter_context(redis.server(Path(name)))
        client = stack.enter_context(closing(redis.Redis(path)))
        client.put(keys, objects)
        client.exist(redis.exists(keys), 3)
        client.get(keys, into)
        assert np.array_equal(into, objects)
        client.delete(keys[:1])
        with pytest.raises(BenchError, match="not b':3"):
            client.exist(redis.exists(keys), 3)
        with pytest.raises(BenchError, match="redis answered"):
            client.get(keys[:1], into[:1])
