"""Leases and holds as the caller has them, and the views of leased memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvstored_client.errors import LeaseEndedError, LeaseInUseError, NotLeasedError
from kvstored_client.local.grants import Extent, Grant
from kvstored_client.objects import ObjectTable
from kvstored_client.results import States, tier_name


@dataclass(slots=True, eq=False)
class Contents:
    """Per object of `table`, shape [objects]: length, TierKind, address (0: not leased), and the
    number of its grant in `grants`.
    """

    table: ObjectTable
    lengths: NDArray[np.int64]
    tiers: NDArray[np.uint8]
    grants: list[Grant]
    addresses: NDArray[np.int64]
    owners: NDArray[np.int64]


class Lease:
    """Chunks of a prefix in the daemon's own memory, readable in place until the lease ends.

    `lease[i]` is chunk i from `start` on; `lease[i, part]` one part of it, where there are several:
    a read-only memoryview, made when it is asked for. numpy arrays, memoryviews and tensors made
    from a view keep the lease; it ends when it was released or dropped *and* the last of them is
    gone. `with` releases at its end.

    `chunks` (and `len`): how many leading chunks can be used, as GetResult.chunks. `states`: one
    per chunk. `reason`, `detail`: why it ends there; reason
    "not_local" if the daemon is not on this node. A lease is its process's own: in a forked child
    there is nothing at these addresses.
    """

    def __init__(
        self, contents: Contents, chunks: int, states: States, reason: str = "", detail: str = ""
    ) -> None:
        self.chunks = chunks
        self.states = states
        self.reason = reason
        self.detail = detail
        self._contents = contents
        self._grants: list[Grant] | None = contents.grants
        self._lock = threading.Lock()
        self._views: dict[int, weakref.ref[Extent]] = {}

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes by the tier that they came from for this lease, by name."""
        tiers, lengths = self._contents.tiers, self._contents.lengths
        kinds = (kind for kind in np.unique(tiers[lengths > 0]).tolist() if tier_name(kind))
        return {tier_name(kind): int(lengths[tiers == kind].sum()) for kind in kinds}

    def __len__(self) -> int:
        return self.chunks

    def __iter__(self) -> Iterator[memoryview]:
        for chunk in range(self.chunks):
            yield self[chunk]

    def __getitem__(self, index: int | tuple[int, str]) -> memoryview:
        chunk, part = index if isinstance(index, tuple) else (index, None)
        return self._bytes(chunk, part).data

    def array(
        self,
        chunk: int,
        part: str | None = None,
        dtype: DTypeLike = np.uint8,
        shape: tuple[int, ...] | None = None,
    ) -> NDArray[np.generic]:
        """One object as a read-only array. `part` None: the only one; `shape` None: flat.

        Raises NotLeasedError, LeaseEndedError, and ValueError if dtype and shape do not fit.
        """
        flat = self._bytes(chunk, part).view(dtype)
        return flat if shape is None else flat.reshape(shape)

    def _bytes(self, chunk: int, part: str | None) -> NDArray[np.uint8]:
        contents = self._contents
        number = object_number(contents.table, chunk, part)
        with self._lock:
            if self._grants is None:
                raise LeaseEndedError("the lease was released")
            address = int(contents.addresses[number])
            if not address:
                raise NotLeasedError(f"{contents.table.want.names[number]} is not held")
            known = self._views.get(number)
            extent = known() if known is not None else None
            if extent is None:
                grant = self._grants[int(contents.owners[number])]
                check_process(grant)
                extent = Extent(grant, address, int(contents.lengths[number]), writable=False)
                self._views[number] = weakref.ref(extent)
        return np.asarray(extent)

    def release(self) -> None:
        """Give everything back. Again: nothing.

        Raises LeaseInUseError, with nothing given back, while views live: what they look at may be
        something else afterwards.
        """
        with self._lock:
            if self._grants is None:
                return
            live = self._live()
            if live:
                raise LeaseInUseError(
                    f"{live} objects of the lease are being looked at",
                    "drop the views, and arrays made from them, first",
                )
            grants = self._take_grants()
        for grant in grants:
            grant.end()

    def _take_grants(self) -> list[Grant]:
        grants, self._grants = self._grants or [], None
        self._contents.grants = []  # so that views alone keep them
        return grants

    def _live(self) -> int:
        return sum(view() is not None for view in self._views.values())

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            grants = self._take_grants()
            live = self._live()
        if not live:
            for grant in grants:
                grant.end()
        # Else the views have the grants, which end with the last of them.

    def __repr__(self) -> str:
        state = "released" if self._grants is None else f"{self.chunks} chunks"
        return f"<Lease of {self._contents.table.prefix!r}: {state}>"


class Hold:
    """What a match found is protected from eviction, in whatever tier, until it is acquired, or the
    hold is released or dropped. A delete is not held up by it.
    """

    def __init__(self, grants: list[Grant]) -> None:
        self._grants = grants

    def release(self) -> None:
        """End the protection. Again: nothing."""
        for grant in self._grants:
            grant.end()

    def __repr__(self) -> str:
        return f"<Hold: {sum(grant.open for grant in self._grants)} of {len(self._grants)} live>"

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def object_number(table: ObjectTable, chunk: int, part: str | None) -> int:
    """The number of an object that a caller names. Raises NotLeasedError."""
    column = 0
    if part is not None:
        names = [each.name for each in table.parts]
        if part not in names:
            raise NotLeasedError(f"part {part!r} is not of this lease", f"it has {names}")
        column = names.index(part)
    elif len(table.parts) != 1:
        raise NotLeasedError("a chunk has several parts here", "name one: lease[chunk, part]")
    if not 0 <= chunk < table.chunks:
        raise NotLeasedError(f"chunk {chunk} of {table.chunks}", "they count from `start`")
    number = int(table.number[chunk, column])
    if number < 0:
        raise NotLeasedError(f"chunk {chunk} is not needed for resuming where the lease ends")
    return number


def check_process(grant: Grant) -> None:
    """Raises LeaseEndedError in a forked child of the process that acquired."""
    if not grant.of_this_process:
        raise LeaseEndedError(
            "the lease is of the process that this one was forked from", "acquire here"
        )
