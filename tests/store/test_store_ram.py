"""The store over the RAM tier alone: publication, leases, caps, eviction, reasons, accounts."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest
import xxhash
from store.support_store import (
    MIB,
    client,
    hold,
    open_store,
    payload,
    tokens,
    two_namespaces,
)

from kvstored import errors
from kvstored.store.api import PutOffer, Received
from kvstored_client.identity import GroupRule, KVPart
from kvstored_client.proto import kvstore_pb2 as pb

SIZE = 64 * 1024 + 4096


async def test_what_was_put_is_got_byte_for_byte() -> None:
    async with open_store() as store:
        c = await client(store)
        run = c.run(tokens(5))
        data = [payload(i, SIZE) for i in range(5)]
        assert list(await c.put(run, data)) == [pb.STORED] * 5
        got, states = await c.get(run)
        assert got == dict(enumerate(data))
        assert list(states) == [pb.IN_RAM] * 5
        answer = store.match(run, pb.PREFIX, pb.DEPTH_NODE)
        assert (answer.chunks, answer.tokens, answer.payload_bytes) == (5, 320, 5 * SIZE)
        assert answer.eta_ms > 0


async def test_nothing_is_readable_before_commit_or_after_abort() -> None:
    async with open_store() as store:
        c = await client(store)
        run = c.run(tokens(2))
        until = time.monotonic() + 5
        ticket = await store.begin_put(PutOffer(run, [SIZE] * 2, b"", False, True, 0, until))
        for wanted in ticket.wanted:
            wanted.view[:] = payload(1, SIZE)
        assert c.states(run) == [pb.MISS_NEVER_STORED] * 2
        assert (await c.get(run))[0] == {}
        await store.abort_put(ticket)
        await store.abort_put(ticket)
        assert c.states(run) == [pb.MISS_NEVER_STORED] * 2
        assert store.ram.usage().charged_bytes == 0


async def test_bytes_with_another_checksum_than_announced_are_refused() -> None:
    async with open_store() as store:
        c = await client(store)
        run = c.run(tokens(2))
        data = [payload(i, SIZE) for i in range(2)]
        wrong = xxhash.xxh3_128_digest(data[0]) + xxhash.xxh3_128_digest(b"other")
        states = await c.put(run, data, checksums=wrong)
        assert list(states) == [pb.STORED, pb.REFUSED_CHECKSUM]
        assert c.states(run)[1] >= pb.MISS_NEVER_STORED
        assert store.ram.usage().objects == 1


async def test_objects_that_did_not_arrive_are_given_back() -> None:
    async with open_store() as store:
        c = await client(store)
        run = c.run(tokens(2))
        until = time.monotonic() + 5
        ticket = await store.begin_put(PutOffer(run, [SIZE] * 2, b"", False, True, 0, until))
        ticket.wanted[0].view[:] = payload(0, SIZE)
        digest = xxhash.xxh3_128_digest(payload(0, SIZE))
        states = await store.commit_put(ticket, [Received(0, digest, digest[:7:-1])])
        assert states[0] == pb.STORED
        assert states[1] != pb.STORED
        assert store.ram.usage().charged_bytes == store.ram.charge_bytes(SIZE)


async def test_first_writer_wins_and_conflicts_are_counted() -> None:
    async with open_store() as store:
        c = await client(store, parts=[KVPart("kv", max_nbytes=1 * MIB)])
        run = c.run(tokens(1))
        first, second = payload(1, SIZE), payload(2, SIZE)
        until = time.monotonic() + 5
        offer = PutOffer(run, [SIZE], b"", False, True, 0, until)
        late = await store.begin_put(offer)
        assert list(await c.put(run, [first])) == [pb.STORED]
        late.wanted[0].view[:] = second
        got = Received(0, xxhash.xxh3_128_digest(second), bytes(8))
        assert list(await store.commit_put(late, [got])) == [pb.EXISTED]
        assert store.accounts.conflicts["default"] == 1
        assert (await c.get(run))[0] == {0: first}
        assert list(await c.put(run, [payload(3, SIZE + 4096)])) == [pb.REFUSED_LENGTH]
        assert store.ram.usage().objects == 1


async def test_eviction_takes_the_oldest_leaf_and_keeps_heads() -> None:
    async with open_store(ram_bytes=8 * MIB) as store:
        c = await client(store, size=1 * MIB)
        old, young = c.run(tokens(4, seed=1)), c.run(tokens(4, seed=2))
        await c.put(old, [payload(i, MIB) for i in range(4)])
        await c.put(young, [payload(9 + i, MIB) for i in range(4)])
        assert store.ram.usage().charged_bytes == 8 * MIB
        more = c.run(tokens(2, seed=3))
        assert list(await c.put(more, [payload(20 + i, MIB) for i in range(2)])) == [pb.STORED] * 2
        assert c.states(old) == [pb.IN_RAM, pb.IN_RAM, pb.MISS_EVICTED, pb.MISS_EVICTED]
        assert c.states(young) == [pb.IN_RAM] * 4
        assert store.ram.usage().footprint_bytes <= 8 * MIB


async def test_use_protects_from_eviction() -> None:
    async with open_store(ram_bytes=8 * MIB) as store:
        c = await client(store, size=1 * MIB)
        first, second = c.run(tokens(4, seed=1)), c.run(tokens(4, seed=2))
        await c.put(first, [payload(i, MIB) for i in range(4)])
        await c.put(second, [payload(9 + i, MIB) for i in range(4)])
        store.touch(first, 0)
        await c.put(c.run(tokens(1, seed=3)), [payload(20, MIB)])
        assert c.states(first) == [pb.IN_RAM] * 4
        assert c.states(second)[-1] == pb.MISS_EVICTED


async def test_leased_bytes_outlive_pressure_and_delete() -> None:
    async with open_store(ram_bytes=8 * MIB) as store:
        c = await client(store, size=1 * MIB)
        run = c.run(tokens(3, seed=1))
        data = [payload(i, MIB) for i in range(3)]
        await c.put(run, data)
        stream, grants = await hold(store, run)
        for seed in range(2, 12):
            await c.put(c.run(tokens(3, seed=seed)), [payload(seed, MIB)] * 3, wait=False)
        assert [bytes(g.view) for g in grants] == data
        assert c.states(run) == [pb.IN_RAM] * 3
        await store.delete(run)
        assert c.states(run) == [pb.MISS_DELETED] * 3
        for seed in range(12, 22):
            await c.put(c.run(tokens(3, seed=seed)), [payload(seed, MIB)] * 3, wait=False)
        assert [bytes(g.view) for g in grants] == data
        assert store.ram.leased_bytes == 3 * MIB
        for grant in grants:
            grant.view.release()
        await stream.close()
        assert store.ram.leased_bytes == 0


async def test_a_put_waits_for_room_and_gets_it_when_a_lease_ends() -> None:
    async with open_store(ram_bytes=4 * MIB) as store:
        c = await client(store, size=1 * MIB)
        run = c.run(tokens(4, seed=1))
        await c.put(run, [payload(i, MIB) for i in range(4)])
        stream, _ = await hold(store, run)
        other = c.run(tokens(2, seed=2))
        refused = await c.put(other, [payload(9, MIB)] * 2, wait=False)
        assert set(refused) == {pb.REFUSED_NO_ROOM}
        assert c.states(other) == [pb.MISS_REFUSED_AT_PUT] * 2
        late = await c.put(other, [payload(9, MIB)] * 2, timeout_s=0.05)
        assert set(late) == {pb.REFUSED_DEADLINE}
        waiting = asyncio.ensure_future(c.put(other, [payload(9, MIB)] * 2))
        await asyncio.wait([waiting], timeout=0.2)
        assert not waiting.done()
        await stream.close()
        assert list(await waiting) == [pb.STORED] * 2


async def test_a_namespace_cap_is_hard_and_evicts_only_its_own() -> None:
    caps = {"other": 2 * MIB}
    async with open_store(settings=two_namespaces(), ram_caps=caps) as store:
        mine = await client(store, size=MIB)
        theirs = await client(store, size=MIB, namespace="other")
        run = mine.run(tokens(4, seed=1))
        await mine.put(run, [payload(i, MIB) for i in range(4)])
        for seed in range(5):
            await theirs.put(theirs.run(tokens(2, seed=seed)), [payload(seed, MIB)] * 2)
            assert store.accounts.namespace_bytes("other", "ram") <= 2 * MIB
        assert mine.states(run) == [pb.IN_RAM] * 4
        big = theirs.run(tokens(3, seed=9))
        states = await theirs.put(big, [payload(1, MIB)] * 3, wait=False)
        assert pb.REFUSED_CAP in states


async def test_namespaces_do_not_see_each_other() -> None:
    async with open_store(settings=two_namespaces()) as store:
        a, b = await client(store), await client(store, namespace="other")
        run = a.run(tokens(3))
        await a.put(run, [payload(i, SIZE) for i in range(3)])
        same_keys = b.run(tokens(3))
        assert same_keys.keys == run.keys
        assert b.states(same_keys) == [pb.MISS_NEVER_STORED] * 3
        assert (await b.get(same_keys))[0] == {}
        assert await store.delete(same_keys) == 0
        assert not store.list("other", b"", b"", 100).entries
        assert a.states(run) == [pb.IN_RAM] * 3
        await b.put(same_keys, [payload(7, SIZE)] * 3)
        assert (await a.get(run))[0][0] == payload(0, SIZE)
        with pytest.raises(errors.Unauthenticated):
            store.usage("third")


async def test_group_rules_decide_the_boundary_and_what_is_read() -> None:
    groups = {
        "full": GroupRule.all(),
        "window": GroupRule.trailing(2 * 64),
        "state": GroupRule.last(),
    }
    parts = [
        KVPart("f", nbytes=8192, group="full"),
        KVPart("w", nbytes=4096, group="window"),
        KVPart("s", nbytes=12288, group="state"),
    ]
    async with open_store() as store:
        c = await client(store, parts=parts, groups=groups)
        run = c.run(tokens(6))
        data = []
        for i in range(6):
            data += [
                payload(i, 8192) if i < 5 else b"",
                payload(i + 10, 4096) if i in (2, 3) else b"",
                payload(i + 20, 12288) if i in (3, 4) else b"",
            ]
        await c.put(run, data)
        answer = store.match(run, pb.PREFIX, pb.DEPTH_NODE)
        assert answer.chunks == 4  # chunk 4 lacks its window part, so boundary 5 does not hold
        part = c.run(tokens(6), 0, 4)
        got, states = await c.get(part)
        assert sorted(got) == [0, 3, 6, 7, 9, 10, 11]
        assert got[11] == payload(23, 12288)
        assert list(states) == [pb.IN_RAM] * 4
        only_states = c.run(tokens(6), 0, 4, parts=["s"])
        got, states = await c.get(only_states)
        assert sorted(got) == [3]
        assert list(states) == [pb.NOT_NEEDED] * 3 + [pb.IN_RAM]


async def test_a_short_last_chunk_counts_its_own_tokens_in_a_window() -> None:
    groups = {"window": GroupRule.trailing(64)}
    async with open_store() as store:
        c = await client(store, parts=[KVPart("w", nbytes=4096, group="window")], groups=groups)
        prompt = tokens(3)[:140]  # chunks of 64, 64 and 12: the window reaches into the second
        run = c.run(prompt)
        await c.put(run, [b"", b"", payload(2, 4096)])
        assert store.match(run, pb.PREFIX, pb.DEPTH_NODE).chunks == 0
        await c.put(run, [b"", payload(1, 4096), b""])
        assert store.match(run, pb.PREFIX, pb.DEPTH_NODE).chunks == 3
        assert sorted((await c.get(run))[0]) == [1, 2]


async def test_equal_keys_in_one_run_are_one_chunk() -> None:
    async with open_store() as store:
        c = await client(store)
        prefix = c.kv.foreign([b"x", b"x", b"y"])
        packed = prefix.keys(bytes(32))
        run = c.run(tokens(3))
        run = dataclasses.replace(run, packed=packed[:96])
        states = await c.put(run, [payload(1, SIZE), payload(1, SIZE), payload(2, SIZE)])
        assert list(states) == [pb.STORED, pb.EXISTED, pb.STORED]
        got, _ = await c.get(run)
        assert got == {0: payload(1, SIZE), 1: payload(1, SIZE), 2: payload(2, SIZE)}
        assert await store.delete(run) == 2
        assert store.ram.usage().objects == 0


async def test_a_prefix_is_held_only_with_every_part_asked_for() -> None:
    parts = [KVPart("rank0", nbytes=4096), KVPart("rank1", nbytes=8192)]
    async with open_store() as store:
        c = await client(store, parts=parts)
        await c.put(c.run(tokens(3), parts=["rank0"]), [payload(i, 4096) for i in range(3)])
        both = c.run(tokens(3))
        assert store.match(both, pb.PREFIX, pb.DEPTH_NODE).chunks == 0
        assert store.match(c.run(tokens(3), parts=["rank0"]), pb.PREFIX, 0).chunks == 3
        await c.put(c.run(tokens(3), 0, 2, ["rank1"]), [payload(i, 8192) for i in range(2)])
        assert store.match(both, pb.PREFIX, pb.DEPTH_NODE).chunks == 2


async def test_time_to_live_ends_a_chunk_and_its_subtree() -> None:
    async with open_store() as store:
        c = await client(store)
        head = c.run(tokens(4), 0, 2)
        await c.put(head, [payload(i, SIZE) for i in range(2)], ttl_ms=50)
        await c.put(c.run(tokens(4), 2, 4), [payload(i, SIZE) for i in range(2)])
        whole = c.run(tokens(4))
        await asyncio.sleep(0.1)  # time to live is a matter of the clock alone
        assert c.states(whole)[:2] == [pb.MISS_EXPIRED] * 2
        assert (await c.get(head))[0] == {}
        ns = store.namespaces["default"]
        now_ms = time.time_ns() // 1_000_000
        assert store.residency.expire(ns, range(ns.index.chunk_rows), now_ms) == 1
        assert c.states(whole) == [pb.MISS_EXPIRED, *[pb.MISS_EVICTED] * 3]
        assert ns.index.object_count == 0


async def test_pins_protect_until_unpinned() -> None:
    async with open_store(ram_bytes=4 * MIB) as store:
        c = await client(store, size=MIB)
        run = c.run(tokens(3, seed=1))
        await c.put(run, [payload(i, MIB) for i in range(3)])
        store.pin(run, 0)
        for seed in range(2, 6):
            await c.put(c.run(tokens(2, seed=seed)), [payload(seed, MIB)] * 2, wait=False)
        assert c.states(run) == [pb.IN_RAM] * 3
        assert store.unpin(run) == 3
        await c.put(c.run(tokens(3, seed=7)), [payload(7, MIB)] * 3, wait=False)
        assert pb.MISS_EVICTED in c.states(run)


async def test_hits_and_misses_are_counted_exactly() -> None:
    async with open_store() as store:
        c = await client(store, tenant="acme")
        long = tokens(5)[:300]  # four full chunks and one of 44 tokens
        await c.put(c.run(long, 0, 3), [payload(i, SIZE) for i in range(3)])
        store.match(c.run(long), pb.PREFIX, pb.DEPTH_NODE)
        await c.get(c.run(long, 0, 3))
        hits = store.accounts.hits["default", "acme", "test-model", "ram"]
        assert (hits.chunks, hits.tokens, hits.nbytes) == (3, 192, 3 * SIZE)
        never = store.accounts.misses["default", "acme", "test-model", "never_stored"]
        gap = store.accounts.misses["default", "acme", "test-model", "after_gap"]
        assert (never.chunks, never.tokens) == (1, 64)
        assert (gap.chunks, gap.tokens, gap.nbytes) == (1, 44, SIZE)
        held = store.accounts.held["default", "acme", "ram"]
        assert (held.charged_bytes, held.objects) == (3 * SIZE, 3)
        before = held.byte_seconds
        store.accounts.settle()
        assert held.byte_seconds > before
        assert store.accounts.puts["default", "acme", "stored"] == 3


async def test_listing_gives_every_chunk_once() -> None:
    async with open_store() as store:
        c = await client(store, size=4096)
        runs = [c.run(tokens(7, seed=s)) for s in range(5)]
        for run in runs:
            await c.put(run, [payload(1, 4096)] * 7)
        seen: list[bytes] = []
        cursor = b""
        while True:
            page = store.list("default", b"", cursor, 4)
            seen += [entry.key for entry in page.entries]
            cursor = page.cursor
            if not cursor:
                break
        assert sorted(seen) == sorted(k for run in runs for k in run.keys)
        with pytest.raises(errors.BadRequest):
            store.list("default", b"", b"abc", 4)


async def test_family_declarations_are_checked() -> None:
    async with open_store() as store:
        c = await client(store, parts=[KVPart("kv", nbytes=8192)])
        await client(store, parts=[KVPart("kv", nbytes=8192), KVPart("more", nbytes=4096)])
        with pytest.raises(errors.FamilyConflict, match="kv"):
            await client(store, parts=[KVPart("kv", nbytes=4096)])
        spec = c.kv.spec()
        spec.model = "another"
        with pytest.raises(errors.FamilyConflict, match="fingerprint"):
            await store.declare("default", spec)
        with pytest.raises(errors.UnknownFamily):
            store.family("default", bytes(32))


async def test_views_of_a_put_that_ended_hold_no_memory() -> None:
    async with open_store(ram_bytes=8 * MIB) as store:
        c = await client(store, parts=[KVPart("kv", max_nbytes=4 * MIB)])
        until = time.monotonic() + 5
        offer = PutOffer(c.run(tokens(8)), [MIB] * 8, b"", False, True, 0, until)
        kept = await store.begin_put(offer)  # named by somebody, as by a traceback
        await store.abort_put(kept)
        with pytest.raises(ValueError, match="released"):
            kept.wanted[0].view[0] = 1
        other = c.run(tokens(2, seed=2))
        states = await c.put(other, [payload(1, 3 * MIB)] * 2, wait=False)
        assert list(states) == [pb.STORED] * 2
        holder, grants = await hold(store, other)
        stream = store.open_get(other, time.monotonic() + 5)
        more = await stream.next()
        assert more
        await stream.close()
        with pytest.raises(ValueError, match="released"):
            bytes(more[0].view)
        assert bytes(grants[0].view[:1]) == payload(1, 3 * MIB)[:1]
        await holder.close()


async def test_one_spec_may_not_declare_a_part_twice_differently() -> None:
    async with open_store() as store:
        c = await client(store, parts=[KVPart("kv", nbytes=8192)])
        spec = c.kv.spec()
        spec.parts.add(name="twin", group="default", bytes=4096)
        spec.parts.add(name="twin", group="default", bytes=8192)
        with pytest.raises(errors.FamilyConflict, match="twice"):
            await store.declare("default", spec)
