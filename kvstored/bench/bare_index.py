"""Reads all records of an index into one array: what a restart is compared with.

Usage: python -m kvstored.bench.bare_index DIRECTORY RECORDS

Prints "ready RECORDS", how many it read, and ends with its standard input.
"""

from __future__ import annotations

import sys

import lmdb
import numpy as np

RECORD_BYTES = 152
_AT_ONCE = 64


def main() -> None:
    """See the module."""
    directory, most = sys.argv[1], int(sys.argv[2])
    records = np.empty((most, RECORD_BYTES + 4), np.uint8)
    count = 0
    env = lmdb.open(directory, readonly=True, lock=False, max_dbs=5)
    with env.begin() as txn:
        db = env.open_db(b"records", txn, create=False, dupsort=True, dupfixed=True)
        cursor = txn.cursor(db)
        keys = list(cursor.iternext_nodup(keys=True, values=False))
        for at in range(0, len(keys), _AT_ONCE):
            raw = cursor.getmulti(
                keys[at : at + _AT_ONCE], dupdata=True, dupfixed_bytes=RECORD_BYTES, keyfixed=True
            )
            rows = np.frombuffer(raw, np.uint8).reshape(-1, RECORD_BYTES + 4)
            records[count : count + len(rows)] = rows
            count += len(rows)
    sys.stdout.write(f"ready {count}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
