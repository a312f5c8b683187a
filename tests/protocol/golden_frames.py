"""How proto/golden/local_frames.json is read, and played back to a daemon."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from server.local_wire import GIVE_UP_S, HEADER, Got, LocalWire

from kvstored_client.proto import kvstore_pb2 as pb

FILE = Path(__file__).parents[2] / "proto" / "golden" / "local_frames.json"
FLAGS = {"REPLY": 1, "LAST": 2, "ERROR": 4}
POSITION = struct.Struct("<QQ")


def entries() -> list[dict[str, Any]]:
    """Every recorded frame and position, in the order of the conversation."""
    loaded: list[dict[str, Any]] = json.loads(FILE.read_text())["frames"]
    return loaded


def message_class(name: str) -> type[Message]:
    """The generated class of a body."""
    found: type[Message] = getattr(pb, name)
    return found


class Player:
    """The client's side of the recorded conversation, on a real connection."""

    def __init__(self, path: Path) -> None:
        self.wire = LocalWire(path)
        self.events: socket.socket | None = None
        self.data: socket.socket | None = None

    def close(self) -> None:
        self.wire.close()
        for end in (self.events, self.data):
            if end is not None:
                end.close()

    def send(self, entry: dict[str, Any]) -> None:
        """Send what the recorded client sent."""
        raw = bytes.fromhex(entry["wire"])
        if entry["channel"] == "data":
            assert self.data is not None
            self.data.send(raw)
        else:
            self.wire.send_raw(raw)

    def receive(self, channel: str) -> Got | bytes:
        """The daemon's next frame on the session's socket or the events channel, or position."""
        if channel == "session":
            got = self.wire.receive()
            self._keep(got)
            return got
        end = self.events if channel == "events" else self.data
        assert end is not None
        assert select.select([end], [], [], GIVE_UP_S)[0]
        message = end.recv(1 << 16)
        if channel == "data":
            return message
        _, kind, flags, _, request_id = HEADER.unpack_from(message)
        return Got(kind, flags, request_id, message[HEADER.size :])

    def _keep(self, got: Got) -> None:
        """Keep the ends of channels; memory is not looked at here."""
        if got.kind == 1 and got.fds:
            self.events = socket.socket(fileno=got.fds[0])
        elif got.kind == 65:
            os.close(got.fds[0])
            self.data = socket.socket(fileno=got.fds[1])
        else:
            for fd in got.fds:
                os.close(fd)
