"""A store over real volumes, one of which goes away, is written around, and comes back."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from store.support_store import client, fail_on_death, payload, tokens
from tiers.nvme_volumes_helpers import CAP_BYTES, PATIENCE, make_volume, until

from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault, FaultyFiles
from kvstored.store.store import Store, StoreSettings
from kvstored.supervise import Supervisor
from kvstored.tiers.base import TierKind
from kvstored.tiers.nvme.member import VolumeSpec
from kvstored.tiers.nvme.status import VolumeState
from kvstored.tiers.nvme.tier import NvmeTier
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.proto import kvstore_pb2 as pb

MIB = 1 << 20
SIZE = 64 * 1024 + 4096
IN_NVME, DOWN = int(pb.IN_NVME), int(pb.MISS_TIER_DOWN)


class World:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = FaultyFiles(RealFiles())
        self.tier = NvmeTier(
            [VolumeSpec(f"v{i}", root / f"v{i}", CAP_BYTES, guarded=False) for i in range(2)],
            root / "registry",
            files=self.files,
            patience=PATIENCE,
            make=make_volume,
        )
        self.supervisor = Supervisor(fail_on_death)
        self.store = Store(RamTier(16 * MIB), self.tier, StoreSettings(), self.supervisor)

    async def becomes(self, number: int, state: VolumeState) -> None:
        await until(lambda: self.tier.volumes()[number].state is state)

    def out_of_ram(self) -> None:
        ns = self.store.namespaces["default"]
        for chunk in range(ns.index.chunk_rows):
            if ns.index.held(chunk) and ns.index.tiers[chunk] & 2:
                self.store.residency.evict_chunk(ns, chunk, TierKind.RAM)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.store.open()
    yield made
    for fault in made.files._faults:  # of a test that failed
        if fault.stuck is not None:
            fault.stuck.set()
    made.files.clear()
    await made.store.close(20.0)
    await made.supervisor.stop()
    assert not any(made.supervisor.restarts.values())


async def test_goes_and_comes_back(world: World) -> None:
    c = await client(world.store)
    run = c.run(tokens(12))
    whole = {i: payload(i, SIZE) for i in range(12)}
    await c.put(run, list(whole.values()), durable=True)
    world.out_of_ram()
    world.files.inject(Fault("*", f"{world.root}/v1*", error=errno.EIO))
    got, _ = await c.get(run)
    assert got.items() < whole.items()
    await world.becomes(1, VolumeState.LOST)
    states = c.states(run)
    assert states.count(DOWN) == 6
    first = next(i for i, state in enumerate(states) if state == DOWN)
    last = max(i for i, state in enumerate(states) if state == DOWN)
    again = await c.put(c.run(tokens(12), stop=first + 1), [whole[i] for i in range(first + 1)])
    assert again[first] == pb.STORED
    await world.store.delete(c.run(tokens(12), start=last))
    world.files.clear()
    await world.becomes(1, VolumeState.OK)
    await until(lambda: world.tier.usage().objects == last)  # no twins, nothing deleted
    assert [s in (IN_NVME, int(pb.IN_RAM)) for s in c.states(run)] == [i < last for i in range(12)]
    world.out_of_ram()
    got, _ = await c.get(run)
    assert got == {i: whole[i] for i in range(last)}


async def test_silent_device_costs_only_its_own(world: World) -> None:
    """Durable puts and gets go on, deadlines hold, and the stop is not held up (by the fixture)."""
    c = await client(world.store)
    run = c.run(tokens(8))
    await c.put(run, [payload(i, SIZE) for i in range(8)], durable=True)
    world.out_of_ram()
    release = threading.Event()
    world.files.inject(Fault("*", f"{world.root}/v0*", stuck=release))
    reading = asyncio.ensure_future(c.get(run, timeout_s=0.2))
    other = c.run(tokens(8, seed=1))
    await c.put(other, [payload(i + 50, SIZE) for i in range(8)], durable=True)
    got, _ = await reading
    assert len(got) <= 4
    await world.becomes(0, VolumeState.LOST)
    states = await c.put(
        c.run(tokens(8, seed=2)), [payload(i + 90, SIZE) for i in range(8)], durable=True
    )
    assert set(states) == {pb.STORED}
    assert await world.store.delete(run)
    release.set()
    world.files.clear()
    await world.becomes(0, VolumeState.OK)
    assert set(c.states(run)).isdisjoint({IN_NVME, int(pb.IN_RAM)})
