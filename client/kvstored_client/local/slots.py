"""Reserved memory of the daemon's, to be written in place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kvstored_client.errors import LeaseEndedError, NotLeasedError
from kvstored_client.local.grants import Extent, Grant
from kvstored_client.local.lease import check_process, object_number
from kvstored_client.objects import Cut, ObjectTable
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.results import PutResult, PutState
from kvstored_client.sending import PutReceipt


class Slots:
    """Room for chunks of a prefix, to be filled and committed: one copy less than a put.

    `slots[i]` is chunk i from `start` on; `slots[i, part]` one part of it: a writable memoryview.
    Nothing is readable by anyone before `commit`. What is not committed by the end of `with`, or
    when the slots are dropped, is given up. Do not write after either: the memory belongs to the
    next reservation of this client then. (Plain views raise ValueError; arrays made from them
    cannot.)

    `states`: one PutState per object, shape [chunks, parts]: 0 for those with a slot; the others
    are settled (`EXISTED`, refused, with `reason` and `detail`).
    """

    def __init__(
        self,
        receipt: PutReceipt,
        lengths: NDArray[np.int64],
        reservations: list[tuple[Cut, Grant]],
        addresses: NDArray[np.int64],
        commit: Callable[[Slots, list[tuple[Cut, Grant]], NDArray[np.bool_], str], PutResult],
    ) -> None:
        """Per object: its length and its address, 0 where there is none to be written."""
        self.receipt = receipt
        self._table: ObjectTable = receipt.table
        self._lengths = lengths
        self._reservations: list[tuple[Cut, Grant]] | None = reservations
        self._addresses = addresses
        self._commit = commit
        self._lock = threading.Lock()
        self._views: list[memoryview] = []

    @property
    def states(self) -> NDArray[np.uint8]:
        """See the class."""
        states = self.receipt.states.copy()
        states[states == int(pb.WANTED)] = 0
        return states.reshape(self._table.chunks, len(self._table.parts))

    @property
    def reason(self) -> str:
        """Why the first object that has no slot has none: a word, "" if all have one or exist."""
        failure = self.receipt.failure
        if failure is not None:
            return failure.reason
        return next((r for s in np.unique(self.states) if s and (r := PutState(int(s)).reason)), "")

    @property
    def detail(self) -> str:
        """A sentence about `reason`, where there is more to say."""
        failure = self.receipt.failure
        return failure.detail if failure is not None else ""

    @property
    def wanted(self) -> list[int]:
        """The chunks that have a slot, for one part at least: what is left to be computed."""
        has = self._addresses.reshape(self._table.chunks, len(self._table.parts)) != 0
        return [int(chunk) for chunk in np.flatnonzero(has.any(axis=1))]

    def __len__(self) -> int:
        return self._table.chunks

    def __repr__(self) -> str:
        state = "ended" if self._reservations is None else f"{len(self.wanted)} to write"
        return f"<Slots of {self._table.chunks} chunks: {state}>"

    def __getitem__(self, index: int | tuple[int, str]) -> memoryview:
        chunk, part = index if isinstance(index, tuple) else (index, None)
        number = object_number(self._table, chunk, part)
        with self._lock:
            if self._reservations is None:
                raise LeaseEndedError("the slots were committed or given up")
            address = int(self._addresses[number])
            if not address:
                raise NotLeasedError(f"{self._table.want.names[number]} has no slot")
            grant = self._owner(number)
            check_process(grant)
            extent = Extent(grant, address, int(self._lengths[number]), writable=True)
            array: NDArray[np.uint8] = np.asarray(extent)
            view = array.data
            self._views.append(view)
        return view

    def _owner(self, number: int) -> Grant:
        width = len(self._table.parts)
        chunk = self._table.start + number // width
        for cut, grant in self._reservations or ():
            if cut.start <= chunk < cut.stop:
                return grant
        raise NotLeasedError(f"{self._table.want.names[number]} has no slot")

    def commit(
        self, indices: Sequence[int] | None = None, durability: str = "accepted"
    ) -> PutResult:
        """Store what was written: chunks `indices`, counted from `start`; None: all. Once.

        The others are given up. `durability` and the deadline are as for `put`: that of the
        client's Timeouts, from now on. Raises LeaseEndedError (in a forked child too),
        NotLeasedError (an index out of range) and OptionError; what else goes wrong is in it.
        """
        chosen = np.ones(self._table.chunks, np.bool_)
        if indices is not None:
            chosen[:] = False
            for index in indices:
                if not 0 <= index < self._table.chunks:
                    raise NotLeasedError(f"chunk {index} of {self._table.chunks}")
                chosen[index] = True
        for _, grant in self._reservations or ():
            check_process(grant)
        wanted = np.repeat(chosen, len(self._table.parts)) & (self._addresses != 0)
        return self._commit(self, self.take_all(), wanted, durability)

    def take_all(self) -> list[tuple[Cut, Grant]]:
        """End the use of the slots; the reservations. Raises LeaseEndedError."""
        with self._lock:
            if self._reservations is None:
                raise LeaseEndedError("the slots were committed or given up")
            taken, self._reservations = self._reservations, None
            for view in self._views:
                with contextlib.suppress(BufferError):  # something was made from it
                    view.release()
            self._views = []
        return taken

    def release(self) -> None:
        """Give up what was not committed. Again: nothing."""
        with contextlib.suppress(LeaseEndedError):
            for _, grant in self.take_all():
                grant.end()

    def __enter__(self) -> Slots:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
