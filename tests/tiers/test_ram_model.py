"""100,000 random operations against a model: nothing leaks, nothing changes under a reader."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import pytest
from tiers.ram_helpers import KIB, audit_tier, content, holds, meta_of

from kvstored.tiers.base import NoRoom, ObjectRead, ReadOutcome, padded_bytes
from kvstored.tiers.ram import PlaceError, RamTier
from kvstored.tiers.ram.places import Move

CAP_BYTES = 3072 * KIB  # segments of up to 24 KiB
SMALL_CAP_BYTES = 640 * KIB
LENGTHS = (4096, 4097, 12_288, 40_000)
NAMESPACES = ("large", "small")


@dataclass
class Held:
    """What the model knows of one place."""

    seed: int
    length_bytes: int
    namespace: str
    published: bool = False
    deleted: bool = False
    readers: int = 0


class Driver:
    """Does random operations on the tier and on the model, and compares after each."""

    def __init__(self, tier: RamTier, seed: int) -> None:
        self.tier = tier
        self.rng = random.Random(seed)
        self.places: dict[int, Held] = {}
        self.in_flight: tuple[asyncio.Task[list[int | NoRoom]], str, list[int]] | None = None
        self.seeds = 0
        self.shares = [1.0] * len(LENGTHS)
        self.charged_bytes = self.objects = self.leased_bytes = 0
        self.refused = 0
        self.raced = 0
        self.waited = 0  # steps since the reserve in flight began
        self.crowded = False

    def choose(self, *, published: bool, deleted: bool = False, leased: bool | None = None) -> int:
        """A random place in that condition, one being moved if possible; 0 when a few tries find
        none.
        """
        books = self.tier._places
        keys = [books._table.place(row) for row in books._moving] or list(self.places)
        for _ in range(8 if keys else 0):
            place = self.rng.choice(keys)
            held = self.places[place]
            if (held.published, held.deleted) == (published, deleted) and leased in (
                None,
                held.readers > 0,
            ):
                return place
        return 0

    async def step(self) -> None:
        if self.in_flight is None:
            actions = [self.reserve, self.publish, self.cancel, self.lease, self.release]
            weights = [4.0, 4, 0.5, 2, 4]
        else:  # growth is under way: get in its way
            actions = [self.nothing, self.publish, self.cancel, self.lease, self.release]
            weights = [6.0, 2, 0.5, 2, 4]
        actions += [self.delete, self.look, self.read, self.misuse]
        weights += [8 if self.crowded else 0.1, 1, 0.15, 0.3]
        await self.rng.choices(actions, weights)[0]()
        if self.in_flight is not None:
            self.waited += 1
            if self.waited > 20:
                await asyncio.wait([self.in_flight[0]])
            if self.in_flight[0].done():
                self.arrived()
        self.compare()

    def compare(self) -> None:
        usage = self.tier.usage()
        on_the_way = self.in_flight[2] if self.in_flight else []
        surplus_bytes = usage.charged_bytes - self.charged_bytes
        assert surplus_bytes in [0, *accumulate(map(padded_bytes, on_the_way))]
        assert usage.objects == self.objects
        assert usage.charged_bytes <= usage.footprint_bytes <= CAP_BYTES
        small = self.tier.namespace_usage("small")
        assert small.charged_bytes <= small.footprint_bytes <= SMALL_CAP_BYTES
        assert self.tier.leased_bytes == self.leased_bytes

    def forget(self, place: int) -> None:
        """The place is free."""
        held = self.places.pop(place)
        self.charged_bytes -= padded_bytes(held.length_bytes)
        self.objects -= held.published

    def drop(self, place: int) -> None:
        """The place was deleted."""
        held = self.places[place]
        held.deleted = True
        if not held.readers:
            self.forget(place)

    def let_go(self, place: int) -> None:
        """One reader less."""
        held = self.places[place]
        self.tier.release(place)
        held.readers -= 1
        if not held.readers:
            self.leased_bytes -= padded_bytes(held.length_bytes)
            if held.deleted:
                self.forget(place)

    async def nothing(self) -> None:
        await asyncio.sleep(0)

    async def reserve(self) -> None:
        namespace = self.rng.choice(NAMESPACES)
        lengths = self.rng.choices(LENGTHS, self.shares, k=self.rng.randint(1, 12))
        task = asyncio.ensure_future(self.tier.reserve(namespace, lengths))
        self.in_flight = (task, namespace, lengths)
        self.waited = 0
        await asyncio.sleep(0)
        self.raced += not task.done()

    def arrived(self) -> None:
        assert self.in_flight is not None
        task, namespace, lengths = self.in_flight
        self.in_flight = None
        self.crowded = False
        for place, length_bytes in zip(task.result(), lengths, strict=True):
            if isinstance(place, NoRoom):
                assert place in (NoRoom.TIER, NoRoom.NAMESPACE)
                assert place is NoRoom.TIER or namespace == "small"
                self.refused += 1
                self.crowded = True
                continue
            assert place not in self.places
            self.seeds += 1
            self.places[place] = Held(self.seeds, length_bytes, namespace)
            self.charged_bytes += padded_bytes(length_bytes)
            view = self.tier.view(place, padded=True)
            assert not any(view[length_bytes:])
            view[:length_bytes] = content(self.seeds, length_bytes)

    async def publish(self) -> None:
        unpublished = [place for place, held in self.places.items() if not held.published]
        for place in unpublished[: self.rng.randint(1, 12)]:
            held = self.places[place]
            meta = meta_of(content(held.seed, held.length_bytes), key=held.seed)
            self.tier.publish(place, meta)
            held.published = True
            self.objects += 1

    async def cancel(self) -> None:
        if place := self.choose(published=False):
            self.tier.cancel([place])
            self.forget(place)

    async def lease(self) -> None:
        if place := self.choose(published=True):
            self.tier.lease(place)
            held = self.places[place]
            self.leased_bytes += 0 if held.readers else padded_bytes(held.length_bytes)
            held.readers += 1
            assert self.tier.leased(place)

    async def release(self) -> None:
        deleted = self.rng.random() < 0.3
        if place := self.choose(published=True, deleted=deleted, leased=True):
            held = self.places[place]
            assert self.tier.view(place) == content(held.seed, held.length_bytes)
            self.let_go(place)

    async def delete(self) -> None:
        self.crowded = False
        for _ in range(self.rng.randint(1, 12)):
            if place := self.choose(published=True):
                await self.tier.delete([place])
                self.drop(place)

    async def look(self) -> None:
        if place := self.choose(published=True):
            held = self.places[place]
            assert holds(self.tier, place, held.seed, held.length_bytes)

    async def read(self) -> None:
        if self.in_flight is None and (place := self.choose(published=True)):
            held = self.places[place]
            data = content(held.seed, held.length_bytes)
            meta = meta_of(data, key=held.seed)
            into = bytearray(padded_bytes(len(data)))
            item = ObjectRead(
                place, meta.key, meta.part, len(data), meta.checksum, memoryview(into)
            )
            assert await self.tier.read([item]) == [ReadOutcome.OK]
            assert into[: len(data)] == data

    async def misuse(self) -> None:
        """What a bug would do is refused, and changes nothing."""
        if place := self.choose(published=True, leased=False):
            for attempt in (self.tier.release, self.tier.view):
                with pytest.raises(PlaceError):
                    attempt(place)
        if place := self.choose(published=True, deleted=True):
            with pytest.raises(PlaceError):
                self.tier.lease(place)
        if place := self.choose(published=False):
            with pytest.raises(PlaceError):
                await self.tier.delete([place])

    async def clear(self) -> None:
        """Everybody lets go of everything."""
        if self.in_flight is not None:
            await asyncio.wait([self.in_flight[0]])
            self.arrived()
        for place, held in list(self.places.items()):
            readers = held.readers
            if not held.published:
                self.tier.cancel([place])
                self.forget(place)
            elif not held.deleted:
                assert holds(self.tier, place, held.seed, held.length_bytes)
                await self.tier.delete([place])
                self.drop(place)
            for _ in range(readers):
                self.let_go(place)


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """The pool gets its turn beside a busy loop, as in the daemon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
async def test_nothing_leaks_over_random_operations(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    caps = {"large": CAP_BYTES, "small": SMALL_CAP_BYTES}
    tier = RamTier(CAP_BYTES, caps.__getitem__)
    await tier.open()
    driver = Driver(tier, seed)
    moved: list[int] = []
    end_move = tier._places.end_move

    def watch(move: Move, copied: bool = True) -> None:
        source = move.source.used
        end_move(move, copied)
        moved.append(source - move.source.used)

    monkeypatch.setattr(tier._places, "end_move", watch)
    for i in range(25_000):
        await driver.step()
        if i % 1000 == 0:
            audit_tier(tier)
            driver.shares = driver.rng.sample([16.0, 4.0, 1.0, 0.2], k=4)
    assert driver.refused > 1000, "the tier was full most of the time"
    assert driver.raced > 200, "growth and other operations overlapped"
    assert moved.count(1) > 100, "objects were moved"
    assert moved.count(0) > 5, "and some could not be, because of a reader"
    await driver.clear()
    driver.compare()
    audit_tier(tier)
    assert (tier.usage().charged_bytes, tier.usage().objects, tier.leased_bytes) == (0, 0, 0)
    # With nothing held, all of the memory can serve one object.
    (place,) = await tier.reserve("large", [CAP_BYTES])
    assert isinstance(place, int)
    await tier.close()
    assert tier.usage().footprint_bytes == 0
