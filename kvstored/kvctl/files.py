"""Payload between files and requests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import xxhash
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from kvstored.kvctl.selection import Mistake
from kvstored.kvctl.sinks import Sink, open_sink
from kvstored_client.failures import GarbageError
from kvstored_client.identity import KVFamily, KVPart
from kvstored_client.proto import kvstore_pb2 as pb

Views = list[NDArray[np.uint8]]


def named_files(options: Iterable[str]) -> dict[str, list[Path]]:
    """--part NAME=FILE options by name. Raises Mistake."""
    files: dict[str, list[Path]] = {}
    for option in options:
        name, equals, file = option.partition("=")
        if not (name and equals and file):
            raise Mistake(f"--part {option}: write NAME=FILE")
        files.setdefault(name, []).append(Path(file))
    return files


def read_objects(family: KVFamily, files: dict[str, list[Path]]) -> tuple[list[str], Views]:
    """(part names, objects chunk by chunk and within a chunk in the order of the names).

    Files are mapped, not read. Raises Mistake.
    """
    by_name = {part.name: part for part in family.parts}
    columns: dict[str, Views] = {}
    for name, paths in files.items():
        if name not in by_name:
            known = ", ".join(by_name) or "none"
            raise Mistake(f"--part {name}: the family's parts are {known}")
        columns[name] = [view for path in paths for view in _objects(by_name[name], path)]
    counts = {name: len(column) for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise Mistake(f"--part: the parts have different numbers of chunks: {counts}")
    return list(columns), [view for row in zip(*columns.values(), strict=True) for view in row]


def _objects(part: KVPart, path: Path) -> Views:
    try:
        size = path.stat().st_size
        content = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
    except OSError as error:
        raise Mistake(f"--part {part.name}={path}: {error.strerror}") from error
    if part.nbytes is None:
        return [content]
    if not size or size % part.nbytes:
        raise Mistake(
            f"--part {part.name}={path}: {size} bytes are not objects of {part.nbytes} bytes"
        )
    return [content[at : at + part.nbytes] for at in range(0, size, part.nbytes)]


class FileReceiver:
    """Takes the messages of one Get, verifies each object, and writes leading ones to files.

    `parts` are the request's; `files` says where a part's objects go, one file each. What is in
    order and verified is kept when the stream breaks off.
    """

    def __init__(self, parts: tuple[str, ...], files: dict[str, Path]) -> None:
        self._parts = parts
        self._paths = files
        self._sinks: dict[str, Sink] = {}
        self.restart()

    def restart(self) -> None:
        """See Receiver."""
        self.done = False
        self.states = b""
        self.bytes_by_tier: dict[int, int] = {}
        self.corrupt: list[int] = []
        self._last = False
        self._objects: list[pb.GetObject] = []
        self._left = 0
        self._written = dict.fromkeys(self._parts, 0)
        self._kept = dict.fromkeys(self._parts, 0)
        self.abandon()
        try:
            for name, path in self._paths.items():
                self._sinks[name] = open_sink(path)
        except OSError:
            self.abandon()
            raise

    def feed(self, message: bytes) -> None:
        """See Receiver."""
        if self._objects:
            self._take(memoryview(message))
        else:
            self._begin(message)
        self.done = self._last and not self._objects

    def _begin(self, message: bytes) -> None:
        try:
            block = pb.GetBlock.FromString(message)
        except DecodeError as error:
            raise GarbageError(f"{len(message)} bytes are not a GetBlock") from error
        self._objects = list(block.objects)
        self._last, self.states = block.last, block.states
        if self._objects:
            self._open()

    def _open(self) -> None:
        self._left = self._objects[0].length_bytes
        self._hash = xxhash.xxh3_128()

    def _take(self, frame: memoryview) -> None:
        while frame:
            if not self._objects:
                raise GarbageError("more payload came than the block's head says")
            item = self._objects[0]
            part = self._part(item)
            piece, frame = frame[: self._left], frame[self._left :]
            self._hash.update(piece)
            if self._wanted(item):
                self._sinks[part].file.write(piece)
            self._left -= len(piece)
            if not self._left:
                self._close(item, part)

    def _part(self, item: pb.GetObject) -> str:
        return self._parts[item.index % len(self._parts)]

    def _wanted(self, item: pb.GetObject) -> bool:
        """Whether it continues its part's file."""
        part = self._part(item)
        return part in self._sinks and item.index // len(self._parts) == self._written[part]

    def _close(self, item: pb.GetObject, part: str) -> None:
        if self._hash.digest() != item.checksum:
            self.corrupt.append(item.index // len(self._parts))
        else:
            self.bytes_by_tier[item.tier] = self.bytes_by_tier.get(item.tier, 0) + item.length_bytes
            if self._wanted(item):
                self._written[part] += 1
                self._kept[part] += item.length_bytes
        self._objects.pop(0)
        if self._objects:
            self._open()

    def keep(self) -> None:
        """Give the files their names; each holds verified leading objects and nothing else.

        A part of which nothing came leaves its file as it was.
        """
        try:
            for name, nbytes in self._kept.items():
                if nbytes and name in self._sinks:
                    self._sinks[name].keep(nbytes)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Remove what is unfinished."""
        for sink in self._sinks.values():
            sink.abandon()
        self._sinks = {}
