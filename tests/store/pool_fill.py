"""What tests of a store with a bucket fill it with, and ask it."""

from __future__ import annotations

import time

from store.pool_memory import MemoryPool, Shelf, node
from store.support_store import Client, client, payload, tokens

from kvstored.store.api import Run
from kvstored.tiers.object.api import ObjectName
from kvstored_client.proto import kvstore_pb2 as pb

SIZE = 64 * 1024 + 4096
MISSES = "default", "default", "test-model"


def names(run: Run) -> list[ObjectName]:
    family = run.family
    return [
        ObjectName(run.namespace, family.fingerprint, key, family.parts[part].name)
        for key in run.keys
        for part in run.parts
    ]


def bytes_of(chunks: int, size: int = SIZE) -> list[bytes]:
    return [payload(i, size) for i in range(chunks)]


async def fill(shelf: Shelf, chunks: int, **more: object) -> list[bytes]:
    """What another node has stored."""
    pool = MemoryPool(shelf)
    async with node(pool) as store:
        c = await client(store)
        data = bytes_of(chunks)
        await c.put(c.run(tokens(chunks)), data, **more)  # type: ignore[arg-type]
        await pool.drained()
    return data


def soon() -> float:
    return time.monotonic() + 20


async def matched(c: Client, run: Run, mode: int = pb.PREFIX) -> tuple[int, list[int]]:
    answer = await c.store.match_pool(run, mode, soon())
    return answer.chunks, list(answer.states)
