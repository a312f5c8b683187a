"""From settings to the objects that serve: tiers, store, auth, limits. Opens nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping

from kvstored.config import NamespaceSettings, Secret, Settings
from kvstored.io.base import Files, RealFiles
from kvstored.server.auth import Auth, NamespaceAuth, token_hash
from kvstored.server.limits import Limits, LocalLimits
from kvstored.store import store as stores
from kvstored.store.pooling import PoolingSettings
from kvstored.store.store import Store, StoreSettings
from kvstored.supervise import Supervisor
from kvstored.tiers.base import TierKind
from kvstored.tiers.nvme.member import VolumeSpec
from kvstored.tiers.nvme.tier import NvmeTier
from kvstored.tiers.object.api import Pool
from kvstored.tiers.object.assembly import make_pool
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.identity import derive_namespace_salt

REGISTRY_FOLDER = "volumes"
"""In the data directory: what is known of volumes that may be away."""

OBJECT_FOLDER = "object"
"""In the data directory: what is owed to the bucket."""


def build_store(settings: Settings, supervisor: Supervisor, files: Files | None = None) -> Store:
    """The store over its tiers, not yet opened. `files` None: the real ones."""
    ram_caps = {n.name: n.ram_cap_bytes for n in settings.namespaces}
    ram = RamTier(settings.ram.cap_bytes, _cap_of(ram_caps), namespaces=list(ram_caps))
    nvme = None
    caps = {(name, TierKind.RAM): cap for name, cap in ram_caps.items()}
    if settings.nvme.enabled:
        nvme_caps = {n.name: n.nvme_cap_bytes for n in settings.namespaces}
        nvme = NvmeTier(
            _volumes(settings),
            settings.daemon.data_dir / REGISTRY_FOLDER,
            _cap_of(nvme_caps),
            files=files,
        )
        caps |= {(name, TierKind.NVME): cap for name, cap in nvme_caps.items()}
    return Store(
        ram,
        nvme,
        StoreSettings(
            namespaces=tuple(
                stores.NamespaceSettings(n.name, n.default_ttl_ms) for n in settings.namespaces
            ),
            max_dirty_bytes=settings.limits.max_dirty_bytes,
            max_tenants=settings.tenants.max,
            namespace_caps=caps,
            pooling=PoolingSettings(
                settings.object.write_back,
                settings.limits.max_dirty_bytes // 2 if settings.object.promote_nvme else 0,
                settings.object.cap_bytes,
            ),
        ),
        supervisor,
        _pool(settings, supervisor, files),
    )


def _pool(settings: Settings, supervisor: Supervisor, files: Files | None) -> Pool | None:
    """The bucket, where one is configured."""
    if not settings.object.url:
        return None
    return make_pool(
        settings.object,
        supervisor,
        files or RealFiles(),
        settings.daemon.data_dir / OBJECT_FOLDER,
        f"{socket.gethostname()}-{os.getpid()}",
    )


def _volumes(settings: Settings) -> list[VolumeSpec]:
    """The volumes by number. The one there is where none is listed is not missed when it is gone:
    it is made anew.
    """
    return [
        VolumeSpec(v.name, v.path, v.cap_bytes, v.drain, guarded=v.listed)
        for v in settings.nvme.volumes
    ]


def build_auth(settings: Settings) -> Auth:
    """Who may do what. A namespace without tokens is open on the Unix socket, over TCP only with
    `listen.insecure`.
    """
    insecure = settings.listen.insecure
    return Auth(
        [
            NamespaceAuth(
                namespace.name,
                _hashes(namespace.tokens),
                anonymous_unix=not namespace.tokens,
                anonymous_tcp=not namespace.tokens and insecure,
            )
            for namespace in settings.namespaces
        ],
        admin_token_hashes=[h for n in settings.namespaces if n.admin for h in _hashes(n.tokens)],
    )


def build_salts(namespaces: Iterable[NamespaceSettings], secret: bytes) -> dict[str, bytes]:
    """The salt of each namespace, 32 bytes, the same on every node that has the same secret."""
    return {n.name: derive_namespace_salt(secret, n.name) for n in namespaces}


def build_limits(settings: Settings) -> Limits:
    """Bounds on calls, those that can be configured among them."""
    return Limits(
        max_put_bytes=settings.limits.max_put_bytes,
        max_running_calls=settings.limits.max_calls,
        stall_timeout_s=settings.limits.stall_timeout_s,
        local=LocalLimits(
            max_sessions=settings.local.max_sessions,
            max_staging_bytes=settings.local.max_staging_bytes,
            max_total_staging_bytes=settings.local.max_total_staging_bytes,
            max_leased_fraction_session=settings.local.max_leased_percent_session / 100,
            max_leased_fraction_namespace=settings.local.max_leased_percent_namespace / 100,
        ),
    )


def _cap_of(caps: Mapping[str, int]) -> Callable[[str], int]:
    """Cap by namespace; none for one that is still on the device but no longer configured."""
    return lambda name: caps.get(name, 0)


def _hashes(tokens: Iterable[Secret]) -> tuple[bytes, ...]:
    return tuple(token_hash(token.reveal()) for token in tokens)
