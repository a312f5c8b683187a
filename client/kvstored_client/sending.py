"""The writing side of Put: header, plan, frames, outcome. No I/O."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from kvstored_client.buffers import Regions
from kvstored_client.failures import Failure, GarbageError
from kvstored_client.memory import Cursor, address_of, new_frame
from kvstored_client.objects import ObjectTable
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.results import PutResult, PutState

FRAME_BYTES = 1 << 20


class PutSender:
    """One Put request over objects first_number and on of `regions`; see proto KVStore.Put."""

    def __init__(
        self,
        regions: Regions,
        first_number: int,
        lengths: NDArray[np.int64],
        make_header: Callable[[bool], pb.PutHeader],
    ) -> None:
        """`lengths`: one per object, 0 if not offered. `make_header(announce)`: see `header`."""
        self._regions = regions
        self._first = first_number
        self._lengths = lengths
        self._make_header = make_header
        self._lock = threading.Lock()
        self._stopped = False
        self._payload = Cursor(regions)
        self.wanted_bytes = 0
        """Length of the payload, once the plan is known."""
        self.copied_ahead_bytes = 0
        self._frame_bytes = FRAME_BYTES
        self.states: bytes = b""
        self.planned: bytes = b""

    def header(self, announce: bool = True) -> bytes:
        """See Sender. `announce` False: without checksums, which are then not computed."""
        self.wanted_bytes = self.copied_ahead_bytes = 0
        self.states = self.planned = b""
        return self._make_header(announce).SerializeToString()

    def plan(self, message: bytes) -> None:
        """See Sender."""
        try:
            plan = pb.PutPlan.FromString(message)
        except DecodeError as error:
            raise GarbageError(f"{len(message)} bytes are not a PutPlan") from error
        self._check_states(plan.states, final=False)
        flags = np.frombuffer(plan.states, np.uint8) == pb.WANTED
        wanted = np.flatnonzero(flags)
        lengths = self._lengths[wanted]
        total = int(lengths.sum())
        if total != plan.payload_bytes or not lengths.all():
            raise GarbageError(
                f"the plan wants {plan.payload_bytes} bytes, its objects have {total}"
            )
        if total and not plan.max_frame_bytes:
            raise GarbageError("the plan allows no frames")
        if not (self.copied_ahead_bytes and bool(flags.all())):
            self.copied_ahead_bytes = 0
            self._payload = Cursor(self._regions.select(wanted + self._first, lengths))
        self.wanted_bytes = total
        self._frame_bytes = min(FRAME_BYTES, plan.max_frame_bytes or FRAME_BYTES)
        self.planned = plan.states

    def copy_ahead(self, address: int, nbytes: int) -> None:
        """Before the plan: copy up to `nbytes` of the payload as it will be if everything is
        wanted, which it mostly is. `copied_ahead_bytes` says how many bytes of the payload are in
        place; after `plan` those that count.
        """
        lengths = self._lengths
        nbytes = min(nbytes, int(lengths.sum()))
        if not lengths.all():
            return
        numbers = np.arange(self._first, self._first + len(lengths))
        self._payload = Cursor(self._regions.select(numbers, lengths))
        if self.copy_to(address, nbytes):
            self.copied_ahead_bytes = nbytes

    def frames(self) -> Iterator[bytes]:
        """See Sender. Objects lie back to back; a frame may hold bytes of several."""
        left = self.wanted_bytes
        while left:
            frame = new_frame(min(left, self._frame_bytes))
            if not self.copy_to(address_of(frame), len(frame)):
                return
            left -= len(frame)
            yield frame

    def copy_to(self, address: int, nbytes: int) -> bool:
        """Copy the next `nbytes` of the payload to an address; False, and nothing is read, after
        `stop`. With `frames`, the other way of having the payload.
        """
        # The caller may get its memory back (`stop`) while a transport's thread is in here.
        with self._lock:
            if self._stopped:
                return False
            self._payload.read(address, nbytes)
            return True

    def finish(self, message: bytes) -> None:
        """See Sender."""
        try:
            reply = pb.PutReply.FromString(message)
        except DecodeError as error:
            raise GarbageError(f"{len(message)} bytes are not a PutReply") from error
        self._check_states(reply.states, final=True)
        self.states = reply.states

    def stop(self) -> None:
        """See Sender."""
        with self._lock:
            self._stopped = True

    def _check_states(self, states: bytes, *, final: bool) -> None:
        if len(states) != len(self._lengths):
            raise GarbageError(f"{len(states)} states for {len(self._lengths)} objects")
        if final and pb.WANTED in states:
            raise GarbageError("an object is still wanted in the last answer")


def unconfirmed(states: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """States of a durable put whose last answer has not come: that an object existed is no word on
    its being durable, which is what that answer waits for.
    """
    return np.where(states == int(pb.EXISTED), np.uint8(pb.STORED_NOT_DURABLE), states)


@dataclass(slots=True, eq=False)
class PutReceipt:
    """What a whole put has come to so far; `states`: one PutState per object, 0 if unknown."""

    table: ObjectTable
    states: NDArray[np.uint8]
    offered: NDArray[np.bool_]
    failure: Failure | None = None

    def result(self) -> PutResult:
        """The verb's answer."""
        states = self.states.copy()
        states[~self.offered & (states == 0)] = int(pb.NOT_OFFERED)
        unknown = (states == 0) | (states == int(pb.WANTED))
        states[unknown] = self.failure.put_state() if self.failure else int(pb.REFUSED_UNREACHABLE)
        table = states.reshape(self.table.chunks, len(self.table.parts))
        outcomes = tuple(PutState(int(row[np.argmax(_RANK[row])])) for row in table)
        kinds = [state.outcome for state in outcomes]
        reason = next((state.reason for state in outcomes if state.reason), "")
        if self.failure and unknown.any():
            reason = self.failure.reason
        return PutResult(
            objects=table,
            outcomes=outcomes,
            stored=kinds.count("stored"),
            existed=kinds.count("existed"),
            refused=kinds.count("refused"),
            reason=reason,
            detail=self.failure.detail if self.failure else "",
        )


def _ranks() -> NDArray[np.uint8]:
    """How much a state decides of its chunk's outcome: the highest does."""
    order = {"not_offered": 0, "existed": 1, "stored": 2, "refused": 4}
    ranks = [order[PutState(value).outcome] for value in range(256)]
    ranks[PutState.STORED_NOT_DURABLE] = 3
    return np.array(ranks, np.uint8)


_RANK = _ranks()
