"""What the server asks of the store, as values. No I/O here.

The store and everything in this module belongs to the verbs' loop, except the memoryviews in
`Grant` and `WantedObject`, which any thread may read (or fill) while the lease (or ticket) lives.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstored_client.identity import KEY_BYTES, GroupRule
from kvstored_client.proto import kvstore_pb2 as pb


@dataclass(frozen=True, slots=True)
class PartInfo:
    """A declared part. `bytes` 0: sizes vary up to `max_bytes`."""

    name: str
    group: str
    bytes: int
    max_bytes: int
    spec: pb.PartSpec


@dataclass(slots=True)
class Family:
    """A declared family of one namespace. Parts are only ever appended."""

    namespace: str
    fingerprint: bytes
    model: str
    chunk_tokens: int
    rules: dict[str, GroupRule]
    parts: list[PartInfo] = field(default_factory=list)
    part_index: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """A validated ChunkRun with its context: what every verb works on.

    `packed`: the keys, KEY_BYTES each, back to back; whole keys, so that a batch of them is looked
    up without an object per key. `keys` makes those objects, once.
    """

    namespace: str
    tenant: str
    family: Family
    packed: bytes
    start: int
    parent: bytes
    end_token: int
    parts: tuple[int, ...]  # indices into family.parts, never empty
    probe: bool = False
    request_id: str = ""
    _keys: list[bytes] = field(default_factory=list, init=False, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.packed) // KEY_BYTES

    @property
    def keys(self) -> list[bytes]:
        """The keys one by one, in order."""
        if self.packed and not self._keys:
            # A void dtype hands out whole 32-byte strings, five times as fast as slicing; "S32"
            # would strip trailing zero bytes.
            self._keys.extend(np.frombuffer(self.packed, dtype=f"V{KEY_BYTES}").tolist())
        return self._keys

    def chunk_end_token(self, i: int) -> int:
        """Tokens of the prefix up to the end of the run's i-th chunk."""
        full = (self.start + i + 1) * self.family.chunk_tokens
        return min(full, self.end_token) if self.end_token and i == len(self) - 1 else full

    def chunk_tokens(self, i: int) -> int:
        """Tokens in the run's i-th chunk."""
        return self.chunk_end_token(i) - (self.start + i) * self.family.chunk_tokens


@dataclass(frozen=True, slots=True)
class MatchAnswer:
    """See proto MatchReply."""

    chunks: int
    tokens: int
    states: bytes
    payload_bytes: int
    eta_ms: float


@dataclass(frozen=True, slots=True)
class Grant:
    """One object, verified and leased. `view` is read-only and exactly the object's bytes."""

    index: int
    length_bytes: int
    checksum: bytes
    tier: int
    view: memoryview
    piece_checksums: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Leased:
    """Objects of a run, verified and leased in RAM until `Store.release(places)`.

    Row i of every column is one object, in the order of the run; shape [objects]. For clients that
    map the segments. `checksums` has 16 bytes per row, `tiers` one; `charged_bytes` is the sum of
    the padded lengths.
    """

    indices: list[int]  # object indices of the request
    segment_ids: list[int]
    offsets_bytes: list[int]
    lengths_bytes: list[int]
    checksums: bytes
    tiers: bytes
    places: NDArray[np.int64]
    charged_bytes: int


@dataclass(frozen=True, slots=True)
class WantedObject:
    """One object whose bytes a put is to bring. `view` is writable, exactly `length_bytes` long."""

    index: int
    length_bytes: int
    view: memoryview


@dataclass(frozen=True, slots=True)
class Received:
    """What the server computed over the daemon's own copy, once an object's bytes are in place."""

    index: int
    checksum: bytes
    piece_checksums: bytes


@dataclass(frozen=True, slots=True)
class PutOffer:
    """A validated PutHeader. `lengths_bytes` has one entry per object; 0 is not offered.
    `claims_at_commit`: it counts against the bound on dirty bytes only from its commit on, which
    waits for that: who reserves may take any time until then.
    """

    run: Run
    lengths_bytes: list[int]
    checksums: bytes
    durable: bool
    wait: bool
    ttl_ms: int
    deadline: float  # time.monotonic()
    claims_at_commit: bool = False


@dataclass(slots=True)
class PutTicket:
    """A put between plan and outcome. `states` holds one PutState per object.

    Made by `Store.begin_put`; ended by exactly one of `commit_put` and `abort_put`.
    """

    ticket_id: int
    offer: PutOffer
    states: bytearray
    wanted: list[WantedObject]


def let_go(view: memoryview) -> None:
    """Release a view of RAM, so that its segment can be given back at once and not when the last
    frame or traceback that names it is collected. One that somebody still reads is left alone.
    """
    with contextlib.suppress(BufferError):
        view.release()


@dataclass(frozen=True, slots=True)
class StoppedReport:
    """What a clean stop could not make durable."""

    lost_objects: int
    lost_bytes: int
