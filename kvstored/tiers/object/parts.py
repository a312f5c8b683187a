"""What the pool is put together from, besides the bucket and the fetcher: as the pool sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstored.tiers.object.api import ObjectName, Offer, Swept


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is owed to the bucket, and what went up since the start. `forgetful`: why what is owed
    is not remembered over a restart, or "".
    """

    objects: int = 0
    bytes: int = 0
    in_flight: int = 0
    uploaded_bytes: int = 0
    forgetful: str = ""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What the janitor saw last. `words`: what it does, for people."""

    known_bytes: int = 0
    known_objects: int = 0
    words: str = ""


class WriteBackPart(Protocol):
    """Uploads, and deletes in order with them."""

    async def open(self) -> None:
        """Begin; not for the bucket's sake to fail."""

    async def close(self, timeout_s: float) -> int:
        """End within the time; how many objects are still owed."""

    def offer(self, offers: Sequence[Offer]) -> int:
        """As in Pool."""

    async def delete(self, names: Sequence[ObjectName], deadline: float) -> bool:
        """As in Pool; after uploads of the same names."""

    async def cancel(self, namespace: str, tenant: str, deadline: float) -> bool:
        """End all uploads of a namespace (of one tenant, unless ""); False: not in time."""

    @property
    def left(self) -> Sequence[ObjectName]:
        """What the node's last life owed, as of `open`."""

    def disown(self, names: Sequence[ObjectName]) -> None:
        """As in Pool."""

    @property
    def backlog(self) -> Backlog:
        """Cheap; any thread."""


class ExistencePart(Protocol):
    """What is there."""

    async def leading(
        self, names: Sequence[Sequence[ObjectName]], deadline: float
    ) -> list[Sequence[int]]:
        """As in Pool."""

    async def each(
        self, names: Sequence[Sequence[ObjectName]], deadline: float
    ) -> list[Sequence[int] | None]:
        """As in Pool."""

    def forget(self, names: Sequence[ObjectName]) -> None:
        """What was known of names is not true any more, one way or the other."""

    def clear(self) -> None:
        """Nothing of what was known may be true any more."""

    def absent(self, names: Sequence[ObjectName]) -> None:
        """The bucket has just said that these are not there."""


class JanitorPart(Protocol):
    """Cap and TTL of the whole bucket, and deletes that reach what other nodes stored."""

    async def open(self) -> None:
        """Begin; not for the bucket's sake to fail."""

    async def close(self) -> None:
        """End."""

    async def delete_all(self, namespace: str, tenant: str, deadline: float) -> Swept:
        """As in Pool."""

    @property
    def inventory(self) -> Inventory:
        """Cheap; any thread."""
