"""What is refused, with which error, and what odd input is taken as it is."""

from __future__ import annotations

import copy
import enum
import pickle
from array import array
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from identity.family_strategies import SALT, families

from kvstored_client.identity import (
    BlockHashError,
    Extra,
    ExtraError,
    FieldError,
    FingerprintMismatchError,
    GroupError,
    GroupRule,
    IdentityError,
    KVFamily,
    KVPart,
    LabelError,
    PartError,
    SaltError,
    TokenError,
    derive_namespace_salt,
    fingerprint_of_spec,
    validate_namespace,
    validate_tenant,
)
from kvstored_client.proto import kvstore_pb2 as pb

PLAIN = KVFamily("m", "w", "float32", 4)


class Special(enum.IntEnum):
    BOS = 1


# ---- tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_ids", "position", "message"),
    [
        ([1, -1], 1, "token_ids[1]: must be 0 to 4294967295, not -1"),
        ([1, 2, 2**32], 2, "token_ids[2]: must be 0 to 4294967295, not 4294967296"),
        ([2**80], 0, f"token_ids[0]: must be 0 to 4294967295, not {2**80}"),
        ([1, 2.0], 1, "token_ids[1]: must be an integer, not float"),
        ([1, True], 1, "token_ids[1]: must be an integer, not bool"),
        ([1, None], 1, "token_ids[1]: must be an integer, not NoneType"),
        ([1, "2"], 1, "token_ids[1]: must be an integer, not str"),
        ([[1, 2]], 0, "token_ids[0]: must be an integer, not list"),
        ([1, np.bool_(True)], 1, "token_ids[1]: must be an integer, not bool"),
        ([1, np.float32(2)], 1, "token_ids[1]: must be an integer, not float32"),
        ([1, np.int64(-5)], 1, "token_ids[1]: must be 0 to 4294967295, not -5"),
        ([np.int64(1), np.int64(-5)], 1, "token_ids[1]: must be 0 to 4294967295, not -5"),
        ([1, np.array([2])], 1, "token_ids[1]: must be an integer, not an array of them"),
        (np.array([1, -1]), 1, "token_ids[1]: must be 0 to 4294967295, not -1"),
        (np.array([1, -1], np.int8), 1, "token_ids[1]: must be 0 to 4294967295, not -1"),
        (np.array([0, 2**32], "u8"), 1, "token_ids[1]: must be 0 to 4294967295, not 4294967296"),
        (np.array([1.0]), 0, "token_ids[0]: must be an integer, not float64"),
        (np.array([True]), 0, "token_ids[0]: must be an integer, not bool"),
        (np.array([1, None], np.object_), 1, "token_ids[1]: must be an integer, not NoneType"),
        (np.array([[1]]), None,
         "token_ids: must have one dimension (one prompt), not shape [1, 1]"),
        (np.array(1), None, "token_ids: must have one dimension (one prompt), not shape []"),
        (array("d", [1.0]), 0, "token_ids[0]: must be an integer, not float"),
    ],
)  # fmt: skip
def test_token_ids_that_are_refused(token_ids: Any, position: int | None, message: str) -> None:
    with pytest.raises(TokenError) as caught:
        PLAIN.prefix(token_ids)
    assert str(caught.value) == message
    assert (caught.value.field, caught.value.position) == ("token_ids", position)


@pytest.mark.parametrize(
    "token_ids", ["123", b"123", bytearray(3), {1, 2}, {1: 2}, None, 5, iter([1])]
)
def test_containers_that_are_refused(token_ids: Any) -> None:
    with pytest.raises(TokenError, match="must be a list, tuple, array or tensor of ints, not"):
        PLAIN.prefix(token_ids)


CONTAINERS: list[Callable[[list[int]], Any]] = [
    tuple,
    lambda ids: array("q", ids),
    lambda ids: [np.int64(i) for i in ids],
    lambda ids: [np.uint64(i) if n else np.int64(i) for n, i in enumerate(ids)],
    lambda ids: [i if n else np.uint32(i) for n, i in enumerate(ids)],
    lambda ids: [np.array(i) for i in ids],
    lambda ids: np.array(ids, np.int64),
    lambda ids: np.array(ids, np.uint64),
    lambda ids: np.array(ids, ">u4"),
    lambda ids: np.array(ids, np.object_),
    lambda ids: np.repeat(np.array(ids, np.uint32), 2)[::2],
]


@given(ids=st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_every_container_gives_the_same_keys(ids: list[int]) -> None:
    keys = PLAIN.prefix(ids).keys(SALT)
    for make in CONTAINERS:
        assert PLAIN.prefix(make(ids)).keys(SALT) == keys


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_every_integer_type_gives_the_same_keys(dtype: str) -> None:
    ids = [0, 1, 127, 5, 9]
    assert PLAIN.prefix(np.array(ids, dtype)).keys(SALT) == PLAIN.prefix(ids).keys(SALT)


def test_ranges_and_enums_are_ints() -> None:
    assert PLAIN.prefix(range(5)).keys(SALT) == PLAIN.prefix([0, 1, 2, 3, 4]).keys(SALT)
    assert PLAIN.prefix([Special.BOS, 2]).keys(SALT) == PLAIN.prefix([1, 2]).keys(SALT)


def test_torch_tensors_are_taken_and_refused_like_arrays() -> None:
    torch = pytest.importorskip("torch")
    ids = [0, 1, 2**31 - 1, 7, 9]
    keys = PLAIN.prefix(ids).keys(SALT)
    for tensor in (
        torch.tensor(ids),
        torch.tensor(ids, dtype=torch.int32),
        torch.tensor(ids).repeat_interleave(2)[::2],
        list(torch.tensor(ids)),
    ):
        assert PLAIN.prefix(tensor).keys(SALT) == keys
    for tensor, message in (
        (torch.tensor([1, -1]), r"token_ids\[1\]: must be 0 to 4294967295, not -1"),
        (torch.tensor([1.0], requires_grad=True), r"token_ids\[0\]: must be an integer"),
        (torch.tensor([1.0], dtype=torch.bfloat16), r"token_ids\[0\]: must be integers"),
        (torch.tensor([True]), r"token_ids\[0\]: must be an integer, not bool"),
        (torch.tensor([[1]]), "one dimension"),
        ([1, torch.tensor(True)], r"token_ids\[1\]: must be an integer, not torch.bool"),
        ([1, torch.tensor(1.0)], r"token_ids\[1\]: must be an integer, not torch.float32"),
    ):
        with pytest.raises(TokenError, match=message):
            PLAIN.prefix(tensor)


@pytest.mark.parametrize("empty", [[], (), np.array([]), np.zeros(0, np.int64), array("I")])
def test_no_tokens_are_no_chunks(empty: Any) -> None:
    prefix = PLAIN.prefix(empty, b"salt", [Extra(0, 4, b"image")])
    assert (len(prefix), prefix.tokens, prefix.keys(SALT)) == (0, 0, b"")
    with pytest.raises(IndexError, match="chunk 0 of a prefix of 0"):
        prefix.end_token(0)
    with pytest.raises(IndexError):
        prefix.key(0, SALT)


def test_a_prefix_keeps_its_tokens_when_the_caller_reuses_the_buffer() -> None:
    ids = np.arange(8, dtype=np.uint32)
    prefix = PLAIN.prefix(ids)
    ids[:] = 0
    assert prefix.keys(SALT) == PLAIN.prefix(range(8)).keys(SALT)


def test_end_tokens() -> None:
    prefix = PLAIN.prefix(range(10))
    assert [prefix.end_token(i) for i in range(len(prefix))] == [4, 8, 10]
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"chunk {index} of a prefix of 3"):
            prefix.end_token(index)


# ---- foreign prefixes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_hashes", "message"),
    [
        ([b"a", b""], "block_hashes[1]: must be 1 to 64 bytes long, not 0"),
        ([bytes(65)], "block_hashes[0]: must be 1 to 64 bytes long, not 65"),
        ([b"a", 12345], "block_hashes[1]: must be bytes, not int"),
        (["ab"], "block_hashes[0]: must be bytes, not str"),
        ([None], "block_hashes[0]: must be bytes, not NoneType"),
        (b"abc", "block_hashes[0]: must be bytes, not int"),
    ],
)
def test_block_hashes_that_are_refused(block_hashes: Any, message: str) -> None:
    with pytest.raises(BlockHashError) as caught:
        PLAIN.foreign(block_hashes)
    assert str(caught.value) == message


def test_a_foreign_prefix_knows_its_tokens() -> None:
    assert PLAIN.foreign([]).tokens == len(PLAIN.foreign([])) == 0
    assert PLAIN.foreign([b"a", b"b"]).tokens == 8
    short = PLAIN.foreign([b"a", b"b"], tokens=5)
    assert [short.end_token(i) for i in range(len(short))] == [4, 5]
    for hashes, tokens in (([b"a", b"b"], 4), ([b"a", b"b"], 9), ([], 1), ([b"a"], 0)):
        with pytest.raises(TokenError, match="tokens: must be"):
            PLAIN.foreign(hashes, tokens=tokens)


# ---- salts and extras ---------------------------------------------------------------------------


def test_salts_that_are_refused() -> None:
    for bad in ("salt", bytearray(4), None, bytes(1025)):
        with pytest.raises(SaltError, match="request_salt: must be"):
            PLAIN.prefix([1], bad)  # type: ignore[arg-type]
        with pytest.raises(SaltError, match="request_salt: must be"):
            PLAIN.foreign([b"a"], bad)  # type: ignore[arg-type]
    for bad in (b"", bytes(31), bytes(33), "s" * 32, bytearray(32)):
        with pytest.raises(SaltError, match="namespace_salt: must be"):
            PLAIN.prefix([1]).keys(bad)  # type: ignore[arg-type]
    for bad in (b"", bytes(15), bytes(1025), "s" * 32):
        with pytest.raises(SaltError, match="deployment_secret: must be"):
            derive_namespace_salt(bad, "default")  # type: ignore[arg-type]
    with pytest.raises(LabelError, match="namespace: must be 1 to 64 bytes"):
        derive_namespace_salt(bytes(16), "")
    assert len(PLAIN.prefix([1], bytes(1024)).keys(SALT)) == 32


@pytest.mark.parametrize(
    ("start", "stop", "digest", "message"),
    [
        (-1, 4, b"d", "start_token: must be 0 to 4294967295, not -1"),
        (4, 4, b"d", "start_token: must be less than stop_token 4, not 4"),
        (0, 2**32, b"d", "stop_token: must be 0 to 4294967295, not 4294967296"),
        (0, 1.0, b"d", "stop_token: must be an int, not float"),
        (False, 1, b"d", "start_token: must be an int, not bool"),
        (0, 1, b"", "digest: must be 1 to 64 bytes long, not 0"),
        (0, 1, bytes(65), "digest: must be 1 to 64 bytes long, not 65"),
        (0, 1, "ab", "digest: must be bytes, not str"),
    ],
)
def test_extras_that_are_refused(start: Any, stop: Any, digest: Any, message: str) -> None:
    with pytest.raises(ExtraError) as caught:
        Extra(start, stop, digest)
    assert str(caught.value) == message


def test_only_extras_are_extras() -> None:
    with pytest.raises(ExtraError, match=r"extras\[1\]: must be an Extra, not tuple"):
        PLAIN.prefix([1], b"", [Extra(0, 1, b"d"), (0, 1, b"d")])  # type: ignore[list-item]


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


# ---- labels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("validate", [validate_namespace, validate_tenant])
def test_labels(validate: Callable[[str], str]) -> None:
    for good in ("default", "a", "x" * 64, "é" * 32, "team/a b.c:1", "日本", " "):
        assert validate(good) == good
    for bad, message in (
        ("x" * 65, "must be 1 to 64 bytes of UTF-8 long, not 65"),
        ("é" * 33, "must be 1 to 64 bytes of UTF-8 long, not 66"),
        ("a\nb", "character 1 is a control character"),
        ("\0", "character 0 is a control character"),
        ("a\x7f", "character 1 is a control character"),
        ("a\x85", "character 1 is a control character"),
        ("a\u2028", "character 1 is a control character"),
        ("\udcff", "lone surrogate"),
        (b"bytes", "must be a str, not bytes"),
        (None, "must be a str, not NoneType"),
    ):
        with pytest.raises(LabelError, match=message):
            validate(bad)  # type: ignore[arg-type]


def test_no_tenant_is_the_default_one_but_no_namespace_is_an_error() -> None:
    assert validate_tenant("") == "default"
    with pytest.raises(LabelError, match="namespace: must be 1 to 64 bytes"):
        validate_namespace("")


def test_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="chunk_tokens"):
        family_with(chunk_tokens=0)
