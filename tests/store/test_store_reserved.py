"""What is reserved and not committed yet keeps others from putting only by the RAM it takes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import xxhash
from store.support_store import MIB, Client, client, open_store, payload, tokens
from store.test_store_faults import Gate

from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault, FaultyFiles
from kvstored.store.api import PutOffer, PutTicket, Received
from kvstored.store.loader import piece_checksums
from kvstored.store.store import StoreSettings
from kvstored_client.identity import KVPart
from kvstored_client.proto import kvstore_pb2 as pb

CHUNKS = 3
DATA = payload(1, MIB)


async def reserve(to: Client, seed: int, wait_s: float = 20.0) -> PutTicket:
    run = to.run(tokens(CHUNKS, seed))
    until = time.monotonic() + wait_s
    lengths = [MIB] * CHUNKS
    offer = PutOffer(run, lengths, b"", False, True, 0, until, claims_at_commit=True)
    return await to.store.begin_put(offer)


def written(ticket: PutTicket) -> list[Received]:
    """All that is wanted, in place."""
    received = []
    for wanted in ticket.wanted:
        wanted.view[:] = DATA
        digest = xxhash.xxh3_128_digest(wanted.view)
        received.append(Received(wanted.index, digest, piece_checksums(wanted.view)))
    return received


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles(RealFiles())


async def test_reservations_take_nothing_of_the_bound_before_their_commit(
    tmp_path: Path, files: FaultyFiles
) -> None:
    settings = StoreSettings(max_dirty_bytes=4 * MIB)
    async with open_store(tmp_path, ram_bytes=32 * MIB, settings=settings, files=files) as store:
        to = await client(store, parts=[KVPart("kv", nbytes=MIB)])
        tickets = [await reserve(to, seed) for seed in (1, 2)]
        assert store.writer is not None
        assert store.writer.claimed_bytes == 0
        run = to.run(tokens(CHUNKS, 3))
        assert set(await to.put(run, [DATA] * CHUNKS, durable=True)) == {pb.STORED}

        gate = Gate()
        files.inject(Fault("pwritev", "*/data", stuck=gate))
        first = await store.commit_put(tickets[0], written(tickets[0]))
        assert set(first) == {pb.STORED}
        second = asyncio.ensure_future(store.commit_put(tickets[1], written(tickets[1])))
        async with asyncio.timeout(10):
            await gate.reached.wait()
        assert not second.done(), "the bound is used up by what is being written"
        files.clear()
        gate.set()
        assert set(await second) == {pb.STORED}
        got, _ = await to.get(to.run(tokens(CHUNKS, 2)))
        assert list(got.values()) == [DATA] * CHUNKS


async def test_a_commit_that_finds_no_room_in_time_is_refused(
    tmp_path: Path, files: FaultyFiles
) -> None:
    settings = StoreSettings(max_dirty_bytes=4 * MIB)
    async with open_store(tmp_path, ram_bytes=32 * MIB, settings=settings, files=files) as store:
        to = await client(store, parts=[KVPart("kv", nbytes=MIB)])
        first, second = await reserve(to, 1), await reserve(to, 2, wait_s=0.3)
        gate = Gate()
        files.inject(Fault("pwritev", "*/data", stuck=gate))
        assert set(await store.commit_put(first, written(first))) == {pb.STORED}
        assert set(await store.commit_put(second, written(second))) == {pb.REFUSED_DEADLINE}
        files.clear()
        gate.set()
