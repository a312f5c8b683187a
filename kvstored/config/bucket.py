"""Section [object]: the bucket that many nodes share."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from kvstored.config.reader import Section
from kvstored.tiers.object.settings import WRITE_BACK, ObjectSettings

MIB = 1 << 20
SCHEMES = ("s3", "file", "gs", "az")
_DAY_S = 86_400.0
_WANTED = "write s3://bucket/prefix, gs://…, az://… or file:///directory"


def build_object(section: Section) -> ObjectSettings:
    """The tier; its `url` is empty where there is none."""
    given = ObjectSettings()
    url = section.text("url", given.url, str, _WANTED)
    if url and (fault := _fault(url)):
        section.complain_secret("url", fault)  # it may hold a password
    endpoint = section.text("endpoint", given.endpoint, str, "write http://host:port")
    if endpoint and (fault := _endpoint_fault(endpoint)):
        section.complain_secret("endpoint", fault)
    settings = ObjectSettings(
        url=url,
        endpoint=endpoint,
        region=section.text("region", given.region, str, "write a text in quotes"),
        allow_http=section.boolean("allow_http", default=given.allow_http),
        cap_bytes=section.size("cap_bytes", given.cap_bytes, least=0),
        ttl_s=section.seconds("ttl_s", given.ttl_s, least=0.0, most=3650 * _DAY_S),
        write_back=section.choice("write_back", given.write_back, WRITE_BACK),
        max_backlog_bytes=section.size("max_backlog_bytes", given.max_backlog_bytes, least=MIB),
        parallel=section.integer("parallel", given.parallel, least=1, most=256),
        range_bytes=section.size("range_bytes", given.range_bytes, least=4 * MIB, most=8 * MIB),
        connect_timeout_s=section.seconds(
            "connect_timeout_s", given.connect_timeout_s, least=0.1, most=60.0
        ),
        range_timeout_s=section.seconds(
            "range_timeout_s", given.range_timeout_s, least=0.1, most=600.0
        ),
        head_timeout_s=section.seconds(
            "head_timeout_s", given.head_timeout_s, least=0.01, most=60.0
        ),
        negative_ttl_s=section.seconds(
            "negative_ttl_s", given.negative_ttl_s, least=0.0, most=3600.0
        ),
        janitor=section.boolean("janitor", default=given.janitor),
        promote_nvme=section.boolean("promote_nvme", default=given.promote_nvme),
    )
    if endpoint.startswith("http://") and not settings.allow_http:
        section.complain(
            "allow_http",
            "object.endpoint is http://, over which what is read and written is not encrypted: "
            "set object.allow_http = true if that is meant",
        )
    return settings


def _fault(url: str) -> str:
    """What is wrong with a URL, without repeating it; "" if nothing is."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (raises for what is none)
    except ValueError:
        return _WANTED
    if parts.username or parts.password or parts.query or parts.fragment:
        return (
            "no user, password or query may stand in it: credentials come from the environment "
            "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, ...) or from the instance"
        )
    if parts.scheme not in SCHEMES:
        return _WANTED
    if parts.scheme == "file":
        return "" if not parts.netloc and len(unquote(parts.path)) > 1 else _WANTED
    return "" if parts.netloc else _WANTED


def _endpoint_fault(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        parts.port  # noqa: B018 (raises for what is none)
    except ValueError:
        return "write http://host:port or https://host:port"
    if parts.username or parts.password or parts.query or parts.fragment:
        return "no user, password or query may stand in it: credentials come from the environment"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "write http://host:port or https://host:port"
    return ""
