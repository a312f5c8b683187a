"""The wire format stands still: recorded messages still mean what they meant."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from golden_messages import as_fields, entries, message_class
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kvstored_client.proto import admin_pb2, kvstore_pb2

GOLDEN = entries()
# A field's type on the wire, and how many: what a message's meaning hangs on.
_VARINTS = {
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_BOOL,
    FieldDescriptor.TYPE_ENUM,
}


@pytest.mark.parametrize("entry", GOLDEN, ids=lambda entry: entry["name"])
def test_recorded_bytes_decode_to_the_recorded_fields(entry: dict[str, Any]) -> None:
    message = message_class(entry["message"]).FromString(bytes.fromhex(entry["wire"]))
    assert as_fields(message) == entry["fields"]
    assert json_format.ParseDict(entry["fields"], message_class(entry["message"])()) == message


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _by_hand(data: bytes, kind: Descriptor) -> dict[str, list[object]]:
    """Decode with nothing but the field numbers of the .proto file, as another language might."""
    fields: dict[str, list[object]] = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        field = kind.fields_by_number[number]
        value: object
        if wire == 0:
            value, at = _varint(data, at)
        elif wire == 1:
            value, at = data[at : at + 8], at + 8
        elif wire == 5:
            value, at = data[at : at + 4], at + 4
        else:
            length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
        if field.type in _VARINTS:
            assert wire == 0 or (wire == 2 and field.is_repeated), field.full_name
        fields.setdefault(field.name, []).append(value)
    return fields


@pytest.mark.parametrize("entry", GOLDEN, ids=lambda entry: entry["name"])
def test_field_numbers_are_those_of_the_recording(entry: dict[str, Any]) -> None:
    kind = message_class(entry["message"]).DESCRIPTOR
    found = _by_hand(bytes.fromhex(entry["wire"]), kind)
    assert set(found) == set(entry["fields"])
    for name, values in found.items():
        field = kind.fields_by_name[name]
        if field.type == FieldDescriptor.TYPE_BYTES and not field.is_repeated:
            assert values == [base64.b64decode(entry["fields"][name])]
        if field.type == FieldDescriptor.TYPE_STRING and not field.is_repeated:
            assert values == [entry["fields"][name].encode()]


def test_every_message_that_travels_has_a_recording() -> None:
    travelling = {
        name
        for module in (kvstore_pb2, admin_pb2)
        for name in module.DESCRIPTOR.message_types_by_name
    }
    seen: set[str] = set()

    def note(kind: Descriptor, fields: dict[str, Any]) -> None:
        seen.add(kind.name)
        for name, value in fields.items():
            inner = kind.fields_by_name[name].message_type
            if inner is not None:
                for item in value if isinstance(value, list) else [value]:
                    note(inner, item)

    for entry in GOLDEN:
        note(message_class(entry["message"]).DESCRIPTOR, entry["fields"])
    # RawFrames never travels; the others have no fields.
    empty = {"ReleaseReply", "StatusRequest", "ListVolumesRequest", "DrainVolumeReply"}
    assert travelling - seen == {"RawFrames", *empty}
