"""What /metrics says of the bucket that nodes share. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from kvstored.server.metric_families import counter, gauge
from kvstored_client.proto import admin_pb2 as admin


def bucket_metrics(status: admin.StatusReply) -> Iterator[Metric]:
    """Every family; without samples where there is no bucket."""
    buckets = [status.bucket] if status.HasField("bucket") else []
    for name, help_text in (
        ("backlog_objects", "Objects owed to the bucket."),
        ("backlog_bytes", "Bytes owed to the bucket."),
        ("in_flight", "Uploads under way."),
        ("known_objects", "Objects of all nodes, as the last janitor listed them."),
        ("known_bytes", "Their bytes."),
        ("cap_bytes", "What the janitor keeps them to; 0: no limit."),
    ):
        rows = [((), float(getattr(bucket, name))) for bucket in buckets]
        yield gauge(f"kvstored_object_{name}", help_text, [], rows)
    for name, help_text in (
        ("uploaded_bytes", "Payload brought up to the bucket by this node."),
        ("fetched_bytes", "Payload brought from the bucket and verified."),
    ):
        rows = [((), float(getattr(bucket, name))) for bucket in buckets]
        yield counter(f"kvstored_object_{name}", help_text, [], rows)
    yield counter(
        "kvstored_object_requests",
        'Requests to the bucket, by what became of them; "get" counts whole objects.',
        ["verb", "outcome"],
        [((o.verb, o.outcome), o.count) for bucket in buckets for o in bucket.outcomes],
    )
