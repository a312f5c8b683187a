"""What is refused, with which error, and what odd input is taken as it is."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from identity.family_strategies import SALT

from kvstored_client.identity import (
    BlockHashError,
    Extra,
    ExtraError,
    KVFamily,
    LabelError,
    SaltError,
    TokenError,
    derive_namespace_salt,
    validate_namespace,
    validate_tenant,
)

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
        KVFamily("m", "w", "float32", chunk_tokens=0)
