"""The local session's frames stand still: a recorded conversation decodes, and plays, as it did."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from protocol.golden_frames import FLAGS, POSITION, Player, entries, message_class
from server.local_serving import LocalServed, local_serving

from kvstored_client.proto import local

GOLDEN = entries()
FRAMES = [entry for entry in GOLDEN if entry["channel"] != "data"]
POSITIONS = [entry for entry in GOLDEN if entry["channel"] == "data"]

# What differs from daemon to daemon, or with its settings.
VOLATILE = {
    "boot_epoch",
    "byte_seconds",
    "server",
    "limits",
    "eta_ms",
    "hint",
    "message",
    "max_leased_bytes",
    "max_staging_bytes",
    "max_requests",
    "size_bytes",
}


def named(entry: dict[str, Any]) -> str:
    return f"{entry['from']}: {entry['name']}"


def as_fields(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return fields


@pytest.mark.parametrize("entry", FRAMES, ids=named)
def test_a_recorded_frame_is_what_the_page_says(entry: dict[str, Any]) -> None:
    wire = bytes.fromhex(entry["wire"])
    # By the page alone.
    length = int.from_bytes(wire[0:4], "little")
    assert length == len(wire) - 16
    assert wire[4] == entry["kind_number"]
    assert wire[5] == sum(FLAGS[name] for name in entry["flags"])
    assert wire[6:8] == b"\0\0"
    assert int.from_bytes(wire[8:16], "little") == entry["request_id"]
    if entry["from"] == "client":
        assert entry["flags"] == []
        assert entry["descriptors"] == 0
    if entry["message"]:
        message = message_class(entry["message"]).FromString(wire[16:])
        assert as_fields(message) == entry["fields"]
    else:
        assert (length, entry["fields"]) == (0, {})


@pytest.mark.parametrize("entry", FRAMES, ids=named)
def test_the_shared_code_reads_and_writes_it(entry: dict[str, Any]) -> None:
    wire = bytes.fromhex(entry["wire"])
    flags = sum(FLAGS[name] for name in entry["flags"])
    expected = local.Frame(entry["kind_number"], flags, entry["request_id"], wire[16:])
    assert local.FrameReader().feed(wire) == [expected]
    assert local.pack(expected.kind, flags, expected.request_id, expected.body) == wire
    if entry["kind"] != "200":  # there on purpose: no kind of this version
        assert local.Kind[entry["kind"]] == entry["kind_number"]


@pytest.mark.parametrize("size", [1, 7, 16, 1000])
def test_frames_are_found_however_the_stream_is_cut(size: int) -> None:
    wires = [bytes.fromhex(e["wire"]) for e in FRAMES if e["channel"] == "session"]
    stream = b"".join(wires)
    reader = local.FrameReader()
    found = [f for i in range(0, len(stream), size) for f in reader.feed(stream[i : i + size])]
    assert [local.pack(f.kind, f.flags, f.request_id, f.body) for f in found] == wires
    assert reader.pending_bytes == 0


@pytest.mark.parametrize("entry", POSITIONS, ids=named)
def test_a_recorded_position(entry: dict[str, Any]) -> None:
    wire = bytes.fromhex(entry["wire"])
    assert struct.unpack("<QQ", wire) == (entry["request_id"], entry["position"])
    assert local.POSITION.unpack(wire) == (entry["request_id"], entry["position"])


def test_every_kind_is_recorded_each_way_it_goes() -> None:
    ways = {(e["kind_number"], e["from"]) for e in FRAMES}
    requests = {kind for kind in local.Kind if kind < local.Kind.RETIRED}
    notices = {local.Kind.RETIRED, local.Kind.CANCEL}
    for kind in local.Kind:
        assert ((kind, "client") in ways) == (kind in requests | notices), kind
        assert ((kind, "daemon") in ways) == (kind not in notices), kind
    assert {e["from"] for e in POSITIONS} == {"client", "daemon"}


@pytest.fixture
def served() -> Iterator[LocalServed]:
    with local_serving() as running:
        yield running


def test_the_conversation_plays_as_recorded(served: LocalServed) -> None:
    """A daemon that is sent what the recorded client sent answers what the recorded one did."""
    player = Player(served.path)
    try:
        for entry in GOLDEN:
            if entry["from"] == "client":
                player.send(entry)
                continue
            if entry.get("kind") == "RETIRE":
                (segment_id,) = entry["fields"]["segment_ids"]
                retire = functools.partial(served.server.retire, segment_id)
                served.look(retire)
            check(entry, player)
    finally:
        player.close()


def check(entry: dict[str, Any], player: Player) -> None:
    """Whether the daemon's next frame is the recorded one."""
    got = player.receive(entry["channel"])
    if isinstance(got, bytes):
        assert POSITION.unpack(got) == (entry["request_id"], entry["position"])
        return
    flags = sum(FLAGS[name] for name in entry["flags"])
    assert (got.kind, got.flags, got.request_id, len(got.fds)) == (
        entry["kind_number"],
        flags,
        entry["request_id"],
        entry["descriptors"],
    ), entry["name"]
    fields = as_fields(message_class(entry["message"]).FromString(got.body))
    assert stable(fields) == stable(entry["fields"]), entry["name"]


def stable(value: Any) -> Any:
    """Without what is volatile, however deep."""
    if isinstance(value, dict):
        return {name: stable(inner) for name, inner in value.items() if name not in VOLATILE}
    return [stable(inner) for inner in value] if isinstance(value, list) else value
