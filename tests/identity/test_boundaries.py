"""Group rules and the longest boundary, against a model that goes token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from identity import reference_keys

from kvstored_client.identity import GroupError, GroupRule, RuleKind, longest_boundary

KINDS: list[RuleKind] = ["all", "trailing", "last"]


@st.composite
def runs(draw: st.DrawFn) -> tuple[dict[str, str], dict[str, GroupRule], int, int, int]:
    """(present, rules, chunk_tokens, start, end_token) of a run of up to 12 chunks."""
    chunk_tokens = draw(st.integers(1, 5))
    start, chunks = draw(st.integers(0, 6)), draw(st.integers(0, 12))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    present, rules = {}, {}
    for i, kind in enumerate(kinds):
        bits = draw(st.lists(st.sampled_from("1110"), min_size=chunks, max_size=chunks))
        present[str(i)] = "".join(bits)
        rules[str(i)] = GroupRule(
            kind, draw(st.integers(1, 3 * chunk_tokens)) if kind == "trailing" else 0
        )
    short = draw(st.integers(0, chunk_tokens - 1)) if chunks else 0
    stop = (start + chunks) * chunk_tokens
    end_token = draw(st.sampled_from([0, stop])) if short == 0 else stop - short
    return present, rules, chunk_tokens, start, end_token


def boundary_tokens(boundary: int, chunks: int, chunk_tokens: int, end_token: int) -> int:
    return end_token if end_token and boundary == chunks else boundary * chunk_tokens


@given(run=runs())
@settings(max_examples=400)
def test_longest_boundary_against_a_model(
    run: tuple[dict[str, str], dict[str, GroupRule], int, int, int],
) -> None:
    present, rules, chunk_tokens, start, end_token = run
    chunks = start + len(present["0"])
    best = start
    for boundary in range(start + 1, chunks + 1):
        tokens = boundary_tokens(boundary, chunks, chunk_tokens, end_token)
        if all(
            reference_keys.holds(
                rules[g].kind, rules[g].tokens, tokens, chunk_tokens, "1" * start + bits
            )
            for g, bits in present.items()
        ):
            best = boundary
    arrays = {g: np.array([bit == "1" for bit in bits], np.bool_) for g, bits in present.items()}
    found = longest_boundary(arrays, rules, chunk_tokens, start=start, end_token=end_token)
    assert found == best - start


@given(
    kind=st.sampled_from(KINDS),
    tokens=st.integers(1, 60),
    boundary=st.integers(0, 12),
    chunk_tokens=st.integers(1, 6),
    data=st.data(),
)
def test_chunks_needed_is_the_least_that_holds(
    kind: RuleKind, tokens: int, boundary: int, chunk_tokens: int, data: st.DataObject
) -> None:
    rule = GroupRule(kind, tokens if kind == "trailing" else 0)
    short = data.draw(st.integers(0, chunk_tokens - 1)) if boundary else 0
    end = boundary * chunk_tokens - short
    needed = rule.chunks_needed(boundary, chunk_tokens, end if short else 0)
    bits = "".join("1" if i in needed else "0" for i in range(boundary))
    assert reference_keys.holds(kind, rule.tokens, end, chunk_tokens, bits)
    for i in needed:
        without = bits[:i] + "0" + bits[i + 1 :]
        assert not reference_keys.holds(kind, rule.tokens, end, chunk_tokens, without)


def test_a_boundary_of_nothing_needs_nothing() -> None:
    for rule in (GroupRule.all(), GroupRule.trailing(5), GroupRule.last()):
        assert list(rule.chunks_needed(0, 64)) == []
        assert longest_boundary({"g": np.zeros(0, np.bool_)}, {"g": rule}, 64, start=3) == 0
    assert longest_boundary({}, {"g": GroupRule.all()}, 64) == 0


@pytest.mark.parametrize(("end_token", "chunks"), [(0, 4), (256, 4), (255, 2), (193, 2)])
def test_a_window_before_a_short_chunk_reaches_one_chunk_further(
    end_token: int, chunks: int
) -> None:
    present = {"w": np.array([True, True, False, True])}
    rules = {"w": GroupRule.trailing(64)}
    assert longest_boundary(present, rules, 64, end_token=end_token) == chunks
    later = end_token and end_token + 3 * 64
    assert longest_boundary(present, rules, 64, start=3, end_token=later) == chunks


def test_groups_that_are_not_asked_for_do_not_count() -> None:
    rules = {"full": GroupRule.all(), "state": GroupRule.last()}
    assert longest_boundary({"state": np.array([False, True])}, rules, 64) == 2
    both = {"state": np.array([False, True]), "full": np.array([False, True])}
    assert longest_boundary(both, rules, 64) == 0


def test_the_argument_is_left_as_it_was() -> None:
    present = np.array([True, False, True])
    present.flags.writeable = False
    rules = {"a": GroupRule.all(), "t": GroupRule.trailing(64), "l": GroupRule.last()}
    assert longest_boundary(dict.fromkeys(rules, present), rules, 64) == 1


def test_arrays_of_different_lengths_are_refused() -> None:
    present = {"a": np.ones(2, np.bool_), "b": np.ones(3, np.bool_)}
    rules = {"a": GroupRule.all(), "b": GroupRule.all()}
    with pytest.raises(GroupError, match=r"present: must have one length .* not \[2, 3\]"):
        longest_boundary(present, rules, 64)


def test_a_group_without_a_rule_is_refused() -> None:
    with pytest.raises(GroupError, match="'b' has no rule"):
        longest_boundary({"b": np.ones(2, np.bool_)}, {"a": GroupRule.all()}, 64)


@pytest.mark.parametrize("end_token", [64, 129, 1])
@pytest.mark.parametrize(
    "rule", [GroupRule.all(), GroupRule.trailing(9), GroupRule.last()], ids=lambda r: r.kind
)
def test_an_end_outside_the_last_chunk_is_refused(rule: GroupRule, end_token: int) -> None:
    with pytest.raises(GroupError, match=f"end_token: {end_token} tokens do not end in chunk 1"):
        rule.chunks_needed(2, 64, end_token)
    with pytest.raises(GroupError, match="end_token"):
        longest_boundary({"g": np.ones(2, np.bool_)}, {"g": rule}, 64, end_token=end_token)


@pytest.mark.parametrize(
    ("kind", "tokens", "message"),
    [
        ("some", 0, 'kind: must be "all", "trailing" or "last", not \'some\''),
        ("trailing", 0, "tokens: must be 1 to 4294967295, not 0"),
        ("trailing", 2**32, "tokens: must be 1 to 4294967295, not 4294967296"),
        ("trailing", True, "tokens: must be an int, not bool"),
        ("trailing", 1.5, "tokens: must be an int, not float"),
        ("all", 1, 'tokens: must be 0 for "all", not 1'),
        ("last", 64, 'tokens: must be 0 for "last", not 64'),
    ],
)
def test_rules_that_cannot_hold_are_refused(kind: RuleKind, tokens: int, message: str) -> None:
    with pytest.raises(GroupError) as caught:
        GroupRule(kind, tokens)
    assert str(caught.value) == message
