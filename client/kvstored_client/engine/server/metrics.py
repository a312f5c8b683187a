"""/metrics: the sums of engine, hook and server in Prometheus' text format."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvstored_client.engine.server.service import TTFT_BOUNDS_S, Service
from kvstored_client.engine.server.weights import WeightUpdater

_ENGINE = {
    "steps": "Batches computed",
    "requests": "Requests taken",
    "finished": "Requests answered to the end",
    "aborted": "Requests ended before, by their clients or a stop string",
    "refused": "Requests that found the engine's queue full",
    "preemptions": "Times a request gave its blocks back and was computed again",
    "deferred": "Times a prompt waited for another's load of the same chunks",
    "prompt_tokens": "Tokens of prompts that were answered",
    "own_hit_tokens": "Of these, found in the engine's own blocks",
    "loaded_tokens": "Of these, loaded from kvstored",
    "prefill_tokens": "Tokens of prompts computed",
    "decode_tokens": "Tokens of answers computed",
}


class Metrics(Collector):
    """Reads the sums when it is asked."""

    def __init__(self, service: Service, updater: WeightUpdater) -> None:
        self._service = service
        self._updater = updater
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        service = self._service
        engine, stats = service.runner.engine, service.stats
        for name, what in _ENGINE.items():
            yield _counter(name, what, getattr(engine.stats, name))
        yield _counter("places_refused", "Requests refused before their body", stats.refused)
        yield _counter("dropped", "Answers whose clients went away", stats.dropped)
        yield _counter("step_failures", "Batches that failed", service.runner.failures)
        yield _gauge("requests_waiting", "Requests in the queue", engine.waiting_requests())
        yield _gauge("requests_running", "Requests that hold blocks", engine.running_requests())
        yield _gauge(
            "requests_loading", "Of these, waiting for kvstored", engine.loading_requests()
        )
        yield _gauge("blocks_free", "KV blocks that hold nothing", engine.pool.free_blocks())
        yield _gauge("blocks_used", "KV blocks in use or kept", engine.pool.used_blocks())
        yield _gauge(
            "prefill_tokens_per_second",
            "Recent rate at which prompts are computed",
            engine.stats.prefill_tokens_per_s,
        )
        yield _gauge("weights_epoch", "Epoch of the weights", self._updater.weights_epoch)
        yield self._ttft()
        yield from _sums("store", "The hook's", getattr(engine.hook, "stats", None))
        yield from _sums("shadow", "The shadow check's", getattr(engine.hook, "checked", None))

    def _ttft(self) -> Metric:
        buckets, below = [], 0
        bounds = [*(f"{bound:g}" for bound in TTFT_BOUNDS_S), "+Inf"]
        for bound, count in zip(bounds, self._service.stats.ttft_counts, strict=True):
            below += count
            buckets.append((bound, below))
        return HistogramMetricFamily(
            "kvstored_engine_ttft_seconds",
            "Time from a request's being queued to its first token",
            buckets=buckets,
            sum_value=self._service.stats.ttft_sum_s,
        )


def _sums(prefix: str, whose: str, stats: object) -> Iterator[Metric]:
    """Every number among the sums that a hook keeps; those by tier with the tier as a label, and
    what is the largest of its kind as a gauge.
    """
    if not dataclasses.is_dataclass(stats):
        return
    for field in dataclasses.fields(stats):
        value = getattr(stats, field.name)
        what = f"{whose} {field.name.replace('_', ' ')}"
        name = f"{prefix}_{field.name}"
        if isinstance(value, Mapping):
            by_tier = CounterMetricFamily(f"kvstored_engine_{name}", what, labels=["tier"])
            for tier, amount in dict(value).items():
                by_tier.add_metric([str(tier)], amount)
            yield by_tier
        elif isinstance(value, float):
            yield _gauge(name, what, value)
        elif isinstance(value, int):
            yield _counter(name, what, value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvstored_engine_{name}", what, value=value)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvstored_engine_{name}", what, value=value)
