"""A put that is published in parts: each object when it is whole, once, whatever the put's end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import xxhash
from store.support_store import MIB, Client, client, open_store, payload, settle, tokens

from kvstored.store.api import PutOffer, PutTicket, Received, Run
from kvstored.store.loader import piece_checksums
from kvstored.store.store import Store
from kvstored_client.proto import kvstore_pb2 as pb

SIZE = 64 * 1024 + 4096
CHUNKS = 8


async def begun(c: Client, run: Run, contents: list[bytes], durable: bool = False) -> PutTicket:
    until = time.monotonic() + 20
    return await c.store.begin_put(PutOffer(run, [SIZE] * CHUNKS, b"", durable, True, 0, until))


def filled(ticket: PutTicket, contents: list[bytes], count: int) -> list[Received]:
    received = []
    for wanted in ticket.wanted[:count]:
        wanted.view[:] = contents[wanted.index]
        digest = xxhash.xxh3_128_digest(wanted.view)
        received.append(Received(wanted.index, digest, piece_checksums(wanted.view)))
    return received


def claimed(store: Store) -> int:
    assert store.writer is not None
    return store.writer.claimed_bytes


@pytest.mark.parametrize("part", [1, 5])
async def test_what_has_come_is_readable_before_the_rest_and_goes_on_its_way(
    tmp_path: Path, part: int
) -> None:
    async with open_store(tmp_path, ram_bytes=32 * MIB) as store:
        c = await client(store)
        run = c.run(tokens(CHUNKS))
        contents = [payload(i, SIZE) for i in range(CHUNKS)]
        ticket = await begun(c, run, contents, durable=True)
        whole = claimed(store)
        received = filled(ticket, contents, CHUNKS)
        store.publish_part(ticket, received[:part])
        assert c.states(run) == [pb.IN_RAM] * part + [pb.MISS_NEVER_STORED] * (CHUNKS - part)
        assert claimed(store) * CHUNKS == whole * (CHUNKS - part)
        await settle(store)  # the part is on its way without the rest
        assert store.tiers[2].usage().objects == part
        store.publish_part(ticket, received[: part + 2])
        assert await store.commit_put(ticket, received) == bytes([pb.STORED]) * CHUNKS
        got, _ = await c.get(run)
        assert got == dict(enumerate(contents))
        assert store.tiers[2].usage().objects == CHUNKS
        assert claimed(store) == 0


async def test_a_put_that_ends_early_leaves_what_was_published(tmp_path: Path) -> None:
    async with open_store(tmp_path, ram_bytes=32 * MIB) as store:
        c = await client(store)
        run = c.run(tokens(CHUNKS))
        contents = [payload(i, SIZE) for i in range(CHUNKS)]
        ticket = await begun(c, run, contents)
        received = filled(ticket, contents, 6)
        store.publish_part(ticket, received[:4])
        await store.abort_put(ticket)
        store.publish_part(ticket, received)  # too late: passed over
        assert c.states(run) == [pb.IN_RAM] * 4 + [pb.MISS_NEVER_STORED] * 4
        assert claimed(store) == 0
        got, _ = await c.get(run)
        assert got == dict(enumerate(contents[:4]))


async def test_a_conflict_is_counted_once(tmp_path: Path) -> None:
    async with open_store(tmp_path, ram_bytes=32 * MIB) as store:
        c = await client(store)
        run = c.run(tokens(CHUNKS))
        contents = [payload(i, SIZE) for i in range(CHUNKS)]
        ticket = await begun(c, run, contents)
        first = [payload(100 + i, SIZE) for i in range(CHUNKS)]
        assert await c.put(run, first) == bytes([pb.STORED]) * CHUNKS
        received = filled(ticket, contents, CHUNKS)
        for count in (2, 4, 6):
            store.publish_part(ticket, received[:count])
        assert await store.commit_put(ticket, received) == bytes([pb.EXISTED]) * CHUNKS
        assert store.accounts.conflicts["default"] == CHUNKS
        got, _ = await c.get(run)
        assert got == dict(enumerate(first))
