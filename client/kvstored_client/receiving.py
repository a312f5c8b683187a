"""The reading side of Get: block heads, raw frames, scattering, verification. No I/O.

Per frame: one hash update and one copy into the caller's memory, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from kvstored_client.buffers import Regions
from kvstored_client.failures import Failure, GarbageError
from kvstored_client.fragments import LARGE_BYTES, PIECE_BYTES, joined, move, move_in_order
from kvstored_client.memory import Cursor, address_of
from kvstored_client.objects import Cut, ObjectTable
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.results import GetResult, States, tier_name

_CHECKSUM_BYTES = 16
_LAST_TIER = int(pb.TIER_OBJECT)
_HELD_STOP = int(pb.NOT_NEEDED)  # states from 1 up to here are held, NOT_NEEDED itself too


@dataclass(slots=True, eq=False)
class Receipt:
    """What a whole get has brought so far, over all its requests.

    Per object: `lengths` of verified bytes and `tiers`. Per chunk: `states`, 0 where nothing is
    known yet, and `corrupt`.
    """

    table: ObjectTable
    regions: Regions
    lengths: NDArray[np.int64]
    tiers: NDArray[np.uint8]
    states: bytearray
    corrupt: set[int]
    failure: Failure | None = None

    @classmethod
    def empty(cls, table: ObjectTable, regions: Regions) -> Receipt:
        """Nothing has come."""
        objects = len(table.want)
        return cls(
            table,
            regions,
            np.zeros(objects, np.int64),
            np.zeros(objects, np.uint8),
            bytearray(table.chunks),
            set(),
        )

    def merge_states(self, first: int, states: bytes) -> None:
        """Take the daemon's states of chunks from `first` on. A chunk may be part of several
        requests, with other parts; the worst state counts.
        """
        known = np.frombuffer(self.states, np.uint8)[first : first + len(states)]
        said = np.frombuffer(states, np.uint8)
        silent = int(pb.NOT_NEEDED)
        take = (known == 0) | (known == silent) | ((said != silent) & (said > known))
        known[take] = said[take]

    def _is_whole(self) -> bool:
        """Whether every object of every chunk is there, and nobody says otherwise: the usual case,
        for which nothing has to be worked out.
        """
        table = self.table
        return (
            self.failure is None
            and not self.corrupt
            and len(table.want) == table.chunks * len(table.parts)
            and min(self.states, default=0) > 0
            and max(self.states) <= _LAST_TIER
            and bool(self.lengths.all())
        )

    def result(self) -> GetResult:
        """The verb's answer."""
        if self._is_whole():
            chunks = self.table.chunks
            everything = np.ones(chunks, np.bool_)
            said = States(bytes(self.states))
            return GetResult(chunks, everything, said, self.lengths, self._by_tier())
        boundary, whole = self.table.usable(self.lengths > 0)
        states = self._final_states(whole)
        held = (states != 0) & (states <= _HELD_STOP)
        whole &= held
        packed = States(states.tobytes())
        if not held.all() and not self.failure:
            reason = packed.first_reason()
        else:
            reason = self.failure.reason if self.failure and not whole.all() else ""
        return GetResult(
            chunks=min(boundary, _leading(held)),
            ok=whole,
            states=packed,
            lengths=self.lengths,
            bytes_by_tier=self._by_tier(),
            reason=reason,
            detail=self.failure.detail if self.failure else "",
        )

    def _by_tier(self) -> dict[str, int]:
        """Bytes that came, by the name of the tier they came from."""
        found = {}
        for kind in range(1, _LAST_TIER + 1):
            mine = self.tiers == kind
            if mine.any():
                found[tier_name(kind)] = int(self.lengths[mine].sum())
        return found

    def _final_states(self, whole: NDArray[np.bool_]) -> NDArray[np.uint8]:
        """What the daemon said, corrected by what came. Bytes decide, not words."""
        states = np.frombuffer(bytes(self.states), np.uint8).copy()
        needs_any = self.table.needed.any(axis=1)
        states[~needs_any] = int(pb.NOT_NEEDED)
        slowest = np.zeros(self.table.needed.shape, np.uint8)
        slowest[self.table.needed] = self.tiers
        unsaid = (states == 0) & whole
        states[unsaid] = slowest.max(axis=1, initial=0)[unsaid]
        claims = (states == 0) | (states <= _HELD_STOP)
        unusable = self.failure.chunk_state() if self.failure else int(pb.MISS_UNREACHABLE)
        states[claims & ~whole] = unusable
        for chunk in self.corrupt:
            states[chunk] = int(pb.MISS_CORRUPT)
        return states


def _leading(flags: NDArray[np.bool_]) -> int:
    return len(flags) if flags.all() else int(np.argmin(flags))


class GetReceiver:
    """Takes the messages of one Get request; see proto KVStore.Get for their order."""

    def __init__(self, receipt: Receipt, cut: Cut) -> None:
        self._receipt = receipt
        self._cut = cut
        self._first_chunk = cut.start - receipt.table.start
        self._numbers = receipt.table.numbers(cut)
        self._cursor = Cursor(receipt.regions)
        self.restart()

    def restart(self) -> None:
        """See Receiver."""
        self.done = False
        self._last_block = False
        self._next_index = 0
        self._objects: list[pb.GetObject] = []
        self._at = 0  # object of the block whose bytes come next
        self._block_left = 0
        self._object_left = 0
        self._hash = xxhash.xxh3_128()

    def feed(self, message: bytes) -> None:
        """See Receiver."""
        if self.done:
            raise GarbageError("more came after the last block")
        if self._block_left:
            self._take_payload(message)
        else:
            self._take_head(message)
        if self._last_block and not self._block_left:
            self.done = True

    def take_rows(
        self,
        indices: Sequence[int] | NDArray[np.int64],
        addresses: NDArray[np.int64],
        lengths: Sequence[int] | NDArray[np.int64],
        checksums: bytes,
        tiers: bytes,
        stop: Callable[[], bool],
    ) -> bool:
        """Copy whole objects from mapped memory to where they belong; all of shape [rows].

        `addresses` are read until this returns. `checksums` are 16 bytes a row: the daemon's word
        for bytes that it has verified. Looks at `stop` at least every 8 MiB; False if it said so:
        rows copied whole before count. Raises GarbageError, with nothing copied, for rows that were
        not asked for, come twice, out of order or with a length that their part does not allow.
        """
        if self.done:
            raise GarbageError("more came after the last answer")
        nbytes = np.asarray(lengths, np.int64)
        numbers = self._check_rows(np.asarray(indices, np.int64), nbytes)
        if not len(checksums) == _CHECKSUM_BYTES * len(numbers) == _CHECKSUM_BYTES * len(tiers):
            raise GarbageError(f"{len(numbers)} rows come without as many checksums and tiers")
        receipt = self._receipt
        receipt.lengths[numbers] = 0  # if the step is run again, what was there is undone
        kinds = np.frombuffer(tiers, np.uint8)
        kinds = np.where((kinds >= 1) & (kinds <= _LAST_TIER), kinds, 0)
        targets = receipt.regions.select(numbers, nbytes)
        if len(numbers) and int(targets.lengths.min(initial=LARGE_BYTES)) >= LARGE_BYTES:
            moved = move_in_order(*joined(*_stretches(addresses, targets)), stop)
            whole = int(np.searchsorted(np.cumsum(nbytes), moved, "right"))
            receipt.lengths[numbers[:whole]] = nbytes[:whole]
            receipt.tiers[numbers[:whole]] = kinds[:whole]
            return whole == len(numbers)
        for rows in _batches(nbytes):
            targets = receipt.regions.select(numbers[rows], nbytes[rows])
            if not move(*_stretches(addresses[rows], targets), stop):
                return False
            receipt.lengths[numbers[rows]] = nbytes[rows]
            receipt.tiers[numbers[rows]] = kinds[rows]
        return True

    def _check_rows(
        self, indices: NDArray[np.int64], nbytes: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The objects' numbers. Raises GarbageError."""
        if len(nbytes) != len(indices):
            raise GarbageError(f"{len(indices)} rows come with {len(nbytes)} lengths")
        if not len(indices):
            return indices
        if indices[0] < self._next_index or (np.diff(indices) <= 0).any():
            raise GarbageError("objects are out of order")
        if indices[-1] >= len(self._numbers):
            raise GarbageError(f"object {indices[-1]} was not asked for")
        numbers = np.asarray(self._numbers, np.int64)[indices]
        if (numbers < 0).any():
            raise GarbageError("an object that is not needed was not asked for")
        want = self._receipt.table.want
        most = want.nbytes[numbers]
        wrong = (nbytes != most) & (want.exact[numbers] | (nbytes <= 0) | (nbytes > most))
        if wrong.any():
            i = int(np.argmax(wrong))
            name = want.names[int(numbers[i])]
            raise GarbageError(f"{name} comes with {nbytes[i]} bytes instead of {most[i]}")
        self._next_index = int(indices[-1]) + 1
        return numbers

    def finish(self, states: bytes) -> None:
        """The last answer came: one state per chunk of the request. Raises GarbageError."""
        if self.done:
            raise GarbageError("more came after the last answer")
        self._take_states(states)
        self.done = True

    def _take_head(self, message: bytes) -> None:
        try:
            block = pb.GetBlock.FromString(message)
        except DecodeError as error:
            raise GarbageError(f"{len(message)} bytes are not a GetBlock") from error
        total = 0
        for item in block.objects:
            self._check_object(item)
            total += item.length_bytes
        if total != block.payload_bytes:
            raise GarbageError(f"a block of {total} bytes announces {block.payload_bytes}")
        if block.last:
            self._take_states(block.states)
        self._objects = list(block.objects)
        self._block_left = total
        self._at = 0
        self._last_block = block.last
        if self._objects:
            self._open_object()

    def _check_object(self, item: pb.GetObject) -> None:
        index = item.index
        if not self._next_index <= index < len(self._numbers):
            raise GarbageError(f"object {index} is out of order or was not asked for")
        self._next_index = index + 1
        number = self._numbers[index]
        want = self._receipt.table.want
        if number < 0:
            raise GarbageError(f"object {index} is not needed and was not asked for")
        most = int(want.nbytes[number])
        if item.length_bytes != most and (want.exact[number] or not 0 < item.length_bytes < most):
            raise GarbageError(
                f"{want.names[number]} comes with {item.length_bytes} bytes instead of {most}"
            )
        if len(item.checksum) != _CHECKSUM_BYTES:
            raise GarbageError(f"object {index} comes without its checksum")

    def _take_states(self, states: bytes) -> None:
        count = self._cut.stop - self._cut.start
        if len(states) != count:
            raise GarbageError(f"{len(states)} states for {count} chunks")
        self._receipt.merge_states(self._first_chunk, states)

    def _open_object(self) -> None:
        item = self._objects[self._at]
        number = self._numbers[item.index]
        self._object_left = item.length_bytes
        self._receipt.lengths[number] = 0  # if the step is run again, what was verified is undone
        self._cursor.seek(number)
        self._hash = xxhash.xxh3_128()

    def _take_payload(self, frame: bytes) -> None:
        nbytes = len(frame)
        if not 0 < nbytes <= self._block_left:
            raise GarbageError(f"a frame of {nbytes} bytes where {self._block_left} are left")
        if nbytes <= self._object_left:  # the usual frame: no view, no address, no second step
            self._hash.update(frame)
            self._cursor.write_bytes(frame)
            self._block_left -= nbytes
            self._object_left -= nbytes
            if not self._object_left:
                self._close_object()
            return
        source = address_of(frame)
        at = 0
        while at < nbytes:
            count = min(nbytes - at, self._object_left)
            self._hash.update(frame if count == nbytes else memoryview(frame)[at : at + count])
            self._cursor.write(source + at, count)
            at += count
            self._object_left -= count
            self._block_left -= count
            if not self._object_left:
                self._close_object()

    def _close_object(self) -> None:
        item = self._objects[self._at]
        number = self._numbers[item.index]
        receipt = self._receipt
        if self._hash.digest() == item.checksum:
            receipt.lengths[number] = item.length_bytes
            receipt.tiers[number] = item.tier if item.tier in (1, 2, 3) else 0
        else:
            receipt.lengths[number] = 0
            receipt.corrupt.add(self._first_chunk + item.index // len(self._cut.parts))
        self._at += 1
        if self._at < len(self._objects):
            self._open_object()


def _batches(nbytes: NDArray[np.int64]) -> Iterator[slice]:
    """Rows cut so that each slice is about as much as is copied between two looks at `stop`."""
    ends = np.cumsum(nbytes)
    begin = done = 0
    while begin < len(nbytes):
        end = max(begin + 1, int(np.searchsorted(ends, done + PIECE_BYTES, "right")))
        yield slice(begin, end)
        begin, done = end, int(ends[end - 1])


def _stretches(
    addresses: NDArray[np.int64], targets: Regions
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(targets, sources, lengths) for `move`: object i at `addresses[i]` goes to object i."""
    lengths = targets.lengths
    if len(lengths) == len(addresses):  # one stretch each
        return targets.addresses, addresses, lengths
    counts = np.diff(targets.first)
    running = np.cumsum(lengths) - lengths
    offsets = running - np.repeat(running[targets.first[:-1]], counts)
    return targets.addresses, np.repeat(addresses, counts) + offsets, lengths
