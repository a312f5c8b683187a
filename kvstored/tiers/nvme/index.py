"""The LMDB environments of a volume: which object is at which place.

A volume has two, of the same make: `index` for what lies in slots, `small` for objects up to
64 KiB, whose bytes it holds as well. Each carries its own tables of names, so that losing one does
not make the other unreadable. See docs/nvme-format.md. All methods block; one thread at a time
writes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstored.io.base import Files
from kvstored.tiers.base import ObjectMeta
from kvstored.tiers.nvme import index_wire as wire
from kvstored.tiers.nvme import record
from kvstored.tiers.nvme.index_process import IndexProcess

KINDS = ("n", "f", "p", "t")
"""Namespaces, families, parts, tenants: the first byte of their keys in `names`."""

FINGERPRINT_BYTES = 32


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
    """One open LMDB environment, in the index child of its volume."""

    def __init__(
        self, files: Files, process: IndexProcess, path: Path, map_bytes: int, volume: bytes
    ) -> None:
        """Open or create the environment. Raises lmdb.Error or OSError.

        The directory's lock file is made anew: the volume's own lock says that nobody else is here.
        """
        self._files = files
        self._process = process
        self.path = path
        self._name = os.fsencode(path)
        self._channel = wire.WRITERS[path.name.startswith("small")]
        self._volume_id = int.from_bytes(volume[:8], "little")
        self.names = NameTable()
        self.written_bytes = 0
        """What commits wrote, whole pages, as the kernel accounts it to the committing thread."""
        self._writing = threading.Lock()
        if "lock.mdb" in files.listdir(path):
            files.unlink(path / "lock.mdb")
        process.ask(self._channel, wire.OPEN, self._name, str(map_bytes).encode(), volume)
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
        """Close the environment; no transaction may be running. A child that is gone has."""
        with contextlib.suppress(OSError):
            self._process.ask(self._channel, wire.CLOSE, self._name)

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
            packed = [
                record.pack(e.meta, e.place, e.sequence, self.names.numbers(e.meta), e.dedication)
                for e in entries
            ]
            rows = record.seal(packed, self._volume_id).tobytes() if packed else b""
            bodies = [b"".join(e.body) if e.body else b"" for e in entries]
            puts, drops = self._small_tables(opened or {}, families or {})
            request = (
                b"".join(place.to_bytes(8, "big") for place in removed),
                rows,
                wire.pack(bodies),
                wire.pack(puts),
                wire.pack(drops),
            )
            self._change(wire.COMMIT, *request)
            self.names.unsaved.clear()

    def _change(self, *request: bytes) -> None:
        """Have the child commit something, in the seam for failures on purpose."""

        def action() -> None:
            answer = self._process.ask(self._channel, request[0], self._name, *request[1:])
            self.written_bytes += int(answer[0]) if answer else 0

        self._files.commit(self.path, action)

    def _small_tables(
        self, opened: Mapping[int, bytes], families: Mapping[tuple[str, bytes], bytes]
    ) -> tuple[list[bytes], list[bytes]]:
        """What to put (database, key, value, ...) and to drop (database, key, ...)."""
        puts: list[bytes] = []
        drops: list[bytes] = []
        for kind, number, name in self.names.unsaved:
            puts += (wire.NAMES, kind.encode() + number.to_bytes(4, "big"), name)
        for region, bitmap in opened.items():
            key = wire.OPENED + region.to_bytes(4, "big")
            if bitmap:
                puts += (wire.META, key, bitmap)
            else:
                drops += (wire.META, key)
        for (namespace, fingerprint), spec in families.items():
            puts += (wire.FAMILIES, fingerprint + namespace.encode(), spec)
        return puts, drops

    def discard(self, rows: Sequence[tuple[bytes, bytes]], kept: Collection[int]) -> None:
        """Remove damaged records, given by key and content, and all payload but that of `kept`."""
        numbers = b"".join((place & 0xFFFFFFFF).to_bytes(4, "big") for place in kept)
        self._change(wire.DISCARD, wire.pack(list(itertools.chain(*rows))), numbers)

    # ---- reading ------------------------------------------------------------------------------

    def records_after(self, place: int, most: int) -> bytes:
        """Records of the next places behind one (-1: the first), at most so many, back to back."""
        first, count = str(place + 1).encode(), str(most).encode()
        return self._process.ask("read", wire.RECORDS_AFTER, self._name, first, count)[0]

    def part_names(self) -> dict[int, str]:
        """Names of parts by number."""
        known = list(self.names.ids["p"].items())  # at once: a commit may be adding to it
        return {number: name.decode() for name, number in known}

    def read_body(self, place: int, header: memoryview, into: memoryview) -> int:
        """Copy a small object's stored header and payload out, as many bytes as fit.

        Gives the number of stored bytes, 0 if there is no such object.
        """
        most = str(len(header) + len(into)).encode()
        request = (wire.BODY, self._name, str(place).encode(), most)
        total, stored = self._process.ask("read", *request)
        first, rest = stored[: len(header)], stored[len(header) :]
        header[: len(first)] = first
        into[: len(rest)] = rest
        return int(total)
