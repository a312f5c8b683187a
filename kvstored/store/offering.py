"""Offers the bucket what its policy says others may want.

An object is offered by name; its bytes are had when its turn comes: from RAM under a lease, or from
NVMe past RAM. One that has left both by then, or was deleted, is not there any more. What came from
the bucket is not offered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvstored.store.api import Family, Run, let_go
from kvstored.store.bypass import Copied, Copy
from kvstored.store.index import NONE
from kvstored.store.loader import Loaded, Loader
from kvstored.store.metas import object_meta
from kvstored.store.namespace import Namespace
from kvstored.store.offered import Offered, hash_one, hashes, held_as
from kvstored.store.residency import Residency
from kvstored.tiers.base import ObjectMeta, TierKind
from kvstored.tiers.object.api import ObjectName, Offer, Outcome, Pool
from kvstored.tiers.object.policy import KEY_BYTES, All, Policy
from kvstored.tiers.ram.tier import RamTier

log = logging.getLogger("kvstored.store")

READ_TIMEOUT_S = 30.0
"""How long to wait for room to read an object of NVMe into, where there is none beside RAM."""

SLICE_NAMES = 1024
SLICE_CHUNKS = 64
"""Offered before others have their turn; each takes some 10 µs."""

MOST_WAITING = 65_536
"""Chunks that wait for their turn to be offered; beyond that they are refused."""

_UP = frozenset({Outcome.OK, Outcome.EXISTED, Outcome.CONFLICT, Outcome.LENGTH})
"""Ends of an offer after which the bucket has an object of that name."""


class _Upload(Offer):
    """One object that was offered, as long as it has not ended."""

    def __init__(self, offering: Offering, ns: Namespace, row: int, meta: ObjectMeta) -> None:
        super().__init__(meta, self.read_bytes, self.end)
        self.ns = ns
        self.row = row
        self.generation = ns.index.generation[row]
        self.space = 0
        self.number = 0  # its hash, and how it is held: what `Offered` knows it by
        self.held = held_as(ns, row)
        self._offering = offering
        self._place = NONE
        self._copy: Copy | None = None
        self._view: memoryview | None = None

    @property
    def alive(self) -> bool:
        """Whether it is still held as it was."""
        return self.ns.index.alive(self.row, self.generation)

    async def read_bytes(self) -> memoryview | None:
        """As Offer.read."""
        if not self.alive:
            return None
        place = self.ns.index.place[TierKind.RAM][self.row]
        if place != NONE:
            self._offering.ram.lease(place)
            self._place = place
        else:
            await self._load()
        if self._copy is not None:
            pieces, self._view = self._copy.pieces, self._copy.view()
        elif self._place != NONE:
            _, pieces = self._offering.ram.checksums(self._place)
            self._view = self._offering.ram.view(self._place)
        else:
            return None
        self.meta = replace(self.meta, piece_checksums=pieces)
        return self._view

    async def _load(self) -> None:
        """From NVMe, past RAM where that can be had."""
        loader = self._offering.loader
        if loader is None or self.ns.index.place[TierKind.NVME][self.row] == NONE:
            return
        future: asyncio.Future[Copied] | asyncio.Future[Loaded] | None
        (future,) = loader.want_copies(self.ns, [self.row])
        if future is None:
            until = time.monotonic() + READ_TIMEOUT_S
            (future,) = loader.want(self.ns, [self.row], until)
        try:
            await asyncio.wait([future])
        finally:
            if not future.done():
                future.cancel()
            elif not future.cancelled():
                self._take(future.result())

    def _take(self, end: Copied | Loaded) -> None:
        if isinstance(end, Loaded):
            self._place = end.place
        else:
            self._copy = end.copy

    def end(self, outcome: Outcome) -> None:
        """As Offer.done."""
        if self._view is not None:
            let_go(self._view)
        if self._place != NONE:
            self._offering.ram.release(self._place)
        if self._copy is not None and self._offering.loader is not None:
            self._offering.loader.give_back(self._copy)
        self._offering.ended(self, outcome)


class Offering:
    """What one store offers to a bucket. Belongs to the verbs' loop."""

    def __init__(
        self,
        pool: Pool,
        policy: Policy,
        ram: RamTier,
        loader: Loader | None,
        residency: Residency,
        released: Callable[[], None],
    ) -> None:
        """`released()` is called whenever a lease ended, for those who wait for room."""
        self.ram = ram
        self.loader = loader
        self._pool = pool
        self._policy = policy
        self._residency = residency
        self._released = released
        self._offered = Offered()
        self._waiting: deque[tuple[Namespace, int, bytes]] = deque()  # space, key
        self._task: asyncio.Task[None] | None = None

    # -- occasions -----------------------------------------------------------------------------

    def stored(self, ns: Namespace, run: Run, chunks: NDArray[np.int32]) -> None:
        """A put has ended; `chunks`: the rows of the run's keys, NONE for those not held."""
        keys = np.frombuffer(run.packed, np.uint8).reshape(-1, KEY_BYTES)
        parents = np.zeros_like(keys)
        parents[1:] = keys[:-1]
        if run.parent:
            parents[0] = np.frombuffer(run.parent, np.uint8)
        held = np.unique(chunks, return_index=True)[1]  # a key may stand in a run twice
        held = np.sort(held[chunks[held] != NONE])
        if not len(held):
            return
        space = _space(ns, run.family)
        due = self._policy.stored(space, keys[held], parents[held])
        # What was due once, and is stored anew, the bucket may have lost as well as this node.
        own = due.own
        if not own.all():
            own = own | self._outdated(ns, space, keys[held], chunks[held])
        rows: dict[int, None] = {}
        for chunk in chunks[held[due.above]].tolist():
            rows.update(dict.fromkeys(reversed(list(ns.index.ancestors(chunk)))))
        rows.update(dict.fromkeys(chunks[held[own]].tolist()))
        self._offer_chunks(ns, space, list(rows))

    def used(self, ns: Namespace, run: Run, states: bytes) -> None:
        """A run was read; `states`: one ChunkState per key. Hits of the bucket are none of ours."""
        if not self._policy.heeds_uses:
            return
        tiers = np.frombuffer(states, np.uint8)
        hit = np.flatnonzero((tiers == TierKind.RAM) | (tiers == TierKind.NVME))
        if not len(hit):
            return
        keys = np.frombuffer(run.packed, np.uint8).reshape(-1, KEY_BYTES)[hit]
        space = _space(ns, run.family)
        due = self._policy.used(space, keys)
        if due.any():
            rows = ns.index.find_many(keys[due].tobytes())
            self._offer_chunks(ns, space, rows[rows != NONE].tolist())

    async def again(self, namespaces: dict[str, Namespace]) -> None:
        """Offer what the node's last life owed and is still here; disown the rest."""
        owed = self._pool.owed()
        for at in range(0, len(owed), SLICE_NAMES):
            gone: list[ObjectName] = []
            uploads: list[_Upload] = []
            for name in owed[at : at + SLICE_NAMES]:
                upload = self._find(namespaces, name)
                if upload is None:
                    gone.append(name)
                else:
                    uploads.append(upload)
            self._pool.disown(gone)
            for upload in uploads[: self._offer(uploads)]:
                self._offered.note_one(upload.number, upload.held)
            await asyncio.sleep(0)

    # -- offers --------------------------------------------------------------------------------

    def _find(self, namespaces: dict[str, Namespace], name: ObjectName) -> _Upload | None:
        ns = namespaces.get(name.namespace)
        chunk = ns.index.find(name.key) if ns is not None else NONE
        if ns is None or chunk == NONE:
            return None
        family = ns.families.by_number[ns.index.family[chunk]]
        part = family.part_index.get(name.part)
        if part is None or family.fingerprint != name.family:
            return None
        row = ns.index.find_object(chunk, part)
        if row == NONE:
            return None
        upload = _Upload(self, ns, row, object_meta(ns, row))
        upload.space = _space(ns, family)
        upload.number = hash_one(upload.space, name.key, part)
        return upload

    def _offer_chunks(self, ns: Namespace, space: int, chunks: Sequence[int]) -> None:
        """Offer the objects of some chunks that are not up yet, as far as is known: the first at
        once, many more in turn with others.
        """
        if not self._waiting:
            self._offer_slice(ns, space, chunks[:SLICE_CHUNKS])
            chunks = chunks[SLICE_CHUNKS:]
        room = MOST_WAITING - len(self._waiting)
        keys = [ns.index.key(chunk) for chunk in chunks]
        self._waiting.extend((ns, space, key) for key in keys[:room])
        if keys[room:]:
            packed = np.frombuffer(b"".join(keys[room:]), np.uint8)
            self._policy.refused(space, packed.reshape(-1, KEY_BYTES))
        if self._waiting and self._task is None:
            self._task = asyncio.ensure_future(self._offer_waiting())
            self._task.add_done_callback(self._done)

    async def _offer_waiting(self) -> None:
        while self._waiting:
            self._next_slice()
            await asyncio.sleep(0)  # others have their turn

    def _next_slice(self) -> None:
        ns, space, _ = self._waiting[0]
        keys: list[bytes] = []
        while self._waiting and len(keys) < SLICE_CHUNKS and self._waiting[0][:2] == (ns, space):
            keys.append(self._waiting.popleft()[2])
        rows = ns.index.find_many(b"".join(keys))
        self._offer_slice(ns, space, rows[rows != NONE].tolist())

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("offering to the bucket failed", exc_info=error)

    def finish(self) -> None:
        """Offer what waits for its turn; for a stop."""
        while self._waiting:
            self._next_slice()

    def _offer_slice(self, ns: Namespace, space: int, chunks: Sequence[int]) -> None:
        index = ns.index
        rows = [row for chunk in chunks for row in index.object_rows(chunk)]
        if not rows:
            return
        keys = b"".join(index.key(index.object_chunk[row]) for row in rows)
        parts = np.array([index.object_part[row] for row in rows], np.uint64)
        numbers = hashes(space, keys, parts)
        held = np.array([held_as(ns, row) for row in rows], np.uint64)
        fresh = np.flatnonzero(~self._offered.known(numbers, held))
        uploads = []
        for at in fresh.tolist():
            upload = _Upload(self, ns, rows[at], object_meta(ns, rows[at]))
            upload.space, upload.number = space, int(numbers[at])
            uploads.append(upload)
        taken = self._offer(uploads)
        self._offered.note(numbers[fresh[:taken]], held[fresh[:taken]])
        if taken < len(fresh):
            refused = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)[fresh[taken:]]
            self._policy.refused(space, np.unique(refused, axis=0))

    def _offer(self, uploads: Sequence[_Upload]) -> int:
        return self._pool.offer(uploads) if uploads else 0

    def deleted(self, ns: Namespace, family: Family, keys: Sequence[bytes]) -> None:
        """The bucket has, or is about to have, these chunks no more: they may be offered again."""
        packed, space = b"".join(keys), _space(ns, family)
        for part in range(len(family.parts)):
            self._offered.drop(hashes(space, packed, np.array([part], np.uint64)))

    def forget(self) -> None:
        """Anything may be offered again."""
        self._offered.clear()

    def came(self, ns: Namespace, family: Family, key: bytes, part: int, row: int) -> None:
        """An object came from the bucket: it is not offered as long as it is held here."""
        self._offered.note_one(hash_one(_space(ns, family), key, part), held_as(ns, row))

    def _outdated(
        self, ns: Namespace, space: int, keys: NDArray[np.uint8], chunks: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Which chunks were offered, or came from the bucket, before they were lost here. One
        object of each tells.
        """
        index = ns.index
        rows = [index.first_object[chunk] for chunk in chunks.tolist()]
        parts = np.array([index.object_part[row] if row != NONE else 0 for row in rows], np.uint64)
        held = np.array([held_as(ns, row) if row != NONE else 0 for row in rows], np.uint64)
        return self._offered.outdated(hashes(space, keys.tobytes(), parts), held)

    def ended(self, upload: _Upload, outcome: Outcome) -> None:
        """An offer has come to its end."""
        self._released()
        if outcome is Outcome.CONFLICT:
            self._residency.accounts.conflicts[upload.ns.name] += 1
        elif outcome is Outcome.LENGTH:
            name = upload.meta.key.hex()
            fields = {"namespace": upload.ns.name, "key": name, "part": upload.meta.part}
            log.warning("the bucket has an object of another length", extra={"fields": fields})
        if outcome not in _UP:
            self._offered.drop_one(upload.number, upload.held)
            self._not_up(upload, outcome)

    def _not_up(self, upload: _Upload, outcome: Outcome) -> None:
        """What was given up, or was gone when its turn came, is due again at its next occasion."""
        if outcome is Outcome.CANCELLED and (upload.alive or isinstance(self._policy, All)):
            return  # it was called off; or it has to be stored again, and is due by that
        key = np.frombuffer(upload.meta.key, np.uint8).reshape(1, KEY_BYTES)
        self._policy.refused(upload.space, key)


def _space(ns: Namespace, family: Family) -> int:
    return ns.families.number(family.fingerprint) << 16 | ns.number
