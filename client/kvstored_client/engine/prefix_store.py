"""What an engine needs of a KVClient, and what it reads of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstored_client.identity import Prefix

Buffers = Sequence[NDArray[np.uint8]]


class Keeper(Protocol):
    """What keeps matched chunks from eviction."""

    def release(self) -> None:
        """Until now."""


class Matched(Protocol):
    """What is read of KVClient.match's answer."""

    @property
    def chunks(self) -> int:
        """Leading chunks that are held."""

    @property
    def eta_ms(self) -> float:
        """How long a get of them would take."""

    @property
    def reason(self) -> str:
        """Why not more of them are; "" where all are."""

    @property
    def hold(self) -> Keeper | None:
        """Keeps them meanwhile, where that can be."""


class Got(Protocol):
    """What is read of KVClient.get's answer."""

    @property
    def chunks(self) -> int:
        """Leading chunks that came whole, counted from `start`."""

    @property
    def bytes_by_tier(self) -> Mapping[str, int]:
        """Where they came from, in bytes."""

    @property
    def reason(self) -> str:
        """Why not more of them came; "" where all did."""


class PutDone(Protocol):
    """What is read of KVClient.put's answer."""

    @property
    def stored(self) -> int:
        """Chunks that are now held and were not before."""

    @property
    def refused(self) -> int:
        """Chunks that the store did not take."""

    @property
    def reason(self) -> str:
        """Why not; "" where it has all."""


class PrefixStore(Protocol):
    """The three verbs of KVClient that an engine needs; see there. Buffers are one block each."""

    def match(self, prefix: Prefix, *, hold: bool, timeout_s: float, tenant: str) -> Matched:
        """Say how many leading chunks of `prefix` are held."""

    def get(
        self, prefix: Prefix, into: Buffers, start: int, stop: int, *, timeout_s: float, tenant: str
    ) -> Got:
        """Write chunks [start, stop) into the buffers, one each, and nothing once it returned."""

    def put(self, prefix: Prefix, views: Buffers, start: int, *, tenant: str) -> PutDone:
        """Offer chunks from `start` on, one buffer each."""
