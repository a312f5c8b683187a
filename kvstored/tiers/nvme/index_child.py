"""The child process in which a volume's LMDB environments are open.

LMDB maps its file: a device that fails, a file that was cut off, or a damaged page kills the
process that looks at it. So a process that does nothing else looks, one for each volume. It serves
one request at a time on each of its sockets, and ends when the daemon has closed them all, or is
gone.

    python -m kvstored.tiers.nvme.index_child FD...

It was given an open descriptor with a flock on the volume's directory, which ends with it.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable

import lmdb

from kvstored.tiers.nvme import index_wire as wire

_SPARE_READERS = 4
_DAMAGED = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.ReadersFullError,  # a damaged page has cost them
)


class Store:
    """One open environment."""

    def __init__(self, path: str, map_bytes: int, volume: bytes) -> None:
        """Open or create it. Raises lmdb.Error."""
        self._volume = volume
        readers = wire.CHANNELS + _SPARE_READERS
        self._env = lmdb.open(
            path,
            map_size=map_bytes,
            max_dbs=len(wire.DATABASES),
            mode=0o600,
            readahead=False,
            max_readers=readers,
            max_spare_txns=readers,
        )
        self._db = {
            name: self._env.open_db(name, dupsort=name == wire.RECORDS, dupfixed=dup)
            for name in wire.DATABASES
            for dup in [name == wire.RECORDS]
        }
        with self._env.begin() as txn:
            self.labelled = txn.get(wire.VOLUME, db=self._db[wire.META]) == volume

    def close(self) -> None:
        """Close it; no transaction may be running."""
        self._env.close()

    # ---- writing ------------------------------------------------------------------------------

    def commit(self, removed: bytes, rows: bytes, bodies: bytes, puts: bytes, drops: bytes) -> None:
        """Change everything in one synced transaction, or nothing. Raises lmdb.Error.

        `removed`: places, 8 bytes each, big-endian. `rows`: records, as many as there are `bodies`,
        each with a stored body or b"". `puts`: database, key, value and so on; `drops`: database,
        key and so on.
        """
        stored = wire.unpack(bodies)
        size = len(rows) // max(1, len(stored))
        records = [rows[at : at + size] for at in range(0, len(rows), size or 1)]
        gone = [removed[at : at + 8] for at in range(0, len(removed), 8)]
        txn = self._env.begin(write=True)
        try:
            self._remove(txn, [*gone, *(row[:8] for row in records)])
            for row, body in zip(records, stored, strict=True):
                self._enter(txn, row, body)
            for db, key, value in _by(3, wire.unpack(puts)):
                txn.put(key, value, db=self._db[db])
            for db, key in _by(2, wire.unpack(drops)):
                txn.delete(key, db=self._db[db])
            if not self.labelled:
                txn.put(wire.VOLUME, self._volume, db=self._db[wire.META])
            txn.commit()
        except BaseException:
            txn.abort()
            raise
        self.labelled = True

    def _remove(self, txn: lmdb.Transaction, places: list[bytes]) -> None:
        with txn.cursor(self._db[wire.RECORDS]) as cursor:
            for prefix in places:
                place = int.from_bytes(prefix, "big")
                found = cursor.set_range_dup(wire.shelf_key(place), prefix)
                if found and cursor.value()[:8] == prefix:
                    cursor.delete()
                    self._remove_payload(txn, place)

    def _remove_payload(self, txn: lmdb.Transaction, place: int) -> None:
        chunk = 0
        while txn.delete(wire.chunk_key(place, chunk), db=self._db[wire.PAYLOAD]):
            chunk += 1

    def _enter(self, txn: lmdb.Transaction, row: bytes, body: bytes) -> None:
        place = int.from_bytes(row[:8], "big")
        txn.put(wire.shelf_key(place), row, db=self._db[wire.RECORDS])
        if body:
            self._remove_payload(txn, place)
        for chunk, at in enumerate(range(0, len(body), wire.CHUNK_BYTES)):
            piece = body[at : at + wire.CHUNK_BYTES]
            txn.put(wire.chunk_key(place, chunk), piece, db=self._db[wire.PAYLOAD])

    def discard(self, rows: bytes, kept: bytes) -> None:
        """Remove records, given by key and content, and all payload but that of numbers `kept`."""
        numbers = {kept[at : at + 4] for at in range(0, len(kept), 4)}
        txn = self._env.begin(write=True)
        try:
            for key, row in _by(2, wire.unpack(rows)):
                txn.delete(key, row, db=self._db[wire.RECORDS])
            with txn.cursor(self._db[wire.PAYLOAD]) as cursor:
                more = cursor.first()
                while more:
                    if cursor.key()[:4] in numbers:
                        more = cursor.next()
                    else:
                        more = cursor.delete() and bool(cursor.key())
            txn.commit()
        except BaseException:
            txn.abort()
            raise

    # ---- reading ------------------------------------------------------------------------------

    def records_after(self, place: int, most: int) -> bytes:
        """Records of the places from this one on, at most so many, back to back."""
        key = wire.shelf_key(place)
        with self._env.begin() as txn, txn.cursor(self._db[wire.RECORDS]) as cursor:
            found = cursor.set_range(key)
            if (
                found
                and cursor.key() == key
                and not cursor.set_range_dup(key, place.to_bytes(8, "big"))
            ):
                found = cursor.set_key(key) and cursor.next_nodup()
            if not found:
                return b""
            return b"".join(itertools.islice(cursor.iternext(keys=False), most))

    def body(self, place: int, most: int) -> tuple[int, bytes]:
        """Length of what is stored for a small object, 0 if nothing is; its first bytes."""
        total, kept = 0, []
        with self._env.begin() as txn, txn.cursor(self._db[wire.PAYLOAD]) as cursor:
            first = wire.chunk_key(place, 0)
            if not cursor.set_key(first):
                return 0, b""
            for key, value in cursor.iternext():
                if key[:4] != first[:4]:
                    break
                if total < most:
                    kept.append(value)
                total += len(value)
        return total, b"".join(kept)[:most]


def _by(count: int, parts: list[bytes]) -> list[list[bytes]]:
    return [parts[at : at + count] for at in range(0, len(parts), count)]


class Server:
    """All environments of a volume."""

    def __init__(self) -> None:
        self._stores: dict[bytes, Store] = {}
        self._opening = threading.Lock()
        self._calls: dict[bytes, Callable[..., list[bytes]]] = {
            wire.OPEN: self._open,
            wire.CLOSE: self._close,
            wire.COMMIT: self._commit,
            wire.DISCARD: self._discard,
            wire.RECORDS_AFTER: self._records_after,
            wire.BODY: self._body,
        }

    def serve(self, sock: socket.socket) -> None:
        """Answer what comes on one socket until it is closed."""
        while True:
            try:
                request = wire.receive(sock)
            except (wire.EndedError, OSError):
                return
            answer = self._answer(request)
            try:
                wire.send(sock, answer)
            except OSError:
                return

    def _answer(self, request: list[bytes]) -> list[bytes]:
        try:
            return [wire.DONE, *self._calls[request[0]](*request[1:])]
        except _DAMAGED as error:
            # Whatever is asked next goes wrong as well, deletes too: only a walk in full mends it.
            sys.stderr.write(f"{os.fsdecode(request[1])}: {error}\n")
            sys.stderr.flush()
            os.abort()
        except lmdb.Error as error:
            return [wire.LMDB_ERROR, type(error).__name__.encode(), str(error).encode()]
        except OSError as error:
            return [wire.OS_ERROR, str(error.errno or 0).encode(), str(error).encode()]

    def _open(self, path: bytes, map_bytes: bytes, volume: bytes) -> list[bytes]:
        with self._opening:
            store = self._stores[path] = Store(os.fsdecode(path), int(map_bytes), volume)
        return [b"1" if store.labelled else b""]

    def _close(self, path: bytes) -> list[bytes]:
        with self._opening:
            self._stores.pop(path).close()
        return []

    def _commit(self, path: bytes, *what: bytes) -> list[bytes]:
        before = _blocks_written()
        self._stores[path].commit(*what)
        return [str(512 * (_blocks_written() - before)).encode()]

    def _discard(self, path: bytes, rows: bytes, kept: bytes) -> list[bytes]:
        self._stores[path].discard(rows, kept)
        return []

    def _records_after(self, path: bytes, place: bytes, most: bytes) -> list[bytes]:
        return [self._stores[path].records_after(int(place), int(most))]

    def _body(self, path: bytes, place: bytes, most: bytes) -> list[bytes]:
        total, stored = self._stores[path].body(int(place), int(most))
        return [str(total).encode(), stored]


def _blocks_written() -> int:
    """Blocks of 512 bytes that this thread has caused to be written, pages in the cache included.

    LMDB does not say what a commit writes.
    """
    return resource.getrusage(resource.RUSAGE_THREAD).ru_oublock


def _serve(server: Server, sock: socket.socket) -> None:
    """A thread's life. A bug ends the process: the daemon must not wait for what never comes."""
    try:
        server.serve(sock)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def main(argv: list[str]) -> int:
    """Serve until all sockets are closed; the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the daemon, which then lets us end
    sockets = [socket.socket(fileno=int(fd)) for fd in argv[1:]]
    server = Server()
    threads = [threading.Thread(target=_serve, args=(server, sock)) for sock in sockets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
