"""Client of kvstored, a per-node store for KV caches of LLM inference.

What this package promises is listed in `__all__`. Names are loaded when they are first used: who
needs only identities does not load grpc.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstored_client.aio import AsyncKVClient, AsyncSlots
    from kvstored_client.buffers import Iov, Rows
    from kvstored_client.client import KVClient
    from kvstored_client.config import CallOptions, Hints, Timeouts
    from kvstored_client.errors import (
        AuthError,
        BufferCountError,
        BufferLayoutError,
        BufferSizeError,
        BufferTypeError,
        BufferUsageError,
        ClosedError,
        ConnectError,
        DeadlineError,
        DrainingError,
        KVStoredClientError,
        LeaseEndedError,
        LeaseInUseError,
        LeaseUsageError,
        NotLeasedError,
        OptionError,
        OverloadedError,
        ProtocolError,
        RangeError,
        ReadOnlyBufferError,
        RefusedError,
        ServiceError,
        UnknownPartError,
        UsageError,
        VersionError,
    )
    from kvstored_client.identity import (
        Extra,
        GroupRule,
        IdentityError,
        KVFamily,
        KVPart,
        Prefix,
        derive_namespace_salt,
    )
    from kvstored_client.jobs import Job
    from kvstored_client.local.lease import Hold, Lease
    from kvstored_client.local.slots import Slots
    from kvstored_client.results import (
        ChunksResult,
        ChunkState,
        CountResult,
        GetResult,
        HelloResult,
        ListEntry,
        MatchResult,
        NamespaceStatus,
        PutResult,
        PutState,
        States,
        StatusResult,
        TenantUsage,
        TierStatus,
        TierUsage,
        UsageResult,
    )
    from kvstored_client.target import default_target

_HOMES = {
    "aio": ("AsyncKVClient", "AsyncSlots"),
    "buffers": ("Iov", "Rows"),
    "client": ("KVClient",),
    "config": ("CallOptions", "Hints", "Timeouts"),
    "errors": (
        "AuthError",
        "BufferCountError",
        "BufferLayoutError",
        "BufferSizeError",
        "BufferTypeError",
        "BufferUsageError",
        "ClosedError",
        "ConnectError",
        "DeadlineError",
        "DrainingError",
        "KVStoredClientError",
        "LeaseEndedError",
        "LeaseInUseError",
        "LeaseUsageError",
        "NotLeasedError",
        "OptionError",
        "OverloadedError",
        "ProtocolError",
        "RangeError",
        "ReadOnlyBufferError",
        "RefusedError",
        "ServiceError",
        "UnknownPartError",
        "UsageError",
        "VersionError",
    ),
    "identity": (
        "Extra",
        "GroupRule",
        "IdentityError",
        "KVFamily",
        "KVPart",
        "Prefix",
        "derive_namespace_salt",
    ),
    "jobs": ("Job",),
    "local.lease": ("Hold", "Lease"),
    "local.slots": ("Slots",),
    "results": (
        "ChunkState",
        "ChunksResult",
        "CountResult",
        "GetResult",
        "HelloResult",
        "ListEntry",
        "MatchResult",
        "NamespaceStatus",
        "PutResult",
        "PutState",
        "States",
        "StatusResult",
        "TenantUsage",
        "TierStatus",
        "TierUsage",
        "UsageResult",
    ),
    "target": ("default_target",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "AsyncKVClient",
    "AsyncSlots",
    "AuthError",
    "BufferCountError",
    "BufferLayoutError",
    "BufferSizeError",
    "BufferTypeError",
    "BufferUsageError",
    "CallOptions",
    "ChunkState",
    "ChunksResult",
    "ClosedError",
    "ConnectError",
    "CountResult",
    "DeadlineError",
    "DrainingError",
    "Extra",
    "GetResult",
    "GroupRule",
    "HelloResult",
    "Hints",
    "Hold",
    "IdentityError",
    "Iov",
    "Job",
    "KVClient",
    "KVFamily",
    "KVPart",
    "KVStoredClientError",
    "Lease",
    "LeaseEndedError",
    "LeaseInUseError",
    "LeaseUsageError",
    "ListEntry",
    "MatchResult",
    "NamespaceStatus",
    "NotLeasedError",
    "OptionError",
    "OverloadedError",
    "Prefix",
    "ProtocolError",
    "PutResult",
    "PutState",
    "RangeError",
    "ReadOnlyBufferError",
    "RefusedError",
    "Rows",
    "ServiceError",
    "Slots",
    "States",
    "StatusResult",
    "TenantUsage",
    "TierStatus",
    "TierUsage",
    "Timeouts",
    "UnknownPartError",
    "UsageError",
    "UsageResult",
    "VersionError",
    "default_target",
    "derive_namespace_salt",
]
