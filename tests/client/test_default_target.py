"""Where a client looks for its daemon when nobody says."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvstored.config import host as hosts
from kvstored_client import default_target, target


@pytest.fixture(autouse=True)
def system_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /run/kvstored, where the machine may have a daemon."""
    monkeypatch.setattr(target, "SYSTEM_RUNTIME_DIR", tmp_path / "system")
    return tmp_path / "system"


def listen(folder: Path) -> None:
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as ear:
        ear.bind(str(folder / "kvstored.sock"))


def test_a_target_that_is_given_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_target({"KVSTORED_TARGET": "dns:///a:1", "XDG_RUNTIME_DIR": "/r"}) == (
        "dns:///a:1"
    )
    monkeypatch.setenv("KVSTORED_TARGET", "dns:///b:2")
    assert default_target() == "dns:///b:2"


def test_a_user_finds_the_daemon_that_the_user_starts(system_dir: Path) -> None:
    for environ in ({"XDG_RUNTIME_DIR": "/r"}, {"TMPDIR": "/t"}, {}):
        assert default_target(environ) == f"unix://{hosts.runtime_dir(environ)}/kvstored.sock"
    assert default_target({"XDG_RUNTIME_DIR": "/r"}) == "unix:///r/kvstored/kvstored.sock"
    home = system_dir if os.getuid() == 0 else Path(f"/t/kvstored-{os.getuid()}")
    assert default_target({"TMPDIR": "/t"}) == f"unix://{home}/kvstored.sock"


def test_the_directory_of_another_service_is_not_taken_for_the_daemons() -> None:
    engine = {"RUNTIME_DIRECTORY": "/run/engine", "XDG_RUNTIME_DIR": "/r"}
    assert default_target(engine) == "unix:///r/kvstored/kvstored.sock"


def test_the_systems_daemon_is_found_where_the_user_has_none(
    tmp_path: Path, system_dir: Path
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    listen(system_dir)
    assert default_target(environ) == f"unix://{system_dir}/kvstored.sock"
    listen(tmp_path / "kvstored")
    assert default_target(environ) == f"unix://{tmp_path}/kvstored/kvstored.sock"
