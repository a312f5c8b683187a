"""What the daemon has lent under one id, and the objects that keep it lent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import getpid

import numpy as np
from numpy.typing import NDArray

from kvstored_client.local.link import Link
from kvstored_client.local.segments import Mapping
from kvstored_client.local.wake import Released
from kvstored_client.proto import kvstore_pb2 as pb


class Grant:
    """One id: a lease, a hold or a reservation. Ends with `end`, or when the last who refers to it
    is gone, in any thread; in a forked child it is nobody's to end.
    """

    __slots__ = ("__weakref__", "_open", "_pid", "id", "link", "mappings")

    def __init__(self, link: Link) -> None:
        self._pid = getpid()
        self.link = link
        self.mappings: list[Mapping] = []
        self.id = 0
        self._open = True
        link.lend(self)

    @property
    def of_this_process(self) -> bool:
        """False in a forked child, where the memory is not mapped."""
        return getpid() == self._pid

    @property
    def open(self) -> bool:
        """Whether it has not been given back."""
        return self._open

    def end(self) -> None:
        """Give it back, once. What was lent may be something else from now on."""
        end_all([self])

    def __del__(
        self, getpid: Callable[[], int] = getpid, released: Callable[[int], Released] = Released
    ) -> None:
        # A finaliser may run within any statement of any thread: it takes no lock.
        if getattr(self, "_open", False) and getpid() == self._pid:
            self.link.outbox.post(released(self.id))


def end_all(grants: Sequence[Grant]) -> None:
    """`end` several, of one session, by one word."""
    mine = [grant for grant in grants if grant._open and grant.of_this_process]
    if mine:
        for grant in mine:
            grant.mappings = []
        mine[0].link.release([grant.id for grant in mine])
        for grant in mine:
            grant._open = False  # last: should a signal's exception come between, see __del__


class Extent:
    """Memory of one lent object, as numpy takes it: whatever is made from it keeps the grant."""

    __slots__ = ("__array_interface__", "__weakref__", "grant")

    def __init__(self, grant: Grant, address: int, nbytes: int, *, writable: bool) -> None:
        self.grant = grant
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, not writable),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Granted:
    """The answer of an Acquire: columns of shape [rows], and the chunks' states."""

    grant: Grant
    indices: NDArray[np.int64]
    addresses: NDArray[np.int64]
    lengths: NDArray[np.int64]
    tiers: NDArray[np.uint8]
    states: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The answer of a Match that holds."""

    grant: Grant
    reply: pb.MatchReply


@dataclass(frozen=True, slots=True, eq=False)
class Reserved:
    """The answer of a Reserve: one address (0: not wanted) and one PutState per object."""

    grant: Grant
    addresses: NDArray[np.int64]
    states: bytes
