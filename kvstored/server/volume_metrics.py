"""What /metrics says of each volume of the NVMe tier. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from kvstored.server.metric_families import counter, gauge
from kvstored.tiers.nvme.status import VolumeState
from kvstored_client.proto import admin_pb2 as admin


def volume_metrics(now: admin.ListVolumesReply) -> Iterator[Metric]:
    """Every family, also those without samples; the ratio only once something was written."""
    yield from _figures(now)
    yield from _states(now)
    yield from _scrubs(now)
    yield counter(
        "kvstored_volume_errors",
        "Failures of a volume's device, by what failed.",
        ["volume", "stage"],
        [((v.name, e.stage), e.count) for v in now.volumes for e in v.errors],
    )
    ratio = GaugeMetricFamily(
        "kvstored_nvme_write_amplification_ratio",
        "Bytes written to the devices per byte of payload, since the start.",
    )
    if now.write_amplification:
        ratio.add_metric([], now.write_amplification)
    yield ratio


def _figures(now: admin.ListVolumesReply) -> Iterator[Metric]:
    for name, field, help_text in (
        ("cap_bytes", "cap_bytes", "Hard cap of a volume."),
        ("footprint_bytes", "footprint_bytes", "What a volume's files really hold."),
        ("charged_bytes", "charged_bytes", "Bytes charged on a volume, with padding."),
        ("objects", "objects", "Objects on a volume."),
        ("read_bytes_per_second", "read_bytes_per_s", "What a busy volume was measured to give."),
        ("write_bytes_per_second", "write_bytes_per_s", "The same, to take."),
    ):
        rows = [((v.name,), float(getattr(v, field))) for v in now.volumes]
        yield gauge(f"kvstored_volume_{name}", help_text, ["volume"], rows)
    for name, help_text in (
        ("read_bytes", "Payload read from a volume and verified."),
        ("written_bytes", "Everything written to a volume, index and headers included."),
        ("accepted_bytes", "Payload of the objects written to a volume."),
    ):
        rows = [((v.name,), float(getattr(v, name))) for v in now.volumes]
        yield counter(f"kvstored_volume_{name}", help_text, ["volume"], rows)


def _states(now: admin.ListVolumesReply) -> Iterator[Metric]:
    yield gauge(
        "kvstored_volume_state",
        "1 for the state that a volume is in.",
        ["volume", "state"],
        [((v.name, s.value), s.value == v.state) for v in now.volumes for s in VolumeState],
    )
    yield gauge(
        "kvstored_volume_info",
        "Where a volume is, and how it moves bytes.",
        ["volume", "directory", "mode"],
        [((v.name, v.directory, v.mode), 1) for v in now.volumes],
    )
    regions: list[tuple[tuple[str, ...], float]] = []
    for v in now.volumes:
        used = v.regions_total - v.regions_free - v.regions_abandoned
        counts = {"used": used, "free": v.regions_free, "abandoned": v.regions_abandoned}
        regions += [((v.name, state), count) for state, count in counts.items()]
    yield gauge("kvstored_volume_regions", "Regions of a volume.", ["volume", "state"], regions)


def _scrubs(now: admin.ListVolumesReply) -> Iterator[Metric]:
    # They grow by themselves, hence are not declared counters.
    for name, field, help_text in (
        ("objects", "scrubbed_objects", "Objects read by scrubs since a volume was opened."),
        ("bytes", "scrubbed_bytes", "The same in bytes."),
        ("dropped_objects", "dropped_objects", "Objects that a scrub found rotten."),
        ("unreadable_objects", "unreadable_objects", "Objects that a device did not give."),
    ):
        rows = [
            ((v.name,), float(getattr(v.scrub, field))) for v in now.volumes if v.HasField("scrub")
        ]
        yield gauge(f"kvstored_volume_scrub_{name}", help_text, ["volume"], rows)
    yield gauge(
        "kvstored_volume_scrub_last_done_seconds",
        "Unix time of the last scrub that read all of a volume; 0: none since it was opened.",
        ["volume"],
        [((v.name,), v.scrub.last_done_ms / 1000) for v in now.volumes if v.HasField("scrub")],
    )
