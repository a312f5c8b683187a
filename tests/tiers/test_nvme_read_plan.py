"""Every byte that is wanted is in exactly one transfer, and transfers are what a device likes."""

from __future__ import annotations

import random

import pytest

from kvstored.tiers.base import PIECE_BYTES
from kvstored.tiers.nvme.header import HEADER_BYTES
from kvstored.tiers.nvme.read_plan import (
    GAP_BYTES,
    MAX_SPANS,
    TRANSFER_BYTES,
    Slot,
    Transfer,
    plan,
    transfer_bytes,
)

KIB, MIB = 1 << 10, 1 << 20


def slots_at_random(rng: random.Random) -> list[Slot]:
    """Slots that do not overlap, in no order."""
    at, found = rng.randrange(1000) * 4096, []
    for index in range(rng.randrange(1, 80)):
        size = rng.choice([68 * KIB, 100 * KIB, MIB, 2 * MIB, 2 * MIB + 8192, 5 * MIB, 17 * MIB])
        found.append(Slot(index, at, size))
        at += HEADER_BYTES + size + rng.choice([0, 0, 4096, GAP_BYTES, GAP_BYTES + 4096, MIB])
    rng.shuffle(found)
    return found


def ranges(transfer: Transfer) -> list[tuple[int, int, int]]:
    """Object, and file range of header and payload, for each span."""
    at, found = transfer.offset_bytes, []
    for span in transfer.spans:
        at += span.gap_bytes
        end = at + span.header_bytes + span.stop_bytes - span.start_bytes
        found.append((span.index, at, end))
        at = end
    return found


@pytest.mark.parametrize("seed", range(30))
def test_each_byte_is_brought_once(seed: int) -> None:
    rng = random.Random(seed)
    slots = slots_at_random(rng)
    most = rng.choice([MIB, 2 * MIB, 4 * MIB])
    transfers = plan(slots, most)
    brought: dict[int, list[tuple[int, int]]] = {slot.index: [] for slot in slots}
    for transfer in transfers:
        for index, begin, end in ranges(transfer):
            brought[index].append((begin, end))
        brings = sum(s.stop_bytes - s.start_bytes for s in transfer.spans)
        assert brings <= (most if len(transfer.spans) > 1 else most * 3 // 2 + PIECE_BYTES)
        assert all(s.gap_bytes <= GAP_BYTES for s in transfer.spans)
        assert len(transfer.spans) <= MAX_SPANS
        assert not transfer.spans[0].gap_bytes
        assert all(s.start_bytes % PIECE_BYTES == 0 for s in transfer.spans)
    for slot in slots:
        at = slot.offset_bytes
        for begin, end in sorted(brought[slot.index]):
            assert begin == at, "neither a hole nor anything twice"
            at = end
        assert at == slot.offset_bytes + HEADER_BYTES + slot.padded_bytes
    offsets = [transfer.offset_bytes for transfer in transfers]
    assert offsets == sorted(offsets)
    for transfer in transfers:
        singly = [part for alone in transfer.singly() for part in ranges(alone)]
        assert singly == ranges(transfer)


def test_neighbours_come_together_and_large_ones_in_even_parts() -> None:
    step = HEADER_BYTES + 512 * KIB
    near = [Slot(i, i * step, 512 * KIB) for i in range(8)]
    assert [len(t.spans) for t in plan(near, 2 * MIB)] == [4, 4]
    (large,) = [Slot(0, 0, 16 * MIB)]
    parts = plan([large], 2 * MIB)
    assert [t.spans[0].stop_bytes - t.spans[0].start_bytes for t in parts] == [2 * MIB] * 8
    assert [t.spans[0].header_bytes for t in parts] == [HEADER_BYTES] + [0] * 7


def test_a_little_is_shared_among_all_and_much_is_brought_in_large_transfers() -> None:
    assert transfer_bytes(4 * MIB, 8) == MIB
    assert transfer_bytes(16 * MIB, 8) == 2 * MIB
    assert transfer_bytes(1 << 30, 8) == TRANSFER_BYTES
    assert len(plan([Slot(0, 0, MIB + 4096)], MIB)) == 1, "a scrap of an object costs a transfer"


def test_the_same_slot_twice_is_two_transfers() -> None:
    assert len(plan([Slot(0, 4096, MIB), Slot(1, 4096, MIB)])) == 2


def test_nothing_wanted_is_nothing_read() -> None:
    assert plan([]) == []
