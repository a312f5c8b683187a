"""The figures operators see, as plain counters. No library, no I/O.

Everything is keyed by tuples of labels whose sets are bounded: namespaces and models by
configuration and Hello, tenants by `max_tenants` (later ones are counted as "other"), the rest by
enumerations. Owned by the verbs' loop; `snapshot` may be taken there at any time.
"""

from __future__ import annotations

import bisect
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

OTHER_TENANT = "other"
DEFAULT_TENANT = "default"
MAX_MODELS = 256

LATENCY_BUCKETS_S = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)


@dataclass(slots=True)
class Histogram:
    """Counts per bucket (the last is +Inf), with sum and count, as Prometheus wants them."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_S) + 1))
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one latency in seconds."""
        self.counts[bisect.bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


@dataclass(slots=True)
class Amount:
    """Chunks, tokens and bytes counted together."""

    chunks: int = 0
    tokens: int = 0
    nbytes: int = 0

    def add(self, chunks: int, tokens: int, nbytes: int) -> None:
        """Count some more."""
        self.chunks += chunks
        self.tokens += tokens
        self.nbytes += nbytes


@dataclass(slots=True)
class Holding:
    """What one tenant holds in one tier, and for how long: bytes and their integral over time."""

    charged_bytes: int = 0
    objects: int = 0
    byte_seconds: float = 0.0
    since: float = 0.0

    def settle(self, now: float) -> None:
        """Bring `byte_seconds` up to date."""
        self.byte_seconds += self.charged_bytes * (now - self.since)
        self.since = now


class Accounts:
    """All counters of one daemon, from its start."""

    def __init__(
        self, max_tenants: int = 1000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`max_tenants` bounds the distinct tenant labels per namespace."""
        self._clock = clock
        self._max_tenants = max_tenants
        self._tenants: dict[str, set[str]] = defaultdict(set)
        self._models: set[str] = set()
        # (namespace, tenant, model, tier)
        self.hits: dict[tuple[str, str, str, str], Amount] = defaultdict(Amount)
        # (namespace, tenant, model, reason)
        self.misses: dict[tuple[str, str, str, str], Amount] = defaultdict(Amount)
        # (namespace, tenant, tier)
        self.held: dict[tuple[str, str, str], Holding] = defaultdict(Holding)
        # (namespace, tenant, tier): objects and bytes ever stored there
        self.stored: dict[tuple[str, str, str], Amount] = defaultdict(Amount)
        # (namespace, tier, reason): objects and bytes that left it
        self.evicted: dict[tuple[str, str, str], Amount] = defaultdict(Amount)
        # (namespace, tenant, outcome): objects
        self.puts: dict[tuple[str, str, str], int] = defaultdict(int)
        self.conflicts: dict[str, int] = defaultdict(int)  # namespace
        self.checksum_failures: dict[str, int] = defaultdict(int)  # tier
        self.latencies: dict[tuple[str, str], Histogram] = defaultdict(Histogram)  # verb, tier
        self.errors: dict[tuple[str, str], int] = defaultdict(int)  # verb, code
        self.recovery_dropped: dict[str, int] = {}  # reason

    def tenant_label(self, namespace: str, tenant: str) -> str:
        """The label under which a tenant is accounted; "other" beyond the bound."""
        tenant = tenant or DEFAULT_TENANT
        known = self._tenants[namespace]
        if tenant in known:
            return tenant
        if len(known) >= self._max_tenants:
            return OTHER_TENANT
        known.add(tenant)
        return tenant

    def model_label(self, model: str) -> str:
        """The label under which a model is accounted; "other" beyond the bound."""
        if model in self._models:
            return model
        if len(self._models) >= MAX_MODELS:
            return OTHER_TENANT
        self._models.add(model)
        return model

    def charge(self, namespace: str, tenant: str, tier: str, nbytes: int, objects: int) -> None:
        """Change what a tenant holds in a tier by (signed) bytes and objects."""
        held = self.held[namespace, tenant, tier]
        held.settle(self._clock())
        held.charged_bytes += nbytes
        held.objects += objects

    def namespace_bytes(self, namespace: str, tier: str) -> int:
        """Bytes charged to a namespace in a tier."""
        return sum(
            h.charged_bytes for (n, _, t), h in self.held.items() if n == namespace and t == tier
        )

    def settle(self) -> None:
        """Bring every byte-second up to date, before they are read."""
        now = self._clock()
        for held in self.held.values():
            held.settle(now)

    def observe(self, verb: str, tier: str, seconds: float) -> None:
        """Count one call's latency. `tier`: the slowest tier it touched, or "none"."""
        self.latencies[verb, tier].observe(seconds)
