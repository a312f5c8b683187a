"""Matching in batches says what looking at one chunk after the other says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstored.store.api import Family, PartInfo, Run
from kvstored.store.index import NONE, TIERS
from kvstored.store.leasing import hold_run
from kvstored.store.lookup import Lookup
from kvstored.store.namespace import Namespace
from kvstored.store.residency import now_ms
from kvstored.store.walk import objects_of
from kvstored_client.identity import GroupRule
from kvstored_client.proto import kvstore_pb2 as pb

FAMILY = Family(
    "default",
    b"f" * 32,
    "m",
    64,
    {"g": GroupRule("all")},
    [PartInfo(f"p{n}", "g", 0, 1 << 20, pb.PartSpec()) for n in range(4)],
)
KEYS = [bytes([n + 1]) * 32 for n in range(20)]

Chunk = tuple[str, dict[int, tuple[int, ...]]]  # how it is held; tiers by part
TIER_SETS = [(), (1,), (2,), (1, 2)]


def some_chunks(dice: random.Random, parts: list[int]) -> list[Chunk]:
    """A long run of chunks that are held in these parts, with one or two that something is the
    matter with.
    """
    chunks: list[Chunk] = []
    for _ in KEYS:
        held = {part: dice.choice(TIER_SETS[1:]) for part in dice.sample(parts, len(parts))}
        chunks.append(("held", held))
    for _ in range(dice.randrange(3)):
        held = {part: dice.choice(TIER_SETS) for part in range(4) if dice.random() < 0.6}
        how = dice.choice(["held", "held", "missing", "late"])
        at = dice.randrange(len(KEYS))
        chunks[at] = (how, chunks[at][1] if how == "late" else held)
    return chunks


def filled(chunks: list[Chunk], expiry: bool) -> Namespace:
    ns = Namespace("default", 0)
    for key, (how, parts) in zip(KEYS, chunks, strict=False):
        if how == "missing":
            continue
        due = 1 if how == "late" else (now_ms() + 1_000_000 if expiry else 0)
        row = ns.index.add_chunk(
            key, b"", family=0, tenant=0, depth=0, end_token=64, expires_ms=due
        )
        for part, tiers in parts.items():
            obj = ns.index.add_object(row, part, 4096 + part, bytes(16))
            for tier in TIERS:
                if tier in tiers:
                    ns.index.set_place(obj, tier, 0)
    return ns


@pytest.mark.parametrize("seed", range(40))
def test_batches_and_single_looks_agree(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(20):
        held = dice.sample(range(4), dice.choice([1, 1, 2, 3, 4]))
        ns = filled(some_chunks(dice, held), expiry=dice.random() < 0.5)
        parts = tuple(dice.sample(held, dice.randint(1, len(held))))
        depth = dice.choice([pb.DEPTH_RAM, pb.DEPTH_NODE, pb.DEPTH_NODE])
        run = Run("default", "t", FAMILY, b"".join(KEYS), 0, b"", 0, parts)
        batch, single = Lookup(ns, run, depth), Lookup(ns, run, depth)
        single._leading_of_one_part = single._leading_of_parts = lambda parts: 0  # type: ignore
        assert batch.prefix() == single.prefix()
        assert batch.states == single.states
        assert batch.payload_bytes == single.payload_bytes
        assert batch.bytes_by_tier == single.bytes_by_tier


@pytest.mark.parametrize("seed", range(40))
def test_each_says_what_looking_at_one_chunk_after_the_other_says(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(20):
        held = dice.sample(range(4), dice.choice([1, 1, 2, 3, 4]))
        chunks = some_chunks(dice, held)
        for _ in range(dice.randrange(8)):  # several of a kind, too
            chunks[dice.randrange(len(KEYS))] = dice.choice(chunks)
        ns = filled(chunks, expiry=dice.random() < 0.5)
        for key in dice.sample(KEYS, dice.choice([0, 5])):
            ns.ghosts.remember(key, pb.MISS_EVICTED)
        parts = tuple(dice.sample(range(4), dice.randint(1, 4)))
        depth = dice.choice([pb.DEPTH_RAM, pb.DEPTH_NODE])
        run = Run("default", "t", FAMILY, b"".join(KEYS), 0, b"", 0, parts)
        batch, single = Lookup(ns, run, depth), Lookup(ns, run, depth)
        states = bytes(single._chunk_state(key, parts) for key in KEYS)
        assert batch.each() == sum(state < pb.MISS_NEVER_STORED for state in states)
        assert bytes(batch.states) == states
        assert batch.payload_bytes == single.payload_bytes
        assert batch.bytes_by_tier == single.bytes_by_tier


TRAILING = Family(
    "default",
    b"f" * 32,
    "m",
    64,
    {"g": GroupRule("all"), "t": GroupRule("trailing", 192), "l": GroupRule("last")},
    [PartInfo(f"p{n}", g, 0, 1 << 20, pb.PartSpec()) for n, g in enumerate("gttl")],
)


@pytest.mark.parametrize("seed", range(40))
def test_a_boundary_is_found_as_by_looking_at_one_chunk_after_the_other(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(20):
        ns = filled(some_chunks(dice, [0, 1, 2, 3]), expiry=dice.random() < 0.5)
        parts = tuple(dice.sample(range(4), dice.randint(1, 4)))
        depth = dice.choice([pb.DEPTH_RAM, pb.DEPTH_NODE])
        run = Run("default", "t", TRAILING, b"".join(KEYS), 0, b"", 0, parts)
        batch, single = Lookup(ns, run, depth), Lookup(ns, run, depth)

        def one_by_one(
            first: int,
            stop: int,
            parts: tuple[int, ...],
            *,
            count: bool = True,
            look: Lookup = single,
        ) -> NDArray[np.uint8]:
            before = look.payload_bytes, dict(look.bytes_by_tier)
            states = [look._chunk_state(key, parts) for key in KEYS[first:stop]]
            if not count:
                look.payload_bytes, look.bytes_by_tier = before
            return np.array(states, np.uint8)

        single._states = one_by_one  # type: ignore[method-assign]
        boundary = batch.prefix()
        assert boundary == single.prefix()
        assert batch.states == single.states
        assert batch.payload_bytes == single.payload_bytes
        assert batch.bytes_by_tier == single.bytes_by_tier
        if boundary and set(parts) == {3}:
            assert list(batch.states[:boundary]) == [
                *[pb.NOT_NEEDED] * (boundary - 1),
                batch.states[boundary - 1],
            ]
            assert batch.states[boundary - 1] in (pb.IN_RAM, pb.IN_NVME)


def test_a_hold_covers_what_is_there_and_charges_what_is_in_ram() -> None:
    both: Chunk = ("held", {0: (1,), 1: (2,)})  # 4096 bytes in RAM, and 4097 below
    ns = filled([both, ("held", {0: (2,)}), ("missing", {}), both], expiry=False)
    run = Run("default", "t", FAMILY, b"".join(KEYS[:4]), 0, b"", 0, (0,))
    keys, charged = hold_run(ns, run, bytes([pb.IN_RAM, pb.IN_NVME, pb.IN_RAM, pb.MISS_EXPIRED]))
    assert (keys, charged) == (KEYS[:2], 4096)
    assert [ns.holds.in_ram(key) for key in KEYS[:2]] == [True, False]
    assert KEYS[3] not in ns.holds


def test_objects_of_many_chunks_come_in_the_order_of_each() -> None:
    dice = random.Random(3)
    ns = filled(some_chunks(dice, [0, 1, 2, 3]), expiry=False)
    chunks = ns.index.find_many(b"".join(KEYS))
    at, objects = objects_of(ns.index, chunks)
    expected = [
        (n, row)
        for n, chunk in enumerate(chunks.tolist())
        if chunk != NONE
        for row in ns.index.object_rows(chunk)
    ]
    assert list(zip(at.tolist(), objects.tolist(), strict=True)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_finds_what_has_not_expired(seed: int) -> None:
    dice = random.Random(seed)
    ns = filled(some_chunks(dice, [0, 2]), expiry=dice.random() < 0.5)
    at_ms = now_ms()
    rows = ns.index.find_many(b"".join(KEYS))
    over = [row != NONE and ns.expired(row, at_ms) for row in rows.tolist()]
    assert ns.expired_many(rows, at_ms).tolist() == over
    found = ns.find_many(b"".join(KEYS), at_ms)
    assert found.dtype == np.int32
    assert found.tolist() == [ns.find(key, at_ms) for key in KEYS]


def test_a_key_that_is_missing_is_not_taken_for_one_that_expired() -> None:
    ns = filled([("late", {0: (1,)})], expiry=False)
    rows = ns.index.find_many(KEYS[0] + KEYS[1])
    assert ns.expired_many(rows, now_ms()).tolist() == [True, False]


def test_the_batches_settle_what_is_held() -> None:
    """Else the comparison above would compare single looks with themselves."""
    dice = random.Random(1)
    held = {n: (dice.choice([1, 2]),) for n in range(4)}
    for parts in ((2,), (0, 3)):
        kept = {n: held[n] for n in parts}
        ns = filled([("held", kept)] * len(KEYS), expiry=True)
        run = Run("default", "t", FAMILY, b"".join(KEYS), 0, b"", 0, parts)
        look = Lookup(ns, run, pb.DEPTH_NODE)
        settled = (
            look._leading_of_one_part(parts[0])
            if len(parts) == 1
            else look._leading_of_parts(parts)
        )
        assert settled == len(KEYS)
