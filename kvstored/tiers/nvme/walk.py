"""The child process that reads LMDB environments at start, so that the daemon need not.

A truncated LMDB file kills the process that reads it (SIGBUS), and a damaged one may do worse. The
child checks each environment, writes its contents to the descriptor it was given (records, then a
JSON document) and prints the sizes of both. Exit status 3, with a message on stderr, is a
complaint.

    python -m kvstored.tiers.nvme.walk VOLUME_HEX FD (DIRECTORY MAX_RECORDS)...
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np

from kvstored.tiers.nvme import index, record

_COMPLAINT = 3
_KEYS_AT_ONCE = 256
_MAX_DAMAGED = 10_000


class ComplaintError(Exception):
    """The environment is not to be trusted."""


def main(argv: list[str]) -> int:
    """Walk the environments; the exit status."""
    volume, fd = bytes.fromhex(argv[1]), int(argv[2])
    try:
        sizes = [
            walk(Path(directory), volume, int(limit), fd)
            for directory, limit in zip(argv[3::2], argv[4::2], strict=True)
        ]
    except (ComplaintError, lmdb.Error, OSError, ValueError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return _COMPLAINT
    sys.stdout.write(json.dumps(sizes) + "\n")
    return 0


def walk(directory: Path, volume: bytes, limit: int, fd: int) -> list[int]:
    """Write the environment's contents to `fd`; the sizes of both parts in bytes."""
    held = os.stat(directory / "data.mdb").st_size
    env = lmdb.open(
        str(directory), readonly=True, lock=False, max_dbs=len(index.DATABASES), readahead=True
    )
    used = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if used > held:
        raise ComplaintError(f"{used} B are in use, the file has {held} B")
    with env.begin() as txn:
        names = {
            name: env.open_db(name, txn, create=False, dupsort=dup, dupfixed=dup)
            for name in index.DATABASES
            for dup in [name == index.RECORDS]
        }
        if txn.get(index.VOLUME, db=names[index.META]) != volume:
            raise ComplaintError("belongs to another volume, or to none")
        expected = txn.stat(names[index.RECORDS])["entries"]
        if expected > limit:
            raise ComplaintError(f"{expected} records, at most {limit} can be")
        found = damaged = 0
        rejected: list[tuple[str, str]] = []
        for part in _records(txn, names[index.RECORDS]):
            found += len(part)
            rows = np.ascontiguousarray(part["row"])
            good = record.whole(rows, int.from_bytes(volume[:8], "little"))
            damaged += int((~good).sum())
            rejected += [
                (part["key"][i].tobytes().hex(), rows[i].tobytes().hex())
                for i in np.flatnonzero(~good)[: _MAX_DAMAGED - len(rejected)]
            ]
            _write_all(fd, rows[good].tobytes())
        if found != expected:
            raise ComplaintError(f"{found} records found, {expected} expected")
        rest = _tables(txn, names) | {"damaged": damaged, "rejected": rejected}
    document = json.dumps(rest).encode()
    _write_all(fd, document)
    return [(found - damaged) * record.RECORD_BYTES, len(document)]


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


_WITH_KEY = np.dtype([("key", "u1", 4), ("row", record.RECORD)])


def _records(txn: lmdb.Transaction, db: lmdb._Database) -> Iterator[np.ndarray]:
    """All records with their keys, some hundred regions at a time."""
    keys = iter(list(txn.cursor(db).iternext_nodup(keys=True, values=False)))
    while some := list(itertools.islice(keys, _KEYS_AT_ONCE)):
        if any(len(key) != 4 for key in some):
            raise ComplaintError("a key of another length")
        raw = txn.cursor(db).getmulti(
            some, dupdata=True, dupfixed_bytes=record.RECORD_BYTES, keyfixed=True
        )
        yield np.frombuffer(raw, _WITH_KEY)


def _tables(txn: lmdb.Transaction, dbs: dict[bytes, lmdb._Database]) -> dict[str, object]:
    """Everything but the records, for JSON."""
    names: dict[str, dict[str, str]] = {kind: {} for kind in index.KINDS}
    for key, name in txn.cursor(dbs[index.NAMES]).iternext():
        kind, number = bytes(key[:1]).decode(), int.from_bytes(key[1:], "big")
        names[kind][str(number)] = name.hex()
    families = [
        (key[: index.FINGERPRINT_BYTES].hex(), key[index.FINGERPRINT_BYTES :].hex(), spec.hex())
        for key, spec in txn.cursor(dbs[index.FAMILIES]).iternext()
    ]
    opened = {
        str(int.from_bytes(key[len(index.OPENED) :], "big")): bitmap.hex()
        for key, bitmap in txn.cursor(dbs[index.META]).iternext()
        if bytes(key).startswith(index.OPENED)
    }
    return {"names": names, "families": families, "opened": opened}


if __name__ == "__main__":
    sys.exit(main(sys.argv))
