"""What the store asks of a bucket that many nodes share, in values.

A bucket is no `Tier`: it has no places, since where an object is follows from its name, and every
node finds it; and it may hold what this node has never heard of. So the store asks it by name:
`exists` and `fetch` for what it lacks, `offer` for what others may want, `delete` for what nobody
may have any more. Nothing here raises for the bucket's sake, and nothing lasts beyond the deadline
that it was given: what cannot be had is a value. All of it is called on the verbs' loop.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstored.tiers.base import ObjectMeta


@dataclass(frozen=True, slots=True)
class ObjectName:
    """What an object of the bucket is found by. `family` and `key` have 32 bytes each."""

    namespace: str
    family: bytes
    key: bytes
    part: str


class Outcome(enum.Enum):
    """What became of one fetch or upload; each is counted under its own name."""

    OK = "ok"
    ABSENT = "absent"  # the bucket has no such object
    CORRUPT = "corrupt"  # header or bytes are not what they say: the stored object is dropped
    SHORT = "short"  # the body ended early, more than once
    LONG = "long"  # the body was longer than the range asked for, more than once
    DEADLINE = "deadline"
    THROTTLED = "throttled"  # 429 or 503 SlowDown, beyond the retries
    SERVER = "server"  # 5xx
    NETWORK = "network"  # reset, refused, no route, cut off
    NAME = "name"  # the endpoint's name was not resolved
    DENIED = "denied"  # credentials wrong, expired, or without the right
    NO_BUCKET = "no_bucket"
    OPEN = "open"  # the breaker is open: it was not tried
    EXISTED = "existed"  # an upload found the name taken by the same bytes
    CONFLICT = "conflict"  # taken by other bytes of the same length: theirs stand
    LENGTH = "length"  # taken by an object of another length: theirs stand
    CANCELLED = "cancelled"


Into = Callable[[ObjectMeta], memoryview | None]
"""Asked on the loop once the header of an object is known: memory of its padded length, aligned, to
put the payload into; None if it is not wanted after all (then the outcome is CANCELLED)."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One object to bring. `length_bytes` if it is known beforehand (exact parts), else 0: then
    the header is read first.
    """

    name: ObjectName
    length_bytes: int
    into: Into


@dataclass(frozen=True, slots=True)
class Fetched:
    """The end of one fetch. `meta` has verified checksums where the outcome is OK."""

    outcome: Outcome
    meta: ObjectMeta | None = None


@dataclass(slots=True, eq=False)
class Offer:
    """One object that may go up. `read` gives its verified bytes when its turn comes: a view of at
    least its length that stays good until `done` is called; None if it is not there any more. The
    checksums of its pieces may be missing from `meta` until then: `read` adds them.
    """

    meta: ObjectMeta
    read: Callable[[], object]  # () -> Awaitable[memoryview | None]
    done: Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """One picture of the bucket for operators and metrics. Never holds a secret.

    `backlog_objects` and `backlog_bytes`: owed to the bucket; `forgetful`: why that is not
    remembered over a restart, or "". `outcomes`: (verb, outcome) -> count since the start; verbs
    are "get", "head", "put", "delete", "list".
    """

    url: str = ""
    health: str = "ok"
    backlog_objects: int = 0
    backlog_bytes: int = 0
    forgetful: str = ""
    in_flight: int = 0
    uploaded_bytes: int = 0
    fetched_bytes: int = 0
    known_bytes: int = 0  # of the whole bucket under our prefix, as the last janitor's list said
    known_objects: int = 0
    outcomes: dict[tuple[str, str], int] = field(default_factory=dict)
    janitor: str = ""


@dataclass(frozen=True, slots=True)
class Swept:
    """The end of a sweep: how many objects are gone, and whether that were all (OK)."""

    objects: int
    outcome: Outcome


class Pool(ABC):
    """A bucket. `open` never fails for its sake: one that is away is a breaker that is open."""

    @abstractmethod
    async def open(self) -> None:
        """Begin. Raises ConfigError for a URL that cannot be one."""

    @abstractmethod
    async def close(self, timeout_s: float) -> int:
        """End everything within the time; how many objects are still owed (they are remembered)."""

    @abstractmethod
    async def leading(
        self, names: Sequence[Sequence[ObjectName]], deadline: float
    ) -> list[Sequence[int]]:
        """How far a prefix is there. `names`: per chunk, in order, the names of its parts. Gives,
        for each leading chunk of which every part exists, the lengths of its objects in bytes; 0
        where that follows from the search without having been asked for.

        A galloping search: O(log n) rounds of HEADs, under the deadline (time.monotonic()), with
        what was absent lately remembered for a while. What is not known in time is absent.
        """

    @abstractmethod
    async def each(
        self, names: Sequence[Sequence[ObjectName]], deadline: float
    ) -> list[Sequence[int] | None]:
        """As `leading` for every chunk on its own: lengths, or None."""

    @abstractmethod
    async def fetch(
        self,
        items: Sequence[Fetch],
        deadline: float,
        arrived: Callable[[int, Fetched], None],
    ) -> None:
        """Bring objects, first ones first, ranges in parallel, each verified piece by piece.

        `arrived(index, fetched)` is called on the loop exactly once per item, in any order; from
        then on nothing more is written to its memory. Returns when all have arrived, soon after the
        deadline at the latest: what is still under way then is DEADLINE, and its memory is given
        back only when nothing writes to it any more.
        """

    @abstractmethod
    def offer(self, offers: Sequence[Offer]) -> int:
        """Queue objects for writing back; how many leading ones were taken. The queue is bounded,
        and what was taken is remembered over a restart until it is up, or not there any more.
        """

    def owed(self) -> Sequence[ObjectName]:
        """What this node's last life still owed to the bucket, as of `open`. Whoever knows what is
        left of it offers that again, and disowns the rest.
        """
        return ()

    def disown(self, names: Sequence[ObjectName]) -> None:
        """These are not owed any more: there is nothing left to bring up."""
        del names

    @abstractmethod
    async def delete(self, names: Sequence[ObjectName], deadline: float) -> bool:
        """Drop objects, durably: True once the bucket has said so for all. Uploads of them under
        way are stopped or undone first.
        """

    @abstractmethod
    async def delete_all(self, namespace: str, tenant: str, deadline: float) -> Swept:
        """Drop everything of a namespace (or of one of its tenants, unless ""), whichever node
        stored it, also objects of nodes that are gone. Durable if the outcome is OK; else some may
        be left, and it may be called again.
        """

    @abstractmethod
    def status(self) -> PoolStatus:
        """Callable from any thread; cheap."""
