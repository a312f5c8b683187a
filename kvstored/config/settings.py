"""The daemon's settings, validated: what every other module is given. docs/configuration.md
describes each for operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstored.config.secret import Secret
from kvstored.tiers.object.settings import ObjectSettings

DEFAULT_NAMESPACE = "default"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Host and port to listen on. Port 0: any free one. An IPv6 host has no brackets here."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Only this machine can reach it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Where the daemon listens. `insecure`: namespaces without tokens are open over TCP too."""

    unix: Path
    tcp: TcpAddress | None
    http: TcpAddress | Path
    insecure: bool


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    """`deployment_secret` None: the one kept in the data directory, made at first start.
    `default_namespace`: there is a namespace "default" even if none is given.
    """

    data_dir: Path
    deployment_secret: Secret | None
    stop_timeout_s: float
    default_namespace: bool


@dataclass(frozen=True, slots=True)
class RamSettings:
    """Hard cap of the RAM tier."""

    cap_bytes: int


@dataclass(frozen=True, slots=True)
class VolumeSettings:
    """One volume of the NVMe tier, in a directory of its own. `drain`: nothing new is placed there,
    and what is there is moved to the others or dropped. `listed`: its directory is made by whoever
    lists it; else it is the daemon's to make.
    """

    name: str
    path: Path
    cap_bytes: int
    drain: bool
    listed: bool = True


@dataclass(frozen=True, slots=True)
class NvmeSettings:
    """Hard cap of the NVMe tier, the sum of its volumes'; 0, and no volumes, where it is not
    enabled. A volume's number is its index here. `scrub_bytes_per_s` 0: no scrub by itself.
    """

    enabled: bool
    cap_bytes: int
    volumes: tuple[VolumeSettings, ...] = ()
    scrub_bytes_per_s: int = 0


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """Bounds on what clients may ask at a time, and on how long they may keep it waiting."""

    max_put_bytes: int
    max_dirty_bytes: int
    max_calls: int
    stall_timeout_s: float


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """Local sessions (shared memory). Percentages are of the namespace's RAM cap, for what leases
    keep in place; staging memory comes on top of the RAM cap.
    """

    enabled: bool
    max_sessions: int
    max_leased_percent_session: int
    max_leased_percent_namespace: int
    max_staging_bytes: int
    max_total_staging_bytes: int


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """Bound on distinct tenant labels per namespace; later ones are accounted as "other"."""

    max: int


@dataclass(frozen=True, slots=True)
class LogSettings:
    """`level`: debug, info, warning, error. `format`: logfmt, json."""

    level: str
    format: str


@dataclass(frozen=True, slots=True)
class NamespaceSettings:
    """A trust domain. Without tokens: open on the Unix socket, over TCP only with `insecure`.

    Caps are at most those of their tiers. `default_ttl_ms` 0: does not expire. `admin`: its tokens
    may call the Admin service.
    """

    name: str
    tokens: tuple[Secret, ...]
    admin: bool
    ram_cap_bytes: int
    nvme_cap_bytes: int
    default_ttl_ms: int


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything."""

    daemon: DaemonSettings
    listen: ListenSettings
    ram: RamSettings
    nvme: NvmeSettings
    limits: LimitSettings
    local: LocalSettings
    tenants: TenantSettings
    log: LogSettings
    namespaces: tuple[NamespaceSettings, ...]
    object: ObjectSettings
