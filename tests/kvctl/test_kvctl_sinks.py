"""`kvctl get --part NAME=FILE` where FILE is no ordinary file."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstored.bench import processes
from kvstored.kvctl import main

NBYTES = 100_000  # more than a pipe holds
FAMILY = {
    "model": "m",
    "weights": "w",
    "kv_dtype": "float32",
    "chunk_tokens": 16,
    "parts": [{"name": "kv", "nbytes": NBYTES}],
}
CHUNKS = ["--family", "family.json", "--token-ids", "ids.txt"]
DATA = np.random.default_rng(5).bytes(2 * NBYTES)


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory() as directory,
        processes.daemon(Path(directory), 64 << 20, tcp=False) as running,
    ):
        yield running.target


@pytest.fixture(autouse=True)
def stored(target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVCTL_TARGET", target)
    Path("family.json").write_text(json.dumps(FAMILY))
    Path("ids.txt").write_text(str(list(range(32))))
    Path("kv.bin").write_bytes(DATA)
    assert main(["put", *CHUNKS, "--part", "kv=kv.bin"]) == 0
    return tmp_path


def get(file: str) -> int:
    return main(["get", *CHUNKS, "--part", f"kv={file}"])


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "kvstored.kvctl", *words]


def left_behind(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.endswith(".part")]


def test_a_link_stays_and_its_target_is_written(stored: Path) -> None:
    (stored / "far").mkdir()
    for name in ("old", "new"):
        Path(name).symlink_to(Path("far") / name)
    Path("far/old").write_text("old")
    for name in ("old", "new"):  # "new" does not exist yet
        assert get(name) == 0
        assert Path(name).is_symlink()
        assert Path("far", name).read_bytes() == DATA
    assert left_behind(stored) == left_behind(stored / "far") == []


def test_a_device_and_a_pipe_stay_what_they_are(stored: Path) -> None:
    Path("null").symlink_to(os.devnull)
    assert get("null") == get(os.devnull) == 0
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    os.mkfifo("pipe")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(Path("pipe").read_bytes()))
    reader.start()
    assert get("pipe") == 0
    reader.join()
    assert got == [DATA]
    assert stat.S_ISFIFO(Path("pipe").stat().st_mode)
    assert left_behind(stored) == []


@pytest.mark.parametrize("appended", [False, True])
def test_standard_output_holds_the_payload_alone(stored: Path, *, appended: bool) -> None:
    words = command("get", *CHUNKS, "--part", "kv=/dev/stdout", "--json")
    if appended:
        with Path("out").open("wb") as out:
            out.write(b"before")
            out.flush()
            done = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, check=True)
        assert Path("out").read_bytes() == b"before" + DATA
    else:
        done = subprocess.run(words, capture_output=True, check=True)
        assert done.stdout == DATA
    assert json.loads(done.stderr)["chunks"] == 2
    assert left_behind(stored) == []


def test_what_cannot_be_written_is_said_before_anything_is_asked(
    stored: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCTL_TARGET", "unix:///nowhere.sock")  # asking it ends with 1
    Path("there").mkdir()
    Path("link").symlink_to("there")
    Path("circle").symlink_to("circle")
    for name, says in (
        ("there", "is a directory"),
        ("link", "is a directory"),
        ("circle", "symbolic links"),
        ("nowhere/out", "there is no directory"),
        ("/dev/fd/9999", "Bad file descriptor"),
    ):
        assert get(name) == 2
        assert says in capsys.readouterr().err
    assert Path("there").is_dir()
    assert left_behind(stored) == left_behind(stored / "there") == []


def test_a_name_taken_meanwhile_leaves_nothing_behind(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def taken(source: Path, to: Path) -> None:
        Path(to).mkdir()
        replace(source, to)

    monkeypatch.setattr(os, "replace", taken)
    assert get("out") == 1
    assert left_behind(stored) == []


@pytest.mark.parametrize("words", [["list"], ["get", *CHUNKS, "--part", "kv=/dev/stdout"]])
def test_nobody_reads(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command(*words), stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
