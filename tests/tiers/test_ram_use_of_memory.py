"""How much of the cap holds payload, under mixed sizes whose shares change."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable

import pytest
from tiers.ram_helpers import KIB, MIB, Bookkeeper, audit, audit_tier, meta_of

from kvstored.tiers.base import MAX_OBJECT_BYTES, NoRoom, ObjectMeta, padded_bytes
from kvstored.tiers.ram import RamTier
from kvstored.tiers.ram.slabs import MAX_EXACT_CLASSES, Slabs

FAMILIES = (256 * KIB, MIB + 12 * KIB, 4 * MIB + 512 * KIB)
SHARES = ((6, 3, 1), (1, 3, 6), (1, 1, 1), (0, 1, 0), (1, 0, 0), (5, 0, 5), (0, 0, 1))


class Lru:
    """The victims of a store: oldest first, of the whole tier or of one namespace."""

    def __init__(self) -> None:
        self.lengths: OrderedDict[int, tuple[str, int]] = OrderedDict()
        self.payload_bytes: dict[str, int] = {}
        self.not_full: set[str] | None = None  # namespaces that were never refused

    def add(self, namespace: str, place: int, length_bytes: int) -> None:
        self.lengths[place] = (namespace, length_bytes)
        self.payload_bytes[namespace] = self.payload_bytes.get(namespace, 0) + length_bytes

    def pop(self, namespace: str | None) -> int:
        place = next(p for p, (n, _) in self.lengths.items() if namespace in (None, n))
        owner, length_bytes = self.lengths.pop(place)
        self.payload_bytes[owner] -= length_bytes
        return place


def share_of_cap(
    books: Bookkeeper,
    lru: Lru,
    namespaces: list[str],
    pick: Callable[[], int],
    puts_bytes: int,
) -> float:
    """Put until so many bytes were put; the least payload / cap after any put since all
    namespaces, or the tier, were full.
    """
    cap_bytes = books.slabs.cap_bytes
    rng = random.Random(7)
    if lru.not_full is None:
        lru.not_full = set(namespaces)
    least = 1.0
    done_bytes = 0
    while done_bytes < puts_bytes:
        namespace, length_bytes = rng.choice(namespaces), pick()
        while isinstance(place := books.reserve(namespace, length_bytes), NoRoom):
            assert place in (NoRoom.TIER, NoRoom.NAMESPACE)
            of_one = place is NoRoom.NAMESPACE
            lru.not_full -= {namespace} if of_one else lru.not_full
            books.places.delete(lru.pop(namespace if of_one else None))
        books.publish(place, length_bytes)
        lru.add(namespace, place, length_bytes)
        done_bytes += length_bytes
        if not lru.not_full:
            least = min(least, sum(lru.payload_bytes.values()) / cap_bytes)
    assert not lru.not_full
    return least


def by_share(shares: tuple[int, ...], rng: random.Random) -> Callable[[], int]:
    """Lengths such that each family gets its share of the bytes."""
    weights = [share / length for share, length in zip(shares, FAMILIES, strict=True)]
    return lambda: rng.choices(FAMILIES, weights)[0]


@pytest.mark.parametrize("cap_bytes", [256 * MIB, 1024 * MIB])
def test_three_families_fill_nine_tenths(cap_bytes: int) -> None:
    books, lru, rng = Bookkeeper(Slabs(cap_bytes)), Lru(), random.Random(1)
    for shares in SHARES:
        pick = by_share(shares, rng)
        assert share_of_cap(books, lru, ["one"], pick, cap_bytes * 5 // 4) >= 0.9, shares
    audit(books.slabs, books.places)


@pytest.mark.parametrize("overcommitted", [False, True])
def test_fifty_namespaces_fill_eight_tenths(overcommitted: bool) -> None:
    namespaces = [f"tenant-{i}" for i in range(50)]
    cap_bytes = 50 * 24 * MIB
    each = None if overcommitted else (lambda _: 24 * MIB)
    books, lru, rng = Bookkeeper(Slabs(cap_bytes, each)), Lru(), random.Random(2)
    for shares in SHARES[:4]:
        pick = by_share(shares, rng)
        assert share_of_cap(books, lru, namespaces, pick, cap_bytes * 2) >= 0.8, shares
    audit(books.slabs, books.places)


def test_moving_costs_less_than_putting() -> None:
    """Sizes that share a tier do not push each other's memory to and fro."""
    books, lru, rng = Bookkeeper(Slabs(1024 * MIB)), Lru(), random.Random(3)
    share_of_cap(books, lru, ["one"], by_share((1, 1, 1), rng), 1280 * MIB)
    before = books.moved_bytes
    share_of_cap(books, lru, ["one"], by_share((1, 1, 1), rng), 2048 * MIB)
    assert books.moved_bytes - before < 0.5 * 2048 * MIB


def test_any_size_at_all_does_not_make_a_segment_each() -> None:
    books, lru, rng = Bookkeeper(Slabs(2048 * MIB)), Lru(), random.Random(4)
    used = share_of_cap(books, lru, ["one"], lambda: rng.randint(4096, 600 * KIB), 6144 * MIB)
    assert used >= 0.75
    assert len(books.slabs.segments) < len(lru.lengths) / 4
    classes = books.slabs.spaces["one"].classes
    assert len(classes) < MAX_EXACT_CLASSES + 8 * 16
    audit(books.slabs, books.places)


def test_rounded_slots_hold_and_waste_little() -> None:
    slabs = Slabs(1 << 40)
    for i in range(MAX_EXACT_CLASSES):
        slabs.begin_segment("many", 4096 * (i + 1), 1)
    rng = random.Random(5)
    for _ in range(2000):
        length_bytes = rng.randint(4096 * (MAX_EXACT_CLASSES + 1), MAX_OBJECT_BYTES)
        slot_bytes = slabs.slot_bytes("many", length_bytes)
        assert padded_bytes(length_bytes) <= slot_bytes <= padded_bytes(length_bytes) * 9 / 8
        assert slot_bytes % 4096 == 0
        assert slabs.slot_bytes("few", length_bytes) == padded_bytes(length_bytes)


async def test_real_memory_of_three_families() -> None:
    """The same through the tier, whose segments are real and objects move for real."""
    cap_bytes = 192 * MIB
    tier = RamTier(cap_bytes)
    await tier.open()
    lru, rng = Lru(), random.Random(6)
    full = False
    for shares in SHARES[:3]:
        pick = by_share(shares, rng)
        done_bytes = 0
        while done_bytes < cap_bytes * 5 // 4:
            length_bytes = pick()
            (place,) = await tier.reserve("one", [length_bytes])
            while isinstance(place, NoRoom):
                assert place is NoRoom.TIER
                full = True
                await tier.delete([lru.pop(None)])
                (place,) = await tier.reserve("one", [length_bytes])
            mark = place.to_bytes(8, "little")
            view = tier.view(place)
            view[:8] = view[-8:] = mark
            tier.publish(place, _unhashed(length_bytes))
            lru.add("one", place, length_bytes)
            done_bytes += length_bytes
            usage = tier.usage()
            assert lru.payload_bytes["one"] == usage.charged_bytes
            assert usage.footprint_bytes <= cap_bytes
            assert not full or usage.charged_bytes >= 0.9 * cap_bytes, shares
    audit_tier(tier)
    for place in lru.lengths:
        tier.lease(place)
        view = tier.view(place)
        assert bytes(view[:8]) == bytes(view[-8:]) == place.to_bytes(8, "little")
        del view
        tier.release(place)
    await tier.close()
    assert tier.usage().footprint_bytes == 0


_METAS = {length: meta_of(bytes(length)) for length in FAMILIES}


def _unhashed(length_bytes: int) -> ObjectMeta:
    """Checksums are not looked at here: that the bytes follow their object is."""
    return _METAS[length_bytes]
