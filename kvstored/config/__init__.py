"""Settings: a TOML file, the environment and defaults, validated as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstored.config import build as building
from kvstored.config import host as hosts
from kvstored.config import sources
from kvstored.config.reader import Effective
from kvstored.config.secret import Secret
from kvstored.config.settings import (
    DaemonSettings,
    LimitSettings,
    ListenSettings,
    LogSettings,
    NamespaceSettings,
    NvmeSettings,
    RamSettings,
    Settings,
    TcpAddress,
    TenantSettings,
    VolumeSettings,
)
from kvstored.errors import ConfigError

__all__ = [
    "DaemonSettings",
    "LimitSettings",
    "ListenSettings",
    "Loaded",
    "LogSettings",
    "NamespaceSettings",
    "NvmeSettings",
    "RamSettings",
    "Secret",
    "Settings",
    "TcpAddress",
    "TenantSettings",
    "VolumeSettings",
    "load",
    "render",
]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Validated settings, what deserves a warning, and every value with where it comes from."""

    settings: Settings
    warnings: tuple[str, ...]
    effective: tuple[Effective, ...]
    file: Path | None


def load(
    file: Path | None,
    environ: Mapping[str, str],
    *,
    insecure: bool = False,
    host: hosts.Host | None = None,
) -> Loaded:
    """Read and validate the configuration. Changes nothing on disk.

    `file` None: the one that the environment names, or none at all. `host` is probed unless given.
    Raises ConfigError with every fault found.
    """
    file = sources.find_file(file, environ)
    tree = sources.read(file, environ)
    if insecure:
        tree.sections.setdefault("listen", {})["insecure"] = sources.Given(True, "--insecure")
    host = hosts.probe(environ) if host is None else host
    settings, report = building.build(tree, host, environ)
    if report.problems:
        raise ConfigError(report.problems)
    return Loaded(settings, tuple(report.warnings), tuple(report.effective), file)


def render(effective: tuple[Effective, ...]) -> str:
    """The effective settings as TOML, secrets masked, each with a remark on where it comes from."""
    lines: list[str] = []
    table = ""
    for setting in effective:
        next_of_list = setting.table.startswith("[[") and setting.key == "name"
        if setting.table != table or next_of_list:
            lines += ["", setting.table] if lines else [setting.table]
            table = setting.table
        remark = ", ".join(filter(None, (setting.note, setting.source)))
        lines.append(f"{setting.key} = {setting.shown}  # {remark}")
    return "\n".join(lines) + "\n"
