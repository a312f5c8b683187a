"""Each kind of byte of every file, zeroed, cut, swapped with another's, or from an older copy.

What a flipped bit does to each is in test_nvme_damage.py, along with what is special about a kind.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiers.conformance import Sample, make_sample, store
from tiers.nvme_helpers import Found, examine
from tiers.nvme_reader import Slot, read_volume
from tiers.powerloss import (
    LARGE,
    SLOT,
    SMALL,
    SMALL_FULL,
    in_memory,
    make_tier,
    walk_in_this_process,
)

PADDED = SLOT + 1  # its last block is padding but for some bytes
SHAPES = {
    "small": SMALL, "full": SMALL_FULL, "slot": PADDED, "twin": PADDED, "large": LARGE,
}  # fmt: skip
SMALL_ONES = {"small", "full", "new small"}


@dataclass(frozen=True)
class Volumes:
    """A volume, itself as it was some changes ago, and another one of the same shape."""

    now: Path
    older: Path
    other: Path
    samples: dict[str, Sample]

    def slot(self, name: str, volume: Path | None = None) -> Slot:
        key = self.samples[name].meta.key
        (found,) = [slot for slot in read_volume(volume or self.now) if slot.key == key]
        return found

    @property
    def data(self) -> Path:
        return self.now / "data"

    def tables(self, volume: Path | None = None) -> list[tuple[int, bytes]]:
        """Offset and content of both copies of the region table."""
        raw = ((volume or self.now) / "data").read_bytes()
        _, entries, first, second, _ = struct.unpack_from("<5Q", raw, 48)
        return [(at, raw[at : at + 64 * entries]) for at in (first, second)]


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def cut(path: Path, length: int) -> None:
    with path.open("r+b") as file:
        file.truncate(length)


def swap(one: Path, two: Path) -> None:
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


async def make_volumes(folder: Path) -> Volumes:
    """Since the older copy, one object of each kind went and another came into its place."""
    samples = {name: make_sample(n, seed) for seed, (name, n) in enumerate(SHAPES.items())}
    going = {"old slot": make_sample(PADDED, 20), "old small": make_sample(SMALL, 21)}
    coming = {
        "new slot": make_sample(PADDED, 30),
        "new small": make_sample(SMALL, 31),
        "new size": make_sample(2 * LARGE, 32),
    }
    now, older, other = folder / "now", folder / "older", folder / "other"
    tier = make_tier(now)
    await tier.open()
    places = await store(tier, [*going.values(), *samples.values()])
    await tier.close()
    shutil.copytree(now, older)
    tier = make_tier(now)
    await tier.open()
    await tier.delete(places[: len(going)])
    await store(tier, list(coming.values()))
    await tier.close()
    made = Volumes(now, older, other, samples | going | coming)
    assert made.slot("new slot").offset == made.slot("old slot", older).offset
    tier = make_tier(other)
    await tier.open()
    theirs = {f"their {name}": make_sample(n, 50 + i) for i, (name, n) in enumerate(SHAPES.items())}
    await store(tier, list(theirs.values()))
    await tier.close()
    return dataclasses.replace(made, samples=made.samples | theirs)


@pytest.fixture(scope="module")
def template() -> Iterator[Volumes]:
    with in_memory() as folder:
        yield asyncio.run(make_volumes(folder))


@pytest.fixture
def volumes(template: Volumes) -> Iterator[Volumes]:
    """To be damaged by one test."""
    with in_memory() as folder:
        shutil.copytree(template.now, folder / "now")
        yield dataclasses.replace(template, now=folder / "now")


async def look(volumes: Volumes) -> tuple[set[str], Found]:
    """Open the volume; the names of what reads well, and the rest of what is to be seen."""
    tier = make_tier(volumes.now)
    recovered = await tier.open()
    try:
        found = await examine(tier, recovered, list(volumes.samples.values()))
        (place,) = await store(tier, [make_sample(LARGE, 999)])
        await tier.delete([place])
    finally:
        await tier.close()
    return {n for n, s in volumes.samples.items() if s.meta.key in found.good}, found


NONE: set[str] = set()
SLOTS = {"slot", "twin", "large", "new slot", "new size"}
ALL = SLOTS | SMALL_ONES
Damage = Callable[[Volumes], None]


def header(content: Callable[[Volumes], bytes], name: str = "slot", at: int = 0) -> Damage:
    """Put something into the slot of an object, from an offset on."""
    return lambda v: patch(v.data, v.slot(name).offset + at, content(v))


def raw(volume: Path, slot: Slot, begin: int, end: int) -> bytes:
    return (volume / "data").read_bytes()[slot.offset + begin : slot.offset + end]


def of_twin(begin: int, end: int) -> Callable[[Volumes], bytes]:
    return lambda v: raw(v.now, v.slot("twin"), begin, end)


def older(begin: int, end: int) -> Callable[[Volumes], bytes]:
    return lambda v: raw(v.older, v.slot("old slot", v.older), begin, end)


def swap_slots(v: Volumes) -> None:
    one, two = v.slot("slot"), v.slot("twin")
    first, second = (raw(v.now, slot, 0, slot.slot_bytes) for slot in (one, two))
    patch(v.data, one.offset, second)
    patch(v.data, two.offset, first)


def table(copies: tuple[int, ...], content: Callable[[Volumes, int], bytes]) -> Damage:
    def damage(v: Volumes) -> None:
        for copy in copies:
            patch(v.data, v.tables()[copy][0], content(v, copy))

    return damage


def table_entry(v: Volumes) -> None:
    for at, _ in v.tables():
        patch(v.data, at + 64 * v.slot("large").region, bytes(64))


def replaced(name: str, source: str) -> Damage:
    return lambda v: shutil.copy(getattr(v, source) / name, v.now / name) and None


def cut_to(name: str, length: Callable[[Volumes], int]) -> Damage:
    return lambda v: cut(v.now / name, length(v))


def zeroed(name: str) -> Damage:
    return lambda v: patch(v.now / name, 0, bytes((v.now / name).stat().st_size))


def removed(name: str) -> Damage:
    return lambda v: (v.now / name).unlink()


def noise(name: str) -> Damage:
    return lambda v: (v.now / name).write_bytes(b"\xa5" * 5000) and None


def both(*damages: Damage) -> Damage:
    return lambda v: [damage(v) for damage in damages] and None


def before_end(v: Volumes) -> int:
    return v.slot("new size").offset + 8192


BACK = {
    # Nothing tells a file's older copy from the file itself: what it holds is whole, and was there.
    # Only where it does not fit the other files can anything be said.
    "data older": {"old slot"},
    "small older": {"old small"},
    # The volume is what its data file says it is, down to what it holds.
    "data of another": {"their slot", "their twin", "their large"},
}
PIECES = {  # of the data file, the superblock and the files that only lock
    "header zeroed": (header(lambda _: bytes(4096)), {"slot"}),
    "header half zeroed": (header(lambda _: bytes(2048), at=2048), {"slot"}),
    "header of another": (header(of_twin(0, 4096)), {"slot"}),
    "header older": (header(older(0, 4096), "new slot"), {"new slot"}),
    "payload zeroed": (header(lambda _: bytes(SLOT), at=4096), {"slot"}),
    "payload sector zeroed": (header(lambda _: bytes(512), at=8192), {"slot"}),
    "payload of another": (header(of_twin(4096, 4096 + PADDED), at=4096), {"slot"}),
    "payload older": (header(older(4096, 4096 + PADDED), "new slot", at=4096), {"new slot"}),
    "slot older": (header(older(0, 4096 + PADDED), "new slot"), {"new slot"}),
    "slots swapped": (swap_slots, {"slot", "twin"}),
    "padding noise": (header(lambda _: b"\xa5" * 2000, at=4096 + PADDED), NONE),
    "table entry zeroed": (table_entry, {"large"}),
    "table zeroed, first": (table((0,), lambda v, i: bytes(len(v.tables()[i][1]))), NONE),
    "table zeroed": (table((0, 1), lambda v, i: bytes(len(v.tables()[i][1]))), SLOTS),
    "table swapped": (table((0, 1), lambda v, i: v.tables()[1 - i][1]), NONE),
    "table of another, second": (table((1,), lambda v, i: v.tables(v.other)[i][1]), NONE),
    "table of another": (table((0, 1), lambda v, i: v.tables(v.other)[i][1]), SLOTS),
    "table older, first": (table((0,), lambda v, i: v.tables(v.older)[i][1]), NONE),
    "table older": (table((0, 1), lambda v, i: v.tables(v.older)[i][1]), {"new size"}),
    "superblock of another": (replaced("superblock", "other"), NONE),
    "superblocks of another": (
        both(
            replaced("superblock", "other"),
            lambda v: patch(v.data, 0, (v.other / "superblock").read_bytes()),
        ),
        ALL,
    ),
    "data zeroed": (zeroed("data"), SLOTS),
    "data emptied": (cut_to("data", lambda _: 0), SLOTS),
    "data removed": (removed("data"), SLOTS),
    "data cut": (cut_to("data", before_end), {"new size"}),
    "data older": (replaced("data", "older"), {"new slot", "new size"}),
    "data of another": (replaced("data", "other"), ALL),
    "lock of all removed": (removed("LOCK"), NONE),
    "lock of all noise": (noise("LOCK"), NONE),
}
for _name in ("index", "small"):
    PIECES |= {
        f"{_name} lock zeroed": (zeroed(f"{_name}/lock.mdb"), NONE),
        f"{_name} lock emptied": (cut_to(f"{_name}/lock.mdb", lambda _: 0), NONE),
        f"{_name} lock removed": (removed(f"{_name}/lock.mdb"), NONE),
        f"{_name} lock noise": (noise(f"{_name}/lock.mdb"), NONE),
        f"{_name} lock of another": (replaced(f"{_name}/lock.mdb", "other"), NONE),
    }


def check(name: str, lost: set[str], good: set[str], found: Found) -> None:
    assert good == ALL - lost | BACK.get(name, NONE)
    if lost and name != "small older":
        said = sum(found.recovered.dropped.values()) + len(found.corrupt) + len(found.problems)
        assert said, "it says what it dropped"
    else:
        assert found.recovered.dropped == {}
        assert found.corrupt == set()


@pytest.mark.parametrize("name", PIECES)
async def test_damage(volumes: Volumes, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    damage, lost = PIECES[name]
    if lost != ALL:  # else the walker complains, as a child that is gone afterwards
        walk_in_this_process(monkeypatch)
    damage(volumes)
    good, found = await look(volumes)
    check(name, lost, good, found)
    again, found = await look(volumes)
    assert again == good
    assert found.problems == (), "what could be mended is"


LMDB = {
    "index swapped with small": (
        lambda v: swap(v.now / "index/data.mdb", v.now / "small/data.mdb"),
        SMALL_ONES,
    ),
    "index older": (replaced("index/data.mdb", "older"), {"new slot", "new size"}),
    "index cut": (cut_to("index/data.mdb", lambda _: 5 * 4096), NONE),
    "small older": (replaced("small/data.mdb", "older"), {"new small"}),
    "small of another": (replaced("small/data.mdb", "other"), SMALL_ONES),
    "both of another": (
        both(replaced("index/data.mdb", "other"), replaced("small/data.mdb", "other")),
        SMALL_ONES,
    ),
}


@pytest.mark.parametrize("name", LMDB)
async def test_damage_to_lmdb(volumes: Volumes, name: str) -> None:
    damage, lost = LMDB[name]
    damage(volumes)
    good, found = await look(volumes)
    check(name, lost, good, found)
