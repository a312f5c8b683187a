"""What the verbs answer: small immutable values."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from kvstored_client.proto import kvstore_pb2 as pb

if TYPE_CHECKING:
    from kvstored_client.local.lease import Hold


class ChunkState(enum.IntEnum):
    """Where a chunk is held, or why it is not; numbers as in proto ChunkState."""

    UNSPECIFIED = 0
    IN_RAM = 1
    IN_NVME = 2
    IN_OBJECT = 3
    NOT_NEEDED = 15
    MISS_NEVER_STORED = 16
    MISS_EVICTED = 17
    MISS_EXPIRED = 18
    MISS_CORRUPT = 19
    MISS_TIER_DOWN = 20
    MISS_DEADLINE = 21
    MISS_DECLINED = 22
    MISS_REFUSED_AT_PUT = 23
    MISS_DELETED = 24
    MISS_AFTER_GAP = 25
    MISS_UNREACHABLE = 26

    @classmethod
    def _missing_(cls, value: object) -> ChunkState:
        # A newer daemon may have states that this client has no word for.
        del value
        return cls.UNSPECIFIED

    @property
    def held(self) -> bool:
        """Whether it counts as held (NOT_NEEDED does)."""
        return 1 <= self <= 15

    @property
    def tier(self) -> str:
        """Tier in words: "ram", "nvme", "object"; "" if not held."""
        return tier_name(int(self))

    @property
    def reason(self) -> str:
        """Why it is not held, like "never_stored"; "" if it is."""
        return "" if self.held else self.name.removeprefix("MISS_").lower()


class PutState(enum.IntEnum):
    """What became of one object of a put; numbers as in proto PutState."""

    UNSPECIFIED = 0
    NOT_OFFERED = 1
    STORED = 3
    EXISTED = 4
    REFUSED_LENGTH = 5
    REFUSED_NO_ROOM = 6
    REFUSED_CAP = 7
    REFUSED_DEADLINE = 8
    REFUSED_CHECKSUM = 9
    REFUSED_DRAINING = 10
    STORED_NOT_DURABLE = 11
    REFUSED_TOO_LARGE = 12
    REFUSED_UNREACHABLE = 13

    @classmethod
    def _missing_(cls, value: object) -> PutState:
        del value
        return cls.UNSPECIFIED

    @property
    def outcome(self) -> str:
        """In words: "stored", "existed", "not_offered" or "refused"."""
        if self in (PutState.STORED, PutState.STORED_NOT_DURABLE):
            return "stored"
        if self in (PutState.EXISTED, PutState.NOT_OFFERED):
            return self.name.lower()
        return "refused"

    @property
    def reason(self) -> str:
        """Why it was refused, like "no_room", or "not_durable"; "" if all went as asked."""
        if self is PutState.STORED_NOT_DURABLE:
            return "not_durable"
        return self.name.removeprefix("REFUSED_").lower() if self.outcome == "refused" else ""


_TIERS = {int(pb.TIER_RAM): "ram", int(pb.TIER_NVME): "nvme", int(pb.TIER_OBJECT): "object"}


def tier_name(kind: int) -> str:
    """Tier in words for a TierKind or a held ChunkState; "" for anything else."""
    return _TIERS.get(kind, "")


class States(Sequence[ChunkState]):
    """One ChunkState per chunk, over the packed bytes that came (`raw`)."""

    __slots__ = ("raw",)

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def __len__(self) -> int:
        return len(self.raw)

    @overload
    def __getitem__(self, index: int) -> ChunkState: ...

    @overload
    def __getitem__(self, index: slice) -> States: ...

    def __getitem__(self, index: int | slice) -> ChunkState | States:
        if isinstance(index, slice):
            return States(self.raw[index])
        return ChunkState(self.raw[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, States) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"<States {', '.join(f'{n} {c}' for n, c in self.counts().items())}>"

    def counts(self) -> dict[str, int]:
        """How many chunks are in each state, by name, most first."""
        values, counts = np.unique(np.frombuffer(self.raw, np.uint8), return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return {ChunkState(int(values[i])).name: int(counts[i]) for i in order}

    def first_reason(self) -> str:
        """Why the first chunk that is not held is not; "" if all are."""
        array = np.frombuffer(self.raw, np.uint8)
        missing = np.flatnonzero((array == 0) | (array > 15))
        return ChunkState(int(array[missing[0]])).reason if len(missing) else ""


@dataclass(frozen=True, slots=True)
class MatchResult:
    """What is held of a prefix.

    `chunks`: leading ones (mode "prefix"), or how many there are (mode "each").
    `tokens`: covered by those chunks. `states`: one per chunk of the prefix. `nbytes`: what a get
    of those chunks would deliver. `eta_ms`: estimated time to have them. `reason`: why it ends
    there, "" where everything is held; `detail` says more where the daemon could not be asked.
    `hold`: what protects it, if that was asked for, something is held, and the daemon is on this
    node.
    """

    chunks: int
    tokens: int
    states: States
    nbytes: int
    eta_ms: float
    reason: str = ""
    detail: str = ""
    hold: Hold | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class GetResult:
    """What a get brought. Buffers of chunks that are not `ok` hold anything.

    `chunks`: from `start`, after how many every group's rule holds with what came: the leading
    run. `ok`, shape [chunks asked for]: every object the chunk needed is in place and verified.
    `lengths`: bytes per object in object order, 0 for one that did not come. `bytes_by_tier`:
    verified bytes, by the tier they came from. `reason`: why the first missing chunk is missing,
    "" if none is.
    """

    chunks: int
    ok: NDArray[np.bool_]
    states: States
    lengths: NDArray[np.int64]
    bytes_by_tier: Mapping[str, int]
    reason: str = ""
    detail: str = ""

    @property
    def nbytes(self) -> int:
        """Verified bytes in all."""
        return sum(self.bytes_by_tier.values())


@dataclass(frozen=True, slots=True, eq=False)
class PutResult:
    """What became of a put. `objects`: one PutState per object, shape [chunks, parts].

    `outcomes`: one per chunk, the worst of its objects: refused, then stored, then existed.
    `stored`, `existed` and `refused` count chunks. `reason`: of the first refusal (or of durability
    not met), "" if there is none.
    """

    objects: NDArray[np.uint8]
    outcomes: tuple[PutState, ...]
    stored: int
    existed: int
    refused: int
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ChunksResult:
    """What touch, prefetch and pin answer. `chunks`: how many of them are held."""

    chunks: int
    states: States
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CountResult:
    """What delete and unpin answer: `chunks` concerned; `reason` "" if the daemon did it all."""

    chunks: int
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class HelloResult:
    """Who answers there, and what it can do."""

    server: str
    protocol_version: int
    boot_epoch: int
    features: frozenset[str]
    max_keys_per_call: int
    max_put_bytes: int
    max_object_bytes: int


@dataclass(frozen=True, slots=True)
class ListEntry:
    """One chunk of a listing; see proto ListEntry. `expires_ms`: Unix time, 0 for never."""

    key: bytes
    family: bytes
    tenant: str
    depth: int
    end_token: int
    nbytes: int
    tier: str
    expires_ms: int
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What the namespace is charged in one tier."""

    tier: str
    charged_bytes: int
    cap_bytes: int
    objects: int


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one tenant is charged in one tier, and for how long it held how much."""

    tenant: str
    tier: str
    charged_bytes: int
    byte_seconds: float


@dataclass(frozen=True, slots=True)
class UsageResult:
    """What a namespace and its tenants hold."""

    tiers: tuple[TierUsage, ...]
    tenants: tuple[TenantUsage, ...]


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier of the daemon; see proto TierStatus."""

    name: str
    cap_bytes: int
    footprint_bytes: int
    charged_bytes: int
    objects: int
    health: str
    mode: str


@dataclass(frozen=True, slots=True)
class NamespaceStatus:
    """One namespace in one tier; see proto NamespaceStatus."""

    name: str
    tier: str
    charged_bytes: int
    cap_bytes: int


@dataclass(frozen=True, slots=True)
class StatusResult:
    """One picture of the daemon; see proto StatusReply."""

    version: str
    boot_epoch: int
    uptime_ms: int
    phase: str
    tiers: tuple[TierStatus, ...]
    namespaces: tuple[NamespaceStatus, ...]
    chunks: int
    objects: int
    dirty_bytes: int
    leased_bytes: int
    families: int
