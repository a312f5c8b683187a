"""What the object tier asks of a bucket: names, bytes and values. See `Bucket`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstored.tiers.object.api import Outcome

Sink = Callable[[memoryview], Awaitable[bool]]
"""Given the body of a read, chunk after chunk, never more in all than was asked for. A chunk is
good only until it returns. False: enough, the read ends as CANCELLED. Runs on the bucket's loop."""


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of one stored object without its bytes. `length_bytes` with the header block.

    `modified_ms`: Unix time by the bucket's clock; a node's own is not to be compared with it.
    """

    outcome: Outcome
    length_bytes: int = 0
    modified_ms: int = 0


@dataclass(frozen=True, slots=True)
class Got:
    """The end of one read. OK: `received_bytes` are what was asked for, or up to the stored
    object's end where that comes first; `total_bytes` is the stored object's length (0: unknown).
    """

    outcome: Outcome
    received_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a listing. As in `Head`."""

    path: str
    length_bytes: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a listing. Not OK: the listing ends here and is not whole."""

    outcome: Outcome
    entries: tuple[Entry, ...] = ()


class Bucket(ABC):
    """A flat space of stored objects, by path, below one prefix of one bucket.

    All methods may be awaited on any loop; what they do happens on a loop and threads of the
    bucket's own. None raises for the bucket's sake: what went wrong is an Outcome. Each takes a
    deadline (time.monotonic()) and ends soon after it, as DEADLINE. After a method has returned, or
    was cancelled, nothing reads or writes the memory that was given to it any more.

    No method retries: a caller knows what a repetition is worth. There are no multipart uploads
    (one PUT takes 5 GiB, the largest object has 256 MiB), so none is ever left behind, and no
    conditional replacement, which directories lack: a lease is a row of names that rise, each
    created with `put_if_absent`.
    """

    @abstractmethod
    async def open(self) -> None:
        """Begin; does not talk to the bucket. Raises ConfigError for a URL that cannot be one."""

    @abstractmethod
    async def close(self) -> None:
        """End what is under way, as CANCELLED, and give the threads back."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Where it is, for people; without anything secret."""

    @property
    @abstractmethod
    def detail(self) -> str:
        """The last thing that went wrong, in our own words and without anything secret; or ""."""

    @abstractmethod
    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run a coroutine on the bucket's own loop, where awaiting its methods costs no hop between
        threads. Cancelling the caller cancels the work; this returns when the work has ended.
        """

    @abstractmethod
    async def head(self, path: str, deadline: float) -> Head:
        """Length and age of a stored object; ABSENT if there is none."""

    @abstractmethod
    async def get(
        self, path: str, start_bytes: int, length_bytes: int, sink: Sink, deadline: float
    ) -> Got:
        """Read a range of a stored object as it comes in. ABSENT; SHORT or LONG where the body is
        not what was announced or asked for; CANCELLED where the sink had enough.
        """

    async def get_range(
        self, path: str, start_bytes: int, into: memoryview, deadline: float
    ) -> Got:
        """Read as much as `into` is long, or what the stored object has. As `get`."""
        target, at = np.frombuffer(into, np.uint8), 0

        async def put(chunk: memoryview) -> bool:
            nonlocal at
            np.copyto(target[at : at + len(chunk)], np.frombuffer(chunk, np.uint8))
            at += len(chunk)
            return True

        return await self.get(path, start_bytes, len(into), put, deadline)

    @abstractmethod
    async def put_if_absent(
        self, path: str, pieces: Sequence[bytes | memoryview], deadline: float
    ) -> Outcome:
        """Create a stored object from pieces, whole or not at all: OK, or EXISTED if the name is
        taken (by anything). DEADLINE, CANCELLED or NETWORK: it may have been created or not.
        """

    @abstractmethod
    def list_pages(self, prefix: str, deadline: float) -> AsyncIterator[Page]:
        """All stored objects below a prefix (whole path components), in no particular order, in
        pages of at most 1000. Ends with a page that is not OK, or after the last.
        """

    @abstractmethod
    async def delete(self, paths: Sequence[str], deadline: float) -> Outcome:
        """Drop stored objects. OK: none of them is there any more, whoever dropped it."""
