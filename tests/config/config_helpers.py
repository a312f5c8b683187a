"""A made-up host, so that what is valid does not depend on the machine that runs the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstored import config
from kvstored.config.host import Host
from kvstored.errors import ConfigError

GIB = 1 << 30


def host(tmp_path: Path, memory_bytes: int = 8 * GIB) -> Host:
    return Host(memory_bytes, "the test's memory", tmp_path / "state", tmp_path / "run")


def load(
    tmp_path: Path,
    toml: str = "",
    environ: dict[str, str] | None = None,
    *,
    insecure: bool = False,
    memory_bytes: int = 8 * GIB,
) -> config.Loaded:
    file = tmp_path / "kvstored.toml"
    file.write_text(toml)
    return config.load(file, environ or {}, insecure=insecure, host=host(tmp_path, memory_bytes))


def problems(tmp_path: Path, toml: str = "", environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, toml, environ)
    return caught.value.problems
