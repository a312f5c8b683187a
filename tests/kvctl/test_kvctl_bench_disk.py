"""`kvctl bench disk` and what `make bench-striping` is made of: nothing left, however they end."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstored.bench import disk, diskshape, extents, leftovers, rawdisk, striping, throttle
from kvstored.bench.payloads import Bytes
from kvstored.bench.processes import BenchError
from kvstored.kvctl import main
from kvstored_client import KVClient, Prefix
from kvstored_client.results import GetResult

MIB = 1 << 20
WAIT_S = 30.0


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short directory for everything, on a file system that takes O_DIRECT."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        if diskshape.file_system(Path(name)) in ("tmpfs", "ramfs"):
            pytest.skip("temporary files are in memory")
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_disk_prints_one_object(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    for name in ("KVCTL_TARGET", "KVCTL_TOKEN", "KVCTL_TOKEN_FILE", "KVCTL_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    words = ["bench", "disk", "--json", "--rounds", "5", "--chunks", "2", "--object-mib", "1"]
    assert main([*words, "--directory", str(place)]) == 0
    captured = capfd.readouterr()
    answer = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert answer["bench"] == "disk"
    assert set(answer["host"]) == {"cores", "memory_bytes", "kernel"}
    cases = answer["cases"]
    assert [(case["op"], case["params"]["extents"]) for case in cases] == [
        ("put_durable", "unwritten"),
        ("get_cold", "written"),
        ("get_cold_client", "written"),
        ("put_durable", "written"),
    ]
    for case in cases:
        params = case["params"]
        assert (case["unit"], case["rounds"]) == ("GB/s", 5)
        assert (params["object_bytes"], params["prefix_chunks"]) == (MIB, 2)
        assert params["volumes"] == 1
        assert params["prefixes"] >= 8
        assert case["verified_bytes"] >= 5 * 2 * MIB
        assert min(case["value"], case["ceiling"], case["ratio"]) > 0
    assert "evicted" in cases[1]["params"]["cold"]
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "last", "match"),
    [
        ("acquire", "first reads", "came back wrong"),
        ("ceiling", "first reads", "came back wrong"),
        ("get", "get_cold,", "came back wrong"),
        ("cold", "first reads", "should have come from NVMe came from .*ram"),
    ],
)
def test_what_is_not_as_said_fails_the_bench(
    wrong: str, last: str, match: str, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    source, read, get = disk.Prefixes._source, rawdisk.RawFiles.read, KVClient.get
    reads = 0

    def other_source(self: disk.Prefixes, number: int) -> Bytes:
        return source(self, number + 1 if self._turn and number else number)

    def read_badly(self: rawdisk.RawFiles, into: Bytes) -> None:
        nonlocal reads
        read(self, into)
        reads += 1
        into[-1] ^= reads > 1  # the first is what was written, read back

    def get_badly(self: KVClient, prefix: Prefix, into: Bytes, **options: object) -> GetResult:
        result = get(self, prefix, into, timeout_s=WAIT_S)
        into[-1] ^= 1
        return result

    if wrong == "acquire":
        monkeypatch.setattr(disk.Prefixes, "_source", other_source)
    elif wrong == "ceiling":
        monkeypatch.setattr(rawdisk.RawFiles, "read", read_badly)
    elif wrong == "get":
        monkeypatch.setattr(KVClient, "get", get_badly)
    else:
        monkeypatch.setattr(disk.Prefixes, "_next", lambda self: 3)
    said: list[str] = []
    settings = disk.Settings((MIB,), prefix_chunks=1, rounds=5, directories=(place,), puts=False)
    with pytest.raises(BenchError, match=match):
        disk.run(settings, said.append)
    assert said[-1].startswith(last)
    assert list(place.iterdir()) == []


def test_memory_is_no_disk() -> None:
    if diskshape.file_system(Path("/dev/shm")) != "tmpfs":
        pytest.skip("/dev/shm is not in memory here")
    with pytest.raises(BenchError, match="is in memory; name one on a device by --directory"):
        diskshape.disk_there_is(Path("/dev/shm"))


def test_shapes_fit_the_disk_and_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstored.bench.payloads.memory_allowed", lambda: (64 << 30, "a test"))
    for size in (MIB, 4 * MIB, 16 * MIB):
        shape = diskshape.shape_of(size, 64, 11, 12 << 30)
        assert shape.chunks == 64
        assert shape.prefixes >= shape.warming + 5
        assert shape.volume_cap_bytes + 2 * shape.prefix_bytes <= 12 << 30
        assert shape.prefixes > shape.ram_cap_bytes / shape.prefix_bytes + 4
    less = diskshape.shape_of(16 * MIB, 64, 11, 1 << 30)
    assert less.prefixes == less.warming + 5
    assert 1 <= less.chunks < 64
    monkeypatch.setattr("kvstored.bench.payloads.memory_allowed", lambda: (2 << 30, "a test"))
    assert diskshape.shape_of(16 * MIB, 64, 11, 12 << 30).chunks == 10
    with pytest.raises(BenchError, match="too little"):
        diskshape.shape_of(16 * MIB, 64, 11, 64 * MIB)


def test_a_payload_is_split_as_the_devices_are_fast() -> None:
    parts = rawdisk.split(64 * MIB, (50.0, 100.0, 150.0, 200.0), 4096)
    assert sum(parts) == 64 * MIB
    assert all(part % 4096 == 0 for part in parts)
    assert [round(part * 10 / (64 * MIB)) for part in parts] == [1, 2, 3, 4]


def test_the_extent_map_tells_what_was_written(place: Path) -> None:
    path = place / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(fd, 0, 4 * MIB)
        assert extents.unwritten_bytes(path) == 4 * MIB
        os.pwrite(fd, b"x" * MIB, MIB)
        os.fsync(fd)
        assert extents.unwritten_bytes(path) == 3 * MIB
    finally:
        os.close(fd)


_HOLDS = """
import subprocess, sys
from pathlib import Path
from kvstored.bench.leftovers import removed
from kvstored.bench.processes import tied
with removed([Path(sys.argv[1])]) as keep:
    heir = subprocess.Popen(tied(["sleep", "300"]), pass_fds=(keep,))
    print(heir.pid, flush=True)
    sys.stdin.read()
"""


def test_the_remover_waits(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes before everyone who held the pipe is gone."""
    made = place / "made"
    made.mkdir()
    waited: list[bool] = []

    class Pipe:
        def __init__(self) -> None:
            self.buffer = self

        def read(self) -> bytes:
            waited.append(made.exists())
            return b""

    monkeypatch.setattr(sys, "stdin", Pipe())
    monkeypatch.setattr(sys, "argv", ["leftovers", str(made)])
    leftovers.main()
    assert waited == [True]
    assert not made.exists()


def test_nothing_is_left_of_what_was_killed(place: Path) -> None:
    made = place / "made"
    (made / "inside").mkdir(parents=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(made)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    heir = os.pidfd_open(int(holder.stdout.readline()))
    assert made.exists()
    holder.kill()
    holder.communicate()
    _until(lambda: not made.exists())
    assert select.select([heir], [], [], 0)[0], "the heir lives on"
    os.close(heir)


_DISKS = """
import sys
from pathlib import Path
from kvstored.bench import throttle
directory = Path(sys.argv[1])
group = throttle.throttle(directory.name)
group.join()
throttle.own_mounts()
disks = [throttle.disk(directory, f"disk{n}", 32 << 20) for n in range(2)]
group.limit(disks, [50_000_000, 100_000_000])
(disks[1].mounted / "file").write_bytes(b"x")
print(*(each.number for each in disks), flush=True)
sys.stdin.read()
"""


def test_throttled_disks_go_with_their_process(place: Path) -> None:
    """Killed half way: no device, no mount, no cgroup, no file."""
    if os.geteuid() or not Path("/dev/loop-control").exists():
        pytest.skip("loop devices need root, and the module `loop`")
    try:
        group = throttle.throttle(place.name)
        group.make()
    except (BenchError, OSError) as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    remover = subprocess.Popen(
        [sys.executable, "-m", "kvstored.bench.leftovers", str(group.path)], stdin=subprocess.PIPE
    )
    with subprocess.Popen(
        [sys.executable, "-c", _DISKS, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        numbers = child.stdout.readline().decode().split()
        assert len(numbers) == 2
        names = [Path(f"/sys/dev/block/{number}/loop/backing_file") for number in numbers]
        assert all(str(place) in name.read_text() for name in names)
        rules = "\n".join(path.read_text() for path in _rules(group))
        assert f"{numbers[0]} 50000000" in rules or f"{numbers[0]} rbps=50000000" in rules
        assert str(place) not in Path("/proc/self/mountinfo").read_text()
        child.kill()
    remover.communicate()
    assert remover.returncode == 0
    assert not group.path.exists()
    _until(lambda: not any(str(place) in _text(name) for name in names))
    assert sorted(path.name for path in place.rglob("*")) == ["disk0", "disk1"]


def _rules(group: throttle.Throttle) -> list[Path]:
    return [
        p for p in group.path.iterdir() if p.name in ("blkio.throttle.read_bps_device", "io.max")
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _until(done: Callable[[], bool]) -> None:
    """Wait for other processes, and for the kernel, to get there."""
    end = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_striping_needs_root(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["striping"])
    assert striping.main() == 1
    assert "needs root" in capfd.readouterr().err
