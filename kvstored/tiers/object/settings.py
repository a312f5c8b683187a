"""How the object tier is set up: section [object] of the configuration, as one value."""

from __future__ import annotations

from dataclasses import dataclass

WRITE_BACK = ("all", "shared", "second_hit")
"""Names of the policies of `kvstored.tiers.object.policy`. Here, since that needs numpy, which the
configuration must not import: its threads would not leave the stop signals to the stop watch.
"""


@dataclass(frozen=True, slots=True)
class ObjectSettings:
    """Section [object]. Times in seconds. Credentials are none of it: they come from the usual
    environment and instance sources.

    `url`: "s3://bucket/prefix", "file:///dir", "gs://…" or "az://…"; empty: there is no such tier.
    `parallel`: requests under way at once for reads. `range_bytes`: most bytes of one read; an
    object longer than that is read by several at once. `cap_bytes` 0 and `ttl_s` 0: no limit.
    """

    url: str = ""
    endpoint: str = ""
    region: str = ""
    allow_http: bool = False
    cap_bytes: int = 0
    ttl_s: float = 0.0
    write_back: str = "all"  # all | shared | second_hit
    max_backlog_bytes: int = 4 << 30
    parallel: int = 16
    range_bytes: int = 8 << 20
    connect_timeout_s: float = 2.0
    range_timeout_s: float = 5.0
    head_timeout_s: float = 1.0
    negative_ttl_s: float = 5.0
    janitor: bool = True
    promote_nvme: bool = True
