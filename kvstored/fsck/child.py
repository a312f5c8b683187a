"""The process that reads one LMDB environment: a truncated one kills its reader (SIGBUS).

    python -m kvstored.fsck.child index|small DIRECTORY VOLUME_HEX FD

Writes each record behind its 4-byte key to FD, and one JSON object to stdout. Small objects are
checked here, bytes and all, so that those bytes need not leave the process. Exit status 3, with a
message on stderr, says that the environment cannot be read.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np

from kvstored.fsck import compare, ondisk
from kvstored.fsck.findings import MAX_LISTED

UNREADABLE = 3
_DATABASES = (b"records", b"names", b"families", b"meta", b"payload")
_BATCH_BYTES = 1 << 20


class Unreadable(Exception):
    """The environment does not hold together."""


class Environment:
    """One environment, open for reading in one transaction."""

    def __init__(self, directory: Path, volume: bytes) -> None:
        """Open it. Raises Unreadable, lmdb.Error or OSError."""
        self.volume_id = int.from_bytes(volume[:8], "little")
        held = os.stat(directory / "data.mdb").st_size
        env = lmdb.open(str(directory), readonly=True, lock=False, max_dbs=len(_DATABASES))
        used = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        if used > held:
            raise Unreadable(f"{used} B are in use, the file has {held} B")
        self.most = held // 8  # entries that can be; a tree that goes in circles has more
        self.txn = env.begin()
        self.db = {}
        for name in _DATABASES:
            dup = name == b"records"
            self.db[name] = env.open_db(name, self.txn, create=False, dupsort=dup, dupfixed=dup)
        if self.txn.get(b"volume", db=self.db[b"meta"]) != volume:
            raise Unreadable("it belongs to another volume, or to none")

    def entries(self, name: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of a database, in order."""
        count = 0
        for key, value in self.txn.cursor(self.db[name]).iternext():
            count += 1
            if count > self.most:
                raise Unreadable(f"`{name.decode()}` has more entries than its file can hold")
            yield bytes(key), bytes(value)
        expected = self.txn.stat(self.db[name])["entries"]
        if count != expected:
            raise Unreadable(f"`{name.decode()}` has {count} entries, and says {expected}")

    def names(self) -> dict[str, dict[int, bytes]]:
        """Names by kind and number."""
        found: dict[str, dict[int, bytes]] = {kind: {} for kind in "nfpt"}
        for key, name in self.entries(b"names"):
            if len(key) != 5 or chr(key[0]) not in found:
                raise Unreadable(f"`names` has the key {key.hex()}")
            found[chr(key[0])][int.from_bytes(key[1:], "big")] = name
        return found

    def opened(self) -> dict[int, bytes]:
        """Bitmaps of open slots, by region."""
        return {
            int.from_bytes(key[7:], "big"): bitmap
            for key, bitmap in self.entries(b"meta")
            if key.startswith(b"opened/")
        }

    def records(self, fd: int) -> Iterator[tuple[bytes, bytes]]:
        """Keys and rows of the records, which are written to `fd` on the way."""
        batch = bytearray()
        for key, row in self.entries(b"records"):
            if len(key) != 4 or len(row) != ondisk.RECORD_BYTES:
                raise Unreadable(f"`records` has a key of {len(key)} B, a value of {len(row)} B")
            batch += key + row
            if len(batch) >= _BATCH_BYTES:
                _write_all(fd, batch)
                batch = bytearray()
            yield key, row
        _write_all(fd, batch)


def _write_all(fd: int, data: bytes | bytearray) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


class SmallObjects:
    """Checks every small object of an environment, one record after the other."""

    def __init__(self, env: Environment, names: compare.Names) -> None:
        self._env = env
        self._names = names
        self._numbers: set[int] = set()
        self.listed: list[list[str | int | None]] = []
        self.counts: Counter[str] = Counter()
        self.figures: Counter[str] = Counter()

    def _find(self, kind: str, detail: str, row: np.void | None, number: int) -> None:
        self.counts[kind] += 1
        if len(self.listed) >= MAX_LISTED:
            return
        if row is None:
            self.listed.append([kind, detail, ondisk.SMALL_BASE + number, None, None])
            return
        namespace = compare.namespace_of(row, self._names)
        self.listed.append(
            [kind, detail, ondisk.SMALL_BASE + number, namespace, row["key"].tobytes().hex()]
        )

    def check(self, raw: bytes) -> None:
        """One record that is whole and where it ought to be."""
        row = compare.one_record(raw)
        number = int(row["place"]) - ondisk.SMALL_BASE
        self._numbers.add(number)
        length = int(row["length_bytes"])
        body = self._body(number, ondisk.SMALL_HEADER_BYTES + ondisk.SMALL_MAX_BYTES + 1)
        if len(body) != ondisk.SMALL_HEADER_BYTES + length:
            detail = f"{len(body)} of {ondisk.SMALL_HEADER_BYTES + length} B are there"
            self._find("payload_missing", detail, row, number)
            return
        spot = ondisk.Spot(self._env.volume_id, 0, ondisk.SMALL_BASE + number, 0)
        block = body[: ondisk.SMALL_HEADER_BYTES].ljust(ondisk.HEADER_BYTES, b"\0")
        try:
            header = ondisk.header(block, spot)
            if header is None:
                raise ondisk.Damage("the header is void")
        except ondisk.Damage as damage:
            self._find("header_damaged", str(damage), row, number)
            return
        different = compare.differences(row, header, self._names, 0)
        if different:
            detail = f"they differ in {', '.join(different)}"
            self._find("header_disagrees", detail, row, number)
            return
        payload = ondisk.PayloadCheck(header)
        payload.take(body[ondisk.SMALL_HEADER_BYTES :])
        fault = payload.fault()
        self.figures["bytes_read"] += length
        if fault:
            self._find("payload_rotten", fault, row, number)
            return
        self.figures.update(objects_good=1, bytes_good=length)

    def _body(self, number: int, most_bytes: int) -> bytes:
        """The stored body: all chunks in order, up to a little more than can be."""
        cursor = self._env.txn.cursor(self._env.db[b"payload"])
        prefix = number.to_bytes(4, "big")
        body = bytearray()
        found = cursor.set_key(prefix + b"\0\0")
        chunk = 0
        while found and cursor.key() == prefix + chunk.to_bytes(2, "big"):
            body += cursor.value()
            if len(body) > most_bytes:
                break
            found = cursor.next()
            chunk += 1
        return bytes(body)

    def orphans(self) -> None:
        """Bytes that no record names."""
        cursor = self._env.txn.cursor(self._env.db[b"payload"])
        last = -1
        for key in cursor.iternext(keys=True, values=False):
            number = int.from_bytes(key[:4], "big")
            if number != last and number not in self._numbers:
                self._find("payload_orphan", "its record is not there", None, number)
            last = number


def _is_sound(key: bytes, raw: bytes, volume_id: int) -> bool:
    """Whether a record of a small object is whole and in place; the parent says what is not."""
    row = compare.one_record(raw)
    number = int(row["place"]) - ondisk.SMALL_BASE
    return (
        ondisk.record_whole(raw, volume_id)
        and 0 <= number < 1 << 32
        and int.from_bytes(key, "big") == number // 1024
        and 0 < int(row["length_bytes"]) <= ondisk.SMALL_MAX_BYTES
    )


def main(argv: list[str]) -> int:
    """Read the environment; the exit status."""
    kind, directory, volume, fd = argv[1], Path(argv[2]), bytes.fromhex(argv[3]), int(argv[4])
    try:
        env = Environment(directory, volume)
        names = env.names()
        objects = SmallObjects(env, names)
        for key, row in env.records(fd):
            if kind == "small" and _is_sound(key, row, env.volume_id):
                objects.check(row)
        if kind == "small":
            objects.orphans()
        opened = env.opened()
        families = sum(1 for _ in env.entries(b"families"))
    except (Unreadable, lmdb.Error, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return UNREADABLE
    document = {
        "names": {k: {str(n): name.hex() for n, name in v.items()} for k, v in names.items()},
        "opened": {str(region): bitmap.hex() for region, bitmap in opened.items()},
        "families": families,
        "findings": objects.listed,
        "counts": objects.counts,
        "figures": objects.figures,
    }
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
