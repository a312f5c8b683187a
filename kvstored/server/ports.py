"""What the server needs of the store, as protocols; `kvstored.store.store.Store` fulfils them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstored.server.auth import Auth, Caller
from kvstored.store.accounting import Accounts
from kvstored.store.api import (
    Family,
    Grant,
    Leased,
    MatchAnswer,
    PutOffer,
    PutTicket,
    Received,
    Run,
)
from kvstored.tiers.nvme.scrub import ScrubStatus
from kvstored.tiers.nvme.status import VolumeStatus
from kvstored_client.proto import admin_pb2 as admin
from kvstored_client.proto import kvstore_pb2 as pb

T = TypeVar("T")


class GetStreamPort(Protocol):
    """See GetStream in docs/architecture.md."""

    @property
    def states(self) -> bytes:
        """One ChunkState per key; final once `exhausted`."""

    @property
    def exhausted(self) -> bool:
        """Whether nothing comes after what `next` gave last."""

    async def next(self) -> list[Grant] | None:
        """What is ready, in order; None at the end."""

    def delivered(self, grants: Sequence[Grant]) -> None:
        """These were handed to the transport in full."""

    async def close(self) -> None:
        """Release every lease; idempotent."""


class AcquireStreamPort(Protocol):
    """See AcquireStream in kvstored/store/leasing.py."""

    @property
    def states(self) -> bytes:
        """One ChunkState per key; final once `next` gave None."""

    async def next(self) -> Leased | None:
        """What is ready, in order, leased until the store releases it; None at the end."""

    async def close(self) -> None:
        """Give up what was not handed out; idempotent."""


class HoldSink(Protocol):
    """Who answers for what a match holds: a local session."""

    def add_hold(self, hold_id: int, keys: list[bytes], charged_bytes: int) -> None:
        """Take the keys over; `charged_bytes`: what they keep in RAM.

        Raises BadRequest for an id in use, ResourceExhausted beyond the session's bounds.
        """


class StorePort(Protocol):
    """See Store in docs/architecture.md."""

    boot_epoch: int
    accounts: Accounts

    async def declare(self, namespace: str, spec: pb.FamilySpec) -> Family:
        """Make a family known; FamilyConflict, BadRequest, ResourceExhausted."""

    def family(self, namespace: str, fingerprint: bytes) -> Family:
        """A declared family; UnknownFamily."""

    def match(self, run: Run, mode: int, depth: int) -> MatchAnswer:
        """Look chunks up."""

    async def match_pool(self, run: Run, mode: int, deadline: float) -> MatchAnswer:
        """Look chunks up, in the shared bucket too where there is one."""

    def open_get(self, run: Run, deadline: float, bypass_ram: bool = False) -> GetStreamPort:
        """Begin to read."""

    def acquire_now(self, run: Run, max_bytes: int) -> tuple[Leased, bytes] | None:
        """Lease all of a run that is in RAM, with its states; None: see `open_acquire`."""

    def open_acquire(
        self, run: Run, deadline: float, room: Callable[[int], bool]
    ) -> AcquireStreamPort:
        """Begin to lease. `room(charged_bytes)`: whether the caller may hold so much more."""

    def release(self, places: NDArray[np.int64]) -> None:
        """End the leases of `Leased.places`."""

    def hold(self, run: Run, states: bytes) -> tuple[list[bytes], int]:
        """Protect the chunks that are held by `states`; their keys, and their bytes in RAM."""

    def unhold(self, namespace: str, keys: Iterable[bytes]) -> None:
        """The twin of `hold`."""

    async def begin_put(self, offer: PutOffer) -> PutTicket:
        """Reserve room."""

    def publish_part(self, ticket: PutTicket, received: Sequence[Received]) -> None:
        """See Store."""

    async def commit_put(self, ticket: PutTicket, received: Sequence[Received]) -> bytes:
        """Publish; one PutState per object."""

    async def abort_put(self, ticket: PutTicket) -> None:
        """Give the room back; idempotent."""

    async def purge(self, namespace: str, tenant: str, deadline: float) -> tuple[int, int]:
        """Drop everything of a namespace or tenant: chunks here, objects in the bucket."""

    def touch(self, run: Run, ttl_ms: int) -> bytes:
        """Mark as used; ChunkStates."""

    async def delete(self, run: Run, corrupt: bool = False, deadline: float | None = None) -> int:
        """Drop chunks; how many. `deadline`: for the bucket."""

    async def prefetch(self, run: Run, deadline: float) -> bytes:
        """Bring chunks into RAM; ChunkStates."""

    def pin(self, run: Run, ttl_ms: int) -> bytes:
        """Protect chunks; ChunkStates."""

    def unpin(self, run: Run) -> int:
        """End protection; how many chunks."""

    def list(self, namespace: str, family: bytes, cursor: bytes, limit: int) -> pb.ListReply:
        """One page of keys."""

    def usage(self, namespace: str) -> pb.UsageReply:
        """What a namespace holds."""

    def status(self) -> admin.StatusReply:
        """The store's part of Admin.Status: all but version, uptime and phase."""


class CallObserver(Protocol):
    """Counts calls; called on the verbs' loop."""

    def call_ended(self, verb: str, outcome: str, seconds: float, tier: str) -> None:
        """`outcome`: "ok" or the ErrorCode's name. `tier`: slowest tier read, or ""."""


class VolumesPort(Protocol):
    """What operators may see and do of volumes; `kvstored.tiers.nvme.tier.NvmeTier` fulfils it."""

    def volumes(self) -> list[VolumeStatus]:
        """Each volume as it is now, by number."""

    async def drain(self, name: str) -> None:
        """Begin to drain; UnknownVolume, LastVolume, DataDirectoryError."""

    def scrub_status(self, number: int) -> ScrubStatus | None:
        """Where the scrub of a volume stands; None while the volume is away."""

    def scrub(self, number: int, rate_bytes_per_s: int) -> asyncio.Future[ScrubStatus] | None:
        """Begin a pass now, at a rate (0: as fast as it goes); done when it has ended. None for a
        volume that is away.
        """


class OperatorHost(Protocol):
    """What operators' verbs share with the others; the dispatcher fulfils it."""

    auth: Auth
    store: StorePort

    @property
    def draining(self) -> bool:
        """Whether new calls are refused."""

    def observed(self, verb: str, caller: Caller) -> AbstractContextManager[None]:
        """Report the call's outcome."""

    async def finish(self, work: Coroutine[object, object, T]) -> T:
        """Run work to its end although the caller may go."""
