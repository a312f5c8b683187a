"""Payload between messages and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from kvstored.kvctl.files import FileReceiver
from kvstored_client.failures import GarbageError
from kvstored_client.proto import kvstore_pb2 as pb


def block(*objects: tuple[int, bytes], last: bool = False, states: bytes = b"") -> bytes:
    return pb.GetBlock(
        objects=[
            pb.GetObject(
                index=i, length_bytes=len(b), checksum=xxhash.xxh3_128_digest(b), tier=pb.TIER_RAM
            )
            for i, b in objects
        ],
        payload_bytes=sum(len(b) for _, b in objects),
        last=last,
        states=states,
    ).SerializeToString()


def test_objects_of_two_parts_across_frames(tmp_path: Path) -> None:
    receiver = FileReceiver(("a", "b"), {"a": tmp_path / "a", "b": tmp_path / "b"})
    receiver.feed(block((0, b"a0"), (1, b"b0"), (2, b"a1")))
    for frame in (b"a0b", b"0", b"a1"):
        receiver.feed(frame)
    assert not receiver.done
    receiver.feed(block(last=True, states=b"\x01\x10"))
    assert receiver.done
    receiver.keep()
    assert (tmp_path / "a").read_bytes() == b"a0a1"
    assert (tmp_path / "b").read_bytes() == b"b0"
    assert receiver.bytes_by_tier == {pb.TIER_RAM: 6}


def test_a_corrupt_object_ends_its_file(tmp_path: Path) -> None:
    receiver = FileReceiver(("a",), {"a": tmp_path / "a"})
    receiver.feed(block((0, b"good"), (1, b"evil"), (2, b"more")))
    receiver.feed(b"good" + b"EVIL" + b"more")
    receiver.feed(block(last=True, states=b"\x01\x01\x01"))
    receiver.keep()
    assert receiver.corrupt == [1]
    assert (tmp_path / "a").read_bytes() == b"good"


def test_what_broke_off_leaves_no_file(tmp_path: Path) -> None:
    receiver = FileReceiver(("a",), {"a": tmp_path / "a"})
    receiver.feed(block((0, b"good")))
    receiver.feed(b"go")
    receiver.abandon()
    assert list(tmp_path.iterdir()) == []


def test_running_again_begins_anew(tmp_path: Path) -> None:
    receiver = FileReceiver(("a",), {"a": tmp_path / "a"})
    receiver.feed(block((0, b"good")))
    receiver.feed(b"good")
    receiver.restart()
    receiver.feed(block((0, b"good"), last=True, states=b"\x01"))
    receiver.feed(b"good")
    receiver.keep()
    assert (tmp_path / "a").read_bytes() == b"good"
    assert receiver.bytes_by_tier == {pb.TIER_RAM: 4}


def test_garbage_is_said_to_be_garbage(tmp_path: Path) -> None:
    receiver = FileReceiver(("a",), {})
    with pytest.raises(GarbageError):
        receiver.feed(b"\xff\xff")
    receiver.feed(block((0, b"good")))
    with pytest.raises(GarbageError):
        receiver.feed(b"good and more")
    assert list(tmp_path.iterdir()) == []
