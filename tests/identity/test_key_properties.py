"""What may and may not share a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from identity import reference_keys
from identity.family_strategies import (
    FIELD_STRATEGIES,
    SALT,
    extras,
    families,
    fields,
    prompts,
    split_keys,
    token_ids,
)

from kvstored_client.identity import (
    Extra,
    GroupRule,
    KVFamily,
    KVPart,
    derive_namespace_salt,
)

PLAIN = KVFamily("m", "w", "float32", 4)
hashes = st.binary(min_size=1, max_size=64)
request_salts = st.binary(max_size=40)
secrets = st.binary(min_size=16, max_size=40)


def native(
    family: KVFamily,
    tokens: list[int],
    request_salt: bytes = b"",
    within: Sequence[Extra] = (),
    *,
    salt: bytes = SALT,
) -> list[bytes]:
    return split_keys(family.prefix(tokens, request_salt, within).keys(salt))


@pytest.mark.parametrize("field", sorted(FIELD_STRATEGIES))
@given(data=st.data())
@settings(max_examples=40)
def test_families_that_differ_in_one_field_share_no_key(field: str, data: st.DataObject) -> None:
    first = data.draw(fields)
    other = {**first, field: data.draw(FIELD_STRATEGIES[field])}
    assume(first[field] != other[field])
    a, b = KVFamily(**first), KVFamily(**other)
    tokens = data.draw(prompts)
    assert a.fingerprint != b.fingerprint
    assert set(native(a, tokens)).isdisjoint(native(b, tokens))
    block_hashes = data.draw(st.lists(hashes, min_size=1, max_size=4))
    foreign_a, foreign_b = a.foreign(block_hashes), b.foreign(block_hashes)
    assert set(split_keys(foreign_a.keys(SALT))).isdisjoint(split_keys(foreign_b.keys(SALT)))


TEXT_FIELDS_IN_ORDER = [
    "model",
    "lora",
    "kv_dtype",
    "quantisation",
    "position_encoding",
    "draft_model",
    "memory_order",
    "engine_format",
]


@pytest.mark.parametrize("at", range(len(TEXT_FIELDS_IN_ORDER) - 1))
def test_a_character_moved_to_the_next_field_makes_another_family(at: int) -> None:
    left, right = TEXT_FIELDS_IN_ORDER[at : at + 2]
    same: dict[str, Any] = dict.fromkeys(TEXT_FIELDS_IN_ORDER, "xy")
    base = KVFamily(weights=b"w", **same)
    moved: list[dict[str, Any]] = [{right: "zxy"}, {left: "xyz"}]
    before, after = (replace(base, **change) for change in moved)
    assert before.fingerprint != after.fingerprint


def test_a_character_moved_between_a_group_and_its_neighbours_makes_another_family() -> None:
    shapes: list[dict[str, GroupRule]] = [
        {"ab": GroupRule.all("c")},
        {"a": GroupRule.all("bc")},
        {"abc": GroupRule.all("")},
        {"a": GroupRule.all("b"), "c": GroupRule.all("")},
        {"a": GroupRule.all(""), "b": GroupRule.all("c")},
        {"a": GroupRule.all(""), "bc": GroupRule.all("")},
        {"a": GroupRule.all(""), "b": GroupRule.all(""), "c": GroupRule.all("")},
    ]
    prints = {KVFamily("m", "w", "d", groups=groups).fingerprint for groups in shapes}
    assert len(prints) == len(shapes)


@given(groups=FIELD_STRATEGIES["groups"], data=st.data())
def test_the_order_of_groups_does_not_matter(
    groups: dict[str, GroupRule], data: st.DataObject
) -> None:
    shuffled = dict(data.draw(st.permutations(sorted(groups.items()))))
    a, b = replace(PLAIN, groups=groups), replace(PLAIN, groups=shuffled)
    assert a.fingerprint == b.fingerprint
    assert list(a.groups) == list(b.groups)
    assert a.spec() == b.spec()


def test_parts_are_not_in_the_fingerprint() -> None:
    rank0 = replace(PLAIN, parts=[KVPart("r0", 4096, heads=(0, 2))])
    rank1 = replace(PLAIN, parts=[KVPart("r1", max_nbytes=8192, heads=(2, 4), layers=(0, 1))])
    assert rank0.fingerprint == rank1.fingerprint == PLAIN.fingerprint
    assert rank0 != rank1
    assert native(rank0, [1, 2, 3]) == native(rank1, [1, 2, 3])


@given(tokens=prompts, a=request_salts, b=request_salts)
def test_request_salts_share_no_key(tokens: list[int], a: bytes, b: bytes) -> None:
    assume(a != b)
    assert set(native(PLAIN, tokens, a)).isdisjoint(native(PLAIN, tokens, b))
    block_hashes = [bytes([token & 255]) for token in tokens]
    foreign = [set(split_keys(PLAIN.foreign(block_hashes, salt).keys(SALT))) for salt in (a, b)]
    assert foreign[0].isdisjoint(foreign[1])


@given(
    tokens=prompts,
    a=st.tuples(secrets, st.text("abc/", min_size=1)),
    b=st.tuples(secrets, st.text("abc/", min_size=1)),
)
def test_namespaces_and_deployments_share_no_key(
    tokens: list[int], a: tuple[bytes, str], b: tuple[bytes, str]
) -> None:
    assume(a != b)
    salts = [derive_namespace_salt(*pair) for pair in (a, b)]
    assert salts[0] != salts[1]
    assert set(native(PLAIN, tokens, salt=salts[0])).isdisjoint(
        native(PLAIN, tokens, salt=salts[1])
    )
    block_hashes = [b"h", b"g"]
    foreign = [set(split_keys(PLAIN.foreign(block_hashes).keys(salt))) for salt in salts]
    assert foreign[0].isdisjoint(foreign[1])


@given(secret=secrets, namespace=st.text("ab", min_size=2, max_size=8))
def test_a_byte_moved_from_namespace_to_secret_makes_another_salt(
    secret: bytes, namespace: str
) -> None:
    moved = derive_namespace_salt(secret + namespace[:1].encode(), namespace[1:])
    assert derive_namespace_salt(secret, namespace) != moved


@given(family=families, tokens=prompts, salt=request_salts, within=extras())
def test_the_package_agrees_with_the_page(
    family: KVFamily, tokens: list[int], salt: bytes, within: list[Extra]
) -> None:
    root = reference_keys.root(SALT, family.fingerprint, salt)
    ranges: list[reference_keys.ExtraRange] = [
        {"start_token": e.start_token, "stop_token": e.stop_token, "digest": e.digest.hex()}
        for e in within
    ]
    expected = reference_keys.native(root, family.chunk_tokens, tokens, ranges)
    assert native(family, tokens, salt, within) == expected


@given(data=st.data(), tokens=prompts, others=extras(), digest=hashes)
def test_an_extra_at_any_chunk_changes_that_key_and_all_after_it(
    data: st.DataObject, tokens: list[int], others: list[Extra], digest: bytes
) -> None:
    start = data.draw(st.integers(0, len(tokens) - 1))
    extra = Extra(start, start + data.draw(st.integers(1, 20)), digest)
    assume(extra not in others)
    without, with_it = (
        native(PLAIN, tokens, b"", others),
        native(PLAIN, tokens, b"", [*others, extra]),
    )
    touched = start // PLAIN.chunk_tokens
    assert with_it[:touched] == without[:touched]
    assert set(with_it[touched:]).isdisjoint(without)


@given(
    text=prompts,
    rest=prompts,
    images=st.tuples(hashes, hashes).filter(lambda pair: pair[0] != pair[1]),
)
def test_a_text_prefix_before_differing_images_is_shared(
    text: list[int], rest: list[int], images: tuple[bytes, bytes]
) -> None:
    placeholder = [7] * 10
    tokens = text + placeholder + rest
    a, b = (
        native(PLAIN, tokens, b"", [Extra(len(text), len(text) + 10, image)]) for image in images
    )
    touched = len(text) // PLAIN.chunk_tokens
    assert a[:touched] == b[:touched]
    assert set(a[touched:]).isdisjoint(b[touched:])


@given(tokens=prompts, data=st.data(), length=st.integers(1, 8), digest=hashes)
def test_an_image_moved_or_resized_is_another_prefix(
    tokens: list[int], data: st.DataObject, length: int, digest: bytes
) -> None:
    start = data.draw(st.integers(0, len(tokens) - 1))
    variants = [
        Extra(start, start + length, digest),
        Extra(start + 1, start + 1 + length, digest),
        Extra(start, start + length + 1, digest),
    ]
    last = [native(PLAIN, [*tokens, 0, 0], b"", [variant])[-1] for variant in variants]
    assert len(set(last)) == 3


@given(tokens=prompts, within=extras(), data=st.data())
def test_order_and_repetition_of_extras_do_not_matter(
    tokens: list[int], within: list[Extra], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(within + within[:1]))
    assert native(PLAIN, tokens, b"", within) == native(PLAIN, tokens, b"", shuffled)


@given(
    tokens=st.lists(token_ids, max_size=40), more=st.lists(token_ids, max_size=20), within=extras()
)
def test_keys_of_a_longer_prompt_extend_those_of_its_chunk_aligned_prefix(
    tokens: list[int], more: list[int], within: list[Extra]
) -> None:
    aligned = len(tokens) // 4 * 4
    short = native(PLAIN, tokens[:aligned], b"", within)
    assert native(PLAIN, tokens + more, b"", within)[: len(short)] == short


@given(a=prompts, b=prompts)
def test_native_keys_agree_exactly_as_far_as_the_chunks_do(a: list[int], b: list[int]) -> None:
    b = a[: len(b) // 2] + b
    chunks_a, chunks_b = ([t[i : i + 4] for i in range(0, len(t), 4)] for t in (a, b))
    shared = 0
    while shared < min(len(chunks_a), len(chunks_b)) and chunks_a[shared] == chunks_b[shared]:
        shared += 1
    keys_a, keys_b = native(PLAIN, a), native(PLAIN, b)
    assert keys_a[:shared] == keys_b[:shared]
    assert set(keys_a[shared:]).isdisjoint(keys_b)
    assert len(set(keys_a)) == len(keys_a)


@given(tokens=prompts, cut=st.integers(1, 3))
def test_a_short_last_chunk_is_a_key_of_its_own(tokens: list[int], cut: int) -> None:
    whole = tokens + [0] * (-len(tokens) % 4)
    short = whole[:-cut]
    full_keys, short_keys = native(PLAIN, whole), native(PLAIN, short)
    assert len(short_keys) == len(full_keys)
    assert short_keys[:-1] == full_keys[:-1]
    assert short_keys[-1] not in full_keys
    prefix = PLAIN.prefix(short)
    assert prefix.tokens == len(short)
    assert [prefix.end_token(i) for i in range(len(prefix))][-1] == len(short)


@given(tokens=prompts, block_hashes=st.lists(hashes, min_size=1, max_size=6))
def test_native_and_foreign_keys_never_meet(tokens: list[int], block_hashes: list[bytes]) -> None:
    keys = native(PLAIN, tokens)
    # The likeliest to collide: block hashes that are what native hashing is fed or gives.
    rows = [np.array(tokens[i : i + 4], "<u4").tobytes() for i in range(0, len(tokens), 4)]
    foreign = PLAIN.foreign(block_hashes + rows + keys)
    assert set(keys).isdisjoint(split_keys(foreign.keys(SALT)))


@given(block_hashes=st.lists(hashes, min_size=1, max_size=8, unique=True), data=st.data())
def test_a_foreign_key_depends_on_its_own_hash_alone(
    block_hashes: list[bytes], data: st.DataObject
) -> None:
    keys = dict(zip(block_hashes, split_keys(PLAIN.foreign(block_hashes).keys(SALT)), strict=True))
    assert len(set(keys.values())) == len(keys)
    shuffled = data.draw(st.permutations(block_hashes))
    again = split_keys(PLAIN.foreign(shuffled).keys(SALT))
    assert again == [keys[block_hash] for block_hash in shuffled]


def test_a_prompt_of_a_million_tokens() -> None:
    tokens = (np.arange(1_000_000, dtype=np.int64) * 2654435761) % 2**32
    family = KVFamily("m", "w", "float32")
    within = [Extra(999_990, 999_999, b"image")]
    prefix = family.prefix(tokens, b"s", within)
    assert len(prefix) == 15_625
    assert prefix.end_token(15_624) == 1_000_000
    root = reference_keys.root(SALT, family.fingerprint, b"s")
    extra: reference_keys.ExtraRange = {
        "start_token": 999_990,
        "stop_token": 999_999,
        "digest": b"image".hex(),
    }
    expected = reference_keys.native(root, 64, tokens.tolist(), [extra])
    assert prefix.keys(SALT) == b"".join(expected)
    assert family.prefix(tokens.tolist(), b"s", within).keys(SALT) == prefix.keys(SALT)


@given(salts=st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=12))
def test_keys_are_remembered_per_salt(salts: list[bytes]) -> None:
    prefix = PLAIN.prefix([1, 2, 3, 4, 5])
    for salt in salts:
        assert prefix.keys(salt) == PLAIN.prefix([1, 2, 3, 4, 5]).keys(salt)
        assert prefix.keys(salt) is prefix.keys(salt)
    assert len(prefix._keys) <= 4
