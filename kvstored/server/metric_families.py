"""Metric families from rows of label values and a figure."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def counter(
    name: str, help_text: str, labels: list[str], rows: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    """A counter family; the text form adds "_total" to its name."""
    family = CounterMetricFamily(name, help_text, labels=labels)
    for key, value in rows:
        family.add_metric(key, value)
    return family


def gauge(
    name: str, help_text: str, labels: list[str], rows: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    """A gauge family."""
    family = GaugeMetricFamily(name, help_text, labels=labels)
    for key, value in rows:
        family.add_metric(key, value)
    return family
