"""What becomes of durable objects when a chunk above them, which RAM alone has, leaves RAM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from store.support_store import MIB, Client, client, open_store, payload, tokens

from kvstored.store.api import Run
from kvstored.store.store import Store
from kvstored.tiers.base import TierKind
from kvstored_client.proto import kvstore_pb2 as pb

SIZE = MIB
HOUR_MS = 3_600_000
CONTENTS = [payload(i, SIZE) for i in range(6)]


class Prefix:
    """A prefix of six chunks."""

    def __init__(self, store: Store, c: Client) -> None:
        self.store, self.c = store, c
        self.run = c.run(tokens(6))

    def part(self, start: int, stop: int) -> Run:
        return self.c.run(tokens(6), start, stop)

    async def put(self, stop: int, only_ram: Sequence[int]) -> None:
        """Put the leading chunks; some of them are, in the end, in RAM alone."""
        states = await self.c.put(self.part(0, stop), CONTENTS[:stop], durable=True, ttl_ms=HOUR_MS)
        assert states == bytes([pb.STORED]) * stop
        self.evict(TierKind.NVME, only_ram)

    def evict(self, tier: TierKind, chunks: Sequence[int]) -> None:
        ns = self.store.namespaces["default"]
        rows = ns.index.find_many(self.run.packed).tolist()
        for i in chunks:
            self.store.residency.evict_chunk(ns, rows[i], tier)

    async def push_out(self) -> None:
        """Fill RAM with others, until nothing of the prefix is there."""
        for seed in range(1, 4):
            others = [payload(6 * seed + i, SIZE) for i in range(6)]
            await self.c.put(self.c.run(tokens(6, seed=seed)), others, durable=True)
        assert pb.IN_RAM not in self.c.states(self.run)


async def test_they_stay_and_are_found_again_when_it_is_put_again(tmp_path: Path) -> None:
    async with open_store(tmp_path, ram_bytes=8 * MIB) as store:
        prefix = Prefix(store, await client(store, size=SIZE))
        await prefix.put(6, [0, 3])
        await prefix.push_out()
        c, run = prefix.c, prefix.run
        assert c.states(run) == [
            *[pb.MISS_EVICTED, pb.IN_NVME, pb.IN_NVME],
            *[pb.MISS_EVICTED, pb.IN_NVME, pb.IN_NVME],
        ]
        assert store.match(run, pb.PREFIX, pb.DEPTH_NODE).chunks == 0
        got, states = await c.get(run)
        assert set(got) == {1, 2, 4, 5}
        assert {states[0], states[3]} == {pb.MISS_EVICTED}
        assert store.accounts.evicted["default", "nvme", "capacity"].chunks == 2  # 0 and 3
        for i in (0, 3):
            await c.put(prefix.part(i, i + 1), CONTENTS[i : i + 1])
        got, _ = await c.get(run)
        assert got == dict(enumerate(CONTENTS))
        index = store.namespaces["default"].index
        expires = [index.expires_ms[row] for row in index.find_many(run.packed).tolist()]
        assert [ms > 0 for ms in expires] == [False, True, True] * 2  # 0 and 3 are new


async def test_a_delete_of_it_still_reaches_them(tmp_path: Path) -> None:
    async with open_store(tmp_path, ram_bytes=8 * MIB) as store:
        prefix = Prefix(store, await client(store, size=SIZE))
        await prefix.put(6, [0, 3])
        await prefix.push_out()
        before = store.tiers[TierKind.NVME].usage().objects
        await store.delete(prefix.part(3, 4))
        assert store.tiers[TierKind.NVME].usage().objects == before - 2
        await store.delete(prefix.part(0, 1))
        assert store.tiers[TierKind.NVME].usage().objects == before - 4
        assert store.namespaces["default"].index.chunk_count == 18  # what pushed it out


async def test_they_are_the_first_to_go_when_the_tier_below_is_full(tmp_path: Path) -> None:
    async with open_store(tmp_path, ram_bytes=8 * MIB, nvme_bytes=64 * MIB) as store:
        c = await client(store, size=SIZE)
        older = c.run(tokens(2, seed=9))
        await c.put(older, CONTENTS[:2], durable=True)
        prefix = Prefix(store, c)
        await prefix.put(6, [0, 3])
        lru = store.namespaces["default"].lru[TierKind.NVME]
        lru.victim(lambda _: False)  # it has looked at the oldest already
        await prefix.push_out()
        seed = 10
        while store.accounts.evicted["default", "nvme", "capacity"].chunks == 2:  # 0 and 3
            await c.put(c.run(tokens(1, seed=seed)), CONTENTS[:1], durable=True)
            seed += 1
        held = c.states(prefix.run)
        assert held.count(pb.IN_NVME) < 4
        assert c.states(older) == [pb.IN_NVME] * 2


async def test_what_ram_alone_has_below_it_goes_and_says_so(tmp_path: Path) -> None:
    async with open_store(tmp_path, ram_bytes=8 * MIB) as store:
        c = await client(store, size=SIZE)
        prefix = Prefix(store, c)
        await prefix.put(3, [0, 2])
        prefix.evict(TierKind.RAM, [1])
        assert c.states(prefix.run)[:3] == [pb.IN_RAM, pb.IN_NVME, pb.IN_RAM]
        prefix.evict(TierKind.RAM, [0])
        assert c.states(prefix.run)[:3] == [pb.MISS_EVICTED, pb.IN_NVME, pb.MISS_EVICTED]
        reasons = {key[1:]: gone.chunks for key, gone in store.accounts.evicted.items()}
        assert reasons == {
            ("nvme", "capacity"): 2,
            ("ram", "capacity"): 2,
            ("ram", "unreachable"): 1,
        }


async def test_a_durable_put_sends_down_what_ram_alone_has_above_it(tmp_path: Path) -> None:
    async with open_store(tmp_path, ram_bytes=8 * MIB) as store:
        prefix = Prefix(store, await client(store, size=SIZE))
        await prefix.put(2, [0, 1])
        held = store.accounts.held["default", "default", "nvme"]
        assert held.objects == 0
        states = await prefix.c.put(prefix.part(2, 3), CONTENTS[2:3], durable=True)
        assert states == bytes([pb.STORED])
        assert held.objects == 3
    async with open_store(tmp_path, ram_bytes=8 * MIB) as store:
        c = await client(store, size=SIZE)
        got, _ = await c.get(c.run(tokens(6), 0, 3))
        assert got == dict(enumerate(CONTENTS[:3]))
