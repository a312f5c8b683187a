"""What one session keeps in place, under the ids that its client chose, and how much it may.

No I/O; belongs to the verbs' loop. docs/protocol.md, "Acquire and Release".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstored.errors import BadRequest, ResourceExhausted
from kvstored.store.api import Leased
from kvstored_client.identity import KEY_BYTES
from kvstored_client.proto import kvstore_pb2 as pb

MAX_HELD_KEYS = 65_536
"""Of one session's holds: chunks below RAM cost a session no bytes, but they too cannot go."""


class LeaseStore(Protocol):
    """What leases need of the store."""

    def release(self, places: NDArray[np.int64]) -> None:
        """End leases."""

    def unhold(self, namespace: str, keys: Iterable[bytes]) -> None:
        """End holds."""


@dataclass(slots=True)
class Share:
    """Bytes that many sessions keep in place together, and how many they may: those of one
    namespace, within `whole`, those of all.
    """

    cap_bytes: int
    used_bytes: int = 0
    whole: Share | None = None

    @property
    def room_bytes(self) -> int:
        """How much more may be added."""
        room = self.cap_bytes - self.used_bytes
        return room if self.whole is None else min(room, self.whole.room_bytes)

    def add(self, nbytes: int) -> None:
        """Keep so much more, or less."""
        self.used_bytes += nbytes
        if self.whole is not None:
            self.whole.add(nbytes)


class Budget:
    """Bytes that one session keeps in place, within its own cap and its namespace's share."""

    def __init__(self, share: Share, cap_bytes: int) -> None:
        self._share = share
        self.cap_bytes = cap_bytes
        self.used_bytes = 0

    @property
    def room_bytes(self) -> int:
        """How much more `charge` would take."""
        return max(0, min(self.cap_bytes - self.used_bytes, self._share.room_bytes))

    def charge(self, nbytes: int) -> bool:
        """Keep so much more; False, and nothing charged, beyond either bound."""
        if nbytes > self.room_bytes:
            return False
        self.used_bytes += nbytes
        self._share.add(nbytes)
        return True

    def uncharge(self, nbytes: int) -> None:
        """Keep so much less."""
        self.used_bytes -= nbytes
        self._share.add(-nbytes)


class Grants:
    """What one Acquire was granted, and is still being granted while `stop` is there."""

    __slots__ = ("charged_bytes", "places", "released", "stop")

    def __init__(self) -> None:
        self.places: list[NDArray[np.int64]] = []
        self.charged_bytes = 0  # of `places`, and of what is being acquired for them
        self.released = False
        self.stop: Callable[[], None] | None = None


class _Hold:
    """Keys of one Match. Each weighs the same share of what the chunks take up in RAM."""

    __slots__ = ("each_bytes", "ended", "hold_id", "keys", "lent")

    def __init__(self, hold_id: int, keys: Iterable[bytes], each_bytes: int) -> None:
        self.hold_id = hold_id
        self.keys = set(keys)
        self.each_bytes = each_bytes
        self.lent = 0  # keys that an Acquire under way may take over
        self.ended = False


def _unpacked(packed: bytes) -> list[bytes]:
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


@dataclass(slots=True)
class Loan:
    """Held keys that an Acquire under way may take over. Their bytes are not charged meanwhile:
    they are about to be charged to the lease.
    """

    keys: dict[bytes, _Hold] = field(default_factory=dict)


class Leases:
    """The lease, hold and reservation ids of one session."""

    def __init__(self, store: LeaseStore, namespace: str, budget: Budget, max_ids: int) -> None:
        self._store = store
        self._namespace = namespace
        self._max_ids = max_ids
        self._grants: dict[int, Grants] = {}
        self._holds: dict[int, _Hold] = {}
        self._reservations: dict[int, Callable[[], None]] = {}
        self._holders: dict[bytes, dict[_Hold, None]] = {}  # by key, in order
        self._held_keys = 0
        self.budget = budget

    def __len__(self) -> int:
        return len(self._grants) + len(self._holds) + len(self._reservations)

    def check_new(self, lease_id: int) -> None:
        """Raise BadRequest unless the id is free, ResourceExhausted when all are taken."""
        if not lease_id:
            raise BadRequest("the id is 0", "choose an id that the session does not use yet")
        for ids in (self._grants, self._holds, self._reservations):
            if lease_id in ids:
                raise BadRequest(
                    f"the id {lease_id} is in use", "choose an id that the session does not use yet"
                )
        if len(self) >= self._max_ids:
            raise ResourceExhausted(
                f"the session uses {len(self)} ids, which is its limit", "release some"
            )

    # ---- leases ----------------------------------------------------------------------------------

    def begin(self, lease_id: int) -> Grants:
        """Take an id for an Acquire; see `check_new`."""
        self.check_new(lease_id)
        grants = self._grants[lease_id] = Grants()
        return grants

    def room(self, grants: Grants, nbytes: int) -> bool:
        """Asked by an Acquire under way before each object: charges it if there is room."""
        if grants.released or not self.budget.charge(nbytes):
            return False
        grants.charged_bytes += nbytes
        return True

    def take(self, lease_id: int, leased: Leased) -> None:
        """Take over what was leased in one go, within `budget.room_bytes`, under an id that
        `check_new` let pass.
        """
        charged = self.budget.charge(leased.charged_bytes)
        assert charged, "no more than the room was to be leased"
        grants = self._grants[lease_id] = Grants()
        grants.places.append(leased.places)
        grants.charged_bytes = leased.charged_bytes

    def add(self, grants: Grants, leased: Leased) -> bool:
        """Take over what `room` has charged already; False where the id was released meanwhile:
        then the lease has ended again.
        """
        if grants.released:
            self._store.release(leased.places)
            return False
        grants.places.append(leased.places)
        return True

    def end(self, lease_id: int, grants: Grants, granted_bytes: int) -> None:
        """An Acquire is over. `granted_bytes`: charged bytes of all it was given.

        An id under which nothing was granted is free again.
        """
        grants.stop = None
        if grants.released:
            return
        self.budget.uncharge(grants.charged_bytes - granted_bytes)
        grants.charged_bytes = granted_bytes
        if not grants.places:
            del self._grants[lease_id]

    # ---- holds -----------------------------------------------------------------------------------

    def add_hold(self, hold_id: int, keys: list[bytes], charged_bytes: int) -> None:
        """Answer for keys that the store holds now; see HoldSink."""
        self.check_new(hold_id)
        if not keys:
            return
        if self._held_keys + len(keys) > MAX_HELD_KEYS:
            raise ResourceExhausted(
                f"the session holds {self._held_keys} chunks", "release holds, or match fewer"
            )
        each_bytes = -(-charged_bytes // len(keys))
        hold = _Hold(hold_id, keys, each_bytes)
        if not self.budget.charge(each_bytes * len(hold.keys)):
            raise ResourceExhausted(
                f"a hold of {charged_bytes} bytes is beyond what the session may keep in place",
                "release leases and holds, or match fewer chunks",
            )
        self._holds[hold_id] = hold
        for key in hold.keys:
            self._holders.setdefault(key, {})[hold] = None
        self._held_keys += len(hold.keys)
        if len(hold.keys) < len(keys):  # a run may name a key twice; it is held once
            repeated = Counter(keys) - Counter(hold.keys)
            self._store.unhold(self._namespace, repeated.elements())

    def lend(self, packed: bytes) -> Loan:
        """Let an Acquire use what is held of the keys it names; end it by `settle`."""
        loan = Loan()
        if not self._holders:
            return loan
        for key in _unpacked(packed):
            holders = self._holders.get(key)
            if holders is None or key in loan.keys:
                continue
            hold = next(iter(holders))
            self._forget_holder(key, hold)
            hold.keys.discard(key)
            hold.lent += 1
            self.budget.uncharge(hold.each_bytes)
            loan.keys[key] = hold
        return loan

    def settle(self, loan: Loan, packed: bytes = b"", states: bytes = b"") -> None:
        """What the Acquire was granted by `states` is held no longer; the rest is, if its hold was
        not released meanwhile and there still is room. Idempotent.
        """
        if not loan.keys:
            return
        named = zip(_unpacked(packed), states, strict=False)
        granted = {key for key, state in named if 0 < state < pb.NOT_NEEDED}
        over: list[bytes] = []
        for key, hold in loan.keys.items():
            hold.lent -= 1
            if not (hold.ended or key in granted) and self.budget.charge(hold.each_bytes):
                hold.keys.add(key)
                self._holders.setdefault(key, {})[hold] = None
            else:
                over.append(key)
        self._held_keys -= len(over)
        self._store.unhold(self._namespace, over)
        for hold in set(loan.keys.values()):
            if not (hold.ended or hold.keys or hold.lent):
                hold.ended = True
                del self._holds[hold.hold_id]
        loan.keys.clear()

    def _forget_holder(self, key: bytes, hold: _Hold) -> None:
        holders = self._holders[key]
        del holders[hold]
        if not holders:
            del self._holders[key]

    # ---- reservations ----------------------------------------------------------------------------

    def reserve(self, lease_id: int, give_up: Callable[[], None]) -> None:
        """Take an id for a Reserve; `give_up` is called when it is released. See `check_new`."""
        self.check_new(lease_id)
        self._reservations[lease_id] = give_up

    def unreserve(self, lease_id: int) -> None:
        """A reservation is over: committed, or refused. Idempotent."""
        self._reservations.pop(lease_id, None)

    # ---- the end ---------------------------------------------------------------------------------

    def release(self, lease_ids: Iterable[int]) -> None:
        """End what these ids stand for, and what is still on its way to them. Unknown ids are
        passed over.
        """
        places: list[NDArray[np.int64]] = []
        for lease_id in lease_ids:
            if (grants := self._grants.pop(lease_id, None)) is not None:
                self._end_grants(grants, places)
            elif (hold := self._holds.pop(lease_id, None)) is not None:
                self._end_hold(hold)
            elif (give_up := self._reservations.pop(lease_id, None)) is not None:
                give_up()
        if places:
            self._store.release(places[0] if len(places) == 1 else np.concatenate(places))

    def release_all(self) -> None:
        """End everything."""
        self.release([*self._grants, *self._holds, *self._reservations])

    def _end_grants(self, grants: Grants, places: list[NDArray[np.int64]]) -> None:
        grants.released = True
        places += grants.places
        grants.places = []
        self.budget.uncharge(grants.charged_bytes)
        grants.charged_bytes = 0
        if grants.stop is not None:
            grants.stop()

    def _end_hold(self, hold: _Hold) -> None:
        hold.ended = True
        self._held_keys -= len(hold.keys)
        self.budget.uncharge(hold.each_bytes * len(hold.keys))
        for key in hold.keys:
            self._forget_holder(key, hold)
        self._store.unhold(self._namespace, hold.keys)
        hold.keys = set()
