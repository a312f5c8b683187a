"""The seam between the store and the places where objects live.

A tier keeps immutable objects at *places* (opaque integers of its own) and gives them back
verified. It decides nothing: which object goes where, what is evicted, who may read are the
store's business. What a tier cannot do right now is a value (`NoRoom`, `WriteOutcome`,
`ReadOutcome`), never an exception; exceptions are for bugs and for a data directory that cannot be
opened at all. All methods are called on the verbs' loop; a tier moves its own blocking work to
threads. The suite in tests/tiers/conformance.py is inherited by the tests of every tier.

Life of a place: ``reserve`` -> (``cancel`` | ``write`` -> readable -> ``delete`` -> free).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALIGNMENT_BYTES = 4096
"""Payload places are aligned and padded to this: what O_DIRECT asks of offset, length, memory."""

PIECE_BYTES = 1 << 20
"""Unit of verification: each piece of an object has an XXH3-64 of its own (design, section 3)."""

VOLUME_SHIFT = 56
"""Places of a tier of several volumes: the volume's number lies above the place's other 56 bits."""

MIN_OBJECT_BYTES = 4096
MAX_OBJECT_BYTES = 256 << 20


def padded_bytes(length_bytes: int) -> int:
    """Length rounded up to ALIGNMENT_BYTES."""
    return (length_bytes + ALIGNMENT_BYTES - 1) & -ALIGNMENT_BYTES


def piece_count(length_bytes: int) -> int:
    """Number of pieces of an object of that length."""
    return (length_bytes + PIECE_BYTES - 1) // PIECE_BYTES


class TierKind(enum.IntEnum):
    """Numbers as in proto TierKind and as the held values of ChunkState."""

    RAM = 1
    NVME = 2
    OBJECT = 3


class NoRoom(enum.Enum):
    """Why `reserve` gave no place."""

    TIER = "tier"  # evict something, anywhere in the tier, and try again
    NAMESPACE = "namespace"  # evict something of the same namespace and try again
    NEVER = "never"  # larger than the cap (or the namespace's cap) can ever hold
    DOWN = "down"  # the tier is failing; do not try again before its health changes
    PENDING = "pending"  # enough is on its way from those who still map it: evict nothing for this


class WriteOutcome(enum.Enum):
    """What became of one object of a `write`."""

    OK = "ok"
    FAILED = "failed"  # not readable, the place is free again; the tier may be ill
    DOWN = "down"
    STUCK = "stuck"  # as FAILED; but the payload is in use until `Tier.released` says otherwise


class ReadOutcome(enum.Enum):
    """What became of one object of a `read`."""

    OK = "ok"
    CORRUPT = "corrupt"  # the bytes are not the object's; the destination holds garbage
    GONE = "gone"  # it was deleted, which the index does not know; the destination holds garbage
    FAILED = "failed"  # the device did not give them
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """All that is known of an object besides its bytes; what a slot header carries."""

    namespace: str
    family: bytes  # fingerprint, 32 bytes
    key: bytes  # 32 bytes
    part: str
    tenant: str
    parent: bytes  # key of the chunk before, 32 bytes; b"" for the first or unknown
    depth: int  # index of the chunk in its prefix
    end_token: int  # tokens of the prefix up to this chunk's end
    expires_ms: int  # Unix time; 0: never
    length_bytes: int
    checksum: bytes  # XXH3-128, canonical (big-endian) 16 bytes
    piece_checksums: bytes  # XXH3-64 of each piece, little-endian 8 bytes each


@dataclass(frozen=True, slots=True)
class ObjectWrite:
    """One object to write to a reserved place.

    `payload` is `padded_bytes(meta.length_bytes)` long, aligned to ALIGNMENT_BYTES in memory, zero
    behind the object's end, and stays unchanged until `write` returns.
    """

    place: int
    meta: ObjectMeta
    payload: memoryview


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """One object to read from a place into `into`.

    `into` is at least `padded_bytes(length_bytes)` long and aligned; all of it may be overwritten,
    whatever the outcome. `key`, `part` and `checksum` are what the reader expects there.
    """

    place: int
    key: bytes
    part: str
    length_bytes: int
    checksum: bytes
    into: memoryview


Arrived = Callable[[int, ReadOutcome, bytes], None]
"""Told of one item of a `read`: its index, what became of it, and, where OK, the XXH3-64 of its
pieces (little-endian, 8 bytes each; otherwise empty). Must not raise.
"""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """`footprint_bytes`: what the memory or device really holds, preallocation and index included.
    `charged_bytes`: sum over objects of `charge_bytes`. Both obey `cap_bytes`.
    """

    cap_bytes: int
    footprint_bytes: int
    charged_bytes: int
    objects: int


_EMPTY_U64: NDArray[np.uint64] = np.zeros(0, np.uint64)


@dataclass(slots=True)
class Recovered:
    """What a persistent tier holds when it is opened, in columns: row i of each is one object.

    `namespaces`, `families`, `parts` and `tenants` are the tables that the `*_id` columns index.
    `family_specs` maps (namespace, fingerprint) to a serialised proto FamilySpec, for those known.
    """

    namespaces: list[str] = field(default_factory=list)
    families: list[bytes] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    tenants: list[str] = field(default_factory=list)
    namespace_id: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    family_id: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    part_id: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    tenant_id: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    keys: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 32), np.uint8))
    parents: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 32), np.uint8))
    depth: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    end_token: NDArray[np.uint64] = field(default_factory=lambda: _EMPTY_U64)
    expires_ms: NDArray[np.uint64] = field(default_factory=lambda: _EMPTY_U64)
    length_bytes: NDArray[np.uint64] = field(default_factory=lambda: _EMPTY_U64)
    checksums: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 16), np.uint8))
    place: NDArray[np.uint64] = field(default_factory=lambda: _EMPTY_U64)
    sequence: NDArray[np.uint64] = field(default_factory=lambda: _EMPTY_U64)
    family_specs: dict[tuple[str, bytes], bytes] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> objects not recovered


class Tier(ABC):
    """One place where objects live."""

    kind: TierKind

    on_lost: Callable[[int], None] | None = None
    """Set by the store; called on the loop with the number of a volume whose objects can be had no
    more, for now: those with a place of that number (see VOLUME_SHIFT)."""

    on_found: Callable[[Recovered], Coroutine[None, None, None]] | None = None
    """Set by the store; run on the loop with what a volume holds that has come back. The store
    deletes what it has no use for. While it runs, `forget` is still told of deletes."""

    @property
    @abstractmethod
    def persistent(self) -> bool:
        """True: what `write` called OK, and what `delete` dropped, holds after a power loss."""

    @property
    @abstractmethod
    def mode(self) -> str:
        """How bytes move, for operators, like "o_direct" or "memfd"."""

    @property
    @abstractmethod
    def health(self) -> str:
        """State in words: "ok", or what is wrong."""

    @abstractmethod
    def usage(self) -> TierUsage:
        """Current figures; cheap, callable from any thread."""

    @abstractmethod
    def charge_bytes(self, length_bytes: int) -> int:
        """What an object of that length is charged here, padding and header included, in the kind
        of place that is meant for its length.
        """

    charge_mask: int = 0
    """Bits of a place that say of what kind it is, where there are several."""

    def charge_at(self, place: int, length_bytes: int) -> int:
        """What an object is charged at its place, of which only `charge_mask` counts."""
        del place
        return self.charge_bytes(length_bytes)

    @abstractmethod
    async def open(self) -> Recovered:
        """Prepare the tier; everything is right (also `usage`) before it returns.

        Raises DataDirectoryError when the place cannot be used at all.
        """

    @abstractmethod
    async def close(self) -> None:
        """Finish running I/O and give everything back. The tier is not used afterwards."""

    @abstractmethod
    async def reserve(self, namespace: str, lengths_bytes: Sequence[int]) -> list[int | NoRoom]:
        """Places for new objects of one namespace, in order, charged from now on.

        From the first length that finds no room on, every entry is that NoRoom.
        """

    @abstractmethod
    def cancel(self, places: Sequence[int]) -> None:
        """Give back reserved places that will not be written."""

    @abstractmethod
    async def write(self, items: Sequence[ObjectWrite]) -> list[WriteOutcome]:
        """Write objects to their reserved places; OK ones are readable (and durable, where
        `persistent`) when it returns. A place whose write is not OK is free again.

        Cancellation of the caller does not cut a write short: the tier finishes it.
        """

    async def released(self, place: int) -> None:
        """Wait until the payload of a write that was STUCK is in use no more, which may take for
        ever. Default: at once; no write is ever STUCK.
        """
        del place

    @abstractmethod
    async def read(
        self, items: Sequence[ObjectRead], arrived: Arrived | None = None
    ) -> list[ReadOutcome]:
        """Read and verify objects. After it returns, or raises CancelledError, nothing more is
        written to any `into`; for what the device keeps, that takes as long as the device does.

        `arrived` is called on the loop for each item exactly once, as soon as it is settled, in any
        order, and before this returns or raises; nothing is written to that item's `into` from then
        on. Items that a cancellation kept from being read arrive as FAILED.
        """

    @abstractmethod
    async def delete(self, places: Sequence[int]) -> None:
        """Drop readable objects; holds after a power loss when it returns, where `persistent`.

        Works on a full device. Readers that are under way finish first.
        """

    async def remember_family(self, namespace: str, fingerprint: bytes, spec: bytes) -> None:
        """Keep a serialised FamilySpec, so that a restarted daemon knows it. Default: forgets."""
        del namespace, fingerprint, spec

    def crowded(self, length_bytes: int) -> list[range]:
        """Places to empty for an object that finds no room, where the tier keeps objects of
        different sizes apart and much of what is free serves other sizes: deleting all that is in
        any one of these ranges makes room for it. Those that hold least come first. Default: none,
        deleting whatever is oldest will do.
        """
        del length_bytes
        return []

    async def forget(self, namespace: str, family: bytes, keys: Sequence[bytes]) -> None:
        """Deleted chunks, whether the store held them or not: what a volume that is away has of
        them must not come back with it. Holds after a power loss when it returns. Default: no part
        of the tier is ever away.
        """
        del namespace, family, keys
