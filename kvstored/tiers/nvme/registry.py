"""What must be known of volumes even while they are away: which there are, what was deleted.

A directory of small files on the data directory's disk, so that it does not go away with a volume:

    known.json          the volumes by UUID; replaced whole
    UUID.deleted        what was deleted while that volume was away ("tombstones"): frames of
                        (length, XXH3-64, payload), appended and synced

A torn frame at the end was never acknowledged and is dropped. Damage before it, or more than
MOST_TOMBSTONES, means that the volume is to come back empty. Everything blocks and is meant for one
thread; OSError means that it could not be made durable.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import xxhash

from kvstored.io.base import Files

_log = logging.getLogger(__name__)

MOST_TOMBSTONES = 100_000
ANY_SEQUENCE = (1 << 64) - 1
KNOWN = "known.json"
_FRAME = struct.Struct("<QQ")
_HEAD = struct.Struct("<QHHH")  # through, lengths of namespace, family, key


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A chunk that is not to come back: copies of it with a sequence up to `through`."""

    namespace: str
    family: bytes
    key: bytes
    through: int = ANY_SEQUENCE


@dataclass(frozen=True, slots=True)
class Known:
    """A volume that was seen. `empty`: what it holds is void. `draining`: it was asked for, and is
    not through. Speeds are as measured, or 0.0.
    """

    uuid: str  # hexadecimal
    directory: str
    name: str
    empty: bool = False
    drained: bool = False
    draining: bool = False
    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0


@dataclass(slots=True)
class Registry:
    """The registry in `directory`, as of the last `load`, and as changed since."""

    files: Files
    directory: Path
    known: dict[str, Known] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _counts: dict[str, int] = field(default_factory=dict)
    _named: set[str] = field(default_factory=set)  # whose file's name is known to be durable

    def load(self) -> dict[str, list[Tombstone]]:
        """Read everything; gives the tombstones of each volume that has some.

        Raises OSError when the directory cannot be used.
        """
        parts = [*reversed(self.directory.parents), self.directory]
        for path in parts:
            if not self._there(path):
                self.files.mkdir(path)
                self.files.sync_directory(path.parent)
        self._load_known()
        found = {}
        for uuid in list(self.known):
            tombstones = self._load_tombstones(uuid)
            if tombstones:
                found[uuid] = tombstones
        return found

    def put(self, known: Known) -> None:
        """Know a volume as it is said to be; durable on return."""
        if self.known.get(known.uuid) == known:
            return
        self._save({**self.known, known.uuid: known})

    def drop(self, uuid: str) -> None:
        """Know a volume no longer, nor what was deleted of it."""
        if uuid in self.known:
            self._save({u: k for u, k in self.known.items() if u != uuid})
        self.clear(uuid)

    def append(self, uuid: str, tombstones: Sequence[Tombstone]) -> None:
        """Remember deletes for a volume; durable on return."""
        known = self.known[uuid]
        if known.empty:
            return
        if self._counts.get(uuid, 0) + len(tombstones) > MOST_TOMBSTONES:
            self.put(replace(known, empty=True))
            self._forget(uuid)
            return
        payload = b"".join(map(_encode, tombstones))
        frame = _FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
        path = self._path(uuid)
        fd = self.files.open(path, os.O_RDWR | os.O_CREAT)
        try:
            end = self.files.stat(path).st_size
            try:
                self._write(fd, frame, end)
                self.files.fdatasync(fd)
            except OSError:
                self.files.truncate(fd, end)  # or what comes later would lie behind a torn frame
                raise
        finally:
            self.files.close(fd)
        if uuid not in self._named:  # also if it is there: who made it may not have come this far
            self.files.sync_directory(self.directory)
            self._named.add(uuid)
        self._counts[uuid] = self._counts.get(uuid, 0) + len(tombstones)

    def clear(self, uuid: str) -> None:
        """Forget what was deleted of a volume: it has been told; durable on return."""
        if self._there(self._path(uuid)):
            self._forget(uuid)
        self._counts.pop(uuid, None)

    # ---- files --------------------------------------------------------------------------------

    def _forget(self, uuid: str) -> None:
        """Remove the file of a volume's tombstones."""
        self._named.discard(uuid)
        self._counts.pop(uuid, None)
        self._unlink(self._path(uuid))

    def _path(self, uuid: str) -> Path:
        return self.directory / f"{uuid}.deleted"

    def _there(self, path: Path) -> bool:
        try:
            self.files.stat(path)
        except FileNotFoundError:
            return False
        return True

    def _unlink(self, path: Path) -> None:
        try:
            self.files.unlink(path)
        except FileNotFoundError:
            return
        self.files.sync_directory(self.directory)

    def _write(self, fd: int, data: bytes, offset: int) -> None:
        left = memoryview(data)
        while left:
            done = self.files.pwritev(fd, [left], offset)
            offset += done
            left = left[done:]

    def _read(self, path: Path) -> bytes:
        fd = self.files.open(path, os.O_RDONLY)
        try:
            data = memoryview(bytearray(self.files.stat(path).st_size))
            at = 0
            while at < len(data) and (done := self.files.preadv(fd, [data[at:]], at)):
                at += done
            return bytes(data[:at])
        finally:
            self.files.close(fd)

    def _save(self, known: dict[str, Known]) -> None:
        body = json.dumps([asdict(k) for k in known.values()], indent=1)
        check = f"{xxhash.xxh3_64_intdigest(body.encode()):016x}\n"
        fresh = self.directory / (KNOWN + ".new")
        fd = self.files.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            self._write(fd, (check + body).encode(), 0)
            self.files.fdatasync(fd)
        finally:
            self.files.close(fd)
        self.files.rename(fresh, self.directory / KNOWN)
        self.files.sync_directory(self.directory)
        self.known = known

    def _load_known(self) -> None:
        path = self.directory / KNOWN
        if not self._there(path):
            return
        try:
            check, body = self._read(path).split(b"\n", 1)
            if int(check, 16) != xxhash.xxh3_64_intdigest(body):
                raise ValueError("its checksum differs")
            self.known = {entry["uuid"]: Known(**entry) for entry in json.loads(body)}
        except (ValueError, TypeError, KeyError) as error:
            self.problems.append(f"{path}: {error}; set aside")
            _log.error("%s: %s; set aside", path, error)
            self.files.rename(path, path.with_suffix(".damaged"))

    def _load_tombstones(self, uuid: str) -> list[Tombstone]:
        path = self._path(uuid)
        if self.known[uuid].empty or not self._there(path):
            return []
        found: list[Tombstone] = []
        data = self._read(path)
        at = 0
        for payload, end in _frames(data):
            found += _decode(payload)
            at = end
        if at < len(data):
            if not _torn(data, at):
                self.problems.append(f"{path}: damaged; the volume comes back empty")
                self.put(replace(self.known[uuid], empty=True))
                return []
            fd = self.files.open(path, os.O_RDWR)
            try:
                self.files.truncate(fd, at)
                self.files.fdatasync(fd)
            finally:
                self.files.close(fd)
        self._counts[uuid] = len(found)
        return found


def _frames(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Payload and end of each whole frame, up to the first that is not."""
    at = 0
    while at + _FRAME.size <= len(data):
        length, check = _FRAME.unpack_from(data, at)
        end = at + _FRAME.size + length
        payload = data[at + _FRAME.size : end]
        if len(payload) != length or xxhash.xxh3_64_intdigest(payload) != check or not length:
            return
        yield payload, end
        at = end


def _torn(data: bytes, at: int) -> bool:
    """Whether what lies behind the last whole frame can be one that was never synced: nothing
    whole follows it.
    """
    if at + _FRAME.size > len(data):
        return True
    length, _ = _FRAME.unpack_from(data, at)
    return at + _FRAME.size + int(length) >= len(data) or not any(data[at : at + _FRAME.size])


def _encode(tombstone: Tombstone) -> bytes:
    name = tombstone.namespace.encode()
    lengths = (len(name), len(tombstone.family), len(tombstone.key))
    return _HEAD.pack(tombstone.through, *lengths) + name + tombstone.family + tombstone.key


def _decode(payload: bytes) -> list[Tombstone]:
    found = []
    at = 0
    while at < len(payload):
        through, *lengths = _HEAD.unpack_from(payload, at)
        at += _HEAD.size
        parts = []
        for length in lengths:
            parts.append(payload[at : at + length])
            at += length
        found.append(Tombstone(parts[0].decode(), parts[1], parts[2], through))
    return found
