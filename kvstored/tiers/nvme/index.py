"""The LMDB environments of a volume: which object is at which place.

A volume has two, of the same make: `index` for what lies in slots, `small` for objects up to
64 KiB, whose bytes it holds as well. Each carries its own tables of names, so that losing one does
not make the other unreadable. See docs/nvme-format.md. All methods block; one thread at a time
writes.
"""

from __future__ import annotations

import itertools
import os
import resource
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import lmdb

from kvstored.io.base import Files
from kvstored.tiers.base import ObjectMeta
from kvstored.tiers.nvme import record
from kvstored.tiers.nvme.layout import CHUNK_BYTES

KINDS = ("n", "f", "p", "t")
"""Namespaces, families, parts, tenants: the first byte of their keys in `names`."""

RECORDS = b"records"
NAMES = b"names"
FAMILIES = b"families"
META = b"meta"
PAYLOAD = b"payload"
DATABASES = (RECORDS, NAMES, FAMILIES, META, PAYLOAD)
OPENED = b"opened/"
VOLUME = b"volume"
FINGERPRINT_BYTES = 32
_SHELF_BITS = 10


def shelf_key(place: int) -> bytes:
    """Key under which a place's record lies: its region, or a thousand small objects."""
    if place >> 32 & 1 << 23:  # the small bit, seen from the region's position
        return ((place & 0xFFFFFFFF) >> _SHELF_BITS).to_bytes(4, "big")
    return (place >> 32).to_bytes(4, "big")


def _chunk_key(place: int, chunk: int) -> bytes:
    return (place & 0xFFFFFFFF).to_bytes(4, "big") + chunk.to_bytes(2, "big")


def _blocks_written() -> int:
    """Blocks of 512 bytes that this thread has caused to be written, pages in the cache included.

    LMDB does not say what a commit writes.
    """
    return resource.getrusage(resource.RUSAGE_THREAD).ru_oublock


@dataclass(slots=True)
class NameTable:
    """Names of each kind and their numbers, and which of them the environment does not have yet."""

    ids: dict[str, dict[bytes, int]] = field(default_factory=lambda: {k: {} for k in KINDS})
    unsaved: list[tuple[str, int, bytes]] = field(default_factory=list)

    @classmethod
    def from_saved(cls, saved: Mapping[str, Mapping[int, bytes]]) -> NameTable:
        """Tables as they were read from an environment."""
        table = cls()
        for kind, names in saved.items():
            table.ids[kind] = {name: number for number, name in names.items()}
        return table

    def number(self, kind: str, name: bytes) -> int:
        """The number of a name, a new one if need be."""
        ids = self.ids[kind]
        known = ids.get(name)
        if known is None:
            known = ids[name] = max(ids.values(), default=-1) + 1
            self.unsaved.append((kind, known, name))
        return known

    def numbers(self, meta: ObjectMeta) -> tuple[int, int, int, int]:
        """Numbers of an object's namespace, family, part and tenant."""
        return (
            self.number("n", meta.namespace.encode()),
            self.number("f", meta.family),
            self.number("p", meta.part.encode()),
            self.number("t", meta.tenant.encode()),
        )

    def in_order(self, kind: str) -> list[bytes]:
        """Names by number; numbers that were never saved are empty."""
        ids = self.ids[kind]
        found = [b""] * (max(ids.values(), default=-1) + 1)
        for name, number in ids.items():
            found[number] = name
        return found


@dataclass(frozen=True, slots=True)
class Entry:
    """An object to enter: a small one brings its header and payload as `body`."""

    place: int
    meta: ObjectMeta
    sequence: int
    dedication: int = 0
    body: tuple[bytes, memoryview] | None = None


class Environment:
    """One open LMDB environment."""

    def __init__(
        self, files: Files, path: Path, map_bytes: int, volume: bytes, readers: int = 16
    ) -> None:
        """Open or create the environment. Raises lmdb.Error or OSError.

        The directory's lock file is made anew: the volume's own lock says that nobody else is here.
        """
        self._files = files
        self.path = path
        self._volume = volume
        self._volume_id = int.from_bytes(volume[:8], "little")
        self.names = NameTable()
        self.written_bytes = 0
        """What commits wrote, whole pages, as the kernel accounts it to the committing thread."""
        self._writing = threading.Lock()
        if "lock.mdb" in files.listdir(path):
            files.unlink(path / "lock.mdb")
        self._env = lmdb.open(
            str(path),
            map_size=map_bytes,
            max_dbs=len(DATABASES),
            mode=0o600,
            readahead=False,
            max_readers=readers,
            max_spare_txns=readers,
        )
        self._db = {
            name: self._env.open_db(name, dupsort=name == RECORDS, dupfixed=name == RECORDS)
            for name in DATABASES
        }
        with self._env.begin() as txn:
            self._labelled = txn.get(VOLUME, db=self._db[META]) == volume
        self._allocate(map_bytes)

    def _allocate(self, length_bytes: int) -> None:
        """Give the file all its blocks now, so that a full file system cannot stop a delete.

        Its name is made durable as well: LMDB syncs what it commits, but not the directory.
        """
        fd = self._files.open(self.path / "data.mdb", os.O_RDWR)
        try:
            self._files.fallocate(fd, 0, length_bytes)
            self._files.fdatasync(fd)
        finally:
            self._files.close(fd)
        self._files.sync_directory(self.path)

    def close(self) -> None:
        """Close the environment; no transaction may be running."""
        self._env.close()

    # ---- writing ------------------------------------------------------------------------------

    def commit(
        self,
        entries: Sequence[Entry] = (),
        removed: Sequence[int] = (),
        opened: Mapping[int, bytes] | None = None,
        families: Mapping[tuple[str, bytes], bytes] | None = None,
    ) -> None:
        """Change everything in one synced transaction. Raises lmdb.Error or OSError; then nothing
        is changed, as far as this process can tell.

        `opened` maps a region to the bitmap of its slots that may be written; b"" removes it.
        """
        with self._writing:
            before = _blocks_written()
            try:
                self._commit(entries, removed, opened or {}, families or {})
            finally:
                self.written_bytes += 512 * (_blocks_written() - before)

    def _commit(
        self,
        entries: Sequence[Entry],
        removed: Sequence[int],
        opened: Mapping[int, bytes],
        families: Mapping[tuple[str, bytes], bytes],
    ) -> None:
        packed = [
            record.pack(e.meta, e.place, e.sequence, self.names.numbers(e.meta), e.dedication)
            for e in entries
        ]
        sealed = record.seal(packed, self._volume_id).tobytes() if packed else b""
        txn = self._env.begin(write=True)
        try:
            self._remove(txn, [*removed, *(e.place for e in entries)])
            self._enter(txn, entries, sealed)
            self._save_small_tables(txn, opened, families)
            self._files.commit(self.path, txn.commit)
        except BaseException:
            txn.abort()
            raise
        self.names.unsaved.clear()
        self._labelled = True

    def _remove(self, txn: lmdb.Transaction, places: Sequence[int]) -> None:
        with txn.cursor(self._db[RECORDS]) as cursor:
            for place in places:
                prefix = place.to_bytes(8, "big")
                found = cursor.set_range_dup(shelf_key(place), prefix)
                if found and cursor.value()[:8] == prefix:
                    cursor.delete()
                    self._remove_payload(txn, place)

    def _remove_payload(self, txn: lmdb.Transaction, place: int) -> None:
        chunk = 0
        while txn.delete(_chunk_key(place, chunk), db=self._db[PAYLOAD]):
            chunk += 1

    def _enter(self, txn: lmdb.Transaction, entries: Sequence[Entry], sealed: bytes) -> None:
        size = record.RECORD_BYTES
        for i, entry in enumerate(entries):
            row = sealed[i * size : (i + 1) * size]
            txn.put(shelf_key(entry.place), row, db=self._db[RECORDS])
            if entry.body is not None:
                body = b"".join(entry.body)
                self._remove_payload(txn, entry.place)
                for chunk, at in enumerate(range(0, len(body), CHUNK_BYTES)):
                    piece = body[at : at + CHUNK_BYTES]
                    txn.put(_chunk_key(entry.place, chunk), piece, db=self._db[PAYLOAD])

    def _save_small_tables(
        self,
        txn: lmdb.Transaction,
        opened: Mapping[int, bytes],
        families: Mapping[tuple[str, bytes], bytes],
    ) -> None:
        for kind, number, name in self.names.unsaved:
            txn.put(kind.encode() + number.to_bytes(4, "big"), name, db=self._db[NAMES])
        for region, bitmap in opened.items():
            key = OPENED + region.to_bytes(4, "big")
            if bitmap:
                txn.put(key, bitmap, db=self._db[META])
            else:
                txn.delete(key, db=self._db[META])
        for (namespace, fingerprint), spec in families.items():
            txn.put(fingerprint + namespace.encode(), spec, db=self._db[FAMILIES])
        if not self._labelled:
            txn.put(VOLUME, self._volume, db=self._db[META])

    def discard(self, rows: Sequence[tuple[bytes, bytes]], kept: Collection[int]) -> None:
        """Remove damaged records, given by key and content, and all payload but that of `kept`."""
        numbers = {place & 0xFFFFFFFF for place in kept}
        txn = self._env.begin(write=True)
        try:
            for key, row in rows:
                txn.delete(key, row, db=self._db[RECORDS])
            with txn.cursor(self._db[PAYLOAD]) as cursor:
                more = cursor.first()
                while more:
                    if int.from_bytes(cursor.key()[:4], "big") in numbers:
                        more = cursor.next()
                    else:
                        more = cursor.delete() and bool(cursor.key())
            self._files.commit(self.path, txn.commit)
        except BaseException:
            txn.abort()
            raise

    # ---- reading ------------------------------------------------------------------------------

    def records_after(self, place: int, most: int) -> bytes:
        """Records of the next places behind one (-1: the first), at most so many, back to back."""
        start = place + 1
        key = shelf_key(start)
        with self._env.begin() as txn, txn.cursor(self._db[RECORDS]) as cursor:
            found = cursor.set_range(key)
            if (
                found
                and cursor.key() == key
                and not cursor.set_range_dup(key, start.to_bytes(8, "big"))
            ):
                found = cursor.set_key(key) and cursor.next_nodup()
            if not found:
                return b""
            return b"".join(itertools.islice(cursor.iternext(keys=False), most))

    def part_names(self) -> dict[int, str]:
        """Names of parts by number."""
        known = list(self.names.ids["p"].items())  # at once: a commit may be adding to it
        return {number: name.decode() for name, number in known}

    def read_body(self, place: int, header: memoryview, into: memoryview) -> int:
        """Copy a small object's stored header and payload out, as many bytes as fit.

        Gives the number of stored bytes, 0 if there is no such object.
        """
        total = 0
        with self._env.begin(buffers=True) as txn:
            cursor = txn.cursor(self._db[PAYLOAD])
            number = _chunk_key(place, 0)[:4]
            if not cursor.set_key(_chunk_key(place, 0)):
                return 0
            for key, value in cursor.iternext():
                if bytes(key[:4]) != number:
                    break
                _scatter(value, total, header, into)
                total += len(value)
        return total


def _scatter(value: memoryview, at: int, header: memoryview, into: memoryview) -> None:
    """Copy bytes that begin at `at` of a stored body to where they belong."""
    if at < len(header):
        first = value[: len(header) - at]
        header[at : at + len(first)] = first
        value = value[len(first) :]
        at += len(first)
    at -= len(header)
    room = value[: max(0, len(into) - at)]
    into[at : at + len(room)] = room
