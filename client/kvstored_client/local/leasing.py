"""From the answers of Acquire to a lease: what came is checked against what was asked for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstored_client.buffers import Regions
from kvstored_client.failures import Failure, GarbageError
from kvstored_client.local.grants import Grant, Granted
from kvstored_client.local.lease import Contents, Lease
from kvstored_client.objects import Cut, ObjectTable
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.receiving import Receipt
from kvstored_client.results import States

_NOWHERE = Regions(
    np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(0, np.int64), []
)
_SLOWEST_TIER = int(pb.TIER_OBJECT)


class Leasing:
    """What a whole acquire has brought so far, over all its requests."""

    def __init__(self, table: ObjectTable) -> None:
        objects = len(table.want)
        self.failure: Failure | None = None
        self.grants: list[Grant] = []
        self._table = table
        self._lengths = np.zeros(objects, np.int64)
        self._tiers = np.zeros(objects, np.uint8)
        self._addresses = np.zeros(objects, np.int64)
        self._owners = np.zeros(objects, np.int64)
        self._answers: list[tuple[int, bytes]] = []

    def take(self, cut: Cut, granted: Granted) -> Failure | None:
        """Note the answer to one request; a Failure, and nothing is leased, if it does not fit."""
        try:
            numbers = self._numbers(cut, granted)
        except GarbageError as error:
            granted.grant.end()
            failure = error.failure()
            granted.grant.link.end(failure)  # what else it says is not to be trusted either
            return failure
        self._lengths[numbers] = granted.lengths
        self._tiers[numbers] = granted.tiers
        self._addresses[numbers] = granted.addresses
        self._owners[numbers] = len(self.grants)
        self.grants.append(granted.grant)
        self._answers.append((cut.start - self._table.start, granted.states))
        return None

    def _numbers(self, cut: Cut, granted: Granted) -> NDArray[np.int64] | slice:
        """Which objects of the table the rows are. Raises GarbageError."""
        table, indices = self._table, granted.indices
        count = cut.stop - cut.start
        if len(granted.states) != count:
            raise GarbageError(f"{len(granted.states)} states for {count} chunks")
        width = len(cut.parts)
        rising = not len(indices) or (
            indices[-1] < count * width and bool((indices[1:] > indices[:-1]).all())
        )
        if not rising:
            raise GarbageError("leased objects are out of order or were not asked for")
        whole = len(indices) == count * width == len(table.want)
        numbers: NDArray[np.int64] | slice = slice(None)
        if not whole:
            numbers = np.asarray(table.numbers(cut), np.int64)[indices]
            if (numbers < 0).any():
                raise GarbageError("an object that is not needed was not asked for")
        most, lengths = table.want.nbytes[numbers], granted.lengths
        if (lengths != most).any():
            exact = table.want.exact[numbers]
            if ((lengths > most) | (exact & (lengths != most))).any():
                raise GarbageError("a leased object has another length than its part declares")
        return numbers

    def _is_whole(self) -> bool:
        """Whether every object of every chunk is there, as one answer says: the usual case, for
        which nothing has to be worked out.
        """
        table = self._table
        if self.failure is not None or len(self._answers) != 1:
            return False
        states = self._answers[0][1]
        if len(states) != table.chunks or len(table.want) != table.chunks * len(table.parts):
            return False
        return min(states) > 0 and max(states) <= _SLOWEST_TIER and bool(self._addresses.all())

    def lease(self) -> Lease:
        """The verb's answer."""
        contents = Contents(
            self._table, self._lengths, self._tiers, self.grants, self._addresses, self._owners
        )
        if self._is_whole():
            return Lease(contents, self._table.chunks, States(self._answers[0][1]))
        receipt = Receipt.empty(self._table, _NOWHERE)
        receipt.lengths = self._lengths
        receipt.tiers = np.where(self._tiers <= _SLOWEST_TIER, self._tiers, 0).astype(np.uint8)
        receipt.failure = self.failure
        for first, answer in self._answers:
            receipt.merge_states(first, answer)
        result = receipt.result()
        return Lease(contents, result.chunks, result.states, result.reason, result.detail)
