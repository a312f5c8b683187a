"""Sizes, secrets, and what the host says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored.config import Secret
from kvstored.config import host as hosts
from kvstored.config.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("1KiB", 1024),
        ("1.5 GiB", 3 << 29),
        ("500MB", 500_000_000),
        ("2tib", 2 << 40),
        (" 1 TB ", 10**12),
        ("0.25KiB", 256),
    ],
)
def test_size_is_read(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "1 bananas", "-1GiB", "1e9", "1,5GiB", "0.1B", "１GiB"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|bytes"):
        parse_size(text)


@given(st.integers(0, 1 << 60))
def test_formatted_size_reads_back_within_its_rounding(size_bytes: int) -> None:
    value, _, unit = format_size(size_bytes).partition(" ")
    one = parse_size(f"1{unit}")
    assert abs(float(value) * one - size_bytes) <= 0.005 * one + 1
    assert 1 <= float(value) <= 1024 or size_bytes == 0 or unit == "B"


def test_secret_never_shows(caplog: pytest.LogCaptureFixture) -> None:
    secret = Secret("correct-horse")
    with caplog.at_level(logging.INFO):
        logging.getLogger("t").info("token %s %r", secret, [secret])
    shown = f"{secret} {secret!r} {[secret]} {caplog.text}"
    assert "horse" not in shown
    assert secret.reveal() == "correct-horse"
    assert secret == Secret("correct-horse") != Secret("other")


def _proc(tmp_path: Path, cgroup: str, mountinfo: str) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       8388608 kB\nMemFree: 1 kB\n")
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "self/mountinfo").write_text(mountinfo)
    return proc


def test_cgroup_v2_limit_of_a_group_above_counts(tmp_path: Path) -> None:
    mount = tmp_path / "cg"
    (mount / "pod/box").mkdir(parents=True)
    (mount / "pod/memory.max").write_text("1073741824\n")
    (mount / "pod/box/memory.max").write_text("max\n")
    line = f"30 1 0:26 / {mount} rw shared:4 - cgroup2 cgroup2 rw\n"
    proc = _proc(tmp_path, "0::/pod/box\n", line)
    assert hosts.memory_allowed(proc) == (1 << 30, f"cgroup limit {mount}/pod/memory.max")


def test_cgroup_v1_limit_counts_and_its_way_of_saying_none_does_not(tmp_path: Path) -> None:
    mount = tmp_path / "cg/memory"
    (mount / "box").mkdir(parents=True)
    (mount / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (mount / "box/memory.limit_in_bytes").write_text("2147483648\n")
    line = f"35 31 0:32 / {mount} rw - cgroup cgroup rw,memory\n"
    proc = _proc(tmp_path, "5:cpu:/box\n4:memory:/box\n0::/\n", line)
    assert hosts.memory_allowed(proc)[0] == 2 << 30


def test_inside_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    mount = tmp_path / "cg"
    mount.mkdir()
    (mount / "memory.max").write_text("536870912\n")
    line = f"30 1 0:26 /docker/abc {mount} ro - cgroup2 cgroup2 rw\n"
    assert hosts.memory_allowed(_proc(tmp_path, "0::/../other\n", line))[0] == 512 << 20


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    assert hosts.memory_allowed(_proc(tmp_path, "", ""))[0] == 8 << 30


def test_places_follow_systemd_then_xdg_then_the_user() -> None:
    systemd = {"STATE_DIRECTORY": "/s/a:/s/b", "RUNTIME_DIRECTORY": "/r/a", "XDG_RUNTIME_DIR": "/x"}
    assert hosts.state_dir(systemd) == Path("/s/a")
    assert hosts.runtime_dir(systemd) == Path("/r/a")
    assert hosts.state_dir({"XDG_STATE_HOME": "/x", "HOME": "/h"}) == Path("/x/kvstored")
    assert hosts.runtime_dir({"XDG_RUNTIME_DIR": "/x"}) == Path("/x/kvstored")
    assert hosts.state_dir({"HOME": "/h"}) == Path("/h/.local/state/kvstored")
    assert hosts.runtime_dir({}, uid=0) == Path("/run/kvstored")
    assert hosts.runtime_dir({"TMPDIR": "/t"}, uid=7) == Path("/t/kvstored-7")


def test_disk_counts_what_is_held_already(tmp_path: Path) -> None:
    before = hosts.disk_for(tmp_path / "data")
    (tmp_path / "data/nvme").mkdir(parents=True)
    (tmp_path / "data/nvme/file").write_bytes(bytes(32 << 20))
    # Others may write to the same disk meanwhile: what is held must make up for what is not free.
    assert abs(hosts.disk_for(tmp_path / "data") - before) < 24 << 20


def test_probing_a_directory_leaves_nothing_behind(tmp_path: Path) -> None:
    assert hosts.unusable_reason(tmp_path / "a/b/c") == ""
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert "Not a directory" in hosts.unusable_reason(tmp_path / "file/data")
    assert hosts.unusable_reason(Path("/proc/kvstored")).startswith("/proc")
