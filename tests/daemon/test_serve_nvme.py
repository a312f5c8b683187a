"""The daemon with its NVMe tier: what was accepted outlives it, or it says what does not."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from daemon.daemon_helpers import config_file, counters, fetch, process, serving
from server.serving import PART_BYTES, Wire, header, run

from kvstored.tiers.nvme.format import BLOCK_BYTES, Superblock
from kvstored_client.proto import kvstore_pb2 as pb

LARGE_BYTES = 1 << 20  # in a slot; PART_BYTES lie in LMDB


def _wire(folder: Path) -> Wire:
    wire = Wire(f"unix:{folder}/run/k.sock")
    wire.hello()
    return wire


def _put(wire: Wire, *, durable: bool = False) -> list[bytes]:
    """Two small objects and two large ones."""
    payload = [os.urandom(size) for size in (PART_BYTES, LARGE_BYTES) for _ in range(2)]
    head = pb.PutHeader(
        run=run(2, parts=["kv", "extra"]),
        lengths_bytes=[PART_BYTES, LARGE_BYTES] * 2,
        durability=pb.DURABLE if durable else pb.ACCEPTED,
    )
    ordered = [payload[0], payload[2], payload[1], payload[3]]
    frames = [part[i : i + (1 << 20)] for part in ordered for i in range(0, len(part), 1 << 20)]
    _, states = wire.put(head, frames)
    assert set(states) == {pb.STORED}
    return ordered


def _get(wire: Wire) -> tuple[list[bytes], set[int]]:
    objects, states, _ = wire.get(pb.GetRequest(run=run(2, parts=["kv", "extra"])))
    return [objects[i] for i in sorted(objects)], set(states)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_what_was_accepted_is_there_after_a_restart(tmp_path: Path, end: str) -> None:
    with serving(tmp_path) as first:
        first.wait_event("ready")
        wire = _wire(tmp_path)
        salt = wire.hello().namespace_salt
        put = _put(wire, durable=end == "kill")
        wire.close()
        if end == "stop":
            first.child.terminate()
            assert first.status() == 0
            assert "not durable" not in first.stderr
        else:
            first.child.kill()
            first.status()
    with serving(tmp_path) as second:
        http = str(second.wait_event("ready")["http"])
        wire = _wire(tmp_path)
        assert wire.hello().namespace_salt == salt
        found = counters(fetch(http, "/metrics")[1])  # right before the first request
        assert found['kvstored_tier_objects{tier="nvme"}'] == 4
        held = 'namespace="default",tenant="default",tier="nvme"'
        assert found[f"kvstored_tenant_objects{{{held}}}"] == 4
        assert _get(wire) == (put, {pb.IN_NVME})
        wire.close()
        found = counters(fetch(http, "/metrics")[1])
    hit = 'model="m",namespace="default",tenant="default",tier="nvme"'
    assert found[f"kvstored_hit_chunks_total{{{hit}}}"] == 2
    assert found[f"kvstored_hit_bytes_total{{{hit}}}"] == sum(map(len, put))
    assert found['kvstored_call_seconds_count{tier="nvme",verb="get"}'] == 1


def test_a_namespace_that_is_gone_does_not_hinder_the_start(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        first.wait_event("ready")
        wire = _wire(tmp_path)
        _put(wire)
        wire.close()
        first.child.terminate()
        assert first.status() == 0
    other = '[[namespace]]\nname = "other"\n'
    file = config_file(tmp_path, other)
    file.write_text(file.read_text().replace("[daemon]", "[daemon]\ndefault_namespace = false"))
    with process("-m", "kvstored", "serve", "--config", str(file)) as second:
        http = str(second.wait_event("ready")["http"])
        found = counters(fetch(http, "/metrics")[1])
        assert 'kvstored_namespace_cap_bytes{namespace="other",tier="nvme"}' in found
        assert not any('namespace="default"' in name for name in found)
        second.child.terminate()
        assert second.status() == 0


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        first.wait_event("ready")
        first.child.terminate()
        assert first.status() == 0
    data = tmp_path / "data/nvme/data"
    with data.open("r+b") as file:
        old = Superblock.decode(file.read(BLOCK_BYTES))
        file.seek(0)
        file.write(dataclasses.replace(old, version=old.version + 1).encode())
    before = data.read_bytes()
    with serving(tmp_path) as second:
        assert second.status() == 2
        assert f"version {old.version + 1}" in second.stderr
        assert "run the version of kvstored that wrote it" in second.stderr
        assert "Traceback" not in second.stderr
    assert data.read_bytes() == before


STUCK_DEVICE = """
import os, sys, threading
from kvstored.stopping import block_signals
block_signals()
from pathlib import Path
from kvstored import config, daemon
from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault, FaultyFiles
files = FaultyFiles(RealFiles())
loaded = config.load(Path(sys.argv[1]), os.environ)

def freeze():
    sys.stdin.readline()
    files.inject(Fault("fdatasync", stuck=threading.Event()))
    files.inject(Fault("*", "*/nvme/*", stuck=threading.Event()))
    print("frozen", file=sys.stderr, flush=True)

threading.Thread(target=freeze, daemon=True).start()
daemon.serve(loaded, files)
"""


def test_a_device_that_never_answers_costs_what_was_not_durable_and_no_time(
    tmp_path: Path,
) -> None:
    file = config_file(tmp_path)
    file.write_text(file.read_text().replace("stop_timeout_s = 20", "stop_timeout_s = 3"))
    with process("-c", STUCK_DEVICE, str(file)) as running:
        http = str(running.wait_event("ready")["http"])
        wire = _wire(tmp_path)
        assert running.child.stdin is not None
        running.child.stdin.write("\n")
        running.child.stdin.flush()
        running.wait_line("frozen")
        put = _put(wire)
        assert _get(wire) == (put, {pb.IN_RAM})
        dirty = counters(fetch(http, "/metrics")[1])["kvstored_dirty_bytes"]
        assert dirty == sum(map(len, put))
        wire.close()
        running.child.terminate()
        assert running.status() == 0
        said = running.wait_event("what was accepted could not all be made durable")
        assert (said["objects"], said["bytes"]) == (4, dirty)


def test_small_puts_reach_the_device_without_being_asked(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        running.wait_event("ready")
        wire = _wire(tmp_path)
        _, states = wire.put(header(1, salt=b"x"), [bytes(PART_BYTES)])
        assert set(states) == {pb.STORED}
        durable = header(1, salt=b"x")
        durable.durability = pb.DURABLE
        _, states = wire.put(durable, [])  # waits for the write that is under way
        assert set(states) == {pb.EXISTED}
        wire.close()
