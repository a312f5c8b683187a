"""Objects to store in a tier, known by a seed, and what a tier has of them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from kvstored.tiers.base import (
    PIECE_BYTES,
    NoRoom,
    ObjectMeta,
    ObjectRead,
    ObjectWrite,
    ReadOutcome,
    Tier,
    WriteOutcome,
    padded_bytes,
)

KIB = 1 << 10


MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """An object as a client would offer it: what is known of it, and its padded bytes."""

    meta: ObjectMeta
    payload: memoryview

    @property
    def data(self) -> bytes:
        return bytes(self.payload[: self.meta.length_bytes])


def aligned_buffer(length_bytes: int, fill: int = 0) -> memoryview:
    """Page-aligned writable memory of the padded length."""
    view = memoryview(mmap.mmap(-1, padded_bytes(length_bytes)))
    if fill:
        np.frombuffer(view, np.uint8)[:] = fill
    return view


def make_sample(
    length_bytes: int, seed: int, *, namespace: str = "default", part: str = "kv"
) -> Sample:
    """An incompressible object; everything about it follows from the arguments."""
    rng = np.random.default_rng([seed, length_bytes])
    payload = aligned_buffer(length_bytes)
    np.frombuffer(payload, np.uint8)[:length_bytes] = rng.integers(
        0, 256, length_bytes, dtype=np.uint8
    )
    data = payload[:length_bytes]
    pieces = b"".join(
        xxhash.xxh3_64_intdigest(data[at : at + PIECE_BYTES]).to_bytes(8, "little")
        for at in range(0, length_bytes, PIECE_BYTES)
    )
    meta = ObjectMeta(
        namespace=namespace,
        family=bytes([seed % 3]) * 32,
        key=rng.bytes(32),
        part=part,
        tenant=f"tenant-{seed % 5}",
        parent=rng.bytes(32) if seed % 4 else b"",
        depth=seed % 1000,
        end_token=64 * (seed % 1000 + 1),
        expires_ms=0 if seed % 2 else 4_000_000_000_000 + seed,
        length_bytes=length_bytes,
        checksum=xxhash.xxh3_128_digest(data),
        piece_checksums=pieces,
    )
    return Sample(meta, payload)


async def reserve_one(tier: Tier, sample: Sample) -> int:
    """A place for the sample; there must be room."""
    (place,) = await tier.reserve(sample.meta.namespace, [sample.meta.length_bytes])
    assert not isinstance(place, NoRoom), place
    return place


async def store(tier: Tier, samples: Sequence[Sample]) -> list[int]:
    """Reserve and write; everything must go well."""
    places = [await reserve_one(tier, sample) for sample in samples]
    items = [
        ObjectWrite(place, sample.meta, sample.payload)
        for place, sample in zip(places, samples, strict=True)
    ]
    assert await tier.write(items) == [WriteOutcome.OK] * len(items)
    return places


def want(place: int, sample: Sample) -> ObjectRead:
    """A read of the sample at the place, into fresh memory full of 0xAA."""
    meta = sample.meta
    into = aligned_buffer(meta.length_bytes, fill=0xAA)
    return ObjectRead(place, meta.key, meta.part, meta.length_bytes, meta.checksum, into)


class Arrivals:
    """Collects what `read` tells of its items, with the bytes as they are at that moment."""

    def __init__(self, items: Sequence[ObjectRead]) -> None:
        self.items = items
        self.found: dict[int, tuple[ReadOutcome, bytes, bytes]] = {}

    def __call__(self, i: int, outcome: ReadOutcome, pieces: bytes) -> None:
        assert i not in self.found, "once only"
        self.found[i] = (outcome, pieces, bytes(self.items[i].into))


async def assert_holds(tier: Tier, place: int, sample: Sample) -> None:
    """The place gives back exactly the sample, and zeros behind its end."""
    item = want(place, sample)
    assert await tier.read([item]) == [ReadOutcome.OK]
    length = sample.meta.length_bytes
    assert item.into[:length] == sample.payload[:length]
    assert not any(item.into[length:]), "padding must be zero after a good read"


async def read_outcome(tier: Tier, item: ObjectRead) -> ReadOutcome:
    (outcome,) = await tier.read([item])
    return outcome


def assert_within_cap(tier: Tier) -> None:
    usage = tier.usage()
    assert usage.charged_bytes <= usage.cap_bytes
    assert usage.footprint_bytes <= usage.cap_bytes
