"""What /metrics says, rendered from the store's plain counters.

Every counter stands still while nobody calls: what moves by itself (loop lag, byte-seconds, times)
is a gauge. Label sets are bounded where they are made, in `kvstored.store.accounting`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstored import __version__
from kvstored.looplag import LoopLag
from kvstored.server.bucket_metrics import bucket_metrics
from kvstored.server.local.figures import LocalFigures
from kvstored.server.metric_families import counter, gauge
from kvstored.server.volume_metrics import volume_metrics
from kvstored.store.accounting import LATENCY_BUCKETS_S, Accounts, Amount, Histogram, Holding
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.proto import admin_pb2 as admin

Key2 = tuple[str, str]
Key3 = tuple[str, str, str]
Key4 = tuple[str, str, str, str]

_BOUNDS = (*(f"{bound:g}" for bound in LATENCY_BUCKETS_S), "+Inf")


@dataclass(frozen=True, slots=True)
class RamFigures:
    """How the RAM tier's memory was had: segments, and bytes known to lie in huge pages."""

    segments: int
    huge_bytes: int

    @classmethod
    def of(cls, ram: RamTier) -> RamFigures:
        """Those of a tier, now."""
        return cls(ram.segments, ram.huge_bytes)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The store's figures at one moment: its tables, copied on the verbs' loop in one step each.

    The entries are the live ones, read afterwards by the thread that renders: a figure may be a
    moment newer than its neighbour, never wrong once traffic rests.
    """

    hits: Mapping[Key4, Amount] = field(default_factory=dict)
    misses: Mapping[Key4, Amount] = field(default_factory=dict)
    held: Mapping[Key3, Holding] = field(default_factory=dict)
    stored: Mapping[Key3, Amount] = field(default_factory=dict)
    evicted: Mapping[Key3, Amount] = field(default_factory=dict)
    puts: Mapping[Key3, int] = field(default_factory=dict)
    conflicts: Mapping[str, int] = field(default_factory=dict)
    checksum_failures: Mapping[str, int] = field(default_factory=dict)
    latencies: Mapping[Key2, Histogram] = field(default_factory=dict)
    errors: Mapping[Key2, int] = field(default_factory=dict)
    recovery_dropped: Mapping[str, int] = field(default_factory=dict)
    not_written: Mapping[str, int] = field(default_factory=dict)
    status: admin.StatusReply = field(default_factory=admin.StatusReply)
    volumes: admin.ListVolumesReply = field(default_factory=admin.ListVolumesReply)
    local: LocalFigures = field(default_factory=LocalFigures)
    ram: RamFigures = field(default_factory=lambda: RamFigures(0, 0))


def take_snapshot(
    accounts: Accounts,
    status: admin.StatusReply,
    not_written: Mapping[str, int],
    local: LocalFigures,
    ram: RamFigures,
    volumes: admin.ListVolumesReply | None = None,
) -> Snapshot:
    """Copy what the renderer needs. Belongs to the verbs' loop; costs no more than the copies.

    `not_written`: objects that the persistent tier did not take, by reason.
    """
    accounts.settle()
    return Snapshot(
        hits=dict(accounts.hits),
        misses=dict(accounts.misses),
        held=dict(accounts.held),
        stored=dict(accounts.stored),
        evicted=dict(accounts.evicted),
        puts=dict(accounts.puts),
        conflicts=dict(accounts.conflicts),
        checksum_failures=dict(accounts.checksum_failures),
        latencies=dict(accounts.latencies),
        errors=dict(accounts.errors),
        recovery_dropped=dict(accounts.recovery_dropped),
        not_written=dict(not_written),
        status=status,
        volumes=volumes or admin.ListVolumesReply(),
        local=local,
        ram=ram,
    )


class CallAccounts:
    """Counts calls as they end (the dispatcher's CallObserver). Belongs to the verbs' loop."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def call_ended(self, verb: str, outcome: str, seconds: float, tier: str) -> None:
        """Count one call's latency, and its error where `outcome` is not "ok"."""
        self._accounts.observe(verb, tier or "none", seconds)
        if outcome != "ok":
            self._accounts.errors[verb, outcome] += 1


@dataclass(frozen=True, slots=True)
class MetricsSources:
    """Where figures come from. All are called from the HTTP thread.

    `snapshot` waits a bounded time for the verbs' loop and raises TimeoutError when it is stuck.
    """

    snapshot: Callable[[], Snapshot]
    lag: Callable[[], LoopLag]
    task_restarts: Callable[[], Mapping[str, int]]
    phase: Callable[[], str]
    started_s: float  # Unix time


class MetricsCollector(Collector):
    """Renders `MetricsSources` for prometheus_client. Used by one scrape at a time or several."""

    def __init__(self, sources: MetricsSources) -> None:
        self._sources = sources

    def collect(self) -> Iterable[Metric]:
        """Every metric family, also those that have no samples yet."""
        snapshot = self._sources.snapshot()
        yield from _daemon_metrics(self._sources)
        yield from _traffic_metrics(snapshot)
        yield from _content_metrics(snapshot)
        yield from _tier_metrics(snapshot.status)
        yield from volume_metrics(snapshot.volumes)
        yield from bucket_metrics(snapshot.status)
        yield from _memory_metrics(snapshot)
        yield _latency_metric(snapshot.latencies)


def _daemon_metrics(sources: MetricsSources) -> Iterator[Metric]:
    lag = sources.lag()
    yield gauge("kvstored_info", "Version of the daemon.", ["version"], [((__version__,), 1)])
    yield GaugeMetricFamily(
        "kvstored_start_time_seconds", "Unix time at which the daemon began.", sources.started_s
    )
    yield GaugeMetricFamily(
        "kvstored_ready", "1 while the daemon serves.", float(sources.phase() == "ready")
    )
    yield gauge(
        "kvstored_loop_lag_seconds",
        "Lateness of the verbs' loop over the last minute; quantile 1 is the greatest.",
        ["quantile"],
        [(("0.5",), lag.p50_s), (("0.99",), lag.p99_s), (("1",), lag.max_s)],
    )
    yield counter(
        "kvstored_task_restarts",
        "Background tasks that died and were started again.",
        ["task"],
        [((task,), count) for task, count in dict(sources.task_restarts()).items()],
    )


def _traffic_metrics(now: Snapshot) -> Iterator[Metric]:
    hit, miss = ["namespace", "tenant", "model", "tier"], ["namespace", "tenant", "model", "reason"]
    for unit, figure in (("chunks", _chunks), ("tokens", _tokens), ("bytes", _nbytes)):
        yield counter(
            f"kvstored_hit_{unit}",
            f"Hits in {unit}: verified and handed to the transport in full.",
            hit,
            [(key, figure(amount)) for key, amount in now.hits.items()],
        )
        yield counter(
            f"kvstored_miss_{unit}",
            f"Misses in {unit}, by reason.",
            miss,
            [(key, figure(amount)) for key, amount in now.misses.items()],
        )
    yield counter(
        "kvstored_put_objects",
        "Objects offered by puts, by what became of them.",
        ["namespace", "tenant", "outcome"],
        now.puts.items(),
    )
    yield counter(
        "kvstored_call_errors",
        "Calls answered with an error.",
        ["verb", "code"],
        now.errors.items(),
    )
    yield counter(
        "kvstored_conflicts",
        "Objects put again with another checksum; the first bytes stand.",
        ["namespace"],
        [((namespace,), count) for namespace, count in now.conflicts.items()],
    )
    yield counter(
        "kvstored_checksum_failures",
        "Objects whose bytes were not those stored; dropped.",
        ["tier"],
        [((tier,), count) for tier, count in now.checksum_failures.items()],
    )


def _content_metrics(now: Snapshot) -> Iterator[Metric]:
    tenant_tier = ["namespace", "tenant", "tier"]
    leaving = ["namespace", "tier", "reason"]
    for unit, figure in (("objects", _chunks), ("bytes", _nbytes)):
        yield counter(
            f"kvstored_stored_{unit}",
            f"Stored in a tier since the start, in {unit}.",
            tenant_tier,
            [(key, figure(amount)) for key, amount in now.stored.items()],
        )
        yield counter(
            f"kvstored_evicted_{unit}",
            f"Left a tier since the start, in {unit}, by reason.",
            leaving,
            [(key, figure(amount)) for key, amount in now.evicted.items()],
        )
    yield counter(
        "kvstored_not_written_objects",
        "Objects that the persistent tier did not take and that stayed in RAM only, by reason.",
        ["reason"],
        [((reason,), count) for reason, count in now.not_written.items()],
    )
    held = now.held.items()
    yield gauge(
        "kvstored_tenant_charged_bytes",
        "Bytes charged to a tenant in a tier, with padding.",
        tenant_tier,
        [(key, holding.charged_bytes) for key, holding in held],
    )
    yield gauge(
        "kvstored_tenant_objects",
        "Objects of a tenant in a tier.",
        tenant_tier,
        [(key, holding.objects) for key, holding in held],
    )
    # Grows by itself while bytes are held, hence not declared a counter.
    yield gauge(
        "kvstored_tenant_byte_seconds",
        "Integral over time of kvstored_tenant_charged_bytes since the start.",
        tenant_tier,
        [(key, holding.byte_seconds) for key, holding in held],
    )
    yield gauge(
        "kvstored_recovery_dropped_objects",
        "Objects found at the last start that could not be kept, by reason.",
        ["reason"],
        [((reason,), count) for reason, count in now.recovery_dropped.items()],
    )


def _tier_metrics(status: admin.StatusReply) -> Iterator[Metric]:
    for name, help_text in (
        ("cap_bytes", "Hard cap of a tier."),
        ("footprint_bytes", "What a tier's memory or device really holds."),
        ("charged_bytes", "Bytes charged in a tier, with padding."),
        ("objects", "Objects in a tier."),
    ):
        rows = [((tier.name,), float(getattr(tier, name))) for tier in status.tiers]
        yield gauge(f"kvstored_tier_{name}", help_text, ["tier"], rows)
    yield gauge(
        "kvstored_tier_healthy",
        "1 while a tier says that it is well.",
        ["tier"],
        [((tier.name,), tier.health == "ok") for tier in status.tiers],
    )
    yield gauge(
        "kvstored_tier_info",
        "How a tier moves bytes.",
        ["tier", "mode"],
        [((tier.name, tier.mode), 1) for tier in status.tiers],
    )
    for name, help_text in (
        ("cap_bytes", "Hard cap of a namespace in a tier."),
        ("charged_bytes", "Bytes charged to a namespace in a tier, with padding."),
    ):
        rows2 = [((n.name, n.tier), float(getattr(n, name))) for n in status.namespaces]
        yield gauge(f"kvstored_namespace_{name}", help_text, ["namespace", "tier"], rows2)
    for name, help_text in (
        ("chunks", "Chunks held in any tier."),
        ("dirty_bytes", "Accepted and not yet durable."),
        ("leased_bytes", "Bytes in RAM that readers hold."),
        ("families", "Families known."),
    ):
        yield GaugeMetricFamily(f"kvstored_{name}", help_text, float(getattr(status, name)))


def _memory_metrics(now: Snapshot) -> Iterator[Metric]:
    local = now.local
    for name, help_text, value in (
        (
            "ram_segments",
            "Segments of the RAM tier, those being given back included.",
            now.ram.segments,
        ),
        ("ram_huge_bytes", "RAM tier memory known to lie in huge pages.", now.ram.huge_bytes),
        ("local_sessions", "Local sessions that are served.", local.sessions),
        (
            "local_quarantined_sessions",
            "Local sessions that the daemon has ended and whose process "
            "may still look at what they held.",
            local.quarantined_sessions,
        ),
        (
            "local_leased_bytes",
            "Bytes in RAM that local sessions keep in place: leases, holds and "
            "reservations, quarantined ones too.",
            local.leased_bytes,
        ),
        (
            "local_staging_bytes",
            "Memory of rings and areas, beside the RAM cap.",
            local.staging_bytes,
        ),
    ):
        yield GaugeMetricFamily(f"kvstored_{name}", help_text, float(value))
    yield counter(
        "kvstored_local_sessions_ended",
        "Local sessions that are over, by what ended them.",
        ["reason"],
        [((reason,), count) for reason, count in dict(local.ended).items()],
    )


def _latency_metric(latencies: Mapping[Key2, Histogram]) -> Metric:
    family = HistogramMetricFamily(
        "kvstored_call_seconds",
        "Time from a call's arrival to its answer, by the slowest tier that it read.",
        labels=["verb", "tier"],
    )
    for labels, histogram in latencies.items():
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip(_BOUNDS, histogram.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(labels, buckets, histogram.sum_s)
    return family


def _chunks(amount: Amount) -> int:
    return amount.chunks


def _tokens(amount: Amount) -> int:
    return amount.tokens


def _nbytes(amount: Amount) -> int:
    return amount.nbytes
