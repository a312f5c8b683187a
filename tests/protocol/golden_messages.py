"""How proto/golden/messages.json is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from kvstored_client.proto import admin_pb2, kvstore_pb2

FILE = Path(__file__).parents[2] / "proto" / "golden" / "messages.json"


def entries() -> list[dict[str, Any]]:
    """Every golden message: name, message type, fields as proto3 JSON, wire bytes in hex."""
    loaded: list[dict[str, Any]] = json.loads(FILE.read_text())["messages"]
    return loaded


def message_class(name: str) -> type[Message]:
    """The generated class of a message of either file."""
    for module in (kvstore_pb2, admin_pb2):
        found = getattr(module, name, None)
        if found is not None:
            return found  # type: ignore[no-any-return]  # generated
    raise KeyError(name)


def as_fields(message: Message) -> dict[str, Any]:
    """A message as proto3 JSON with the field names of the .proto file."""
    fields: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return fields
