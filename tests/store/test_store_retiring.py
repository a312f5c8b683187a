"""Room that is on its way from clients: waited for, and nothing evicted in its stead."""

from __future__ import annotations

import asyncio

import pytest
from store.support_store import MIB, client, open_store, payload, tokens, two_namespaces

from kvstored.store.store import Store
from kvstored.tiers.ram import retirement
from kvstored_client.identity import KVPart
from kvstored_client.proto import kvstore_pb2 as pb

SMALL, LARGE = 64 * 1024, 256 * 1024


class Clients:
    """Clients that map every segment and answer when the test lets them."""

    def __init__(self, store: Store) -> None:
        self.asked: list[asyncio.Future[None]] = []
        store.ram.retiring = self._retire

    def _retire(self, segment_id: int) -> asyncio.Future[None]:
        del segment_id
        self.asked.append(asyncio.get_running_loop().create_future())
        return self.asked[-1]

    def answer(self) -> None:
        for future in self.asked:
            if not future.done():
                future.set_result(None)


async def test_a_put_waits_for_clients_and_evicts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retirement, "CLIENTS_S", 0.0)
    async with open_store(ram_bytes=4 * MIB) as store:
        clients = Clients(store)
        c = await client(store, parts=[KVPart("s", nbytes=SMALL), KVPart("l", nbytes=LARGE)])
        gone, kept = c.run(tokens(34, 1), parts=["s"]), c.run(tokens(30, 2), parts=["s"])
        await c.put(gone, [payload(1, SMALL)] * 34)
        await c.put(kept, [payload(2, SMALL)] * 30)
        await store.delete(gone)
        assert store.ram.usage().footprint_bytes == 4 * MIB
        run = c.run(tokens(3, 3), parts=["l"])
        data = [payload(i, LARGE) for i in range(3)]
        assert set(await c.put(run, data, wait=False)) == {pb.REFUSED_NO_ROOM}
        asked = len(clients.asked)
        assert 0 < asked * SMALL < 2 * LARGE
        waits = asyncio.Event()
        after = store._trash.freed.after

        async def wait(seen: int) -> None:
            waits.set()
            await after(seen)

        monkeypatch.setattr(store._trash.freed, "after", wait)
        waiting = asyncio.ensure_future(c.put(run, data))
        while not waiting.done():  # only what waits for room can be woken by it
            asleep = asyncio.ensure_future(waits.wait())
            await asyncio.wait([waiting, asleep], return_when=asyncio.FIRST_COMPLETED)
            asleep.cancel()
            waits.clear()
            clients.answer()
        assert set(waiting.result()) == {pb.STORED}
        assert c.states(kept) == [pb.IN_RAM] * 30, "nothing was evicted"
        assert (await c.get(run))[0] == dict(enumerate(data))
        clients.answer()
        store.ram.retiring = None


async def test_a_client_that_never_answers_takes_no_other_namespace_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retirement, "CLIENTS_S", 0.0)
    async with open_store(ram_bytes=16 * MIB, settings=two_namespaces(), floors=True) as store:
        clients = Clients(store)
        segments = store.ram._slabs.segments
        store.ram.stuck = lambda: frozenset(
            s.segment_id for s in segments.values() if s.namespace == "default"
        )
        c = await client(store, parts=[KVPart("s", nbytes=SMALL)])
        for seed in range(300):
            await c.put(c.run(tokens(1, seed)), [payload(seed, SMALL)], wait=False)
        held = store.ram.namespace_usage("default").objects
        other = await client(store, parts=[KVPart("l", nbytes=LARGE)], namespace="other")
        for seed in range(8):
            run = other.run(tokens(4, seed))
            data = [payload(seed + i, LARGE) for i in range(4)]
            assert list(await other.put(run, data, timeout_s=10.0)) == [pb.STORED] * 4
            assert (await other.get(run))[0] == dict(enumerate(data))
        assert store.ram.namespace_usage("default").objects == held  # nothing was lost for nothing
        assert clients.asked == []
        assert store.ram.usage().footprint_bytes <= 16 * MIB
        # Within its own class it goes on by evicting its own.
        assert list(await c.put(c.run(tokens(1, 999)), [payload(9, SMALL)])) == [pb.STORED]


async def test_what_can_never_fit_together_is_refused_at_once() -> None:
    async with open_store(ram_bytes=64 * MIB, ram_caps={"default": 2 * MIB}) as store:
        c = await client(store, parts=[KVPart("l", nbytes=LARGE)])
        run = c.run(tokens(12))
        states = await c.put(run, [payload(i, LARGE) for i in range(12)], timeout_s=1000.0)
        assert list(states) == [pb.STORED] * 8 + [pb.REFUSED_CAP] * 4
        large = await client(store, parts=[KVPart("x", nbytes=4 * MIB)])
        run = large.run(tokens(1, 1), parts=["x"])
        assert list(await large.put(run, [payload(1, 4 * MIB)])) == [pb.REFUSED_TOO_LARGE]
