"""How fast each volume is, and what goes to it for that."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from tiers.nvme_volumes_helpers import World, walk_here

from kvstored.tiers.nvme import probe, speed, walker
from kvstored.tiers.nvme.striping import Candidate, Striper
from kvstored.tiers.nvme.volume_tier import VolumeTier

MIB = 1 << 20

# ---- planner ------------------------------------------------------------------------------------


def slowest(chosen: list[int], speeds: list[float]) -> float:
    """How long the last volume takes, as a multiple of what it takes at best."""
    taken = [chosen.count(n) / speed for n, speed in enumerate(speeds)]
    return max(taken) / (len(chosen) / sum(speeds))


@pytest.mark.parametrize("speeds", [[1.0] * 4, [50e6, 100e6, 150e6, 200e6], [3e9, 1e9]])
@pytest.mark.parametrize("batch", [1, 16, 64, 256])
def test_work_goes_by_speed(speeds: list[float], batch: int) -> None:
    striper = Striper()
    among = [Candidate(n, speed) for n, speed in enumerate(speeds)]
    chosen: list[int] = []
    while len(chosen) < 256:
        chosen += striper.plan([MIB] * batch, among)
    assert slowest(chosen, speeds) < 1.04
    # And within each prefix of 64, up to the one object that cannot be cut.
    for at in range(0, 256, 64):
        counts = [chosen[at : at + 64].count(n) for n in range(len(speeds))]
        ideal = [64 * s / sum(speeds) for s in speeds]
        assert all(abs(c - i) < 2 for c, i in zip(counts, ideal, strict=True))


def test_neighbours_go_to_different_volumes() -> None:
    chosen = Striper().plan([MIB] * 40, [Candidate(n, 1e9) for n in range(4)])
    assert all(a != b for a, b in itertools.pairwise(chosen))


def test_sizes_count() -> None:
    rng = random.Random(1)
    sizes = [rng.choice([1, 4, 16]) * MIB for _ in range(400)]
    chosen = Striper().plan(sizes, [Candidate(0, 1e9), Candidate(1, 1e9)])
    load = [sum(s for s, c in zip(sizes, chosen, strict=True) if c == n) for n in (0, 1)]
    assert abs(load[0] - load[1]) <= 16 * MIB


def test_room_comes_before_speed() -> None:
    among = [Candidate(0, 9e9, room_bytes=2 * MIB), Candidate(1, 1e9)]
    chosen = Striper().plan([MIB] * 20, among)
    assert chosen.count(0) == 2
    assert Striper().plan([MIB], [Candidate(0, 1e9, 0), Candidate(1, 2e9, 0)]) == [1]


def test_one_that_was_full_is_not_flooded() -> None:
    striper = Striper()
    for _ in range(50):
        striper.plan([MIB] * 16, [Candidate(0, 1e9, room_bytes=0), Candidate(1, 1e9)])
    chosen = striper.plan([MIB] * 16, [Candidate(0, 1e9), Candidate(1, 1e9)])
    assert chosen.count(0) <= 11


@pytest.mark.parametrize("batch", [16, 64])
def test_a_prefix_does_not_make_up_for_another(batch: int) -> None:
    """Each is as good as one that comes first, whatever was put before."""
    speeds = [50e6, 100e6, 150e6, 200e6]
    among = [Candidate(n, speed) for n, speed in enumerate(speeds)]
    striper = Striper()
    for before in (64, 37, 32, 64):
        for _ in range(2):
            striper.plan([MIB] * before, among, idle=True)
        chosen: list[int] = []
        while len(chosen) < 64:
            chosen += striper.plan([MIB] * batch, among, idle=not chosen)
        assert [chosen.count(n) for n in range(4)] == [6, 13, 19, 26]
        assert slowest(chosen, speeds) < 1.02


def test_single_objects_with_pauses_are_spread_too() -> None:
    among = [Candidate(n, 1e9) for n in range(4)]
    striper = Striper()
    chosen = [striper.plan([MIB], among, idle=True)[0] for _ in range(64)]
    assert [chosen.count(n) for n in range(4)] == [16] * 4


def test_nearly_equal_speeds_are_dealt_in_turn() -> None:
    striper = Striper()
    among = [Candidate(n, speed) for n, speed in enumerate([100e6, 113e6, 95e6, 104e6])]
    chosen = [n for _ in range(16) for n in striper.plan([MIB] * 4, among)]
    for at in range(0, 64, 4):
        assert sorted(chosen[at : at + 4]) == [0, 1, 2, 3]


def test_unknown_speed_counts_as_the_mean() -> None:
    chosen = Striper().plan([MIB] * 60, [Candidate(0, 1e9), Candidate(1, 3e9), Candidate(2)])
    assert [chosen.count(n) for n in range(3)] == [10, 30, 20]


# ---- speed --------------------------------------------------------------------------------------


def throttled(mib_per_s: float, free_mib: int, seconds: float) -> list[tuple[float, int]]:
    """Ends of transfers of 1 MiB on a device that lets the first ones pass."""
    ends = [(0.001 * i, MIB) for i in range(free_mib)]
    while ends[-1][0] < seconds:
        ends.append((0.01 + (len(ends) - free_mib) / mib_per_s, MIB))
    return ends


def test_what_passes_in_the_beginning_does_not_count() -> None:
    ends = throttled(100.0, 10, 0.6)
    assert sum(n for _, n in ends) / ends[-1][0] > 110 * MIB
    assert speed.steady(ends, 0.2) == pytest.approx(100 * MIB, rel=0.001)
    assert speed.steady(ends[:10], 0.2) == 0.0
    assert speed.steady([], 0.2) == 0.0


def test_a_speed_follows_what_is_seen_both_ways() -> None:
    assert speed.followed(0.0, 100, 0.5) == 200
    high = low = 0.0
    for _ in range(20):
        high = speed.followed(high or 200.0, 100, 1.0)
        low = speed.followed(low or 50.0, 100, 1.0)
    assert high == pytest.approx(100, rel=0.02)
    assert low == pytest.approx(100, rel=0.02)
    assert speed.followed(100.0, 50, 0.1) < 115, "one look says little"


def test_equal_is_what_cannot_be_told_apart() -> None:
    assert speed.levelled([100, 0, 118, 200]) == pytest.approx([109, 139.333, 109, 200], rel=1e-4)
    assert speed.levelled([0, 0]) == [1.0, 1.0]
    chain = speed.levelled([100, 115, 130, 145])
    assert chain[0] == chain[1] < chain[2] == chain[3]


async def test_asked_for_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_WRITE_S", 0.1), ("_READ_S", 0.1), ("_WARM_UP_S", 0.02)):
        monkeypatch.setattr(probe, name, value)
    tier = VolumeTier(tmp_path / "alone", 48 * MIB, region_bytes=8 * MIB)
    await tier.open()
    spare = tier.spare()
    assert spare is not None
    assert min(probe.measure(*spare)) > 0
    await tier.close()
    monkeypatch.setattr(walker, "_run", walk_here)
    world = World(tmp_path, 2)
    world.measured = {"v0": (3e9, 2e9), "v1": (1e9, 1e9)}
    await world.start()
    assert [v.read_bytes_per_s for v in world.tier.volumes()] == [3e9, 1e9]
    members = world.tier._members
    members[0].read_bytes_per_s, members[1].read_bytes_per_s = 1.5e9, 1.1e9
    world.measured = {}
    await world.restart()
    kept = [v.read_bytes_per_s for v in world.tier.volumes()]
    assert kept == [1.5e9, 1e9], "what traffic showed, where it is another"
    await world.tier.close()
