"""Names and stored format of the object tier."""

from __future__ import annotations

from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tiers.conformance import MIB, make_sample
from tiers.object_servers import S3Server

from kvstored.tiers.object import format as stored
from kvstored.tiers.object.api import ObjectName
from kvstored.tiers.object.naming import escape, listing_prefix, name_of, path_of, unescape

NAME = ObjectName("default", bytes(range(32)), bytes(range(32, 64)), "kv")
HOSTILE = ("..", ".", "a/b", "../../etc", "a%2Fb", "=2F", "=b", "é" * 32, "a" * 64, "a b\n", "\0")


def test_the_golden_name() -> None:
    assert path_of(NAME) == (
        "v1/default/000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f/"
        "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f.kv"
    )
    assert escape("a/b=c") == "a=2Fb=3Dc"
    assert escape(".x.") == "=2Ex."


LABELS = st.text(max_size=64).filter(lambda text: len(text.encode()) <= 64)


@given(LABELS, LABELS)
def test_names_come_back_and_stay_one_component(namespace: str, part: str) -> None:
    for text in (namespace, part):
        assert unescape(escape(text)) == text
        assert "/" not in escape(text)
        assert len(escape(text)) < 255 - 65
    if namespace:
        name = replace(NAME, namespace=namespace, part=part)
        assert name_of(path_of(name)) == name


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_stay_below_their_namespace(text: str) -> None:
    path = path_of(replace(NAME, namespace=text, part=text))
    assert path.startswith(listing_prefix(text) + "/")
    assert len(path.split("/")) == 4
    assert not {".", ".."} & set(path.split("/"))


@pytest.mark.parametrize(
    "path",
    [
        "v2/a/b/c.d",
        "v1/a",
        "control/janitor/1",
        path_of(NAME).upper(),
        path_of(NAME) + "=2f",
        "v1/=41/x",
    ],
)
def test_other_paths_are_no_objects(path: str) -> None:
    assert name_of(path) is None


def test_two_spellings_of_one_name_are_not_both_accepted() -> None:
    with pytest.raises(ValueError, match="no escaped name"):
        unescape("=41")


@pytest.mark.parametrize("length", [1, 4096, MIB, MIB + 1, 3 * MIB + 5])
def test_a_header_comes_back(length: int) -> None:
    meta = replace(make_sample(length, 1).meta, tenant="ténant", parent=b"\2" * 32, depth=7)
    block = stored.encode(meta, 1234, "node a")
    assert len(block) == stored.HEADER_BYTES
    assert stored.decode(block) == stored.ObjectHeader(meta, 1234, "node a")


def test_the_golden_header() -> None:
    meta = make_sample(4096, 1).meta
    assert xxhash.xxh3_64_hexdigest(stored.encode(meta, 1234)) == "539873f7627887a8"


def test_every_damaged_byte_of_a_header_shows() -> None:
    block = bytearray(stored.encode(make_sample(MIB + 1, 1).meta, 1234))
    for at in range(0, len(block), 7):
        block[at] ^= 0x10
        with pytest.raises(stored.HeaderError):
            stored.decode(block)
        block[at] ^= 0x10
    stored.decode(block)


def test_headers_of_newer_versions_are_not_read() -> None:
    block = bytearray(stored.encode(make_sample(4096, 1).meta, 1234))
    block[24] = 1
    block[2040:2048] = bytes(8)
    block[2040:2048] = xxhash.xxh3_64_intdigest(block).to_bytes(8, "little")
    with pytest.raises(stored.HeaderError, match="newer"):
        stored.decode(block)


def test_an_object_under_another_name_is_told_apart() -> None:
    meta = make_sample(4096, 1).meta
    name = ObjectName(meta.namespace, meta.family, meta.key, meta.part)
    assert stored.is_named(meta, name)
    for other in (
        replace(name, namespace="other"),
        replace(name, family=bytes(32)),
        replace(name, key=bytes(32)),
        replace(name, part="other"),
    ):
        assert not stored.is_named(meta, other)


def test_the_server_is_there(s3_server: S3Server) -> None:
    assert s3_server.url() != s3_server.url()
