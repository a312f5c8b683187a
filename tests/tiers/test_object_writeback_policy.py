"""Which chunks go up, and when."""

from __future__ import annotations

import numpy as np
import pytest

from kvstored.tiers.object.policy import POLICIES, All, Policy, SecondHit, Shared, make_policy
from kvstored.tiers.object.settings import WRITE_BACK

NONE = np.zeros((1, 32), np.uint8)


def chain(seed: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys of a prefix, and their parents."""
    keys = np.random.default_rng(seed).integers(0, 256, (length, 32), dtype=np.uint8)
    return keys, np.concatenate([NONE, keys[:-1]])


def test_each_name_of_the_configuration_is_a_policy() -> None:
    assert set(POLICIES) == set(WRITE_BACK) == {"all", "shared", "second_hit"}
    for name in POLICIES:
        assert isinstance(make_policy(name), Policy)


def test_all_takes_what_is_stored_once() -> None:
    policy, (keys, parents) = All(), chain(1, 8)
    due = policy.stored(0, keys, parents)
    assert due.own.all()
    assert not due.above.any()
    assert not policy.used(0, keys).any()


def test_second_hit_takes_what_is_used_again_and_that_once() -> None:
    policy, (keys, parents) = SecondHit(), chain(1, 8)
    assert not policy.stored(0, keys, parents).own.any()
    assert policy.used(0, keys[:4]).tolist() == [True] * 4
    assert policy.used(0, keys).tolist() == [False] * 4 + [True] * 4
    assert not policy.used(0, keys).any()
    assert not policy.stored(0, keys, parents).own.any()


def test_second_hit_takes_what_is_stored_again() -> None:
    policy, (keys, parents) = SecondHit(), chain(1, 8)
    policy.stored(0, keys, parents)
    assert policy.stored(0, keys, parents).own.all()


def test_spaces_do_not_see_each_other() -> None:
    policy, (keys, parents) = SecondHit(), chain(1, 8)
    policy.stored(0, keys, parents)
    assert not policy.used(1, keys).any()


def test_all_heeds_uses_as_long_as_something_was_refused() -> None:
    policy, (keys, _) = All(), chain(1, 8)
    assert not policy.heeds_uses
    policy.refused(0, keys[5:])
    policy.refused(0, keys[5:])
    assert policy.heeds_uses
    assert not policy.used(1, keys).any()
    assert policy.used(0, keys).tolist() == [False] * 5 + [True] * 3
    assert not policy.heeds_uses
    assert not policy.used(0, keys).any()


def test_what_was_refused_is_due_at_the_next_use() -> None:
    policy, (keys, parents) = SecondHit(), chain(1, 8)
    policy.stored(0, keys, parents)
    assert policy.used(0, keys).all()
    policy.refused(0, keys[5:])
    assert policy.used(0, keys).tolist() == [False] * 5 + [True] * 3


def test_shared_takes_what_two_go_on_from() -> None:
    policy, (keys, parents) = Shared(), chain(1, 8)
    assert not policy.stored(0, keys, parents).above.any()
    assert not policy.stored(0, keys, parents).above.any(), "the same once more is not shared"
    other, _ = chain(2, 2)
    branch = np.concatenate([keys[4:5], other[:1]])
    due = policy.stored(0, other, branch)
    assert due.above.tolist() == [True, False], "the fifth chunk has two ways on; other[0] has one"
    assert not due.own.any()
    third, _ = chain(3, 1)
    assert not policy.stored(0, third, keys[4:5]).above.any(), "once"
    policy.refused(0, keys[4:5])
    assert policy.stored(0, third, keys[4:5]).above.all()


def test_first_chunks_have_nothing_above_them() -> None:
    policy = Shared()
    for seed in range(4):
        assert not policy.stored(0, *chain(seed, 1)).above.any()


@pytest.mark.parametrize("kind", [SecondHit, Shared])
def test_memory_is_bounded_and_forgets(kind: type[SecondHit] | type[Shared]) -> None:
    policy = kind(slots=4)
    keys, parents = chain(1, 64)
    policy.stored(0, keys, parents)
    policy.stored(0, keys, parents)
    # forgotten, so seen once only: never due for what was not seen twice
    fresh, fresh_parents = chain(9, 64)
    due = policy.stored(0, fresh, fresh_parents)
    assert not due.own.any()
    assert not due.above.any()
