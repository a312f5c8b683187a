"""Many clients at once over small tiers: no wrong byte, and every figure adds up afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import random
from functools import partial
from pathlib import Path

import pytest
from store.support_store import MIB, Client, client, open_store, payload, tokens, two_namespaces

from kvstored.store.index import NONE
from kvstored.store.store import Store
from kvstored.tiers.base import TierKind
from kvstored_client.identity import KVPart
from kvstored_client.proto import kvstore_pb2 as pb

PROMPTS = 12
CHUNKS = 6
SIZES = (4096, 70_000, 300_000)
PARTS = [KVPart(f"p{i}", nbytes=size) for i, size in enumerate(SIZES)]


def body(seed: int, chunk: int, part: int) -> bytes:
    return payload(seed * 1000 + chunk * 10 + part, SIZES[part])


async def one_client(c: Client, seed: int, operations: int) -> int:
    """Random verbs; every byte read must be the one that belongs to its key. Gives bytes read."""
    dice = random.Random(seed)
    read = 0
    for _ in range(operations):
        prompt = dice.randrange(PROMPTS)
        start = dice.choice([0, 0, 0, 1, 3])
        run = c.run(tokens(CHUNKS, seed=prompt), start, dice.randint(start + 1, CHUNKS))
        verb = dice.choice(
            ["put", "put", "get", "get", "get", "match", "delete", "touch", "cancel"]
        )
        if verb == "put":
            data = [
                body(prompt, start + i, j) for i in range(len(run.keys)) for j in range(len(PARTS))
            ]
            wait = dice.random() < 0.5
            await c.put(run, data, wait=wait, timeout_s=2.0, durable=dice.random() < 0.3)
        elif verb == "get":
            got, states = await c.get(run)
            for index, data_read in got.items():
                i, j = divmod(index, len(PARTS))
                assert data_read == body(prompt, start + i, j)
                read += len(data_read)
            whole = [i for i, s in enumerate(states) if s in (pb.IN_RAM, pb.IN_NVME)]
            assert all(i * len(PARTS) + j in got for i in whole for j in range(len(PARTS)))
        elif verb == "match":
            c.store.match(run, pb.PREFIX, pb.DEPTH_NODE)
        elif verb == "delete":
            await c.store.delete(run)
        elif verb == "touch":
            c.store.touch(run, 0)
        else:
            task = asyncio.ensure_future(c.get(run))
            await asyncio.sleep(dice.random() * 0.003)  # a client that goes away at some moment
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    return read


def passed_over(seen: list[int], chunk: int) -> bool:
    seen.append(chunk)
    return True


def check_figures(store: Store) -> None:
    """Index, recency, accounts and tiers must tell the same story."""
    for tier_kind, tier in store.tiers.items():
        label = {TierKind.RAM: "ram", TierKind.NVME: "nvme"}[tier_kind]
        usage = tier.usage()
        held = [h for (_, _, t), h in store.accounts.held.items() if t == label]
        assert sum(h.charged_bytes for h in held) == usage.charged_bytes
        assert sum(h.objects for h in held) == usage.objects
        assert usage.footprint_bytes <= usage.cap_bytes
        in_index = 0
        for ns in store.namespaces.values():
            rows = [row for row in range(ns.index.chunk_rows) if ns.index.held(row)]
            resident = [r for r in rows if ns.index.tiers[r] & (1 << tier_kind.value)]
            leaves = [r for r in resident if not ns.index.children[tier_kind][r]]
            seen: list[int] = []
            assert ns.lru[tier_kind].victim(partial(passed_over, seen)) == NONE
            ns.lru[tier_kind].put_back()
            assert sorted(set(seen)) == sorted(leaves)  # an entry may be noted twice
            places = ns.index.place[tier_kind]
            in_index += sum(places[o] != NONE for r in rows for o in ns.index.object_rows(r))
            for row in rows:
                assert ns.index.tiers[row], "a chunk that is nowhere"
        assert in_index == usage.objects
    assert store.ram.leased_bytes == 0


@pytest.mark.parametrize("with_nvme", [False, True])
async def test_a_storm_leaves_no_wrong_byte_and_no_leak(tmp_path: Path, with_nvme: bool) -> None:
    directory = tmp_path if with_nvme else None
    async with open_store(
        directory, ram_bytes=6 * MIB, nvme_bytes=24 * MIB, settings=two_namespaces()
    ) as store:
        clients = [
            await client(store, parts=PARTS, namespace=namespace, tenant=f"t{n}")
            for n in range(3)
            for namespace in ("default", "other")
        ]
        read = await asyncio.gather(*(one_client(c, n, 60) for n, c in enumerate(clients)))
        assert sum(read) > 0
        if store.writer is not None and (waiting := store.writer.in_flight()):
            await asyncio.wait(waiting)
        for tier in store.tiers:
            await store._trash.flush(tier)
        check_figures(store)
    if with_nvme:
        async with open_store(tmp_path, nvme_bytes=24 * MIB, settings=two_namespaces()) as store:
            for tier in store.tiers:
                await store._trash.flush(tier)
            check_figures(store)
