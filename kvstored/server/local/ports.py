"""What puts need of their session, as a protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstored.errors import KvstoredError
from kvstored_client.proto.local import Kind


class SessionPort(Protocol):
    """One local session; every method is called on the verbs' loop."""

    @property
    def namespace(self) -> str:
        """The one namespace of the session."""

    def notice(self, kind: Kind, body: bytes, fds: Sequence[int] = ()) -> None:
        """Tell the client, before any later reply. The descriptors stay the caller's."""

    def retire_areas(self, area_ids: list[int]) -> None:
        """Ask the client to unmap these; `Puts.area_retired` is called for each that it did."""

    def fail(self, error: KvstoredError) -> None:
        """End the session: the client has broken the protocol."""

    def charge(self, nbytes: int) -> bool:
        """Keep so many bytes more in place; False, and nothing charged, beyond what it may."""

    def uncharge(self, nbytes: int) -> None:
        """The twin of `charge`."""
