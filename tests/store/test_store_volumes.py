"""What a store holds when volumes go away and come back, over a tier that says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from store.support_store import Client, client, fail_on_death, payload, settle, tokens

from kvstored.store import volumes
from kvstored.store.store import Store, StoreSettings
from kvstored.supervise import Supervisor
from kvstored.tiers.base import (
    VOLUME_SHIFT,
    Arrived,
    NoRoom,
    ObjectRead,
    ObjectWrite,
    ReadOutcome,
    Recovered,
    TierKind,
    WriteOutcome,
)
from kvstored.tiers.nvme.volume_tier import VolumeTier
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.proto import kvstore_pb2 as pb

MIB = 1 << 20
SIZE = 64 * 1024 + 4096
_WITHIN = (1 << VOLUME_SHIFT) - 1


class Labelled(VolumeTier):
    """One volume whose places say, in turn, that they are on volume 0 or 1. Remembers deletes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 64 * MIB)
        self.forgotten: list[tuple[str, bytes, list[bytes]]] = []
        self.turn = 0
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.gates: dict[int, asyncio.Event] = {}  # by volume
        self.reached = asyncio.Event()

    async def reserve(self, namespace: str, lengths_bytes: Sequence[int]) -> list[int | NoRoom]:
        places = await super().reserve(namespace, lengths_bytes)
        labelled: list[int | NoRoom] = []
        for place in places:
            if isinstance(place, int):
                place |= (self.turn % 2) << VOLUME_SHIFT
                self.turn += 1
            labelled.append(place)
        return labelled

    async def write(self, items: Sequence[ObjectWrite]) -> list[WriteOutcome]:
        await self.may_write.wait()
        return await super().write([replace(i, place=i.place & _WITHIN) for i in items])

    async def read(
        self, items: Sequence[ObjectRead], arrived: Arrived | None = None
    ) -> list[ReadOutcome]:
        gates = [self.gates[n] for i in items if (n := i.place >> VOLUME_SHIFT) in self.gates]
        for gate in gates:
            self.reached.set()
            await gate.wait()
        return await super().read([replace(i, place=i.place & _WITHIN) for i in items], arrived)

    async def delete(self, places: Sequence[int]) -> None:
        await super().delete([place & _WITHIN for place in places])

    async def forget(self, namespace: str, family: bytes, keys: Sequence[bytes]) -> None:
        self.forgotten.append((namespace, family, list(keys)))


class World:
    """A store of one client with a prefix of 8 chunks, durable, of which every other is on 1."""

    def __init__(self, store: Store, tier: Labelled, c: Client) -> None:
        self.store, self.tier, self.c = store, tier, c
        self.run = c.run(tokens(8))
        self.index = store.namespaces["default"].index

    def out_of_ram(self) -> None:
        ns = self.store.namespaces["default"]
        for key in reversed(self.run.keys):
            chunk = ns.index.find(key)
            if ns.index.tiers[chunk] & 2:
                self.store.residency.evict_chunk(ns, chunk, TierKind.RAM)

    def on_volume(self, number: int) -> Recovered:
        """What a volume would find of the prefix when it comes back."""
        rows = [self.index.find(key) for key in self.run.keys]
        objects = [self.index.first_object[row] for row in rows]
        places = [self.index.place[TierKind.NVME][o] for o in objects]
        mine = [i for i, place in enumerate(places) if place >> VOLUME_SHIFT == number]
        parents = [self.run.keys[i - 1] if i else bytes(32) for i in mine]
        checksums = b"".join(self.index.checksum(objects[i]) for i in mine)
        count = len(mine)
        zeros = np.zeros(count, np.uint32)
        return Recovered(
            namespaces=["default"],
            families=[self.run.family.fingerprint],
            parts=["kv"],
            tenants=["default"],
            namespace_id=zeros,
            family_id=zeros,
            part_id=zeros,
            tenant_id=zeros,
            keys=np.frombuffer(b"".join(self.run.keys[i] for i in mine), np.uint8).reshape(-1, 32),
            parents=np.frombuffer(b"".join(parents), np.uint8).reshape(-1, 32),
            depth=np.array(mine, np.uint32),
            end_token=np.array([64 * (i + 1) for i in mine], np.uint64),
            expires_ms=np.zeros(count, np.uint64),
            length_bytes=np.full(count, SIZE, np.uint64),
            checksums=np.frombuffer(checksums, np.uint8).reshape(-1, 16),
            place=np.array([places[i] for i in mine], np.uint64),
            sequence=np.array(mine, np.uint64) + np.uint64(1),
        )

    def states(self) -> list[int]:
        return self.c.states(self.run)

    def check_accounts(self) -> None:
        held = sum(self.index.place[TierKind.NVME][row] != -1 for row in self.rows())
        assert self.store.accounts.held["default", "default", "nvme"].objects == held
        charged = self.store.accounts.namespace_bytes("default", "nvme")
        assert charged == held * self.tier.charge_bytes(SIZE)

    def rows(self) -> list[int]:
        chunks = [self.index.find(key) for key in self.run.keys]
        return [row for c in chunks if c != -1 for row in self.index.object_rows(c)]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    tier = Labelled(tmp_path)
    supervisor = Supervisor(fail_on_death)
    store = Store(RamTier(16 * MIB), tier, StoreSettings(), supervisor)
    await store.open()
    c = await client(store)
    it = World(store, tier, c)
    await c.put(it.run, [payload(i, SIZE) for i in range(8)], durable=True)
    yield it
    await store.close(20.0)
    await supervisor.stop()
    assert not any(supervisor.restarts.values())


IN_NVME, DOWN = int(pb.IN_NVME), int(pb.MISS_TIER_DOWN)


async def test_only_what_a_lost_volume_held_is_a_miss(world: World) -> None:
    world.out_of_ram()
    assert world.states() == [IN_NVME] * 8
    world.store.volume_lost(1)
    assert world.states() == [IN_NVME, DOWN] * 4
    world.check_accounts()
    lost = world.store.accounts.evicted["default", "nvme", "volume_lost"]
    assert (lost.chunks, lost.nbytes) == (4, 4 * SIZE)
    got, _ = await world.c.get(world.run)
    assert got.keys() == {0, 2, 4, 6}
    states = await world.c.put(world.run, [payload(i, SIZE) for i in range(8)], durable=True)
    assert list(states) == [pb.EXISTED, pb.STORED] * 4
    got, _ = await world.c.get(world.run)
    assert got == {i: payload(i, SIZE) for i in range(8)}
    world.check_accounts()


async def test_what_ram_has_of_a_lost_volume_stays(world: World) -> None:
    world.store.volume_lost(0)
    assert world.states() == [int(pb.IN_RAM)] * 8
    world.check_accounts()
    world.out_of_ram()
    world.check_accounts()


async def test_a_volume_that_comes_back_is_read_again(world: World) -> None:
    world.out_of_ram()
    found = world.on_volume(1)
    assert world.tier.on_lost is not None
    assert world.tier.on_found is not None
    world.tier.on_lost(1)
    await world.tier.on_found(found)
    assert world.states() == [IN_NVME] * 8
    world.check_accounts()
    got, _ = await world.c.get(world.run)
    assert got == {i: payload(i, SIZE) for i in range(8)}


async def test_what_ram_has_is_durable_again_when_its_volume_comes_back(world: World) -> None:
    found = world.on_volume(1)
    world.store.volume_lost(1)
    await world.store.volume_found(found)
    assert world.tier.usage().objects == 8, "the durable copy of what is in RAM was deleted"
    world.out_of_ram()
    assert world.states() == [IN_NVME] * 8
    world.check_accounts()


async def test_what_was_put_again_meanwhile_is_held_once(world: World) -> None:
    world.out_of_ram()
    found = world.on_volume(1)
    world.store.volume_lost(1)
    await world.c.put(world.run, [payload(i, SIZE) for i in range(8)], durable=True)
    assert world.tier.usage().objects == 12
    await world.store.volume_found(found)
    await world.store._trash.flush(TierKind.NVME)
    assert world.tier.usage().objects == 8
    world.check_accounts()


async def test_what_is_on_its_way_down_when_its_volume_comes_back_is_held_once(
    world: World,
) -> None:
    world.out_of_ram()
    found = world.on_volume(1)
    world.store.volume_lost(1)
    world.tier.may_write.clear()
    await world.c.put(world.run, [payload(i, SIZE) for i in range(8)])
    await world.store.volume_found(found)
    world.tier.may_write.set()
    await settle(world.store)
    await world.store._trash.flush(TierKind.NVME)
    assert world.tier.usage().objects == 8
    world.check_accounts()


async def test_a_delete_tells_of_all_that_it_named_and_dropped(world: World) -> None:
    world.out_of_ram()
    world.store.volume_lost(1)
    deleted, evicted = int(pb.MISS_DELETED), int(pb.MISS_EVICTED)
    assert await world.store.delete(world.c.run(tokens(8), 3, 5)) == 2  # 3 is away, 4 is there
    ((namespace, family, keys),) = world.tier.forgotten
    assert (namespace, family) == ("default", world.run.family.fingerprint)
    assert set(keys) == set(world.run.keys[3:])
    assert world.states()[3:] == [deleted, deleted, evicted, evicted, evicted]
    assert world.tier.usage().objects == 6, "only what is there can be deleted there"


async def test_a_delete_holds_while_a_volume_is_being_taken_in(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volumes, "SLICE_ROWS", 1)
    world.out_of_ram()
    found = world.on_volume(1)
    world.store.volume_lost(1)
    taking_in = asyncio.ensure_future(world.store.volume_found(found))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not taking_in.done()
    assert await world.store.delete(world.c.run(tokens(8), 3, 8)) >= 2
    assert world.tier.usage().objects == 3, "acknowledged before it held"
    await taking_in
    missing = int(pb.MISS_NEVER_STORED), int(pb.MISS_DELETED), DOWN
    missing += (int(pb.MISS_EVICTED),)
    assert all(state in missing for state in world.states()[3:])
    assert world.states()[:3] == [IN_NVME] * 3
    world.check_accounts()


async def test_a_delete_waits_for_what_is_being_taken_in(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volumes, "SLICE_ROWS", 1)
    world.out_of_ram()
    found = world.on_volume(1)
    world.store.volume_lost(1)
    taking_in = asyncio.ensure_future(world.store.volume_found(found))
    await asyncio.sleep(0)
    ns = world.store.namespaces["default"]
    settled = asyncio.ensure_future(world.store._volumes.settled(ns, world.run.keys[5:]))
    await asyncio.sleep(0)
    assert not taking_in.done()
    assert not settled.done()
    await asyncio.wait_for(settled, 20)
    assert taking_in.done()
    assert world.states() == [IN_NVME] * 5 + [DOWN, IN_NVME, DOWN]
    await world.store._volumes.settled(ns, world.run.keys)  # nothing is being taken in


async def test_a_volume_that_goes_while_it_is_taken_in_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volumes, "SLICE_ROWS", 1)
    world.out_of_ram()
    found = world.on_volume(1)
    world.store.volume_lost(1)
    taking_in = asyncio.ensure_future(world.store.volume_found(found))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    world.store.volume_lost(1)
    await taking_in
    assert world.states() == [IN_NVME, DOWN] * 4
    world.check_accounts()
    await settle(world.store)


async def test_what_is_left_of_chunks_is_swept_up_when_nothing_lies_below(world: World) -> None:
    world.out_of_ram()
    world.store.volume_lost(1)
    ns = world.store.namespaces["default"]
    assert not ns.index.husks(0, ns.index.chunk_rows)[1:], "all but the last keep others linked"
    assert ns.index.chunk_count == 8
    await world.store.delete(world.c.run(tokens(8), 6, 7))
    await world.store._volumes.sweep(ns, 0, ns.index.chunk_rows)
    assert ns.index.chunk_count == 5, "5 went, as 6 had kept it; 4 has an object"
    world.store.volume_lost(0)
    await world.store._volumes.sweep(ns, 0, ns.index.chunk_rows)
    assert ns.index.chunk_count == 0
    assert ns.index.object_count == 0
    world.check_accounts()


async def test_what_is_left_of_a_chunk_is_not_listed_nor_leased(world: World) -> None:
    world.out_of_ram()
    world.store.volume_lost(1)
    page = world.store.list("default", b"", b"", 100)
    assert {entry.key for entry in page.entries} == set(world.run.keys[::2])
    await world.c.get(world.c.run(tokens(8), 0, 1))
    assert world.store.acquire_now(world.c.run(tokens(8), 0, 2), 1 << 30) is None
    assert world.store.match(world.run, pb.PREFIX, pb.DEPTH_NODE).chunks == 1
    assert list(world.store.match(world.run, pb.PREFIX, pb.DEPTH_NODE).states)[1] == DOWN


@pytest.mark.parametrize("deleted", [(1, 2), (0, 8)])
async def test_a_delete_holds_for_what_comes_back_before_the_tier_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch, deleted: tuple[int, int]
) -> None:
    world.out_of_ram()
    found = world.on_volume(1)
    world.store.volume_lost(1)
    monkeypatch.setattr(volumes, "SLICE_ROWS", 1)
    told = world.tier.forget

    async def comes_back(namespace: str, family: bytes, keys: Sequence[bytes]) -> None:
        monkeypatch.setattr(world.tier, "forget", told)
        await world.store.volume_found(found)
        await told(namespace, family, keys)

    monkeypatch.setattr(world.tier, "forget", comes_back)
    await world.store.delete(world.c.run(tokens(8), *deleted))
    left = deleted[0]
    assert world.states()[:left] == [IN_NVME] * left
    assert set(world.states()[left:]).isdisjoint({IN_NVME, int(pb.IN_RAM)})
    assert world.tier.usage().objects == left, "what was dropped is deleted below"
    assert {key for _, _, keys in world.tier.forgotten for key in keys} == set(
        world.run.keys[left:]
    )
    world.check_accounts()


async def test_places_of_a_lost_volume_are_not_deleted_when_it_is_back(world: World) -> None:
    """The objects are there again, in the same places."""
    world.out_of_ram()
    found = world.on_volume(1)
    trash, ns = world.store._trash, world.store.namespaces["default"]
    async with trash._locks[TierKind.NVME]:  # a flush is under way
        world.store.residency.drop_subtree(ns, world.index.find(world.run.keys[6]), DOWN, "expired")
        assert len(trash._waiting[TierKind.NVME]) == 2
        world.store.volume_lost(1)
        await world.store.volume_found(found)
    await trash.flush(TierKind.NVME)
    assert world.states() == [*[IN_NVME] * 6, DOWN, IN_NVME]
    assert world.tier.usage().objects == 7
    world.check_accounts()


@pytest.mark.parametrize("bypass_ram", [False, True])
async def test_nobody_waits_for_a_device_that_was_given_up(world: World, bypass_ram: bool) -> None:
    """And what is put again elsewhere is read, though the old read has not come back."""
    world.out_of_ram()
    one = world.c.run(tokens(8), 1, 2)
    gate = world.tier.gates[1] = asyncio.Event()
    stream = world.store.open_get(one, time.monotonic() + 60, bypass_ram)
    getting = asyncio.ensure_future(stream.next())
    await world.tier.reached.wait()
    world.store.volume_lost(1)
    assert await asyncio.wait_for(getting, 20) is None
    assert list(stream.states) == [DOWN]
    await stream.close()
    world.tier.turn = 0
    await world.c.put(one, [payload(1, SIZE)], durable=True)
    world.out_of_ram()
    stream = world.store.open_get(one, time.monotonic() + 60, bypass_ram)
    grants = await asyncio.wait_for(stream.next(), 20)
    assert grants is not None
    assert bytes(grants[0].view) == payload(1, SIZE)
    stream.delivered(grants)
    await stream.close()
    gate.set()
    assert world.store._loader is not None
    await world.store._loader.close()  # waits for what is under way, and ends nothing
    assert world.store.ram.leased_bytes == 0
    assert world.states()[1] in (IN_NVME, int(pb.IN_RAM))
    arena = world.store._loader._bypass.arena
    assert arena.free_bytes == arena.size_bytes
