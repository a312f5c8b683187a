"""The hash table of keys against a dict: growth, removal, clashes of tags, batches."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored.store.index import ChunkIndex
from kvstored.store.keys import NONE, KeyTable


def packed(keys: list[bytes]) -> bytes:
    return b"".join(keys)


def clashing(table: KeyTable) -> None:
    """Make the tag of a key its first 32 bits."""
    table._coefficients = np.array([1 << 32, 0, 0, 0, 0, 0, 0, 0], np.uint64)
    table._constant = np.uint64(0)
    table._factors, table._offset = table._coefficients.tolist(), 0


def same(table: KeyTable, model: dict[bytes, int], asked: list[bytes]) -> None:
    assert len(table) == len(model)
    expected = [model.get(key, NONE) for key in asked]
    assert [table.find(key) for key in asked] == expected
    assert table.find_many(packed(asked)).tolist() == expected
    for key in asked:
        if key in model:
            assert table.key(model[key]) == key


def test_it_grows_and_shrinks_as_a_dict_does() -> None:
    dice = random.Random(1)
    table, model, free = KeyTable(), dict[bytes, int](), list[int]()
    rows = 0
    for target in (30_000, 2_000, 25_000, 0, 3_000):
        absent: list[bytes] = []
        while len(model) != target:
            growing = len(model) < target
            if dice.random() < (0.8 if growing else 0.2):
                if free:
                    row = free.pop()
                else:
                    row, rows = rows, rows + 1
                key = dice.randbytes(32)
                table.add(key, row)
                model[key] = row
            elif model:
                key = next(iter(model))
                row = model.pop(key)
                table.remove(row)
                free.append(row)
                absent.append(key)
            if dice.random() < (0.001 if table._old is None else 0.2):
                held = dice.sample(list(model), min(40, len(model)))
                asked = [*held, *absent[-60:], dice.randbytes(32)]
                dice.shuffle(asked)
                same(table, model, asked)
        same(table, model, [*model, *absent[-2000:]])


# All the keys share three tags, which also lie far apart, close together and at the table's end.
TAGS = [(0).to_bytes(4, "little"), (1).to_bytes(4, "little"), b"\xff" * 4]
KEYS = [tag + bytes([n]) + bytes(26) + b"k" for tag in TAGS for n in range(12)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(range(len(KEYS))), max_size=120))
def test_keys_whose_tags_clash_are_told_apart(flips: list[int]) -> None:
    table, model = KeyTable(), dict[bytes, int]()
    clashing(table)
    for n in flips:
        key = KEYS[n]
        if key in model:
            table.remove(model.pop(key))
        else:
            table.add(key, n)
            model[key] = n
        same(table, model, KEYS)


def test_clashing_tags_survive_the_move_to_a_larger_table() -> None:
    table, model = KeyTable(), dict[bytes, int]()
    clashing(table)
    for n in range(1200):
        key = (n % 7 << 28).to_bytes(4, "little") + n.to_bytes(28, "big")
        table.add(key, n)
        model[key] = n
    same(table, model, list(model))


def test_keys_passed_on_across_the_border_of_what_was_moved_are_found() -> None:
    dice = random.Random(4)
    table, model = KeyTable(), dict[bytes, int]()
    clashing(table)
    for row in range(2000):
        model[dice.randbytes(32)] = row
    for key, row in model.items():
        table.add(key, row)
    border = (127 << 32) // table._young.count + 1 | 1  # tag of the last bucket of the first step
    for row in range(2000, 2020):
        key = border.to_bytes(4, "little") + dice.randbytes(28)
        table.add(key, row)
        model[key] = row
    assert table._old is None
    table._renew()
    table._move()
    assert table._old is not None
    same(table, model, list(model))


def test_a_missing_key_is_not_taken_for_the_one_in_row_0() -> None:
    table = KeyTable()
    key = b"\x01" * 32
    table.add(key, 0)
    missing = [bytes([n]) * 32 for n in range(2, 20)]
    assert table.find_many(packed([*missing, key])).tolist() == [NONE] * 18 + [0]
    table.remove(0)  # its bytes still lie in the column
    assert table.find_many(packed([key] * 20)).tolist() == [NONE] * 20


@pytest.mark.parametrize("count", [0, 1, 8, 9, 700])
def test_batches_of_any_length(count: int) -> None:
    dice = random.Random(2)
    table, keys = KeyTable(), [dice.randbytes(32) for _ in range(count)]
    for row, key in enumerate(keys[::2]):
        table.add(key, row)
    expected = [n // 2 if n % 2 == 0 else NONE for n in range(count)]
    found = table.find_many(packed(keys))
    assert found.dtype == np.int32
    assert found.tolist() == expected


def test_no_two_tables_hash_alike() -> None:
    key = bytes(range(32))
    assert len({KeyTable()._tag(key) for _ in range(20)}) > 15


def test_growing_moves_a_bounded_number_of_keys_per_change() -> None:
    dice = random.Random(3)
    table, moves = KeyTable(), 0
    for row in range(60_000):
        before = table._moved if table._old is not None else 0
        old = table._old
        table.add(dice.randbytes(32), row)
        if table._old is not None and table._old is old:
            moves += 1
            assert table._moved - before <= 128
    assert moves > 20


def test_a_key_passed_on_is_found_beside_one_whose_tag_stands_twice() -> None:
    table = KeyTable()
    clashing(table)
    near = [(n << 26).to_bytes(4, "little") + bytes([n]) * 28 for n in range(1, 11)]
    twice = [(40 << 26).to_bytes(4, "little") + bytes([n]) * 28 for n in (1, 2)]
    full = [(50 << 26 | 2 * n).to_bytes(4, "little") + bytes(28) for n in range(9)]
    keys = [*near, *twice, *full]
    for row, key in enumerate(keys):
        table.add(key, row)
    asked = [*near, twice[0], full[8]]
    assert table.find_many(packed(asked)).tolist() == [keys.index(key) for key in asked]


def test_what_was_found_lately_is_not_found_once_keys_come_or_go() -> None:
    """The index remembers look-ups: a key that comes or goes must end that, each way it can."""
    index = ChunkIndex()
    keys = [bytes([i]) * 32 for i in range(40)]
    packed = b"".join(keys)

    def rows() -> list[int]:
        found = index.find_many(packed)
        again = index.find_many(packed)
        assert found.tolist() == again.tolist()
        again[:] = 7  # the caller's own
        assert index.find_many(packed).tolist() == found.tolist()
        return [int(row) for row in found]

    assert rows() == [NONE] * 40
    added = [
        index.add_chunk(key, b"", family=0, tenant=0, depth=0, end_token=64, expires_ms=0)
        for key in keys[:20]
    ]
    assert rows() == added + [NONE] * 20
    index.remove_chunk(added[3])
    assert rows() == [*added[:3], NONE, *added[4:]] + [NONE] * 20
