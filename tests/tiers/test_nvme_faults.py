"""A device that fails: outcomes and health, not exceptions; and nothing said is untrue after."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
from tiers.conformance import KIB, MIB, assert_holds, make_sample, reserve_one, store, want
from tiers.nvme_helpers import CAP_BYTES, keys, make_tier, make_volume, reopen

from kvstored.errors import DataDirectoryError
from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault, FaultyFiles
from kvstored.tiers.base import NoRoom, ObjectWrite, ReadOutcome, WriteOutcome
from kvstored.tiers.nvme.volume_tier import DeleteNotDurable, VolumeTier

LENGTH = 600_000
"""Of which a region holds three, so that a write needs no new region."""


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles(RealFiles())


@pytest.fixture
async def tier(tmp_path: Path, files: FaultyFiles) -> AsyncIterator[VolumeTier]:
    made = make_tier(tmp_path / "volume", files)
    await made.open()
    yield made
    files.clear()
    await made.close()


class Gate(threading.Event):
    """For `Fault.stuck`: `entered` is set once somebody is stuck."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def wait(self, timeout: float | None = None) -> bool:
        self._loop.call_soon_threadsafe(self.entered.set)
        return super().wait(timeout)


async def try_write(tier: VolumeTier, length: int = LENGTH, seed: int = 1) -> WriteOutcome:
    sample = make_sample(length, seed)
    place = await reserve_one(tier, sample)
    (outcome,) = await tier.write([ObjectWrite(place, sample.meta, sample.payload)])
    return outcome


WRITE_FAULTS = [
    (LENGTH, Fault("pwritev", "*/data", error=errno.EIO, times=1)),
    (LENGTH, Fault("pwritev", "*/data", error=errno.ENOSPC, times=1)),
    (LENGTH, Fault("fdatasync", "*/data", error=errno.EIO, times=1)),
    (LENGTH, Fault("commit", "*/index", error=errno.EIO, times=1, skip=1)),
    (LENGTH, Fault("commit", "*/index", error=errno.EIO, times=1, skip=1, after=True)),
    (LENGTH, Fault("commit", "*/index", times=1, exception=lambda: lmdb.MapFullError("full"))),
    (4 * KIB, Fault("commit", "*/small", error=errno.ENOSPC, times=1)),
    (4 * KIB, Fault("commit", "*/small", error=errno.EIO, times=1, after=True)),
]


@pytest.mark.parametrize(
    ("length", "fault"), WRITE_FAULTS, ids=lambda f: getattr(f, "operation", f)
)
async def test_failed_write_is_an_outcome(
    tmp_path: Path, tier: VolumeTier, files: FaultyFiles, length: int, fault: Fault
) -> None:
    (warm,) = await store(tier, [make_sample(length, 50)])  # the region is dedicated and open
    await tier.delete([warm])
    fault.seen = fault.hits = 0
    fault.skip = 0
    files.inject(fault)
    assert await try_write(tier, length) is WriteOutcome.FAILED
    assert fault.hits == 1
    # After a failed sync the slot is taken back, and the sync of that goes well.
    assert (tier.health == "ok") == (fault.operation == "fdatasync")
    assert len(tier.problems) == (fault.operation == "fdatasync")
    assert tier.errors.total() >= 1
    assert (tier.usage().charged_bytes, tier.usage().objects) == (0, 0)
    assert await try_write(tier, length) is WriteOutcome.OK, "it recovers by itself"
    assert tier.health == "ok"
    await tier.close()
    sample = make_sample(length, 1)
    found = await reopen(tmp_path / "volume", [sample, make_sample(length, 50)])
    assert found.good == {sample.meta.key}


async def test_failed_write_cannot_come_back(
    tmp_path: Path, tier: VolumeTier, files: FaultyFiles
) -> None:
    """The index would not take it, and its header could not be voided either."""
    await store(tier, [make_sample(LENGTH, 50)])
    files.inject(Fault("commit", "*/index", error=errno.EIO, times=1))
    # The slot is written; overwriting its header fails.
    files.inject(Fault("pwritev", "*/data", error=errno.EIO, skip=1, times=1))
    assert await try_write(tier) is WriteOutcome.FAILED
    await tier.close()
    shutil.rmtree(tmp_path / "volume" / "index")
    found = await reopen(tmp_path / "volume", [make_sample(LENGTH, 1), make_sample(LENGTH, 50)])
    assert make_sample(LENGTH, 1).meta.key not in found.good


async def test_region_whose_sync_failed_is_not_written_again(
    tmp_path: Path, tier: VolumeTier, files: FaultyFiles
) -> None:
    kept = make_sample(LENGTH, 50)
    (place,) = await store(tier, [kept])
    files.inject(Fault("fdatasync", "*/data", error=errno.EIO, times=1))
    assert await try_write(tier, LENGTH) is WriteOutcome.FAILED
    (after,) = await store(tier, [make_sample(LENGTH, 2)])
    assert after >> 32 != place >> 32
    await assert_holds(tier, place, kept)
    await tier.close()
    found = await reopen(tmp_path / "volume", [kept, make_sample(LENGTH, 2)])
    assert found.good == keys([kept, make_sample(LENGTH, 2)])


async def test_short_transfers_are_continued(tier: VolumeTier, files: FaultyFiles) -> None:
    await store(tier, [make_sample(LENGTH, 2)])
    files.inject(Fault("pwritev", "*/data", short=0.5, times=2))
    files.inject(Fault("preadv", "*/data", short=0.3, times=2))
    sample = make_sample(LENGTH + 5, 1)
    (place,) = await store(tier, [sample])
    await assert_holds(tier, place, sample)
    assert files.calls["preadv"] >= 3


async def test_failed_reads_are_outcomes(tier: VolumeTier, files: FaultyFiles) -> None:
    sample = make_sample(MIB, 1)
    (place,) = await store(tier, [sample])
    files.inject(Fault("preadv", "*/data", error=errno.EIO, times=1))
    assert await tier.read([want(place, sample)]) == [ReadOutcome.FAILED]
    assert tier.health.startswith("read: ")
    for bit in (0, 8 * 5000, 8 * (4096 + MIB) - 1):
        files.inject(Fault("preadv", "*/data", flip=bit, times=1))
        assert await tier.read([want(place, sample)]) == [ReadOutcome.CORRUPT]
    files.inject(Fault("preadv", "*/data", short=0.0, times=1))
    assert await tier.read([want(place, sample)]) == [ReadOutcome.FAILED]
    await assert_holds(tier, place, sample)
    assert tier.health == "ok"


async def test_what_goes_on_failing_is_counted_each_time_and_said_once(
    tier: VolumeTier, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    sample = make_sample(MIB, 1)
    (place,) = await store(tier, [sample])
    files.inject(Fault("preadv", "*/data", error=errno.EIO, times=5))
    for _ in range(5):
        assert await tier.read([want(place, sample)]) == [ReadOutcome.FAILED]
    assert tier.errors["read"] == 5
    said = [r for r in caplog.records if r.getMessage().startswith("nvme read")]
    assert len(said) == 1


async def test_write_damaged_on_its_way_is_found(tier: VolumeTier, files: FaultyFiles) -> None:
    sample = make_sample(LENGTH, 1)
    await store(tier, [make_sample(LENGTH, 2)])
    files.inject(Fault("pwritev", "*/data", flip=8 * 70_000, times=1))
    (place,) = await store(tier, [sample])
    assert await tier.read([want(place, sample)]) == [ReadOutcome.CORRUPT]


@pytest.mark.parametrize("stage", ["void", "commit"])
async def test_delete_holds_by_either_means(
    tmp_path: Path, tier: VolumeTier, files: FaultyFiles, stage: str
) -> None:
    """One of header and index could not be changed; the other is enough, whatever is lost next."""
    gone, kept = make_sample(LENGTH, 1), make_sample(300_000, 2)
    place, _ = await store(tier, [gone, kept])
    where, operation = {"void": ("data", "pwritev"), "commit": ("index", "commit")}[stage]
    files.inject(Fault(operation, f"*/{where}", error=errno.EIO, times=1))
    await tier.delete([place])
    assert tier.usage().objects == 1
    assert await tier.read([want(place, gone)]) == [ReadOutcome.CORRUPT]
    await tier.close()
    for named in ({gone.meta.key} if stage == "commit" else set(), set()):
        found = await reopen(tmp_path / "volume", [gone, kept])
        assert (found.good, found.gone) == ({kept.meta.key}, named)
        assert not found.corrupt, "a delete is no damage"
        shutil.rmtree(tmp_path / "volume" / "index")


async def test_delete_that_is_not_durable_says_so(
    tmp_path: Path, tier: VolumeTier, files: FaultyFiles
) -> None:
    gone, kept = make_sample(4 * KIB, 1), make_sample(4 * KIB, 2)
    place, _ = await store(tier, [gone, kept])
    files.inject(Fault("commit", "*/small", error=errno.EIO, times=1))
    with pytest.raises(DeleteNotDurable, match="tried again"):
        await tier.delete([place])
    assert await tier.read([want(place, gone)]) == [ReadOutcome.CORRUPT]
    charge = tier.charge_bytes(4 * KIB)
    assert tier.usage().charged_bytes == 2 * charge, "charged until it is really gone"
    await store(tier, [make_sample(4 * KIB, 3)])
    assert tier.usage().charged_bytes == 2 * charge
    await tier.close()
    samples = [gone, kept, make_sample(4 * KIB, 3)]
    assert (await reopen(tmp_path / "volume", samples)).good == keys(samples[1:])


async def test_deletes_work_on_a_full_volume(tier: VolumeTier, files: FaultyFiles) -> None:
    places: dict[int, list[int]] = {}
    for length in (4 * KIB, 64 * KIB, 100_000):
        places[length] = []
        while True:
            (place,) = await tier.reserve("default", [length])
            if isinstance(place, NoRoom):
                break
            sample = make_sample(length, len(places[length]))
            (outcome,) = await tier.write([ObjectWrite(place, sample.meta, sample.payload)])
            assert outcome is WriteOutcome.OK
            places[length].append(place)
            if length == 4 * KIB and len(places[length]) == 60:
                break
    assert await tier.reserve("default", [64 * KIB]) == [NoRoom.TIER]
    files.inject(Fault("fallocate", "*", error=errno.ENOSPC))
    for held in places.values():
        await tier.delete(held)
    assert tier.usage().charged_bytes == 0
    assert tier.health == "ok"


async def test_cancelled_read_waits_for_a_stuck_device(
    tier: VolumeTier, files: FaultyFiles
) -> None:
    samples = [make_sample(MIB, seed) for seed in range(12)]
    places = await store(tier, samples)
    release = Gate()
    files.inject(Fault("preadv", "*/data", stuck=release))
    reads = [want(p, s) for p, s in zip(places, samples, strict=True)]
    task = asyncio.ensure_future(tier.read(reads))
    await release.entered.wait()
    task.cancel()
    for _ in range(50):
        await asyncio.sleep(0)  # the loop runs on
    early = task.done()
    release.set()
    assert not early, "its buffers are still in use"
    with pytest.raises(asyncio.CancelledError):
        await task
    for read in reads:
        np.frombuffer(read.into, np.uint8)[:] = 0x77
    files.clear()
    await assert_holds(tier, places[0], samples[0])
    assert all(np.all(np.frombuffer(read.into, np.uint8) == 0x77) for read in reads)


async def test_delete_waits_for_a_stuck_reader(tier: VolumeTier, files: FaultyFiles) -> None:
    sample = make_sample(LENGTH, 1)
    (place,) = await store(tier, [sample])
    release = Gate()
    files.inject(Fault("preadv", "*/data", stuck=release, times=1))
    reading = asyncio.ensure_future(tier.read([want(place, sample)]))
    await release.entered.wait()
    deleting = asyncio.ensure_future(tier.delete([place]))
    await store(tier, [make_sample(LENGTH, 2)])  # a whole commit goes by
    early = deleting.done()
    late = await tier.read([want(place, sample)])
    release.set()
    assert await reading == [ReadOutcome.OK]
    await deleting
    assert not early
    assert late == [ReadOutcome.CORRUPT], "nobody new gets in"
    assert tier.usage().objects == 1


async def test_many_objects_share_a_commit(tier: VolumeTier, files: FaultyFiles) -> None:
    samples = [make_sample(100_000, seed) for seed in range(64)]
    await store(tier, samples[:1])
    before = files.calls.copy()
    await store(tier, samples[1:])
    assert files.calls["commit"] - before["commit"] <= 8
    assert files.calls["fdatasync"] - before["fdatasync"] <= 30


async def test_region_table_that_cannot_be_written(tier: VolumeTier, files: FaultyFiles) -> None:
    files.inject(Fault("pwritev", "*/data", error=errno.EIO, times=1))
    assert await tier.reserve("default", [MIB]) == [NoRoom.DOWN]
    assert not isinstance((await tier.reserve("default", [MIB]))[0], NoRoom)


async def test_full_file_system_is_a_smaller_cap(tmp_path: Path) -> None:
    files = FaultyFiles(RealFiles())
    files.inject(Fault("fallocate", "*/data", error=errno.ENOSPC, times=1))
    files.inject(Fault("fallocate", "*/data", error=errno.ENOSPC, skip=4, times=1))
    tier = make_tier(tmp_path, files)
    await tier.open()
    assert any("file system is full" in problem for problem in tier.problems)
    usage = tier.usage()
    assert usage.footprint_bytes <= usage.cap_bytes < CAP_BYTES
    answers = await tier.reserve("default", [1_900_000] * 10)
    assert [isinstance(a, NoRoom) for a in answers] == [False] * 3 + [True] * 7
    await tier.close()
    whole = make_tier(tmp_path)
    await whole.open()
    assert whole.usage().cap_bytes == CAP_BYTES, "the room is used once it is there"
    await whole.close()


class FullFiles(RealFiles):
    """Files of a file system that others have filled."""

    def statvfs(self, path: Path) -> os.statvfs_result:
        found = list(super().statvfs(path))
        found[3] = found[4] = 0  # free blocks, for root and for others
        return os.statvfs_result(found)

    def fallocate(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        if offset_bytes + length_bytes > os.fstat(fd).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("cap_bytes", [CAP_BYTES, 3 * CAP_BYTES])
async def test_full_file_system_does_not_keep_a_volume_closed(
    tmp_path: Path, cap_bytes: int
) -> None:
    before = await make_volume(tmp_path)
    tier = make_tier(tmp_path, FullFiles(), cap_bytes)
    found = await tier.open()
    try:
        assert found.place.tolist() == sorted(before)
        usage = tier.usage()
        assert usage.footprint_bytes <= usage.cap_bytes <= CAP_BYTES + MIB
        assert any("file system is full" in p for p in tier.problems) == (cap_bytes > CAP_BYTES)
        await store(tier, [make_sample(n, 100 + n) for n in (20_000, 300_000)])
    finally:
        await tier.close()


async def test_smaller_cap_after_restart(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    await tier.open()
    samples = []
    for seed in range(100):
        sample = make_sample(LENGTH, seed)
        (place,) = await tier.reserve("default", [LENGTH])
        if isinstance(place, NoRoom):
            break
        await tier.write([ObjectWrite(place, sample.meta, sample.payload)])
        samples.append(sample)
    await tier.close()
    found = await reopen(tmp_path, samples, cap_bytes=20 * MIB, full=True)
    assert 0 < len(found.good) < len(samples)
    assert sum(found.recovered.dropped.values()) == len(samples) - len(found.good)
    again = await reopen(tmp_path, samples, cap_bytes=CAP_BYTES, full=True)
    assert again.good == found.good


async def test_second_opener_is_refused(tmp_path: Path, tier: VolumeTier) -> None:
    with pytest.raises(DataDirectoryError, match=r"in use by another process .*stop the other"):
        await make_tier(tmp_path / "volume").open()


@pytest.mark.parametrize(
    ("error", "operation"),
    [
        (errno.EACCES, "open"),
        (errno.EROFS, "mkdir"),
        (errno.EIO, "listdir"),
        (errno.ENOSPC, "open"),
    ],
)
async def test_unusable_directory(tmp_path: Path, error: int, operation: str) -> None:
    files = FaultyFiles(RealFiles())
    files.inject(Fault(operation, f"{tmp_path}/volume*", error=error))
    with pytest.raises(DataDirectoryError, match=r"volume: .* \(make it exist"):
        await make_tier(tmp_path / "volume", files).open()


async def test_directory_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("do not touch")
    with pytest.raises(DataDirectoryError, match="a directory of its own"):
        await make_tier(tmp_path).open()
    assert (tmp_path / "thesis.tex").read_text() == "do not touch"


async def test_cap_too_small(tmp_path: Path) -> None:
    with pytest.raises(DataDirectoryError, match=r"does not hold one region.*raise the cap to"):
        await make_tier(tmp_path, cap_bytes=4 * MIB).open()


async def test_misuse_is_an_exception(tier: VolumeTier) -> None:
    sample = make_sample(MIB, 1)
    item = ObjectWrite(0, sample.meta, sample.payload)
    with pytest.raises(ValueError, match="not reserved"):
        await tier.write([item])
    with pytest.raises(ValueError, match="holds no object"):
        await tier.delete([0])
    place = await reserve_one(tier, sample)
    with pytest.raises(ValueError, match="payload of"):
        await tier.write([ObjectWrite(place, sample.meta, sample.payload[:4096])])
    assert await tier.write([ObjectWrite(place, sample.meta, sample.payload)]) == [WriteOutcome.OK]
