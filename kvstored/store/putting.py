"""One Put: plan, reserve, and, once every byte is in place and hashed, publish."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.store.accounting import Accounts
from kvstored.store.api import PutOffer, PutTicket, Received, Run, WantedObject, let_go
from kvstored.store.index import NONE, Chain
from kvstored.store.namespace import Namespace
from kvstored.store.residency import Residency, now_ms
from kvstored.store.room import Room
from kvstored.store.sending_down import above, send_again
from kvstored.store.trash import Trash
from kvstored.store.writer import Writer
from kvstored.tiers.base import NoRoom, ObjectMeta, TierKind, padded_bytes
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.identity import KEY_BYTES
from kvstored_client.proto import kvstore_pb2 as pb

_REFUSALS = {
    NoRoom.TIER: pb.REFUSED_NO_ROOM,
    NoRoom.NAMESPACE: pb.REFUSED_CAP,
    NoRoom.NEVER: pb.REFUSED_TOO_LARGE,
    NoRoom.DOWN: pb.REFUSED_NO_ROOM,
    NoRoom.PENDING: pb.REFUSED_NO_ROOM,
}


Stored = Callable[[Namespace, Run, NDArray[np.int32]], None]
"""Told of each put that has published, for what goes further than this node: the rows of its chunks
that are held now, NONE for the others."""

_LEAST_CHAIN = 4  # below it, one by one is faster


@dataclass(slots=True)
class _Open:
    """A ticket's reserved places, by object index; emptied as they are published or given back."""

    ns: Namespace
    offer: PutOffer
    places: dict[int, int]
    claimed_bytes: int = 0  # of the bound on dirty bytes


class Putter:
    """The puts under way in one store."""

    def __init__(
        self,
        ram: RamTier,
        writer: Writer | None,
        residency: Residency,
        room: Room,
        trash: Trash,
        max_dirty_bytes: int,
        stored: Stored | None = None,
    ) -> None:
        self._stored = stored
        self._ram = ram
        self._writer = writer
        self._residency = residency
        self._room = room
        self._trash = trash
        self._max_dirty_bytes = max_dirty_bytes
        self._open: dict[int, _Open] = {}
        self._next_ticket = 0

    @property
    def _accounts(self) -> Accounts:
        return self._residency.accounts

    # -- planning ------------------------------------------------------------------------------

    async def begin(self, ns: Namespace, offer: PutOffer) -> PutTicket:
        """Decide for each object and reserve room for the wanted ones."""
        states = bytearray(len(offer.lengths_bytes))
        wanted = self._plan(ns, offer, states)
        lengths = [offer.lengths_bytes[i] for i in wanted]
        fitting = _fitting(lengths, self._ram.most_bytes(ns.name))
        for index in wanted[fitting:]:  # no waiting helps: these can never be there together
            alone = padded_bytes(offer.lengths_bytes[index]) > self._ram.most_bytes(ns.name)
            states[index] = pb.REFUSED_TOO_LARGE if alone else pb.REFUSED_CAP
            self._remember_refusal(ns, offer.run.keys[index // len(offer.run.parts)])
        wanted, lengths = wanted[:fitting], lengths[:fitting]
        opened = _Open(ns, offer, {})
        places = await self._reserve(opened, lengths) if wanted else []
        self._next_ticket += 1
        objects = []
        for index, place in zip(wanted, places, strict=True):
            if isinstance(place, NoRoom):
                late = offer.wait and place in (NoRoom.TIER, NoRoom.NAMESPACE)
                states[index] = pb.REFUSED_DEADLINE if late else _REFUSALS[place]
                self._remember_refusal(ns, offer.run.keys[index // len(offer.run.parts)])
                continue
            opened.places[index] = place
            states[index] = pb.WANTED
            objects.append(WantedObject(index, offer.lengths_bytes[index], self._ram.view(place)))
        self._open[self._next_ticket] = opened
        return PutTicket(self._next_ticket, offer, states, objects)

    def _remember_refusal(self, ns: Namespace, key: bytes) -> None:
        """Let a later miss of a chunk that nobody holds name its reason."""
        if ns.index.find(key) == NONE:
            ns.ghosts.remember(key, pb.MISS_REFUSED_AT_PUT)

    def _plan(self, ns: Namespace, offer: PutOffer, states: bytearray) -> list[int]:
        """Fill in what is decided already; give the indices of the objects to ask for."""
        run, at_ms = offer.run, now_ms()
        wanted: list[int] = []
        held: list[int] = []
        chunks = ns.index.find_many(run.packed)
        over = ns.expired_many(chunks, at_ms)
        if over.any():
            self._residency.expire(ns, chunks[over].tolist(), at_ms)
            chunks = ns.index.find_many(run.packed)  # what lay below has gone, too
        for i, chunk in enumerate(chunks.tolist()):
            if chunk != NONE:
                held.append(chunk)
            for j, part in enumerate(run.parts):
                index = i * len(run.parts) + j
                if not offer.lengths_bytes[index]:
                    states[index] = pb.NOT_OFFERED
                    continue
                row = ns.index.find_object(chunk, part) if chunk != NONE else NONE
                if row == NONE:
                    wanted.append(index)
                else:
                    announced = offer.checksums[16 * index : 16 * index + 16]
                    states[index] = self._already(ns, row, offer.lengths_bytes[index], announced)
        self._residency.touch(ns, held)
        return wanted

    def _already(self, ns: Namespace, row: int, length_bytes: int, checksum: bytes) -> int:
        """The outcome for an object that is held already: the first writer's bytes stand."""
        if ns.index.object_length[row] != length_bytes:
            return int(pb.REFUSED_LENGTH)
        if checksum and checksum != ns.index.checksum(row):
            self._accounts.conflicts[ns.name] += 1
        return int(pb.EXISTED)

    async def _reserve(self, opened: _Open, lengths: list[int]) -> list[int | NoRoom]:
        """Room in RAM, within the bound on dirty bytes; what is had of that is claimed."""
        offer = opened.offer
        until = offer.deadline if offer.wait else None
        if offer.claims_at_commit:
            return await self._room.reserve(TierKind.RAM, opened.ns, lengths, until)
        if not await self._dirty_room(sum(map(padded_bytes, lengths)), until):
            return [NoRoom.TIER] * len(lengths)
        self._claim(opened, sum(map(padded_bytes, lengths)))
        places: list[int | NoRoom] = []
        try:
            places = await self._room.reserve(TierKind.RAM, opened.ns, lengths, until)
        finally:
            had = zip(lengths, places, strict=False)
            got = sum(padded_bytes(n) for n, place in had if not isinstance(place, NoRoom))
            self._claim(opened, got)
        return places

    def _claim(self, opened: _Open, nbytes: int) -> None:
        """Set what a put has claimed of the bound on dirty bytes."""
        if self._writer is not None and nbytes != opened.claimed_bytes:
            self._writer.claim(nbytes - opened.claimed_bytes)
            opened.claimed_bytes = nbytes

    async def _dirty_room(self, nbytes: int, until: float | None) -> bool:
        """Whether the persistent tier's backlog leaves room for so many more dirty bytes."""
        writer = self._writer
        if writer is None:
            return True
        while (
            held := writer.dirty_bytes + writer.claimed_bytes
        ) and held + nbytes > self._max_dirty_bytes:
            left = until - time.monotonic() if until is not None else 0.0
            if left <= 0:
                return False
            try:
                await asyncio.wait_for(self._trash.freed.after(self._trash.freed.count), left)
            except TimeoutError:
                return False
        return True

    # -- publishing ----------------------------------------------------------------------------

    def publish_part(self, ticket: PutTicket, received: Sequence[Received]) -> None:
        """Publish what has arrived so far, while the rest of the put is still on its way: so its
        way to the persistent tier begins. `commit` is told of it again.
        """
        opened = self._open.get(ticket.ticket_id)
        if opened is not None:
            self._publish_all(opened, ticket, received)
            lengths = ticket.offer.lengths_bytes
            self._claim(opened, sum(padded_bytes(lengths[index]) for index in opened.places))

    def _publish_all(
        self, opened: _Open, ticket: PutTicket, received: Sequence[Received]
    ) -> NDArray[np.int32]:
        """Publish what is not published yet. Gives the rows of the run's keys."""
        ns, offer, states = opened.ns, ticket.offer, ticket.states
        chunks = ns.index.find_many(offer.run.packed)
        undecided = (got for got in received if states[got.index] == pb.WANTED)
        whole = sorted(undecided, key=lambda got: got.index)
        if _is_new_chain(offer, whole, chunks):
            self._publish_chain(opened, whole, chunks)
            for got in whole:
                states[got.index] = pb.STORED
        else:
            added: dict[bytes, int] = {}
            for got in whole:
                states[got.index] = self._publish(opened, got, chunks, added)
        return chunks

    async def commit(self, ticket: PutTicket, received: Sequence[Received]) -> bytes:
        """Publish what arrived whole and as announced; wait for durability where it was asked.

        From here on cancellation loses no place: publishing is done before the first wait, but for
        the one of a reservation, which is still open then.
        """
        received = await self._with_dirty_room(ticket, received)
        opened = self._open.pop(ticket.ticket_id)
        ns, offer = opened.ns, ticket.offer  # durability and deadline may be the commit's own
        states = ticket.states
        try:
            chunks = self._publish_all(opened, ticket, received)
        finally:
            for wanted in ticket.wanted:
                let_go(wanted.view)
            self._ram.cancel(list(opened.places.values()))
            self._claim(opened, 0)  # what was published is dirty now
        for index in opened.places:
            if states[index] == pb.WANTED:
                states[index] = pb.REFUSED_DEADLINE
        opened.places.clear()
        self._residency.touch(ns, chunks[chunks != NONE])
        self._trash.freed.notify()  # what was reserved may be evicted from now on
        if self._stored is not None and len(chunks):
            held = np.isin(np.frombuffer(states, np.uint8), (pb.STORED, pb.EXISTED))
            any_part = held.reshape(len(chunks), -1).any(axis=1)
            self._stored(ns, offer.run, np.where(any_part, chunks, np.int32(NONE)))
        if offer.durable:
            await self._await_durable(ns, offer, states)
        self._count(ns, offer, states)
        return bytes(states)

    async def _with_dirty_room(
        self, ticket: PutTicket, received: Sequence[Received]
    ) -> Sequence[Received]:
        """What has arrived, once the bound on dirty bytes lets it in; nothing if that is too late.
        All but reservations are in already.
        """
        opened, offer = self._open[ticket.ticket_id], ticket.offer
        if not offer.claims_at_commit or self._writer is None:
            return received
        nbytes = sum(padded_bytes(offer.lengths_bytes[got.index]) for got in received)
        if await self._dirty_room(nbytes, offer.deadline if offer.wait else None):
            self._claim(opened, nbytes)
            return received
        for got in received:
            ticket.states[got.index] = pb.REFUSED_DEADLINE if offer.wait else pb.REFUSED_NO_ROOM
        return []

    def _publish_chain(
        self, opened: _Open, whole: Sequence[Received], chunks: NDArray[np.int32]
    ) -> None:
        """`_publish` for a run of new chunks, in columns; see `_is_new_chain`."""
        ns, offer = opened.ns, opened.offer
        run, first, count = offer.run, whole[0].index, len(whole)
        span = slice(first, first + count)
        checksums = b"".join(got.checksum for got in whole)
        places = [opened.places[got.index] for got in whole]
        part = run.family.parts[run.parts[0]].name
        pieces = [got.piece_checksums for got in whole]
        self._ram.publish_many(places, run.keys[span], part, checksums, pieces)
        for got in whole:
            del opened.places[got.index]
        for key in run.keys[span]:
            ns.ghosts.forget(key)
        ends = np.arange(run.start + first + 1, run.start + first + count + 1, dtype=np.uint64)
        ends *= np.uint64(run.family.chunk_tokens)
        ends[-1] = run.chunk_end_token(first + count - 1)
        chain = Chain(
            packed=run.packed[KEY_BYTES * first : KEY_BYTES * (first + count)],
            parent_key=run.keys[first - 1] if first else run.parent,
            parent_row=int(chunks[first - 1]) if first else NONE,
            family=ns.families.number(run.family.fingerprint),
            tenant=ns.tenant_number(run.tenant),
            depth=run.start + first,
            end_tokens=ends,
            expires_ms=self._expiry_ms(ns, offer),
            part=run.parts[0],
            lengths=np.array(offer.lengths_bytes[span], np.uint32),
            checksums=checksums,
        )
        try:
            rows, objects = ns.index.add_chain(chain)
        except BaseException:
            self._trash.discard(TierKind.RAM, places)
            raise
        chunks[span] = rows
        self._residency.place_chain(ns, rows, objects, places)
        if self._writer is not None:
            for got, chunk, row, place in zip(
                whole, rows.tolist(), objects.tolist(), places, strict=True
            ):
                meta = self._meta(ns, chunk, offer, got.index, 0, got)
                self._writer.submit(ns, row, meta, place)

    def _publish(
        self, opened: _Open, got: Received, chunks: NDArray[np.int32], added: dict[bytes, int]
    ) -> int:
        """Publish one object: bytes are in place and checksummed; now, last, the index learns.

        `chunks`: the rows of the run's keys, kept up to date; `added`: those that this put added.
        """
        ns, offer = opened.ns, opened.offer
        announced = offer.checksums[16 * got.index : 16 * got.index + 16]
        if announced and announced != got.checksum:
            return int(pb.REFUSED_CHECKSUM)
        run = offer.run
        i, j = divmod(got.index, len(run.parts))
        length = offer.lengths_bytes[got.index]
        chunk = int(chunks[i])
        if chunk == NONE:  # unless the same key stood earlier in the run
            chunk = chunks[i] = added.get(run.keys[i], NONE)
        if chunk != NONE:
            row = ns.index.find_object(chunk, run.parts[j])
            if row != NONE:  # somebody else was first while our bytes came
                return self._already(ns, row, length, got.checksum)
            if ns.index.first_object[chunk] == NONE:  # it had stayed for what is below it
                ns.ghosts.forget(run.keys[i])
                ns.index.set_expiry(chunk, self._expiry_ms(ns, offer))
        else:
            chunk = self._add_chunk(ns, offer, i, int(chunks[i - 1]) if i else NONE)
            chunks[i] = added[run.keys[i]] = chunk
        meta = self._meta(ns, chunk, offer, i, j, got)
        place = opened.places.pop(got.index)
        self._ram.publish(place, meta)
        row = ns.index.add_object(chunk, run.parts[j], length, got.checksum)
        self._residency.place_object(ns, row, TierKind.RAM, place)
        if self._writer is not None:
            self._writer.submit(ns, row, meta, place)
        return int(pb.STORED)

    def _add_chunk(self, ns: Namespace, offer: PutOffer, i: int, parent_row: int) -> int:
        run = offer.run
        ns.ghosts.forget(run.keys[i])
        return ns.index.add_chunk(
            run.keys[i],
            run.keys[i - 1] if i else run.parent,
            family=ns.families.number(run.family.fingerprint),
            tenant=ns.tenant_number(run.tenant),
            depth=run.start + i,
            end_token=run.chunk_end_token(i),
            expires_ms=self._expiry_ms(ns, offer),
            parent_row=parent_row,
        )

    @staticmethod
    def _expiry_ms(ns: Namespace, offer: PutOffer) -> int:
        ttl_ms = offer.ttl_ms or ns.default_ttl_ms
        return now_ms() + ttl_ms if ttl_ms else 0

    def _meta(
        self, ns: Namespace, chunk: int, offer: PutOffer, i: int, j: int, got: Received
    ) -> ObjectMeta:
        run = offer.run
        return ObjectMeta(
            namespace=ns.name,
            family=run.family.fingerprint,
            key=run.keys[i],
            part=run.family.parts[run.parts[j]].name,
            tenant=ns.tenants[ns.index.tenant[chunk]],
            parent=ns.index.parent_key(chunk),
            depth=ns.index.depth[chunk],
            end_token=ns.index.end_token[chunk],
            expires_ms=ns.index.expires_ms[chunk],
            length_bytes=offer.lengths_bytes[got.index],
            checksum=got.checksum,
            piece_checksums=got.piece_checksums,
        )

    async def _await_durable(self, ns: Namespace, offer: PutOffer, states: bytearray) -> None:
        """Wait until stored and existing objects are durable; mark those that are not in time."""
        rows = {
            index: row
            for index, row in self._object_rows(ns, offer)
            if states[index] in (pb.STORED, pb.EXISTED)
        }
        pending: dict[int, asyncio.Future[bool]] = {}
        if self._writer is not None and rows:
            higher = above(ns, ns.index.object_chunk[rows[min(rows)]])
            lacking = [*higher, *rows.values()]
            send_again(ns, lacking, self._writer, self._ram, self._max_dirty_bytes)
            pending = self._writer.pending_of(ns, rows)
            # Also for what is above, though what is durable is so whatever comes of that.
            waiting = [
                *pending.values(),
                *self._writer.pending_of(ns, dict(enumerate(higher))).values(),
            ]
            if waiting:
                left = max(0.0, offer.deadline - time.monotonic())
                await asyncio.wait(waiting, timeout=left)
        for index in states_of(states, pb.STORED, pb.EXISTED):
            row = rows.get(index)
            future = pending.get(index)
            durable = (
                future.done() and future.result()
                if future is not None
                else row is not None and ns.index.place[TierKind.NVME][row] != NONE
            )
            if not durable:
                states[index] = pb.STORED_NOT_DURABLE

    def _object_rows(self, ns: Namespace, offer: PutOffer) -> list[tuple[int, int]]:
        found = []
        for i, chunk in enumerate(ns.index.find_many(offer.run.packed).tolist()):
            if chunk == NONE:
                continue
            for j, part in enumerate(offer.run.parts):
                row = ns.index.find_object(chunk, part)
                if row != NONE:
                    found.append((i * len(offer.run.parts) + j, row))
        return found

    def _count(self, ns: Namespace, offer: PutOffer, states: bytearray) -> None:
        for state in set(states) - {int(pb.NOT_OFFERED)}:
            outcome = pb.PutState.Name(pb.PutState.ValueType(state)).lower()
            self._accounts.puts[ns.name, offer.run.tenant, outcome] += states.count(state)

    def abort(self, ticket: PutTicket) -> None:
        """Give back everything a ticket reserved. Nothing of it becomes readable. Idempotent."""
        opened = self._open.pop(ticket.ticket_id, None)
        for wanted in ticket.wanted:
            let_go(wanted.view)
        if opened is not None:
            self._ram.cancel(list(opened.places.values()))
            opened.places.clear()
            self._claim(opened, 0)
            self._trash.freed.notify()


def _fitting(lengths: Sequence[int], room_bytes: int) -> int:
    """How many leading objects fit in so much memory together."""
    for count, length in enumerate(lengths):
        room_bytes -= padded_bytes(length)
        if room_bytes < 0:
            return count
    return len(lengths)


def _is_new_chain(offer: PutOffer, whole: Sequence[Received], chunks: NDArray[np.int32]) -> bool:
    """Whether what came is a run of chunks of one part, none of them held and none named twice,
    with the checksums announced: the usual put.
    """
    count = len(whole)
    if count < _LEAST_CHAIN or len(offer.run.parts) != 1:
        return False
    first = whole[0].index
    span = slice(first, first + count)
    if whole[-1].index != first + count - 1 or (chunks[span] != NONE).any():
        return False
    announced = offer.checksums[16 * first : 16 * (first + count)]
    if announced and announced != b"".join(got.checksum for got in whole):
        return False
    return len(set(offer.run.keys[span])) == count


def states_of(states: bytearray, *wanted: int) -> list[int]:
    """Indices of the objects in any of these states."""
    return [index for index, state in enumerate(states) if state in wanted]
