"""What /status says: the daemon, its tiers and volumes, as plain JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from google.protobuf.message import Message

from kvstored import __version__
from kvstored_client.proto import admin_pb2 as admin

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def status_page(
    phase: str, status: admin.StatusReply, volumes: admin.ListVolumesReply
) -> dict[str, Json]:
    """The page. No namespace or tenant is named: who may read metrics may read this."""
    return {
        "version": __version__,
        "phase": phase,
        "uptime_ms": status.uptime_ms,
        "chunks": status.chunks,
        "objects": status.objects,
        "dirty_bytes": status.dirty_bytes,
        "leased_bytes": status.leased_bytes,
        "tiers": [plain(tier) for tier in status.tiers],
        "bucket": plain(status.bucket) if status.HasField("bucket") else None,
        "volumes": [plain(volume) for volume in volumes.volumes],
        "write_amplification": volumes.write_amplification or None,
    }


def plain(message: Message) -> dict[str, Json]:
    """A message by its fields' names. Numbers stay numbers, unlike in protobuf's own JSON; a
    message that is not set is None.
    """
    found: dict[str, Json] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, Message):
            found[field.name] = plain(value) if message.HasField(field.name) else None
        else:
            found[field.name] = _value(value)
    return found


def _value(value: object) -> Json:
    """A field's value. Judged by what it can do: descriptors tell it differently by version."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Iterable):
        return [plain(one) if isinstance(one, Message) else _value(one) for one in value]
    raise TypeError(f"a status has no {type(value).__name__}")
