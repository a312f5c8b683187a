"""LMDB that kills whoever looks at it: one volume's objects are misses for a while, no more."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import lmdb
import pytest
from tiers.conformance import KIB, make_sample
from tiers.nvme_volumes_helpers import World, until

from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault
from kvstored.tiers.base import VOLUME_SHIFT, ReadOutcome
from kvstored.tiers.nvme import draining
from kvstored.tiers.nvme import index_wire as wire
from kvstored.tiers.nvme.format import is_small
from kvstored.tiers.nvme.index import Entry, Environment
from kvstored.tiers.nvme.index_process import IndexProcess
from kvstored.tiers.nvme.status import VolumeState

PAGE_BYTES = 4096
PAGE_HEADER_BYTES = 16
CHUNK_KEY_BYTES = 6
LEAF, BIG = 2, 1
SMALL, LARGE = 20 * KIB, 100 * KIB
IN_VOLUME = (1 << VOLUME_SHIFT) - 1


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path, 2)
    await made.start()
    yield made
    await made.end()


def child(world: World, number: int) -> IndexProcess:
    tier = world.tier._volumes._members[number].tier
    assert tier is not None
    return tier._volume.process


def small_on(world: World, number: int) -> list[int]:
    return [p for p in world.on(number) if is_small(p & IN_VOLUME)]


@pytest.mark.parametrize("seed", range(3))
async def test_killed_under_load(world: World, seed: int) -> None:
    rng = random.Random(seed)
    numbers = iter(range(1, 100_000))
    halt = False

    async def puts() -> None:
        while not halt:
            lengths = [rng.choice((SMALL, LARGE)) for _ in range(6)]
            samples = [make_sample(length, next(numbers)) for length in lengths]
            for sample in samples:
                world.samples[sample.meta.key] = sample
            await world.put(samples)
            if len(world.held) > 60:
                await world.delete([world.held[p] for p in sorted(world.held)[:40:2]])

    async def gets() -> None:
        while not halt:
            if world.held:
                places = rng.sample(sorted(world.held), min(6, len(world.held)))
                await world.read(places)
            await asyncio.sleep(0)

    load = [asyncio.ensure_future(puts()), asyncio.ensure_future(gets())]
    for times in range(1, 3):
        more = next(numbers) + rng.randint(20, 90)
        await until(lambda more=more: next(numbers) > more)  # type: ignore[misc]
        os.kill(child(world, 1).pid, rng.choice((signal.SIGKILL, signal.SIGBUS)))
        await until(lambda times=times: world.losses == times)  # type: ignore[misc]
        await world.becomes(1, VolumeState.OK)
        assert world.status(0).state is VolumeState.OK
    halt = True
    await asyncio.gather(*load)
    await world.assert_all_read()
    assert not world.keys() & world.deleted
    before = world.keys()
    await world.restart()
    assert world.keys() >= before
    await world.assert_all_read()


async def test_killed_while_nothing_is_asked(world: World) -> None:
    await world.put_new(1, 8, SMALL)
    before = world.keys()
    first = child(world, 1).pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: world.losses == 1)
    await world.becomes(1, VolumeState.OK)
    assert world.keys() == before
    assert child(world, 1).pid != first
    assert world.status(1).errors == {"index": 1}
    await world.assert_all_read()


def cut_off(path: Path) -> None:
    os.truncate(path, 2 * PAGE_BYTES)


def zero_payload(path: Path) -> None:
    """Lose the page that says where the bytes of the last small objects are."""
    pages = path.read_bytes()
    found: dict[int, bytes] = {}
    for at in range(2 * PAGE_BYTES, len(pages), PAGE_BYTES):
        flags, lower = struct.unpack_from("<HH", pages, at + 10)
        if flags != LEAF or lower <= PAGE_HEADER_BYTES:
            continue
        node = at + struct.unpack_from("<H", pages, at + lower - 2)[0]
        node_flags, key_bytes = struct.unpack_from("<HH", pages, node + 4)
        if node_flags & BIG and key_bytes == CHUNK_KEY_BYTES:
            found[at] = pages[node + 8 : node + 8 + key_bytes]
    with path.open("r+b") as file:
        for at in [at for at, key in found.items() if key == max(found.values())]:
            file.seek(at)  # or a copy of it that is no longer in use
            file.write(bytes(PAGE_BYTES))


@pytest.mark.parametrize(
    ("damage", "count"), [(cut_off, 12), (zero_payload, 12), (zero_payload, 60)]
)
async def test_small_is_damaged(world: World, damage: Callable[[Path], None], count: int) -> None:
    await world.put_new(1000, count, SMALL)
    await world.put_new(100, 12, LARGE)
    lost = {world.held[p].meta.key for p in small_on(world, 1)}
    kept = world.keys() - lost
    assert len(lost) >= 4
    damage(world.root / "v1" / "small" / "data.mdb")
    outcomes = await world.read(small_on(world, 1))
    assert set(outcomes.values()) & {ReadOutcome.FAILED, ReadOutcome.DOWN}
    await until(lambda: world.losses == 1)
    await world.becomes(1, VolumeState.OK)
    assert world.keys() == kept
    assert "small: " in world.status(1).detail
    await world.assert_all_read()
    await world.put_new(200, 8, SMALL)
    assert small_on(world, 1)
    await world.restart()
    assert world.keys() >= kept
    await world.assert_all_read()
    assert world.status(0).state is VolumeState.OK


async def test_index_is_cut_off(world: World) -> None:
    await world.put_new(1, 12, SMALL)
    await world.put_new(100, 12, LARGE)
    before = world.keys()
    cut_off(world.root / "v1" / "index" / "data.mdb")
    samples = [make_sample(LARGE, seed) for seed in range(300, 304)]
    world.samples.update({s.meta.key: s for s in samples})
    await world.put(samples)
    await until(lambda: world.losses == 1)
    await world.becomes(1, VolumeState.OK)
    assert world.keys() >= before  # made again from the headers
    await world.assert_all_read()


async def test_small_that_kills_one_child_after_the_other_is_made_anew(world: World) -> None:
    """As damage to a page that only a commit looks at does: no walk finds it."""
    await world.put_new(1, 12, SMALL)
    await world.put_new(100, 12, LARGE)
    lost = {world.held[p].meta.key for p in small_on(world, 1)}
    kept = world.keys() - lost
    for times in range(1, 4):
        process = child(world, 1)
        os.kill(process.pid, signal.SIGSTOP)  # it is at a read when it crashes
        reading = asyncio.ensure_future(world.read(small_on(world, 1)[:1]))
        await until(lambda: bool(process._asked))  # noqa: B023
        os.kill(process.pid, signal.SIGABRT)
        os.kill(process.pid, signal.SIGCONT)
        await reading
        await until(lambda times=times: world.losses == times)  # type: ignore[misc]
        await world.becomes(1, VolumeState.OK)
        assert world.keys() == (kept if times == 3 else kept | lost)
    await world.put_new(200, 8, SMALL)
    assert small_on(world, 1)
    await world.assert_all_read()


async def test_dies_while_its_volume_is_drained(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small objects cannot be read without it: they are not given up for that."""
    monkeypatch.setattr(draining, "_SLICE_OBJECTS", 4)
    await world.put_new(1, 12, LARGE)
    small = await world.put_new(50, 12, SMALL)
    held = world.keys()
    gone = next(s for s in small if s in [world.held[p] for p in small_on(world, 1)])
    assert len(small_on(world, 1)) > 4
    gate = threading.Event()
    copying = world.files.inject(Fault("pwritev", f"{world.root}/v0/data", stuck=gate, times=1))
    await world.tier.drain("v1")
    await until(lambda: bool(copying.hits))
    os.kill(child(world, 1).pid, signal.SIGKILL)
    assert await world.delete([gone])
    gate.set()
    await world.becomes(1, VolumeState.DRAINED)
    assert world.keys() == held - {gone.meta.key}
    assert not world.on(1)
    assert world.status(1).errors["index"] == 1
    await world.assert_all_read()


async def test_next_child_waits_for_the_last(tmp_path: Path) -> None:
    first = IndexProcess(tmp_path)
    starting = asyncio.ensure_future(asyncio.to_thread(IndexProcess, tmp_path))
    done, _ = await asyncio.wait({starting}, timeout=0.2)
    assert not done
    first.close()
    second = await starting
    second.close()


def test_child_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    process = IndexProcess(tmp_path, deadline_s=0.2)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(OSError, match=r"no answer for 0\.2 s") as raised:
        process.ask("read", wire.BODY, b"small", b"1", b"1")
    assert raised.value.errno == errno.ENOTCONN
    assert not Path(f"/proc/{process.pid}").exists()
    assert not process.suspects
    process.close()
    with pytest.raises(OSError, match="index process ended"):
        process.ask("read", wire.BODY, b"small", b"1", b"1")


STOPPED = """
import sys
from pathlib import Path
from kvstored.tiers.nvme import index_wire as wire
from kvstored.tiers.nvme.index_process import IndexProcess

process = IndexProcess(Path(sys.argv[1]), deadline_s=3.0)
print(process.pid, flush=True)
sys.stdin.readline()
print("asked", flush=True)
process.ask("small", wire.OPEN, sys.argv[2].encode(), b"1048576", b"v" * 16)
process.close()
print("answered")
"""


def test_time_in_which_both_were_stopped_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    arguments = [sys.executable, "-c", STOPPED, str(tmp_path), str(tmp_path / "small")]
    with subprocess.Popen(arguments, stdin=-1, stdout=-1, text=True) as daemon:
        assert daemon.stdin is not None
        assert daemon.stdout is not None
        both = (int(daemon.stdout.readline()), daemon.pid)
        os.kill(both[0], signal.SIGSTOP)
        daemon.stdin.write("\n")
        daemon.stdin.flush()
        assert daemon.stdout.readline() == "asked\n"
        status = Path(f"/proc/{daemon.pid}/status")
        while "sleeping" not in status.read_text():  # it waits for the answer
            time.sleep(0.001)
        os.kill(both[1], signal.SIGSTOP)
        time.sleep(3.2)  # the deadline passes: that is what is to be seen
        for pid in both:
            os.kill(pid, signal.SIGCONT)
        assert daemon.stdout.readline() == "answered\n"


def test_errors_of_lmdb_are_raised_here(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    process = IndexProcess(tmp_path)
    env = Environment(RealFiles(), process, tmp_path / "small", 128 * KIB, b"v" * 16)
    sample = make_sample(60 * KIB, 1)
    bodies = [(b"h" * 2056, sample.payload) for _ in range(3)]
    entries = [
        Entry((1 << 55) + i, sample.meta, i, body=body) for i, body in enumerate(bodies, start=1)
    ]
    with pytest.raises(lmdb.MapFullError):
        env.commit(entries)
    env.commit(entries[:1])  # names, too, that the failed one did not save
    block, into = bytearray(2056), bytearray(60 * KIB)
    assert env.read_body(entries[0].place, memoryview(block), memoryview(into)) == 2056 + 60 * KIB
    assert into == sample.data
    assert env.read_body(entries[1].place, memoryview(block), memoryview(into)) == 0
    env.close()
    process.close()
