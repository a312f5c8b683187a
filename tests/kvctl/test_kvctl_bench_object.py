"""`kvctl bench object`: one object of the agreed shape; wrong bytes fail it; nothing is left."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from obstore.store import MemoryStore

from kvstored.bench import bucket, bucketshape, payloads, processes, rawobject, seaweed
from kvstored.bench.payloads import MIB, Bytes
from kvstored.bench.processes import BenchError
from kvstored.kvctl import main


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short directory for everything."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def left(place: Path) -> list[str]:
    return [path.name for path in place.iterdir() if path.suffix != ".lock"]


def test_object_prints_one_object(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    for name in ("KVCTL_TARGET", "KVCTL_TOKEN", "KVCTL_TOKEN_FILE", "KVCTL_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    words = ["bench", "object", "--json", "--quick", "--delays-ms", "2"]
    assert main([*words, "--directory", str(place)]) == 0
    captured = capfd.readouterr()
    answer = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert answer["bench"] == "object"
    assert [case["op"] for case in answer["cases"]] == ["put", "get_cold"]
    for case in answer["cases"]:
        params = case["params"]
        assert (case["unit"], case["rounds"]) == ("GB/s", 5)
        assert (params["object_bytes"], params["prefix_chunks"]) == (MIB, 8)
        assert params["delay_ms"] == 2
        assert case["verified_bytes"] == 5 * 8 * MIB
        assert min(case["value"], case["ceiling"], case["ratio"]) > 0
        assert min(params["cpu_s_per_gb"], params["ceiling_cpu_s_per_gb"]) > 0
    assert "evicted" in answer["cases"][1]["params"]["cold"]
    assert left(place) == []


def test_wrong_bytes_fail_the_bench(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    source = bucket.Prefixes._source

    def other(self: bucket.Prefixes, number: int) -> Bytes:
        return source(self, number + 1 if self._turn >= 0 else number)

    monkeypatch.setattr(bucket.Prefixes, "_source", other)
    said: list[str] = []
    settings = bucket.Settings((MIB,), 1, delays_ms=(0,), rounds=5, directory=place)
    with pytest.raises(BenchError, match="came back wrong"):
        bucket.run(settings, said.append)
    assert said[-1].startswith("put, objects of 1 MiB, round 5")
    assert left(place) == []


def test_bare_reads_put_each_range_in_its_place() -> None:
    objects = payloads.random_bytes(20, 1).reshape(2, 10)
    raw = rawobject.RawObjects(MemoryStore(), 2, 4)  # type: ignore[arg-type]
    raw.put("x", objects)
    into = np.zeros_like(objects)
    raw.read("x", into)
    assert np.array_equal(into, objects)
    with pytest.raises(BenchError, match="AlreadyExists"):
        raw.put("x", objects)
    raw.close()


def test_a_bare_request_that_fails_is_no_ceiling() -> None:
    raw = rawobject.RawObjects(seaweed.store(9), 2, MIB)
    with pytest.raises(BenchError, match="bare requests failed"):
        raw.read("x", np.zeros((3, 4), np.uint8))
    raw.close()


def test_a_line_passes_everything_on() -> None:
    sent = bytes(payloads.random_bytes(3 * MIB + 5, 1))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            peer, _ = server.accept()
            with peer:
                got = bytearray()
                while part := peer.recv(MIB):
                    got += part
                peer.sendall(got)

        thread = threading.Thread(target=echo)
        thread.start()
        port = server.getsockname()[1]
        with (
            processes.child("kvstored.bench.delay", port, 1) as (_, (there,)),
            socket.create_connection(("127.0.0.1", int(there))) as near,
        ):
            near.sendall(sent)
            near.shutdown(socket.SHUT_WR)
            got = bytearray()
            while part := near.recv(MIB):
                got += part
            assert got == sent
        thread.join()


def test_shapes_fit_the_disk_and_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvstored.bench.payloads.memory_allowed", lambda: (64 << 30, "a test"))
    monkeypatch.setattr(bucketshape, "MOST_DISK_BYTES", 1 << 40)
    monkeypatch.setattr("kvstored.bench.shapes.os.statvfs", lambda _: Disk(64 << 30))
    for size in (MIB, 4 * MIB):
        shape = bucketshape.shape_of(size, 64, 11, tmp_path)
        assert (shape.chunks, shape.rounds) == (64, 11)
        assert shape.prefixes * shape.prefix_bytes >= shape.ram_cap_bytes + 5 * shape.prefix_bytes
    less = bucketshape.shape_of(16 * MIB, 64, 30, tmp_path)
    assert less.chunks == 64
    assert 5 < less.rounds < 30
    assert less.disk_bytes <= 32 << 30
    monkeypatch.setattr("kvstored.bench.shapes.os.statvfs", lambda _: Disk(2 << 30))
    few = bucketshape.shape_of(16 * MIB, 64, 11, tmp_path)
    assert few.rounds == 5
    assert few.chunks < 64
    monkeypatch.setattr("kvstored.bench.shapes.os.statvfs", lambda _: Disk(64 << 20))
    with pytest.raises(BenchError, match="too little"):
        bucketshape.shape_of(16 * MIB, 64, 11, tmp_path)


class Disk:
    """A file system with so much room."""

    f_frsize = 4096

    def __init__(self, free_bytes: int) -> None:
        self.f_bavail = free_bytes // 4096


def test_object_takes_no_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "object", "--target", "unix:///nowhere"]) == 2
    assert "its own" in capsys.readouterr().err
    assert main(["bench", "object", "--delays-ms", "-1"]) == 2
