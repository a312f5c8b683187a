"""A damaged volume: it opens, serves what is whole, never what is not, and says what it dropped."""

from __future__ import annotations

import dataclasses
import errno
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest
from tiers.conformance import KIB, MIB, Sample, assert_holds, make_sample, store
from tiers.nvme_helpers import (
    CAP_BYTES,
    LENGTHS,
    REGION_BYTES,
    examine,
    keys,
    make_tier,
    make_volume,
    reopen,
)
from tiers.nvme_reader import Slot, read_volume

from kvstored.errors import DataDirectoryError
from kvstored.io.base import RealFiles
from kvstored.io.faults import Fault, FaultyFiles
from kvstored.tiers.nvme import format as disk
from kvstored.tiers.nvme.failures import may_mend
from kvstored.tiers.nvme.index import Entry, Environment
from kvstored.tiers.nvme.volume import Settings, open_volume


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def truncate(path: Path, length: int) -> None:
    with path.open("r+b") as file:
        file.truncate(length)


def slot_of_length(directory: Path, length: int) -> Slot:
    (found,) = [slot for slot in read_volume(directory) if len(slot.payload) == length]
    return found


def split(volume: dict[int, Sample], length: int) -> tuple[Sample, set[bytes]]:
    """The sample of that length, and the keys of the others."""
    (one,) = [s for s in volume.values() if s.meta.length_bytes == length]
    return one, keys(list(volume.values())) - {one.meta.key}


def large(volume: dict[int, Sample]) -> set[bytes]:
    return {s.meta.key for s in volume.values() if s.meta.length_bytes > 64 * KIB}


async def test_reader_written_from_the_page_agrees(tmp_path: Path) -> None:
    volume = await make_volume(tmp_path)
    slots = {slot.region << 32 | slot.slot: slot for slot in read_volume(tmp_path)}
    in_slots = {place: s for place, s in volume.items() if s.meta.length_bytes > 64 * KIB}
    assert slots.keys() == in_slots.keys()
    for place, sample in in_slots.items():
        slot = slots[place]
        assert slot.payload == sample.data
        meta = sample.meta
        assert (slot.namespace, slot.part, slot.tenant, slot.family, slot.key) == (
            meta.namespace, meta.part, meta.tenant, meta.family, meta.key,
        )  # fmt: skip


HEADER_BYTES = {
    "magic": 0,
    "state": 10,
    "volume": 32,
    "dedication": 40,
    "place": 48,
    "sequence": 56,
    "length": 72,
    "family": 130,
    "key": 170,
    "checksum": 230,
    "name lengths": 256,
    "names": 273,
    "unused": 1500,
    "header checksum": 2041,
    "pieces": 2050,
    "last byte": 4095,
}


async def test_header_damage_is_one_miss(tmp_path: Path) -> None:
    volume = await make_volume(tmp_path)
    slot = slot_of_length(tmp_path, MIB)
    hurt, others = split(volume, MIB)
    tier = make_tier(tmp_path)
    recovered = await tier.open()
    for offset in HEADER_BYTES.values():
        flip(tmp_path / "data", slot.offset + offset)
        found = await examine(tier, recovered, list(volume.values()))
        assert (found.good, found.corrupt) == (others, {hurt.meta.key}), offset
        flip(tmp_path / "data", slot.offset + offset)
    await tier.close()


@pytest.mark.parametrize("offset", [60, 170, 2041])
async def test_header_damage_in_a_rebuild_is_counted(tmp_path: Path, offset: int) -> None:
    volume = await make_volume(tmp_path)
    slot = slot_of_length(tmp_path, MIB)
    hurt, _ = split(volume, MIB)
    flip(tmp_path / "data", slot.offset + offset)
    shutil.rmtree(tmp_path / "index")
    found = await reopen(tmp_path, list(volume.values()))
    assert found.recovered.dropped == {"header_damaged": 1}
    assert found.good == keys(list(volume.values())) - {hurt.meta.key}


async def test_payload_and_padding(tmp_path: Path) -> None:
    volume = await make_volume(tmp_path)
    slot = slot_of_length(tmp_path, MIB + 1)
    hurt, others = split(volume, MIB + 1)
    flip(tmp_path / "data", slot.offset + 4096 + MIB + 1)  # the first byte of padding
    tier = make_tier(tmp_path)
    recovered = await tier.open()
    found = await examine(tier, recovered, list(volume.values()))
    assert found.corrupt == set()
    for offset in (0, MIB - 1, MIB):
        flip(tmp_path / "data", slot.offset + 4096 + offset, bit=7)
        found = await examine(tier, recovered, list(volume.values()))
        assert (found.good, found.corrupt) == (others, {hurt.meta.key})
        flip(tmp_path / "data", slot.offset + 4096 + offset, bit=7)
    await tier.close()


async def test_slots_swapped(tmp_path: Path) -> None:
    """Each object's slot holds the other, of the same size, whole and with a good checksum."""
    volume = await make_volume(tmp_path, [600_000, 600_000, 600_000])
    first, second = read_volume(tmp_path)[:2]
    assert first.region == second.region
    raw = (tmp_path / "data").read_bytes()
    for source, target in ((first, second), (second, first)):
        piece = raw[source.offset : source.offset + source.slot_bytes]
        overwrite(tmp_path / "data", target.offset, piece)
    found = await reopen(tmp_path, list(volume.values()))
    assert found.corrupt == {first.key, second.key}
    shutil.rmtree(tmp_path / "index")
    found = await reopen(tmp_path, list(volume.values()))
    assert found.recovered.dropped == {"header_damaged": 2}
    assert len(found.good) == 1


def _superblock_flipped(at: Path) -> None:
    flip(at / "superblock", 50)


def _superblock_zeroed(at: Path) -> None:
    overwrite(at / "superblock", 0, bytes(4096))


def _superblock_cut(at: Path) -> None:
    truncate(at / "superblock", 100)


def _superblock_gone(at: Path) -> None:
    (at / "superblock").unlink()


def _superblock_copy_flipped(at: Path) -> None:
    flip(at / "data", 3000)


def _locks_garbage(at: Path) -> None:
    for name in ("index", "small"):
        (at / name / "lock.mdb").write_bytes(b"\xff" * 8192)


def _table_first_copy(at: Path) -> None:
    overwrite(at / "data", 4096, b"\xa5" * 4096)


def _table_second_copy(at: Path) -> None:
    (_, entries, _, second, _) = struct.unpack("<5Q", (at / "superblock").read_bytes()[48:88])
    overwrite(at / "data", second, bytes(64 * entries))


@pytest.mark.parametrize(
    "damage",
    [
        _superblock_flipped,
        _superblock_zeroed,
        _superblock_cut,
        _superblock_gone,
        _superblock_copy_flipped,
        _locks_garbage,
        _table_first_copy,
        _table_second_copy,
    ],
)
async def test_damage_that_costs_nothing(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    volume = await make_volume(tmp_path)
    damage(tmp_path)
    found = await reopen(tmp_path, list(volume.values()))
    assert found.good == keys(list(volume.values()))
    assert found.recovered.dropped == {}
    again = await reopen(tmp_path, list(volume.values()))
    assert again.problems == (), "what was found is mended"


async def test_both_superblocks_damaged(tmp_path: Path) -> None:
    await make_volume(tmp_path)
    flip(tmp_path / "superblock", 50)
    flip(tmp_path / "data", 50)
    with pytest.raises(DataDirectoryError, match=r"both superblocks are unreadable.*empty the dir"):
        await make_tier(tmp_path).open()


@pytest.mark.parametrize("other", ["silent", "damaged"])
async def test_a_device_that_gives_no_superblock_is_waited_for(tmp_path: Path, other: str) -> None:
    """What is there may be good: nobody is told to remove it."""
    volume = await make_volume(tmp_path)
    files = FaultyFiles(RealFiles())
    files.inject(Fault("preadv", "*/data", error=errno.EIO))
    if other == "silent":
        files.inject(Fault("preadv", "*/superblock", error=errno.EIO))
    else:
        flip(tmp_path / "superblock", 50)
    tier = make_tier(tmp_path, files)
    with pytest.raises(DataDirectoryError, match="device does not give") as caught:
        await tier.open()
    assert "empty" not in str(caught.value)
    assert may_mend(caught.value)
    assert (await reopen(tmp_path, list(volume.values()))).good == keys(list(volume.values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, r"format version 2.*reads versions up to 1"),
        ({"incompat": 4}, r"incompatible features 0x4"),
    ],
)
async def test_newer_format_is_refused(
    tmp_path: Path, change: dict[str, int], message: str
) -> None:
    await make_volume(tmp_path)
    old = disk.Superblock.decode((tmp_path / "superblock").read_bytes())
    block = dataclasses.replace(old, **change).encode()
    (tmp_path / "superblock").write_bytes(block)
    overwrite(tmp_path / "data", 0, block)
    with pytest.raises(DataDirectoryError, match=message):
        await make_tier(tmp_path).open()
    assert (tmp_path / "superblock").read_bytes() == block, "nothing was written"


async def test_unknown_compatible_feature_is_fine(tmp_path: Path) -> None:
    volume = await make_volume(tmp_path)
    old = disk.Superblock.decode((tmp_path / "superblock").read_bytes())
    block = dataclasses.replace(old, compat=1).encode()
    (tmp_path / "superblock").write_bytes(block)
    overwrite(tmp_path / "data", 0, block)
    assert (await reopen(tmp_path, list(volume.values()))).good == keys(list(volume.values()))


async def test_region_entry_lost_in_both_copies(tmp_path: Path) -> None:
    volume = await make_volume(tmp_path)
    slot = slot_of_length(tmp_path, MIB)
    (_, _, first, second, _) = struct.unpack("<5Q", (tmp_path / "superblock").read_bytes()[48:88])
    for table in (first, second):
        flip(tmp_path / "data", table + 64 * slot.region + 9)
    hurt, others = split(volume, MIB)
    found = await reopen(tmp_path, list(volume.values()))
    assert found.recovered.dropped == {"region_unknown": 1}
    assert found.good == others
    assert hurt.meta.key not in found.corrupt


async def test_region_given_another_dedication_forgets_what_it_held(tmp_path: Path) -> None:
    """As an older copy of the region table would have it."""
    volume = await make_volume(tmp_path)
    slot = slot_of_length(tmp_path, MIB)
    superblock = disk.Superblock.decode((tmp_path / "superblock").read_bytes())
    entry = disk.RegionEntry(
        slot.region, disk.RegionState.DEDICATED, slot.slot_bytes, 12345, sequence=10_000
    )
    for table in superblock.table_offsets:
        raw = entry.encode(superblock.volume_id)
        overwrite(tmp_path / "data", table + 64 * slot.region, raw)
    _, others = split(volume, MIB)
    found = await reopen(tmp_path, list(volume.values()))
    assert found.good == others
    assert found.recovered.dropped == {"region_rededicated": 1}


def _truncated(path: Path) -> None:
    truncate(path, 3 * 4096)


def _emptied(path: Path) -> None:
    truncate(path, 0)


def _zeroed(path: Path) -> None:
    overwrite(path, 0, bytes(path.stat().st_size))


def _meta_zeroed(path: Path) -> None:
    overwrite(path, 0, bytes(2 * 4096))


def _behind_meta_zeroed(path: Path) -> None:
    overwrite(path, 2 * 4096, bytes(40 * 4096))


def _noise(path: Path) -> None:
    overwrite(path, 2 * 4096, random.Random(7).randbytes(60 * 4096))


def _removed(path: Path) -> None:
    path.unlink()


LMDB_DAMAGE = [
    _truncated, _emptied, _zeroed, _meta_zeroed, _behind_meta_zeroed, _noise, _removed,
]  # fmt: skip


@pytest.mark.parametrize("damage", LMDB_DAMAGE)
async def test_index_is_made_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    volume = await make_volume(tmp_path)
    damage(tmp_path / "index" / "data.mdb")
    found = await reopen(tmp_path, list(volume.values()))
    assert found.good == keys(list(volume.values()))
    assert found.recovered.dropped == {}
    assert found.recovered.family_specs == {("default", b"\x01" * 32): b"spec"}
    assert any(p.startswith("index: ") for p in found.problems)
    again = await reopen(tmp_path, list(volume.values()))
    assert again.good == found.good
    assert again.problems == ()


async def test_truncated_index_kills_the_child_and_not_us(tmp_path: Path) -> None:
    """The file is long enough for what LMDB says is used, but a hole was cut at its end."""
    volume = await make_volume(tmp_path)
    path = tmp_path / "index" / "data.mdb"
    # A meta page that says fewer pages are used than the trees refer to.
    for page in (0, 1):
        overwrite(path, page * 4096 + 16 + 120, struct.pack("<Q", 2))
    truncate(path, 3 * 4096)
    found = await reopen(tmp_path, list(volume.values()))
    assert any("signal" in p or "exit" in p for p in found.problems), found.problems
    assert found.good == keys(list(volume.values()))


@pytest.mark.parametrize("damage", [_truncated, _zeroed, _behind_meta_zeroed, _removed])
async def test_small_objects_are_lost_and_counted(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    volume = await make_volume(tmp_path)
    damage(tmp_path / "small" / "data.mdb")
    found = await reopen(tmp_path, list(volume.values()))
    assert found.recovered.dropped == {"small_environment_lost": 1}
    assert found.good == large(volume)
    assert found.corrupt == set()


async def test_damaged_record_of_a_small_object(tmp_path: Path) -> None:
    """It is dropped, and so are its bytes; the others stay."""
    volume = await make_volume(tmp_path, [4 * KIB, 5 * KIB, 64 * KIB, MIB])
    hurt, others = split(volume, 5 * KIB)

    def look(damage: bool) -> tuple[int, int]:
        """Number of records and of payload chunks."""
        with lmdb.open(str(tmp_path / "small"), max_dbs=5) as env:
            records = env.open_db(b"records", dupsort=True, dupfixed=True)
            with env.begin(write=True) as txn:
                for key, row in txn.cursor(records) if damage else ():
                    if hurt.meta.key in row:
                        bad = row.replace(hurt.meta.key, bytes(32))
                        txn.delete(key, row, db=records)
                        txn.put(key, bad, db=records)
                        break
                payload = env.open_db(b"payload", txn)
                return txn.stat(records)["entries"], txn.stat(payload)["entries"]

    assert look(damage=True) == (3, 2 + 2 + 17)
    found = await reopen(tmp_path, list(volume.values()))
    assert found.good == others
    assert found.recovered.dropped == {"small_record_damaged": 1}
    assert look(damage=False) == (2, 2 + 17)
    again = await reopen(tmp_path, list(volume.values()))
    assert (again.good, again.recovered.dropped) == (others, {})


@pytest.mark.parametrize("seed", range(4))
async def test_random_flips_in_lmdb(tmp_path: Path, seed: int) -> None:
    volume = await make_volume(tmp_path, [*LENGTHS, *[4 * KIB] * 20])
    rng = random.Random(seed)
    for name in ("index", "small"):
        for _ in range(10):
            flip(tmp_path / name / "data.mdb", rng.randrange(80 * 4096), rng.randrange(8))
    found = await reopen(tmp_path, list(volume.values()))
    assert found.good >= large(volume)


async def test_index_of_another_volume_and_an_older_one(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    volume = await make_volume(mine)
    await make_volume(other, [MIB + 7])
    older = (mine / "index" / "data.mdb").read_bytes()
    tier = make_tier(mine)
    await tier.open()
    gone, place = (
        split(volume, MIB)[0],
        next(p for p, s in volume.items() if s.meta.length_bytes == MIB),
    )
    await tier.delete([place])
    await tier.close()
    (mine / "index" / "data.mdb").write_bytes(older)
    found = await reopen(mine, list(volume.values()))
    assert gone.meta.key not in found.good, "a deleted object came back with an old index"
    shutil.copy(other / "index" / "data.mdb", mine / "index" / "data.mdb")
    found = await reopen(mine, list(volume.values()))
    assert found.good == keys(list(volume.values())) - {gone.meta.key}
    assert found.corrupt == set()


async def test_walker_that_takes_too_long(tmp_path: Path) -> None:
    volume = await make_volume(tmp_path, [MIB])
    found = await reopen(tmp_path, list(volume.values()), walk_timeout_s=0.001)
    assert any("no answer within" in p for p in found.problems)
    assert found.good == keys(list(volume.values()))


def forge(directory: Path, entries: list[Entry]) -> None:
    """Put records into the index of a closed volume."""
    volume = open_volume(RealFiles(), Settings(directory, CAP_BYTES, REGION_BYTES))
    env: Environment = volume.environment("index")
    env.names.ids["n"] = {b"default": 0}
    env.commit(entries)
    env.close()
    volume.close()


async def test_records_that_point_astray(tmp_path: Path) -> None:
    """Outside the volume, at a slot that is not there, of another size or another dedication."""
    volume = await make_volume(tmp_path)
    slot = slot_of_length(tmp_path, MIB)
    raw = (tmp_path / "data").read_bytes()
    (dedication,) = struct.unpack_from("<Q", raw, slot.offset + 40)
    meta = make_sample(MIB, 77).meta
    other = make_sample(500_000, 78).meta
    third = make_sample(MIB, 79).meta
    forge(
        tmp_path,
        [
            Entry(disk.place_of(5000, 0), meta, 500, dedication),
            Entry(disk.place_of(slot.region, 1000), third, 501, dedication),
            Entry(disk.place_of(slot.region, 1 - slot.slot), other, 502, dedication),
            Entry(disk.place_of(15, 0), make_sample(MIB, 80).meta, 503, 1),
        ],
    )
    found = await reopen(tmp_path, list(volume.values()))
    assert found.recovered.dropped["region_unknown"] >= 2
    assert sum(found.recovered.dropped.values()) == 4
    assert found.good == keys(list(volume.values()))


async def test_damaged_files_kept_aside_are_few(tmp_path: Path) -> None:
    volume = await make_volume(tmp_path)
    for _ in range(3):
        _zeroed(tmp_path / "index" / "data.mdb")
        await reopen(tmp_path, list(volume.values()))  # looks at the footprint as well
    assert sum(".damaged-" in name for name in RealFiles().listdir(tmp_path)) == 2


async def test_interrupted_format_begins_anew(tmp_path: Path) -> None:
    await make_volume(tmp_path)
    (tmp_path / "formatting").touch()
    tier = make_tier(tmp_path)
    assert len((await tier.open()).place) == 0
    sample = make_sample(MIB, 1)
    (place,) = await store(tier, [sample])
    await assert_holds(tier, place, sample)
    await tier.close()
    assert not (tmp_path / "formatting").exists()
