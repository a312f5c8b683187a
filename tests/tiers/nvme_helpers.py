"""Helpers of the NVMe tests: a volume with known objects, and a look at what came through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tiers.conformance import KIB, MIB, Sample, aligned_buffer, make_sample, store

from kvstored.io.base import Files
from kvstored.tiers.base import ObjectRead, ReadOutcome, Recovered
from kvstored.tiers.nvme.volume_tier import VolumeTier

CAP_BYTES = 40 * MIB
REGION_BYTES = 2 * MIB
LENGTHS = (4 * KIB, 64 * KIB, 100_000, 100_001, 300_000, MIB, MIB + 1)


def make_tier(
    directory: Path,
    files: Files | None = None,
    cap_bytes: int = CAP_BYTES,
    walk_timeout_s: float = 20,
    ahead_bytes: int = 0,
) -> VolumeTier:
    """A tier with small regions, not opened. Without regions made ready, so that every call to the
    device is one that was asked for.
    """
    return VolumeTier(
        directory,
        cap_bytes,
        files=files,
        region_bytes=REGION_BYTES,
        walk_timeout_s=walk_timeout_s,
        ahead_bytes=ahead_bytes,
    )


async def make_volume(directory: Path, lengths: Sequence[int] = LENGTHS) -> dict[int, Sample]:
    """A closed volume that holds one object of each length, by place."""
    tier = make_tier(directory)
    await tier.open()
    samples = [make_sample(length, seed) for seed, length in enumerate(lengths)]
    places = await store(tier, samples)
    await tier.remember_family("default", b"\x01" * 32, b"spec")
    await tier.close()
    return dict(zip(places, samples, strict=True))


@dataclass
class Found:
    """What a reopened volume holds: keys that read well, that are named but corrupt, or gone."""

    good: set[bytes] = field(default_factory=set)
    corrupt: set[bytes] = field(default_factory=set)
    gone: set[bytes] = field(default_factory=set)
    recovered: Recovered = field(default_factory=Recovered)
    problems: tuple[str, ...] = ()


async def examine(tier: VolumeTier, recovered: Recovered, samples: Sequence[Sample]) -> Found:
    """Read everything an open tier says it holds. Bytes that read OK must be the sample's."""
    by_key = {sample.meta.key: sample for sample in samples}
    found = Found(recovered=recovered, problems=tier.problems)
    for row, place in enumerate(recovered.place):
        key = recovered.keys[row].tobytes()
        item = ObjectRead(
            int(place),
            key,
            recovered.parts[recovered.part_id[row]],
            int(recovered.length_bytes[row]),
            recovered.checksums[row].tobytes(),
            aligned_buffer(int(recovered.length_bytes[row])),
        )
        (outcome,) = await tier.read([item])
        if outcome is ReadOutcome.OK:
            assert item.into[: item.length_bytes] == by_key[key].data, "another object's bytes"
            found.good.add(key)
        elif outcome is ReadOutcome.GONE:
            found.gone.add(key)
        else:
            assert outcome is ReadOutcome.CORRUPT
            found.corrupt.add(key)
    usage = tier.usage()
    assert usage.footprint_bytes <= usage.cap_bytes
    assert usage.charged_bytes <= usage.cap_bytes
    assert usage.objects == len(recovered.place)
    return found


async def reopen(
    directory: Path,
    samples: Sequence[Sample],
    *,
    cap_bytes: int = CAP_BYTES,
    walk_timeout_s: float = 20,
    full: bool = False,
) -> Found:
    """Open a volume, look at everything, and close it."""
    tier = make_tier(directory, cap_bytes=cap_bytes, walk_timeout_s=walk_timeout_s)
    recovered = await tier.open()
    try:
        found = await examine(tier, recovered, samples)
        if not full:  # it also takes new objects, whatever was found
            (place,) = await store(tier, [make_sample(200_000, 999)])
            await tier.delete([place])
        return found
    finally:
        await tier.close()


def keys(samples: Sequence[Sample]) -> set[bytes]:
    return {sample.meta.key for sample in samples}
