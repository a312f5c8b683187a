"""Families and their parts: what is refused and how it is said, and that they survive the wire."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from identity.family_strategies import SALT, families

from kvstored_client.identity import (
    FieldError,
    FingerprintMismatchError,
    GroupError,
    GroupRule,
    IdentityError,
    KVFamily,
    KVPart,
    PartError,
    fingerprint_of_spec,
)
from kvstored_client.proto import kvstore_pb2 as pb

PLAIN = KVFamily("m", "w", "float32", 4)


# ---- families -----------------------------------------------------------------------------------

TEXTS = ["model", "kv_dtype", "lora", "quantisation", "position_encoding", "draft_model",
         "memory_order", "engine_format"]  # fmt: skip


def family_with(**changes: Any) -> KVFamily:
    return replace(PLAIN, **changes)


@pytest.mark.parametrize("field", TEXTS)
def test_text_fields(field: str) -> None:
    longest = "é" * 512
    assert getattr(family_with(**{field: longest}), field) == longest
    for bad, message in (
        (longest + "x", "bytes of UTF-8 long, not 1025"),
        (b"bytes", "must be a str, not bytes"),
        (None, "must be a str, not NoneType"),
        ("ok\ud800", "character 2 is a lone surrogate"),
    ):
        with pytest.raises(FieldError, match=f"^{field}: .*{message}"):
            family_with(**{field: bad})


@pytest.mark.parametrize("field", ["model", "kv_dtype", "weights"])
@pytest.mark.parametrize("empty", ["", b""])
def test_what_must_not_be_empty(field: str, empty: str | bytes) -> None:
    with pytest.raises(FieldError, match=f"^{field}: must be"):
        family_with(**{field: empty})


def test_text_is_taken_as_given() -> None:
    variants = ["caf\u00e9", "cafe\u0301", "CAF\u00e9", "caf\u00e9 ", "caf\u00e9\0", "\ufb01", "fi"]
    assert len({family_with(model=v).fingerprint for v in variants}) == len(variants)
    for variant in variants:
        family = family_with(model=variant)
        assert (
            KVFamily.from_spec(pb.FamilySpec.FromString(family.spec().SerializeToString()))
            == family
        )


@pytest.mark.parametrize(
    ("field", "bad", "message"),
    [
        ("chunk_tokens", 0, "must be 1 to 65536, not 0"),
        ("chunk_tokens", -64, "must be 1 to 65536, not -64"),
        ("chunk_tokens", 65537, "must be 1 to 65536, not 65537"),
        ("chunk_tokens", 2**40, "must be 1 to 65536, not 1099511627776"),
        ("chunk_tokens", 64.0, "must be an int, not float"),
        ("chunk_tokens", True, "must be an int, not bool"),
        ("chunk_tokens", "64", "must be an int, not str"),
        ("weights_epoch", -1, "must be 0 to 18446744073709551615, not -1"),
        ("weights_epoch", 2**64, f"must be 0 to 18446744073709551615, not {2**64}"),
        ("weights", bytes(1025), "must be 1 to 1024 bytes long, not 1025"),
        ("weights", bytearray(4), "must be bytes, not bytearray"),
        ("quantisation_scales", bytes(1025), "must be 0 to 1024 bytes long, not 1025"),
        ("quantisation_scales", "s", "must be bytes, not str"),
    ],
)
def test_other_fields_that_are_refused(field: str, bad: Any, message: str) -> None:
    with pytest.raises(FieldError) as caught:
        family_with(**{field: bad})
    assert str(caught.value) == f"{field}: {message}"
    assert caught.value.field == field


def test_the_largest_and_smallest_chunks() -> None:
    assert len(family_with(chunk_tokens=65536).prefix(range(65537))) == 2
    assert len(family_with(chunk_tokens=1).prefix(range(3))) == 3


def test_weights_may_be_text() -> None:
    assert family_with(weights="é") == family_with(weights="é".encode())


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({}, "groups: must be 1 to 64, not 0"),
        ({str(i): GroupRule.all() for i in range(65)}, "groups: must be 1 to 64, not 65"),
        ({"a": "all"}, "groups: 'a' has a str, not a GroupRule"),
        ({"": GroupRule.all()}, "groups: must be 1 to 64 bytes of UTF-8 long, not 0"),
        ({"a\n": GroupRule.all()}, "groups: character 1 is a control character (U+000A)"),
        ({1: GroupRule.all()}, "groups: must be a str, not int"),
        ([GroupRule.all()], "groups: must map names to rules, not be list"),
    ],
)
def test_groups_that_are_refused(groups: Any, message: str) -> None:
    with pytest.raises(GroupError) as caught:
        family_with(groups=groups)
    assert str(caught.value) == message


def test_attention_is_text() -> None:
    with pytest.raises(GroupError, match="attention: must be 0 to 1024 bytes"):
        GroupRule.all("x" * 1025)


def test_a_family_does_not_change() -> None:
    groups = {"default": GroupRule.all()}
    family = family_with(groups=groups)
    groups["more"] = GroupRule.last()
    assert list(family.groups) == ["default"]
    with pytest.raises(TypeError):
        family.groups["more"] = GroupRule.last()  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        family.model = "other"  # type: ignore[misc]


# ---- parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "", "nbytes": 4096}, "name: must be 1 to 64 bytes of UTF-8 long, not 0"),
        ({"name": "é" * 33, "nbytes": 4096}, "name: must be 1 to 64 bytes of UTF-8 long, not 66"),
        ({"name": "a\0", "nbytes": 4096}, "name: character 1 is a control character (U+0000)"),
        ({"name": b"kv", "nbytes": 4096}, "name: must be a str, not bytes"),
        ({"name": "kv"}, "nbytes: part 'kv' needs one of nbytes and max_nbytes"),
        ({"name": "kv", "nbytes": 4096, "max_nbytes": 4096},
         "nbytes: part 'kv' needs one of nbytes and max_nbytes"),
        ({"name": "kv", "nbytes": 4095}, "nbytes: must be 4096 to 268435456, not 4095"),
        ({"name": "kv", "max_nbytes": (256 << 20) + 1},
         "max_nbytes: must be 4096 to 268435456, not 268435457"),
        ({"name": "kv", "nbytes": 0}, "nbytes: must be 4096 to 268435456, not 0"),
        ({"name": "kv", "nbytes": 4096.0}, "nbytes: must be an int, not float"),
        ({"name": "kv", "nbytes": 4096, "layers": (2, 2)},
         "layers: start must be less than stop, not 2 and 2"),
        ({"name": "kv", "nbytes": 4096, "heads": (0, 2**32)},
         "heads: must be 0 to 4294967295, not 4294967296"),
        ({"name": "kv", "nbytes": 4096, "heads": (1,)}, "heads: must be (start, stop), not (1,)"),
        ({"name": "kv", "nbytes": 4096, "heads": 3}, "heads: must be (start, stop), not 3"),
    ],
)  # fmt: skip
def test_parts_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PartError) as caught:
        KVPart(**arguments)
    assert str(caught.value) == message


def test_parts_that_do_not_fit_their_family() -> None:
    part = KVPart("kv", 4096)
    with pytest.raises(PartError, match=r"parts\[1\]: 'kv' is declared twice"):
        family_with(parts=[part, replace(part, nbytes=8192)])
    with pytest.raises(PartError, match=r"parts\[0\]: 'kv' names group 'ssm', which the family"):
        family_with(parts=[replace(part, group="ssm")])
    with pytest.raises(PartError, match=r"parts\[0\]: must be a KVPart, not str"):
        family_with(parts=["kv"])


# ---- the wire -----------------------------------------------------------------------------------

PARTS = [
    KVPart("kv", 256 << 20),
    KVPart("é" * 32, max_nbytes=4096, layers=(0, 12), heads=(4, 8)),
    KVPart("x", 5000, layers=(3, 4)),
]


@given(family=families)
def test_a_family_survives_the_wire(family: KVFamily) -> None:
    group = next(iter(family.groups))
    family = replace(family, parts=[replace(part, group=group) for part in PARTS])
    spec = pb.FamilySpec.FromString(family.spec().SerializeToString())
    assert fingerprint_of_spec(spec) == spec.fingerprint == family.fingerprint
    again = KVFamily.from_spec(spec)
    assert again == family
    assert hash(again) == hash(family)
    assert again.spec() == family.spec()


def test_a_family_and_its_prefixes_can_be_copied_and_pickled() -> None:
    family = family_with(parts=PARTS)
    for twin in (pickle.loads(pickle.dumps(family)), copy.deepcopy(family), copy.copy(family)):
        assert twin == family
    prefix = family.prefix([1, 2, 3])
    assert pickle.loads(pickle.dumps(prefix)).keys(SALT) == prefix.keys(SALT)


@pytest.mark.parametrize("claimed", [b"", bytes(32), b"short"])
def test_a_spec_that_claims_another_fingerprint_is_refused(claimed: bytes) -> None:
    spec = PLAIN.spec()
    spec.fingerprint = claimed
    assert fingerprint_of_spec(spec) == PLAIN.fingerprint
    with pytest.raises(FingerprintMismatchError, match=f"fields give {PLAIN.fingerprint.hex()}"):
        KVFamily.from_spec(spec)


def test_the_fingerprint_of_a_spec_does_not_look_at_its_parts() -> None:
    spec = PLAIN.spec()
    spec.parts.add(name="\n", group="nowhere", bytes=1)
    assert fingerprint_of_spec(spec) == PLAIN.fingerprint
    with pytest.raises(PartError):
        KVFamily.from_spec(spec)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda spec: spec.ClearField("model"), "model: must be 1 to 1024 bytes"),
        (lambda spec: spec.ClearField("groups"), "groups: must be 1 to 64, not 0"),
        (
            lambda spec: spec.groups.add(name="default", rule=1),
            r"groups\[1\]: 'default' is declared",
        ),
        (lambda spec: spec.groups.add(name="b"), r"groups\[1\]: 'b' has unknown rule 0"),
        (lambda spec: spec.groups.add(name="b", rule=9), r"groups\[1\]: 'b' has unknown rule 9"),
        (lambda spec: spec.groups.add(name="b", rule=2), "tokens: must be 1 to 4294967295, not 0"),
        (lambda spec: spec.groups.add(name="b", rule=1, trailing_tokens=5), "tokens: must be 0"),
        (lambda spec: setattr(spec, "chunk_tokens", 0), "chunk_tokens: must be 1 to 65536, not 0"),
        (lambda spec: setattr(spec, "lora", "x" * 1025), "lora: must be 0 to 1024"),
    ],
)
def test_specs_that_no_family_can_have(
    spoil: Callable[[pb.FamilySpec], object], message: str
) -> None:
    spec = PLAIN.spec()
    spoil(spec)
    for read in (fingerprint_of_spec, KVFamily.from_spec):
        with pytest.raises(IdentityError, match=message):
            read(spec)
