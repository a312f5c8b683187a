"""The child process that reads LMDB environments at start, so that the daemon need not.

A truncated LMDB file kills the process that reads it (SIGBUS), and a damaged one may do worse. The
child checks each environment, writes its contents to the descriptor it was given (the columns of
`record.layout`, then a JSON document) and prints how many records there are room for and how many
there are, and the size of the document. PAYLOAD 1: the bytes of
small objects are read as well. Exit status 3, with a message on stderr, is a complaint.

    python -m kvstored.tiers.nvme.walk VOLUME_HEX FD PAYLOAD (DIRECTORY MAX_RECORDS)...
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np

from kvstored.tiers.nvme import index, record
from kvstored.tiers.nvme import index_wire as wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

_COMPLAINT = 3
_RECORDS_AT_ONCE = 8192
_MAX_DAMAGED = 10_000
_CHUNK_KEY_BYTES = 6


class ComplaintError(Exception):
    """The environment is not to be trusted."""


def main(argv: list[str]) -> int:
    """Walk the environments; the exit status."""
    volume, fd, payload = bytes.fromhex(argv[1]), int(argv[2]), argv[3] == "1"
    try:
        sizes = [
            walk(Path(directory), volume, int(limit), fd, payload)
            for directory, limit in zip(argv[4::2], argv[5::2], strict=True)
        ]
    except (ComplaintError, lmdb.Error, OSError, ValueError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return _COMPLAINT
    sys.stdout.write(json.dumps(sizes) + "\n")
    return 0


def walk(directory: Path, volume: bytes, limit: int, fd: int, payload: bool) -> list[int]:
    """Append the environment's contents to the file `fd`; records expected, records whole, and the
    document's bytes.
    """
    held = os.stat(directory / "data.mdb").st_size
    env = lmdb.open(
        str(directory), readonly=True, lock=False, max_dbs=len(wire.DATABASES), readahead=True
    )
    used = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if used > held:
        raise ComplaintError(f"{used} B are in use, the file has {held} B")
    with env.begin() as txn:
        names = {
            name: env.open_db(name, txn, create=False, dupsort=dup, dupfixed=dup)
            for name in wire.DATABASES
            for dup in [name == wire.RECORDS]
        }
        if txn.get(wire.VOLUME, db=names[wire.META]) != volume:
            raise ComplaintError("belongs to another volume, or to none")
        expected = txn.stat(names[wire.RECORDS])["entries"]
        if expected > limit:
            raise ComplaintError(f"{expected} records, at most {limit} can be")
        columns = _Columns(fd, expected)
        found = 0
        rejected: list[tuple[str, str]] = []
        for part in _records(txn, names[wire.RECORDS], expected):
            found += len(part)
            if found > expected:
                raise ComplaintError(f"more than {expected} records, which were expected")
            rows = np.ascontiguousarray(part["row"])
            good = record.whole(rows, int.from_bytes(volume[:8], "little"))
            if good.all():
                columns.add(rows)
                continue
            columns.add(rows[good])
            rejected += [
                (part["key"][i].tobytes().hex(), rows[i].tobytes().hex())
                for i in np.flatnonzero(~good)[: _MAX_DAMAGED - len(rejected)]
            ]
        if found != expected:
            raise ComplaintError(f"{found} records found, {expected} expected")
        damaged = found - columns.count
        if payload:
            _read_payload(txn, names[wire.PAYLOAD])
        rest = _tables(txn, names) | {"damaged": damaged, "rejected": rejected}
    document = json.dumps(rest).encode()
    os.lseek(fd, 0, os.SEEK_END)
    _write_all(fd, document)
    return [expected, columns.count, len(document)]


def _read_payload(txn: lmdb.Transaction, db: lmdb._Database) -> None:
    """Look at every page of it: whoever does may die of one, and it had better be this process."""
    expected, found = txn.stat(db)["entries"], 0
    for key, value in txn.cursor(db).iternext():
        found += 1
        if len(key) != _CHUNK_KEY_BYTES or len(value) > wire.CHUNK_BYTES or found > expected:
            raise ComplaintError("payload that cannot be")
    if found != expected:
        raise ComplaintError(f"{found} pieces of payload found, {expected} expected")


class _Columns:
    """Columns behind all that a file holds already, which are filled from the front."""

    def __init__(self, fd: int, capacity: int) -> None:
        self._fd = fd
        begins, size = record.layout(capacity)
        before = os.fstat(fd).st_size
        os.ftruncate(fd, before + size)
        self._at = {name: before + begin for name, begin in begins.items()}
        self.count = 0

    def add(self, rows: record.Records) -> None:
        """Add records."""
        for name, kind in record.COLUMNS.items():
            # The items of a column as they are, whatever they consist of; only `place` is swapped.
            values = rows[name] if rows[name].ndim == 1 else _whole(rows, name)
            packed = np.ascontiguousarray(values.astype(kind) if name == "place" else values)
            _write_all(self._fd, packed, self._at[name] + self.count * kind.itemsize)
        self.count += len(rows)


def _whole(rows: record.Records, name: str) -> NDArray[Any]:
    """A column of fixed-size strings as one item each: copied many times faster."""
    kind, offset = _FIELDS[name][:2]
    return np.ndarray(len(rows), f"V{kind.itemsize}", rows, offset, (record.RECORD_BYTES,))


def _write_all(fd: int, data: bytes | NDArray[Any], offset: int | None = None) -> None:
    left = memoryview(data).cast("B") if isinstance(data, bytes) else data.view("u1").data
    while left:
        done = os.write(fd, left) if offset is None else os.pwrite(fd, left, offset)
        left = left[done:]
        offset = offset if offset is None else offset + done


_FIELDS: Mapping[str, Any] = record.RECORD.fields or {}
_WITH_KEY = np.dtype([("key", "u1", 4), ("row", record.RECORD)])


def _records(txn: lmdb.Transaction, db: lmdb._Database, expected: int) -> Iterator[np.ndarray]:
    """All records with their keys, some thousand at a time: as many as a cache holds."""
    keys = list(txn.cursor(db).iternext_nodup(keys=True, values=False))
    if any(len(key) != 4 for key in keys):
        raise ComplaintError("a key of another length")
    step = max(1, _RECORDS_AT_ONCE * len(keys) // max(1, expected))
    for at in range(0, len(keys), step):
        raw = txn.cursor(db).getmulti(
            keys[at : at + step],
            dupdata=True,
            dupfixed_bytes=record.RECORD_BYTES,
            keyfixed=True,
        )
        yield np.frombuffer(raw, _WITH_KEY)


def _tables(txn: lmdb.Transaction, dbs: dict[bytes, lmdb._Database]) -> dict[str, object]:
    """Everything but the records, for JSON."""
    names: dict[str, dict[str, str]] = {kind: {} for kind in index.KINDS}
    for key, name in txn.cursor(dbs[wire.NAMES]).iternext():
        kind, number = bytes(key[:1]).decode(), int.from_bytes(key[1:], "big")
        names[kind][str(number)] = name.hex()
    families = [
        (key[: index.FINGERPRINT_BYTES].hex(), key[index.FINGERPRINT_BYTES :].hex(), spec.hex())
        for key, spec in txn.cursor(dbs[wire.FAMILIES]).iternext()
    ]
    opened = {
        str(int.from_bytes(key[len(wire.OPENED) :], "big")): bitmap.hex()
        for key, bitmap in txn.cursor(dbs[wire.META]).iternext()
        if bytes(key).startswith(wire.OPENED)
    }
    return {"names": names, "families": families, "opened": opened}


if __name__ == "__main__":
    sys.exit(main(sys.argv))
