"""The local session of a real daemon."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server import local_holder
from server import local_serving as serving
from server import local_wire as w
from server.local_wire import LocalWire
from support_daemon import Daemon, running_daemon

from kvstored_client.proto import kvstore_pb2 as pb

CHUNKS = 8


def opened(running: Daemon) -> LocalWire:
    """A session whose family is declared."""
    wire = LocalWire(running.folder / "k-local.sock")
    wire.open()
    hello = wire.call(
        w.HELLO,
        pb.HelloRequest(protocol_version=1, namespace="default", families=[serving.SPEC]),
    )
    assert isinstance(hello, pb.HelloReply)
    assert pb.FEATURE_LOCAL in hello.features
    assert hello.boot_epoch == wire.opened.boot_epoch
    return wire


def store(wire: LocalWire, count: int) -> None:
    """Put chunks by Reserve and Commit."""
    size = serving.PART_BYTES
    reserved = wire.call(
        w.RESERVE,
        pb.ReserveRequest(run=serving.run(count), lease_id=99, lengths_bytes=[size] * count),
    )
    assert isinstance(reserved, pb.ReserveReply)
    (notice,) = wire.notices
    area = pb.LocalArea.FromString(notice.body)
    assert area.area_id == reserved.area_id
    with mmap.mmap(notice.fds[0], area.size_bytes) as memory:
        for i, offset in enumerate(reserved.offsets_bytes):
            memory[offset : offset + size] = serving.content(i)
    committed = wire.call(w.COMMIT, pb.CommitRequest(lease_id=99, durability=pb.DURABLE))
    assert committed == pb.PutReply(states=bytes([pb.STORED]) * count)


@pytest.fixture
def stored() -> Iterator[Daemon]:
    with running_daemon() as running:
        wire = opened(running)
        store(wire, CHUNKS)
        wire.close()
        yield running


def test_views_outlive_the_daemon_and_bytes_its_restart(stored: Daemon) -> None:
    wire = opened(stored)
    granted = wire.acquire(serving.run(CHUNKS), 1)
    expected = [serving.content(i) for i in range(CHUNKS)]
    assert [wire.bytes_of(row) for row in granted.rows] == expected
    stored.stop()
    kind, error = wire.event()
    assert isinstance(error, pb.Error)
    assert (kind, error.code) == (w.GOODBYE, pb.DRAINING)
    wire.until_gone()
    assert [wire.bytes_of(row) for row in granted.rows] == expected
    stored.start()
    again = opened(stored)
    assert again.opened.boot_epoch != wire.opened.boot_epoch
    granted = again.acquire(serving.run(CHUNKS), 1)
    assert granted.states == bytes([pb.IN_NVME]) * CHUNKS
    assert [again.bytes_of(row) for row in granted.rows] == expected
    wire.close()
    again.close()


def test_killed_clients_leave_no_descriptor(stored: Daemon) -> None:
    """One after the other, each with a forked child that outlives it."""
    assert stored.child is not None
    folder = Path(f"/proc/{stored.child.pid}/fd")
    path = stored.folder / "k-local.sock"
    children = []
    wire = opened(stored)
    wire.acquire(serving.run(CHUNKS), 1)
    wire.release(1)
    before = len(os.listdir(folder))
    for _ in range(4):
        holder = subprocess.Popen(
            [sys.executable, local_holder.__file__, str(path), str(CHUNKS), "fork"],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert holder.stdout is not None
        children.append(int(holder.stdout.readline().split()[1]))
        assert len(os.listdir(folder)) > before
        holder.kill()
        holder.wait()
        holder.stdout.close()
    try:
        # Its death was known before the daemon reads what comes after it; sessions end in order.
        for _ in range(50):
            wire.release(1)
            if len(os.listdir(folder)) == before:
                break
        assert len(os.listdir(folder)) == before
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        wire.close()
