"""What must be known of volumes even while they are away: which there are, what was deleted.

A directory of small files on the data directory's disk, so that it does not go away with a volume:

    known.json          the volumes by UUID; replaced whole
    UUID.deleted        what was deleted while that volume was away ("tombstones"): an AppendLog

A torn frame at the end was never acknowledged and is dropped. Damage before it, or more than
MOST_TOMBSTONES, means that the volume is to come back empty. Everything blocks and is meant for one
thread; OSError means that it could not be made durable.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import xxhash

from kvstored.io.appendlog import AppendLog
from kvstored.io.base import Files
from kvstored.io.whole import is_there, make_directory, read_whole, replace_file

_log = logging.getLogger(__name__)

MOST_TOMBSTONES = 100_000
ANY_SEQUENCE = (1 << 64) - 1
KNOWN = "known.json"
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
    _tombstone_files: dict[str, AppendLog] = field(default_factory=dict)

    def load(self) -> dict[str, list[Tombstone]]:
        """Read everything; gives the tombstones of each volume that has some.

        Raises OSError when the directory cannot be used.
        """
        make_directory(self.files, self.directory)
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
        if known.empty or not tombstones:
            return
        if self._counts.get(uuid, 0) + len(tombstones) > MOST_TOMBSTONES:
            self.put(replace(known, empty=True))
            self._forget(uuid)
            return
        self._file_of(uuid).append(b"".join(map(_encode, tombstones)))
        self._counts[uuid] = self._counts.get(uuid, 0) + len(tombstones)

    def clear(self, uuid: str) -> None:
        """Forget what was deleted of a volume: it has been told; durable on return."""
        self._forget(uuid)

    # ---- files --------------------------------------------------------------------------------

    def _forget(self, uuid: str) -> None:
        """Remove the file of a volume's tombstones."""
        self._counts.pop(uuid, None)
        self._file_of(uuid).remove()

    def _file_of(self, uuid: str) -> AppendLog:
        """The file of a volume's tombstones."""
        path = self.directory / f"{uuid}.deleted"
        return self._tombstone_files.setdefault(uuid, AppendLog(self.files, path))

    def _save(self, known: dict[str, Known]) -> None:
        body = json.dumps([asdict(k) for k in known.values()], indent=1)
        check = f"{xxhash.xxh3_64_intdigest(body.encode()):016x}\n"
        replace_file(self.files, self.directory / KNOWN, (check + body).encode())
        self.known = known

    def _load_known(self) -> None:
        path = self.directory / KNOWN
        if not is_there(self.files, path):
            return
        try:
            check, body = read_whole(self.files, path).split(b"\n", 1)
            if int(check, 16) != xxhash.xxh3_64_intdigest(body):
                raise ValueError("its checksum differs")
            self.known = {entry["uuid"]: Known(**entry) for entry in json.loads(body)}
        except (ValueError, TypeError, KeyError) as error:
            self.problems.append(f"{path}: {error}; set aside")
            _log.error("%s: %s; set aside", path, error)
            self.files.rename(path, path.with_suffix(".damaged"))

    def _load_tombstones(self, uuid: str) -> list[Tombstone]:
        if self.known[uuid].empty:
            return []
        file = self._file_of(uuid)
        read = file.load()
        found = [tombstone for payload in read.payloads for tombstone in _decode(payload)]
        if read.damaged:
            self.problems.append(f"{file.path}: damaged; the volume comes back empty")
            self.put(replace(self.known[uuid], empty=True))
            return []
        if read.whole_bytes < read.length_bytes:
            file.cut(read.whole_bytes)
        self._counts[uuid] = len(found)
        return found


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
