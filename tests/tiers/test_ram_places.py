"""Leases, moves and memory of the RAM tier, one rule at a time."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tiers.ram_helpers import KIB, MIB, audit_tier, content, holds, meta_of, put

from kvstored.tiers.base import NoRoom, ObjectRead, ObjectWrite, ReadOutcome
from kvstored.tiers.ram import PlaceError, RamTier, growth, pages
from kvstored.tiers.ram.segment import Segment

PAGE = 4096
CAP_BYTES = 4 * MIB  # segments of up to 32 KiB: 8 slots of a page


@pytest.fixture
async def tier() -> AsyncIterator[RamTier]:
    caps = {"small": 256 * KIB}
    tier = RamTier(CAP_BYTES, lambda name: caps.get(name, CAP_BYTES))
    await tier.open()
    yield tier
    audit_tier(tier)
    await tier.close()
    assert tier.usage().footprint_bytes == 0


async def fill(tier: RamTier, length_bytes: int, namespace: str = "default") -> list[int]:
    """Put (with the index as seed) until there is no room. Asked for at once, so that segments
    are as large as they get.
    """
    answers = await tier.reserve(namespace, [length_bytes] * (CAP_BYTES // PAGE + 1))
    places = [place for place in answers if isinstance(place, int)]
    assert len(places) < len(answers)
    for seed, place in enumerate(places):
        data = content(seed, length_bytes)
        tier.view(place)[:] = data
        tier.publish(place, meta_of(data, key=seed))
    return places


async def reserved(tier: RamTier, length_bytes: int) -> int:
    """A place; there must be room."""
    (place,) = await tier.reserve("default", [length_bytes])
    assert isinstance(place, int)
    return place


def mapped_segments() -> int:
    """Segments in this process's address space, by the kernel's account."""
    return Path("/proc/self/maps").read_text().count("kvstored-ram")


class Gate:
    """Holds a blocking call in the pool until it is opened."""

    def __init__(self, call: Callable[..., object]) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self._call = call

    def __call__(self, *args: object) -> object:
        self.entered.set()
        assert self.open.wait(30)
        return self._call(*args)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 30)


async def test_delete_under_lease_frees_at_the_last_release(tier: RamTier) -> None:
    place = await put(tier, 1, 5000)
    tier.lease(place)
    tier.lease(place)
    assert (tier.leased(place), tier.leased_bytes) == (True, 8192)
    view = tier.view(place)
    await tier.delete([place])
    with pytest.raises(PlaceError, match="not readable"):
        tier.lease(place)
    others = await fill(tier, 5000)
    assert view == content(1, 5000), "nobody else was given the slot"
    tier.release(place)
    assert tier.usage().charged_bytes == 8192 * (len(others) + 1)
    assert await tier.reserve("default", [5000]) == [NoRoom.TIER]
    view.release()
    tier.release(place)
    assert tier.usage().charged_bytes == 8192 * len(others)
    assert tier.leased_bytes == 0
    assert isinstance((await tier.reserve("default", [5000]))[0], int)


async def test_a_release_too_many_raises(tier: RamTier) -> None:
    place = await put(tier, 1, PAGE)
    with pytest.raises(PlaceError, match="more often than leased"):
        tier.release(place)
    tier.lease(place)
    tier.release(place)
    with pytest.raises(PlaceError, match="more often than leased"):
        tier.release(place)
    assert holds(tier, place, 1, PAGE)


async def test_a_freed_place_never_names_another_object(tier: RamTier) -> None:
    old = await put(tier, 1, PAGE)
    await tier.delete([old])
    new = await put(tier, 2, PAGE)
    assert old != new
    for attempt in (tier.lease, tier.release, tier.view, tier.leased, tier.checksums):
        with pytest.raises(PlaceError, match="not in use"):
            attempt(old)
    with pytest.raises(PlaceError):
        await tier.delete([old])
    for never in (0, -1, 1 << 62):
        with pytest.raises(PlaceError):
            tier.lease(never)
    assert holds(tier, new, 2, PAGE)


async def test_only_reserved_or_leased_places_can_be_viewed(tier: RamTier) -> None:
    (place,) = await tier.reserve("default", [5000])
    assert isinstance(place, int)
    assert (len(tier.view(place)), len(tier.view(place, padded=True))) == (5000, 8192)
    tier.publish(place, meta_of(tier.view(place)))
    with pytest.raises(PlaceError, match="without a lease"):
        tier.view(place)
    tier.lease(place)
    where = tier.locate(place)
    view = tier.view(place)
    view[:3] = b"abc"
    assert os.pread(tier.segment_fd(where.segment_id), 3, where.offset) == b"abc"
    tier.release(place)


async def test_publish_refuses_what_was_not_reserved(tier: RamTier) -> None:
    (place,) = await tier.reserve("default", [5000])
    assert isinstance(place, int)
    with pytest.raises(PlaceError, match="4999 bytes for a place of 5000"):
        tier.publish(place, meta_of(bytes(4999)))
    tier.publish(place, meta_of(bytes(tier.view(place))))
    with pytest.raises(PlaceError, match="not reserved"):
        tier.publish(place, meta_of(bytes(5000)))


async def test_checksums_are_those_published(tier: RamTier) -> None:
    length_bytes = MIB + 5
    place = await put(tier, 3, length_bytes)
    meta = meta_of(content(3, length_bytes))
    assert tier.checksums(place) == (meta.checksum, meta.piece_checksums)
    assert len(meta.piece_checksums) == 16


async def test_read_finds_damage_in_any_piece(tier: RamTier) -> None:
    length_bytes = MIB + 5
    place = await put(tier, 3, length_bytes)
    meta = meta_of(content(3, length_bytes), key=3)
    into = memoryview(bytearray(length_bytes + PAGE))
    item = ObjectRead(place, meta.key, meta.part, length_bytes, meta.checksum, into)
    for position in (0, MIB, length_bytes - 1):
        tier.lease(place)
        view = tier.view(place)
        view[position] ^= 1
        assert await tier.read([item]) == [ReadOutcome.CORRUPT]
        view[position] ^= 1
        view.release()
        tier.release(place)
        assert await tier.read([item]) == [ReadOutcome.OK]


async def test_a_reused_slot_has_clean_padding(tier: RamTier) -> None:
    places = await fill(tier, 2 * PAGE)
    await tier.delete(places)
    answers = await tier.reserve("default", [PAGE + 1] * len(places))
    for place in answers:
        assert isinstance(place, int)
        assert not any(tier.view(place, padded=True)[PAGE + 1 :])


async def test_memory_goes_from_one_size_to_another(tier: RamTier) -> None:
    places = await fill(tier, PAGE)
    kept = set(places[::7])
    await tier.delete([place for place in places if place not in kept])
    large = await fill(tier, 3 * PAGE)
    assert len(large) * 3 * PAGE > CAP_BYTES * 0.8
    for seed, place in enumerate(places):
        assert place not in kept or holds(tier, place, seed, PAGE)
    for seed, place in enumerate(large):
        assert holds(tier, place, seed, 3 * PAGE)


async def test_leased_objects_pin_their_segments(tier: RamTier) -> None:
    places = await fill(tier, PAGE)
    kept = places[::4]
    where = {}
    for place in kept:
        tier.lease(place)
        where[place] = tier.locate(place)
    await tier.delete([place for place in places if place not in set(kept)])
    assert await tier.reserve("default", [3 * PAGE]) == [NoRoom.TIER]
    assert {place: tier.locate(place) for place in kept} == where
    for place in kept:
        tier.release(place)
    assert isinstance((await tier.reserve("default", [3 * PAGE]))[0], int)


@pytest.mark.parametrize("event", ["lease", "delete", "lease, delete", "lease, delete, release"])
async def test_an_object_used_while_it_is_moved(
    tier: RamTier, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    places = await fill(tier, PAGE)
    await tier.delete([place for i, place in enumerate(places) if i % 8 >= 2])
    kept = {place: i for i, place in enumerate(places) if i % 8 < 2}
    gate = Gate(Segment.copy_from)
    monkeypatch.setattr(Segment, "copy_from", lambda *args: gate(*args))
    growing = asyncio.ensure_future(tier.reserve("default", [3 * PAGE]))
    await gate.reached()
    books = tier._places
    place = books._table.place(next(iter(books._moving)))
    charged_bytes = tier.usage().charged_bytes
    if "lease" in event:
        tier.lease(place)
        before = tier.locate(place)
    if "delete" in event:
        await tier.delete([place])
    if "release" in event:
        tier.release(place)
    freed = event in ("delete", "lease, delete, release")
    assert tier.usage().charged_bytes == charged_bytes - PAGE * freed
    gate.open.set()
    (large,) = await growing
    assert isinstance(large, int), "another segment was taken, or this one"
    if freed:
        del kept[place]
    else:
        assert tier.locate(place) == before, "what is read is not moved"
        assert tier.view(place) == content(kept[place], PAGE)
        tier.release(place)
        if "delete" in event:
            del kept[place]
    for other, seed in kept.items():
        assert holds(tier, other, seed, PAGE)
    audit_tier(tier)


async def test_segments_serve_one_namespace_for_life(tier: RamTier) -> None:
    """What one namespace wrote never comes up in another's memory."""
    secret = b"\xa5" * PAGE
    for length_bytes in (PAGE, 3 * PAGE):
        (*places,) = await fill(tier, length_bytes, "a")
        for place in places:
            tier.lease(place)
            tier.view(place)[:PAGE] = secret
            tier.release(place)
        await tier.delete(places)
    theirs = {s for s, r in tier._slabs.segments.items() if r.namespace == "a"}
    for place in await tier.reserve("b", [PAGE] * (CAP_BYTES // PAGE)):
        assert isinstance(place, int), "all of a's memory was given back"
        assert tier.locate(place).segment_id not in theirs
        assert not any(tier.view(place))
    assert tier.namespace_usage("a").footprint_bytes == 0


async def test_a_namespace_at_its_cap_disturbs_no_other(tier: RamTier) -> None:
    others = await fill(tier, PAGE, "large")
    await tier.delete(others[:200])
    small = await fill(tier, PAGE, "small")
    assert tier.namespace_usage("small").footprint_bytes <= 256 * KIB
    assert len(small) * PAGE > 200 * KIB
    footprint_bytes = tier.namespace_usage("large").footprint_bytes
    assert await tier.reserve("small", [3 * PAGE]) == [NoRoom.NAMESPACE]
    assert await tier.reserve("small", [257 * KIB]) == [NoRoom.NEVER]
    assert tier.namespace_usage("large").footprint_bytes == footprint_bytes


async def test_given_back_memory_is_the_machines_again(tier: RamTier) -> None:
    places = await fill(tier, PAGE)
    inodes = {os.fstat(segment.fd).st_ino for segment in tier._growth.memory.values()}
    await tier.delete(places)
    (place,) = await tier.reserve("default", [CAP_BYTES])
    assert isinstance(place, int)
    held = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            held.add(os.stat(f"/proc/self/fd/{name}").st_ino)
        except FileNotFoundError:
            continue  # the listing's own
    assert not inodes & held
    assert mapped_segments() == 1


async def test_memory_stays_counted_while_somebody_views_it(tier: RamTier) -> None:
    place = await put(tier, 1, CAP_BYTES)
    tier.lease(place)
    view = tier.view(place)
    tier.release(place)  # the holder lets go of the lease before the view
    await tier.delete([place])
    assert await tier.reserve("other", [PAGE]) == [NoRoom.TIER]
    assert tier.usage().footprint_bytes == CAP_BYTES
    assert view[:100] == content(1, CAP_BYTES)[:100], "no crash, no foreign bytes"
    view.release()
    assert isinstance((await tier.reserve("other", [PAGE]))[0], int)
    assert tier.usage().footprint_bytes < CAP_BYTES


async def test_a_kernel_that_gives_no_memory_is_down_for_a_while(
    tier: RamTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = await put(tier, 1, 3 * PAGE)
    populate = pages.populate

    def refuse(address: int, size_bytes: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(pages, "populate", refuse)
    monkeypatch.setattr(growth, "_RETRY_S", 3600.0)
    before = tier.usage()
    assert await tier.reserve("default", [PAGE]) == [NoRoom.DOWN]
    assert "no memory" in tier.health
    assert tier.usage() == before
    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(pages, "populate", populate)
    assert await tier.reserve("default", [PAGE]) == [NoRoom.DOWN], "not asked again at once"
    assert holds(tier, kept, 1, 3 * PAGE)
    tier._growth._retry_at = time.monotonic()
    assert tier.health == "ok"
    assert isinstance((await tier.reserve("default", [PAGE]))[0], int)
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1


async def test_a_cancelled_reserve_keeps_nothing(
    tier: RamTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.cancel([await reserved(tier, PAGE)])  # leaves a free slot of that size
    gate = Gate(Segment.populate)
    monkeypatch.setattr(Segment, "populate", lambda *args: gate(*args))
    task = asyncio.ensure_future(tier.reserve("default", [PAGE, 3 * PAGE]))
    await gate.reached()
    assert tier.usage().charged_bytes == PAGE
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tier.usage().charged_bytes == 0
    gate.open.set()
    (place,) = await tier.reserve("default", [PAGE])
    assert isinstance(place, int)
    assert tier.usage().charged_bytes == PAGE
    tier.cancel([place])


async def test_reserves_that_wait_for_memory_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = RamTier(64 * MIB)  # the least segment has 8 slots of a page
    await tier.open()
    gate = Gate(Segment.populate)
    monkeypatch.setattr(Segment, "populate", lambda *args: gate(*args))
    waiting = [asyncio.ensure_future(tier.reserve("default", [PAGE])) for _ in range(8)]
    await gate.reached()
    assert tier.segments == 1
    gate.open.set()
    places = {place for (place,) in await asyncio.gather(*waiting)}
    assert len(places) == 8
    assert tier.segments == 1
    await tier.close()


async def test_many_reserves_at_once_stay_within_the_cap(tier: RamTier) -> None:
    lengths = [PAGE, 3 * PAGE, 50 * PAGE, MIB]
    answers = await asyncio.gather(
        *(tier.reserve(f"n{i % 5}", [lengths[i % 4]] * 3) for i in range(200))
    )
    places = [place for answer in answers for place in answer if isinstance(place, int)]
    assert len(set(places)) == len(places)
    assert any(isinstance(place, NoRoom) for answer in answers for place in answer)
    audit_tier(tier)
    tier.cancel(places)
    assert tier.usage().charged_bytes == 0


async def test_close_waits_for_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = RamTier(CAP_BYTES)
    await tier.open()
    (place,) = await tier.reserve("default", [PAGE])
    assert isinstance(place, int)
    data = content(1, PAGE)
    item = ObjectWrite(place, meta_of(data), memoryview(data))
    writing = asyncio.ensure_future(tier.write([item]))
    await asyncio.sleep(0)
    writing.cancel()
    await tier.close()
    assert writing.cancelled()
    assert tier.usage().footprint_bytes == 0


async def test_lengths_that_no_object_has_are_refused(tier: RamTier) -> None:
    for length_bytes in (0, -1):
        with pytest.raises(ValueError, match="an object of"):
            await tier.reserve("default", [length_bytes])
