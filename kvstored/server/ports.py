"""What the server needs of the store, as protocols; `kvstored.store.store.Store` fulfils them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstored.store.accounting import Accounts
from kvstored.store.api import Family, Grant, MatchAnswer, PutOffer, PutTicket, Received, Run
from kvstored_client.proto import admin_pb2 as admin
from kvstored_client.proto import kvstore_pb2 as pb


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

    def open_get(self, run: Run, deadline: float, bypass_ram: bool = False) -> GetStreamPort:
        """Begin to read."""

    async def begin_put(self, offer: PutOffer) -> PutTicket:
        """Reserve room."""

    async def commit_put(self, ticket: PutTicket, received: Sequence[Received]) -> bytes:
        """Publish; one PutState per object."""

    async def abort_put(self, ticket: PutTicket) -> None:
        """Give the room back; idempotent."""

    def touch(self, run: Run, ttl_ms: int) -> bytes:
        """Mark as used; ChunkStates."""

    async def delete(self, run: Run, corrupt: bool = False) -> int:
        """Drop chunks; how many."""

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
