"""The scrub: it reads everything, and drops what is rotten and nothing else."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb
import pytest
from tiers.conformance import KIB, MIB, make_sample, store
from tiers.nvme_helpers import LENGTHS, make_tier, make_volume
from tiers.nvme_reader import read_volume

from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault, FaultyFiles
from kvstored.tiers.base import ObjectRead, ReadOutcome
from kvstored.tiers.nvme.contents import Listed
from kvstored.tiers.nvme.format import is_small
from kvstored.tiers.nvme.scrub import (
    MAX_BATCH_BYTES,
    Pace,
    PassEnd,
    Scrubber,
    ScrubStatus,
)
from kvstored.tiers.nvme.volume_tier import VolumeTier

NO_BACKGROUND = 0


class Volume:
    """A volume under scrub; `between` runs before the first read."""

    def __init__(self, tier: VolumeTier) -> None:
        self.tier = tier
        self.asked: list[int] = []  # places, in the order in which they were read
        self.batches: list[list[int]] = []
        self.between: Callable[[], Any] | None = None
        self.outcome: ReadOutcome | None = None  # given instead of what the tier says
        self.listings = 0
        self.read_so_many = asyncio.Event()
        self.so_many = 1

    async def read(self, items: Sequence[ObjectRead]) -> list[ReadOutcome]:
        self.asked += [item.place for item in items]
        self.batches.append([item.length_bytes for item in items])
        if self.between is not None:
            between, self.between = self.between, None
            await between()
        outcomes = await self.tier.read(items)
        if len(self.asked) >= self.so_many:
            self.read_so_many.set()
        return [self.outcome or outcome for outcome in outcomes]

    async def list_after(self, place: int, most: int) -> list[Listed]:
        self.listings += 1
        return await self.tier.list_after(place, most)

    def is_live(self, place: int) -> bool:
        return self.tier.is_live(place)

    @property
    def region_count(self) -> int:
        return self.tier.region_count


class Scrub:
    """A scrubber of an open volume, and what it had dropped."""

    def __init__(self, tier: VolumeTier) -> None:
        self.volume = Volume(tier)
        self.rotten: list[int] = []
        self.gone: list[int] = []
        self.scrubber = Scrubber(self.volume, self._drop, rate_bytes_per_s=NO_BACKGROUND)

    def _drop(self, place: int, gone: bool) -> None:
        (self.gone if gone else self.rotten).append(place)

    async def run(self, rate: int = 0) -> ScrubStatus:
        return await self.scrubber.demand(rate)


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Opens the volume in tmp_path, with a scrub; closes both at the end."""
    open_now: list[Scrub] = []

    async def open_it(files: FaultyFiles | None = None) -> Scrub:
        tier = make_tier(tmp_path, files)
        await tier.open()
        open_now.append(Scrub(tier))
        return open_now[-1]

    yield open_it
    for scrub in open_now:
        await scrub.scrubber.close()
        await scrub.volume.tier.close()


async def test_reads_everything_once(tmp_path: Path, opened: Callable[..., Any]) -> None:
    volume = await make_volume(tmp_path, [*LENGTHS, *[4 * KIB] * 100, *[70_000] * 200])
    scrub = await opened()
    status = await scrub.run()
    assert sorted(scrub.volume.asked) == sorted(volume)
    assert scrub.volume.asked == sorted(volume), "in order of place"
    total = sum(sample.meta.length_bytes for sample in volume.values())
    assert status.last_done_ms > 0
    assert status == ScrubStatus(
        running=False, on_demand=True, last_end=PassEnd.DONE, last_done_ms=status.last_done_ms,
        passes_done=1, pass_objects=len(volume), pass_bytes=total,
        scrubbed_objects=len(volume), scrubbed_bytes=total,
    )  # fmt: skip
    assert scrub.rotten == []
    status = await scrub.run()
    assert (status.passes_done, status.pass_bytes, status.scrubbed_bytes) == (2, total, 2 * total)


async def test_listing_page_by_page(tmp_path: Path, opened: Callable[..., Any]) -> None:
    volume = await make_volume(tmp_path, [*LENGTHS, *[4 * KIB] * 100, *[70_000] * 100])
    scrub = await opened()
    for most in (1, 90):
        found: list[Listed] = []
        while page := await scrub.volume.tier.list_after(found[-1].place if found else -1, most):
            assert len(page) <= most
            found += page
        assert [one.place for one in found] == sorted(volume)
    for one in found:
        meta = volume[one.place].meta
        assert (one.key, one.part, one.length_bytes, one.checksum) == (
            meta.key, meta.part, meta.length_bytes, meta.checksum,
        )  # fmt: skip


def rot_slot(directory: Path, length: int) -> None:
    (slot,) = [s for s in read_volume(directory) if len(s.payload) == length]
    with (directory / "data").open("r+b") as file:
        file.seek(slot.offset + 4096 + length - 1)
        file.write(bytes([slot.payload[-1] ^ 1]))


def rot_small(directory: Path, place: int) -> None:
    with lmdb.open(str(directory / "small"), max_dbs=5) as env:
        payload = env.open_db(b"payload")
        with env.begin(write=True, db=payload) as txn:
            key = (place & 0xFFFFFFFF).to_bytes(4, "big") + b"\0\1"
            value = txn.get(key)
            txn.put(key, value[:-1] + bytes([value[-1] ^ 1]))


async def test_what_is_rotten_is_dropped(tmp_path: Path, opened: Callable[..., Any]) -> None:
    volume = await make_volume(tmp_path)
    rotten = {p for p, s in volume.items() if s.meta.length_bytes in (4 * KIB, MIB + 1)}
    rot_slot(tmp_path, MIB + 1)
    rot_small(tmp_path, min(p for p in rotten if is_small(p)))
    scrub = await opened()
    status = await scrub.run()
    assert set(scrub.rotten) == rotten
    assert len(scrub.rotten) == 2
    assert (status.dropped_objects, status.dropped_bytes) == (2, 4 * KIB + MIB + 1)
    assert status.pass_objects == len(volume), "what is rotten was scrubbed as well"
    await scrub.volume.tier.delete(scrub.rotten)
    status = await scrub.run()
    assert (status.dropped_objects, status.pass_objects) == (2, len(volume) - 2)


async def test_what_was_deleted_without_its_commit_is_dropped_and_is_no_damage(
    tmp_path: Path, opened: Callable[..., Any]
) -> None:
    volume = await make_volume(tmp_path)
    place = next(p for p, s in volume.items() if s.meta.length_bytes == MIB)
    files = FaultyFiles(RealFiles())
    tier = make_tier(tmp_path, files)
    await tier.open()
    files.inject(Fault("commit", "*/index", error=errno.EIO))
    await tier.delete([place])
    await tier.close()
    scrub = await opened()
    status = await scrub.run()
    assert (scrub.gone, scrub.rotten) == ([place], [])
    assert (status.dropped_objects, status.pass_objects) == (0, len(volume) - 1)


async def test_store_that_fails_to_drop(tmp_path: Path) -> None:
    """The scrub goes on."""
    await make_volume(tmp_path)
    rot_slot(tmp_path, MIB)
    tier = make_tier(tmp_path)
    await tier.open()

    def fails(place: int, gone: bool) -> None:
        assert not gone
        raise RuntimeError(place)

    scrubber = Scrubber(tier, fails, rate_bytes_per_s=NO_BACKGROUND)
    status = await scrubber.demand()
    assert (status.last_end, status.dropped_objects) == (PassEnd.DONE, 1)
    await scrubber.close()
    await tier.close()


async def test_places_that_change_hands_meanwhile(
    tmp_path: Path, opened: Callable[..., Any]
) -> None:
    """Deleted, or deleted and written again, between the listing and the read: no rot."""
    volume = await make_volume(tmp_path, [*LENGTHS, 70_000, 70_000, 4 * KIB])
    scrub = await opened()
    tier = scrub.volume.tier
    others = [make_sample(s.meta.length_bytes, 500 + i) for i, s in enumerate(volume.values())]

    async def change() -> None:
        await tier.delete(list(volume))
        again = await store(tier, others[:-3])
        assert set(again) & set(volume), "some places are used again"

    scrub.volume.between = change
    status = await scrub.run()
    assert scrub.rotten == []
    assert (status.last_end, status.dropped_objects) == (PassEnd.DONE, 0)
    assert scrub.volume.listings > 2, "it looked again at what it did not find"


async def test_nothing_is_dropped_once_it_is_closed(
    tmp_path: Path, opened: Callable[..., Any]
) -> None:
    """The place may mean something else by then."""
    await make_volume(tmp_path, [MIB])
    rot_slot(tmp_path, MIB)
    scrub = await opened()
    closing: list[asyncio.Task[None]] = []

    async def close() -> None:
        closing.append(asyncio.create_task(scrub.scrubber.close()))
        await asyncio.sleep(0)

    scrub.volume.between = close
    await scrub.run()
    await closing[0]
    assert scrub.rotten == []


async def test_read_that_is_wrong_once(tmp_path: Path, opened: Callable[..., Any]) -> None:
    """A bit lost on the way is no rot; the object is counted as scrubbed in a later pass."""
    await make_volume(tmp_path)
    files = FaultyFiles(RealFiles())
    scrub = await opened(files)
    files.inject(Fault("preadv", "*/data", flip=8 * 5000, times=1))
    status = await scrub.run()
    assert (scrub.rotten, status.dropped_objects) == ([], 0)
    assert status.pass_objects == len(LENGTHS) - 1


async def test_what_cannot_be_read_stays(tmp_path: Path, opened: Callable[..., Any]) -> None:
    await make_volume(tmp_path)
    files = FaultyFiles(RealFiles())
    scrub = await opened(files)
    files.inject(Fault("preadv", "*/data", error=errno.EIO))
    status = await scrub.run()
    large = sum(n > 64 * KIB for n in LENGTHS)
    assert (status.last_end, status.unreadable_objects) == (PassEnd.DONE, large)
    assert (scrub.rotten, status.pass_objects) == ([], len(LENGTHS) - large)


async def test_volume_that_is_down(tmp_path: Path, opened: Callable[..., Any]) -> None:
    await make_volume(tmp_path)
    scrub = await opened()
    scrub.volume.outcome = ReadOutcome.DOWN
    assert (await scrub.run()).last_end is PassEnd.DOWN
    scrub.volume.outcome = None
    assert (await scrub.run()).last_end is PassEnd.DONE
    await scrub.volume.tier.close()
    status = await scrub.run()
    assert (status.last_end, status.passes_done) == (PassEnd.DOWN, 1)


async def test_storm(tmp_path: Path) -> None:
    """Passes without end while objects come and go: whatever is dropped would be a mistake."""
    tier = make_tier(tmp_path)
    await tier.open()
    rotten: list[int] = []
    scrubber = Scrubber(tier, lambda place, _: rotten.append(place), rate_bytes_per_s=NO_BACKGROUND)
    rng = random.Random(3)
    lengths = (4 * KIB, 60 * KIB, 70_000, 70_000, 200_000)
    held: list[int] = []
    passes = [scrubber.demand()]
    for seed in range(60):
        if passes[-1].done():
            passes.append(scrubber.demand())
        many = 4 if len(held) > 40 else 0
        gone = [held.pop(rng.randrange(len(held))) for _ in range(many)]
        samples = [make_sample(rng.choice(lengths), 10 * seed + i) for i in range(4)]
        placed, _ = await asyncio.gather(store(tier, samples), tier.delete(gone))
        held += placed
    status = await passes[-1]
    assert rotten == []
    assert len(passes) > 5
    assert status.scrubbed_objects > 100
    await scrubber.close()
    await tier.close()


async def test_large_object_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object larger than a batch is read by itself; the memory is given back."""
    monkeypatch.setattr("kvstored.tiers.nvme.scrub.MAX_BATCH_BYTES", 300_000)
    volume = await make_volume(tmp_path)
    tier = make_tier(tmp_path)
    await tier.open()
    watched = Volume(tier)
    scrubber = Scrubber(watched, lambda *_: None, rate_bytes_per_s=NO_BACKGROUND)
    status = await scrubber.demand()
    assert status.pass_objects == len(volume)
    assert all(sum(batch) <= 300_000 or len(batch) == 1 for batch in watched.batches)
    assert len(watched.batches) < len(volume), "the small ones go together"
    assert len(scrubber._memory._block) == 0
    await scrubber.close()
    await tier.close()


# ---- when -------------------------------------------------------------------------------------


class Dice(random.Random):
    """Begins at once, in region `first`."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def random(self) -> float:
        return 0.0

    def randrange(self, *_: Any) -> int:
        return self.first


async def background(tmp_path: Path, first: int, rate: int) -> tuple[Volume, Scrubber]:
    tier = make_tier(tmp_path)
    await tier.open()
    watched = Volume(tier)
    return watched, Scrubber(
        watched, lambda _: None, rate_bytes_per_s=rate, pause_s=3600, rng=Dice(first)
    )


async def test_background_begins_anywhere_and_reads_everything(tmp_path: Path) -> None:
    volume = await make_volume(tmp_path)
    first = sorted({place >> 32 for place in volume if not is_small(place)})[1]
    watched, scrubber = await background(tmp_path, first, 1 << 40)
    watched.so_many = len(volume)
    await watched.read_so_many.wait()
    assert watched.asked[0] >> 32 == first
    assert sorted(watched.asked) == sorted(volume)
    assert not scrubber.status.on_demand
    await scrubber.close()
    await watched.tier.close()


async def test_demand_goes_before_the_background(tmp_path: Path) -> None:
    """A pass that would take for ever gives way, and goes on afterwards where it was."""
    volume = await make_volume(tmp_path)
    watched, scrubber = await background(tmp_path, 0, 1)
    await watched.read_so_many.wait()
    status = await scrubber.demand()
    assert (status.on_demand, status.pass_objects, status.passes_done) == (True, len(volume), 1)
    await scrubber.close()
    await watched.tier.close()


async def test_new_demand_takes_the_place_of_the_old(tmp_path: Path) -> None:
    volume = await make_volume(tmp_path)
    watched, scrubber = await background(tmp_path, 0, NO_BACKGROUND)
    slow = scrubber.demand(1)
    await watched.read_so_many.wait()
    given_up = scrubber.demand(1)
    given_up.cancel()
    fast = scrubber.demand()
    assert (await slow) == (await fast)
    assert (await fast).pass_objects == len(volume)
    await scrubber.close()
    await watched.tier.close()


async def test_close_ends_a_slow_pass(tmp_path: Path) -> None:
    volume = await make_volume(tmp_path)
    watched, scrubber = await background(tmp_path, 0, NO_BACKGROUND)
    slow = scrubber.demand(1)
    await watched.read_so_many.wait()
    first = list(watched.asked)
    for _ in range(50):  # time enough to read the rest, at another rate
        await watched.tier.list_after(-1, 100)
    assert watched.asked == first
    await scrubber.close()
    assert (await slow).last_end is PassEnd.CUT_SHORT
    assert len(watched.asked) < len(volume), "at once, not when it has read everything"
    assert (await scrubber.demand()).last_end is PassEnd.CUT_SHORT, "none after the end"
    await watched.tier.close()


def test_pace() -> None:
    pace = Pace(1000, now=10.0)
    assert pace.delay_s(500, began=10.0, now=10.0) == 0.5
    assert pace.delay_s(500, began=10.5, now=10.75) == 0.25, "the time it took counts"
    assert pace.delay_s(500, began=11.0, now=13.0) == 0.0
    assert pace.delay_s(500, began=20.0, now=20.0) == 0.5, "time that was not used is no credit"
    assert pace.delay_s(500, began=20.0, now=20.0) == 1.0
    assert Pace(0, now=10.0).delay_s(1 << 40, began=10.0, now=10.0) == 0.0


@pytest.mark.parametrize(
    ("rate", "nbytes"), [(0, MAX_BATCH_BYTES), (1, MIB), (8 * MIB, 2 * MIB), (10**12, 16 * MIB)]
)
def test_batches_follow_the_rate(rate: int, nbytes: int) -> None:
    assert Pace(rate, now=0.0).batch_bytes == nbytes
