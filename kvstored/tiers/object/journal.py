"""What this node owes to the bucket, remembered over a restart.

A file of its own under the data directory (`object/owed`): an AppendLog. A payload is a row of
changes: a name is owed, or is not any more. What is damaged ends the file: what was owed behind it
is forgotten, which costs an upload and never a wrong byte. When most of a file is history it is
written anew.

`Journal` blocks and is meant for one thread; `Owed` is what the write-back asks, on its loop.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from kvstored.io.appendlog import FRAME_BYTES, AppendLog
from kvstored.io.base import Files
from kvstored.io.whole import make_directory
from kvstored.tiers.object.api import ObjectName

_log = logging.getLogger(__name__)

MOST_OWED: Final = 131_072
"""Names remembered; of more than that the oldest are forgotten."""

MAGIC: Final = b"KVSTOWE1"
NAME: Final = "owed"
TRY_AGAIN_S: Final = 5.0
"""After a failed write, all is written anew; a disk that was full has room again some day, and a
bucket that is away changes nothing meanwhile that would be written."""

REWRITE_ABOVE_BYTES: Final = 1 << 20
ABOUT_A_NAME_BYTES: Final = 96
_CHANGE = struct.Struct("<BBHH")  # owed, version, lengths of namespace and part

Change = tuple[bool, ObjectName]
"""Whether a name is owed from now on."""


class Journal:
    """The file. `live` is what is owed as of the last `load` or `write`, in order."""

    def __init__(
        self, files: Files, directory: Path, *, rewrite_above_bytes: int = REWRITE_ABOVE_BYTES
    ) -> None:
        self._files = files
        self._directory = directory
        self._file = AppendLog(files, directory / NAME, head=MAGIC)
        self._rewrite_above_bytes = rewrite_above_bytes
        self._end = 0  # where the next frame goes; 0: the file has to be written anew
        self.live: dict[ObjectName, None] = {}
        self.problem = ""
        """What was wrong with the file when it was read; or ""."""

    def load(self) -> list[ObjectName]:
        """Read what is owed. Raises OSError where the directory cannot be used."""
        make_directory(self._files, self._directory)
        found = self._file.load()
        for payload in found.payloads:
            self._take(_decoded(payload))
        if left := found.length_bytes - found.whole_bytes:
            self.problem = f"{left} B behind {found.whole_bytes} B of it are no whole frames"
            _log.warning("%s: %s; what they owed is forgotten", self._file.path, self.problem)
        # also a whole file: it is never appended to before it is known to be durable
        self._end = 0
        return list(self.live)

    def write(self, changes: Sequence[Change]) -> None:
        """Remember changes; durable on return where a name has come to be owed. After an OSError
        they are not remembered in the file; the next `write` writes all of it anew.
        """
        self._take(changes)
        payload = b"".join(_encoded(owed, name) for owed, name in changes)
        end, self._end = self._end, 0  # until it is known how this ends
        history = end + FRAME_BYTES + len(payload) > self._rewrite_above_bytes
        if not end or (history and end > 4 * ABOUT_A_NAME_BYTES * len(self.live)):
            self._write_anew()
            return
        self._end = self._file.append(payload, synced=any(owed for owed, _ in changes))

    def replace(self, names: Iterable[ObjectName]) -> None:
        """Remember these names and no others. As `write`."""
        self.live.clear()
        self._take((True, name) for name in names)
        self._write_anew()

    def _take(self, changes: Iterable[Change]) -> None:
        for owed, name in changes:
            self.live.pop(name, None)
            if owed:
                self.live[name] = None
        while len(self.live) > MOST_OWED:
            del self.live[next(iter(self.live))]

    def _write_anew(self) -> None:
        """Replace the file by one that holds what is live."""
        self._end = 0
        names = b"".join(_encoded(True, name) for name in self.live)
        self._end = self._file.replace([names] if names else [])


class Owed:
    """The names owed, on the write-back's loop; the journal follows on a thread, in groups.

    `count`, and `in`, are as of now. What is added is in the file a moment later (`flush`
    waits for it): a kill in between forgets an upload. Without a journal nothing is remembered.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal
        self._names: dict[ObjectName, None] = {}
        self._changes: dict[ObjectName, bool] = {}  # not handed to the journal yet
        self._too_many = False  # changes; the journal is to be given all names instead
        self._writing: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._threads = ThreadPoolExecutor(1, "object-journal") if journal else None
        self.failures = 0
        """Writes of the journal that failed: what they said may be forgotten."""
        self.problem = ""
        """What ails the journal now; or ""."""

    async def open(self) -> Sequence[ObjectName]:
        """What the node's last life still owed; it stays owed until it is dropped."""
        if self._journal is None or self._threads is None:
            return ()
        loop = asyncio.get_running_loop()
        try:
            names = await loop.run_in_executor(self._threads, self._journal.load)
        except OSError as error:
            self._failed(error)
            return ()
        self._names = dict.fromkeys(names)
        return names

    @property
    def count(self) -> int:
        """How many are owed."""
        return len(self._names)

    def __contains__(self, name: ObjectName) -> bool:
        return name in self._names

    def add(self, name: ObjectName) -> None:
        """A name is owed."""
        if name not in self._names:
            self._names[name] = None
            self._change(name, True)

    def drop(self, name: ObjectName) -> None:
        """A name is not owed any more: it is up, or there is nothing to bring up."""
        if name in self._names:
            del self._names[name]
            self._change(name, False)

    async def flush(self) -> None:
        """Wait until the file says what was added and dropped so far, or failed to."""
        while self._writing is not None:
            await asyncio.wait((self._writing,))

    async def close(self) -> None:
        """Flush, once more if the last write failed, and give the thread back."""
        if self._retry is not None:
            self._try_again()
        await self.flush()
        if self._retry is not None:
            self._retry.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _change(self, name: ObjectName, owed: bool) -> None:
        if self._journal is None:
            return
        self._changes[name] = owed
        if len(self._changes) > MOST_OWED:  # the disk does not follow
            self._changes.clear()
            self._too_many = True
        self._begin(self._journal)

    def _begin(self, journal: Journal) -> None:
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(journal), name="object-journal")
            self._writing.add_done_callback(self._ended)

    def _try_again(self) -> None:
        """The journal lacks what its last write had to say: have it write all anew."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._journal is not None:
            self._too_many = True
            self._begin(self._journal)

    async def _write(self, journal: Journal) -> None:
        loop = asyncio.get_running_loop()
        while self._changes or self._too_many:
            changes = [(owed, name) for name, owed in self._changes.items()]
            work = partial(journal.write, changes)
            if self._too_many:
                work = partial(journal.replace, list(self._names))
            self._changes.clear()
            self._too_many = False
            try:
                await loop.run_in_executor(self._threads, work)
            except OSError as error:
                self._failed(error)
                if self._retry is None:
                    self._retry = loop.call_later(TRY_AGAIN_S, self._try_again)
            else:
                self.problem = ""

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._writing = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        if not self.problem:
            _log.warning("what is owed to the bucket is not remembered: %s", error)
        self.failures += 1
        self.problem = f"what is owed is not remembered over a restart: {error}"


def _encoded(owed: bool, name: ObjectName) -> bytes:
    namespace, part = name.namespace.encode(), name.part.encode()
    head = _CHANGE.pack(owed, 1, len(namespace), len(part))
    return head + name.family + name.key + namespace + part


def _decoded(payload: bytes) -> list[Change]:
    """The changes of a whole frame; those of a version that is not known end it."""
    found: list[Change] = []
    at = 0
    with suppress(struct.error, UnicodeDecodeError):
        while at < len(payload):
            owed, version, *lengths = _CHANGE.unpack_from(payload, at)
            if version != 1:
                break
            at += _CHANGE.size
            parts = []
            for length in (32, 32, *lengths):
                parts.append(payload[at : at + length])
                at += length
            family, key, namespace, part = parts
            found.append((bool(owed), ObjectName(namespace.decode(), family, key, part.decode())))
    return found
