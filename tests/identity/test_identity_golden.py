"""The golden vectors, by the package and by an implementation made from the page alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from identity import reference_keys

from kvstored_client.identity import (
    Extra,
    GroupRule,
    KVFamily,
    derive_namespace_salt,
    fingerprint_of_spec,
    longest_boundary,
)
from kvstored_client.identity.family import _encode

Vector = dict[str, Any]

GOLDEN_PATH = Path(__file__).parents[2] / "proto" / "golden" / "identity.json"
GOLDEN: Vector = json.loads(GOLDEN_PATH.read_text("utf-8"))
SPECS: dict[str, reference_keys.Spec] = {f["name"]: f["spec"] for f in GOLDEN["families"]}


def named(section: str) -> pytest.MarkDecorator:
    vectors = GOLDEN[section]
    ids = [v.get("name") or v.get("namespace") or v.get("about") for v in vectors]
    return pytest.mark.parametrize("vector", vectors, ids=ids)


def family(name: str) -> KVFamily:
    spec = SPECS[name]
    return KVFamily(
        spec["model"],
        bytes.fromhex(spec["weights"]),
        spec["kv_dtype"],
        spec["chunk_tokens"],
        weights_epoch=int(spec["weights_epoch"]),
        lora=spec["lora"],
        quantisation=spec["quantisation"],
        quantisation_scales=bytes.fromhex(spec["quantisation_scales"]),
        groups={g["name"]: rule(dict(g)) for g in spec["groups"]},
        position_encoding=spec["position_encoding"],
        draft_model=spec["draft_model"],
        memory_order=spec["memory_order"],
        engine_format=spec["engine_format"],
    )


def rule(group: Vector) -> GroupRule:
    return GroupRule(group["rule"], group["trailing_tokens"], group.get("attention", ""))


def reference_root(vector: Vector) -> bytes:
    return reference_keys.root(
        bytes.fromhex(vector["namespace_salt"]),
        reference_keys.fingerprint(SPECS[vector["family"]]),
        bytes.fromhex(vector["request_salt"]),
    )


def test_the_file_names_the_version_and_persons_of_the_page() -> None:
    page = (GOLDEN_PATH.parents[2] / "docs" / "identity.md").read_text("utf-8")
    assert GOLDEN["version"] == 1
    persons = set(GOLDEN["persons"].values())
    assert len(persons) == 5
    for person in persons:
        assert len(person.encode("ascii")) == 16
        assert f"`{person}`" in page


@named("namespace_salts")
def test_namespace_salts(vector: Vector) -> None:
    secret, namespace = bytes.fromhex(vector["deployment_secret"]), vector["namespace"]
    expected = bytes.fromhex(vector["salt"])
    assert reference_keys.namespace_salt(secret, namespace) == expected
    assert derive_namespace_salt(secret, namespace) == expected


@named("families")
def test_families(vector: Vector) -> None:
    expected = bytes.fromhex(vector["fingerprint"])
    assert reference_keys.family_encoding(vector["spec"]).hex() == vector["encoding"]
    assert reference_keys.fingerprint(vector["spec"]) == expected
    subject = family(vector["name"])
    assert subject.fingerprint == expected
    assert fingerprint_of_spec(subject.spec()) == expected
    assert _encode(subject.spec()).hex() == vector["encoding"]


def test_no_two_families_share_a_fingerprint() -> None:
    assert len({f["fingerprint"] for f in GOLDEN["families"]}) == len(GOLDEN["families"])


@named("native")
def test_native_keys(vector: Vector) -> None:
    tokens, extras = vector["token_ids"], vector["extras"]
    expected = [bytes.fromhex(key) for key in vector["keys"]]
    root = reference_root(vector)
    assert root.hex() == vector["root"]
    chunk_tokens = SPECS[vector["family"]]["chunk_tokens"]
    assert reference_keys.native(root, chunk_tokens, tokens, extras) == expected
    prefix = family(vector["family"]).prefix(
        tokens,
        bytes.fromhex(vector["request_salt"]),
        [Extra(e["start_token"], e["stop_token"], bytes.fromhex(e["digest"])) for e in extras],
    )
    salt = bytes.fromhex(vector["namespace_salt"])
    assert prefix.keys(salt) == b"".join(expected)
    assert [prefix.key(i, salt) for i in range(len(prefix))] == expected


@named("foreign")
def test_foreign_keys(vector: Vector) -> None:
    hashes = [bytes.fromhex(h) for h in vector["block_hashes"]]
    expected = [bytes.fromhex(key) for key in vector["keys"]]
    root = reference_root(vector)
    assert root.hex() == vector["root"]
    assert reference_keys.foreign(root, hashes) == expected
    prefix = family(vector["family"]).foreign(hashes, bytes.fromhex(vector["request_salt"]))
    assert prefix.keys(bytes.fromhex(vector["namespace_salt"])) == b"".join(expected)


@named("boundaries")
def test_boundaries(vector: Vector) -> None:
    groups = vector["groups"]
    present = {
        str(i): np.array([bit == "1" for bit in group["present"]], np.bool_)
        for i, group in enumerate(groups)
    }
    rules = {str(i): rule(group) for i, group in enumerate(groups)}
    found = longest_boundary(
        present,
        rules,
        vector["chunk_tokens"],
        start=vector["start"],
        end_token=vector["end_token"],
    )
    assert found == vector["chunks"]


def test_what_the_vectors_say_of_each_other() -> None:
    native = {v["name"]: v["keys"] for v in GOLDEN["native"]}
    foreign = {v["name"]: v["keys"] for v in GOLDEN["foreign"]}
    assert native["aligned"] == native["short-last"][:2] == native["longer"][:2]
    assert native["longer"][2] not in native["short-last"] + native["zero-padded"]
    assert native["zero-padded"][2] not in native["short-last"]
    assert native["image-cut"] == native["image"][:2]
    assert native["other-image"][0] == native["image"][0] == native["short-last"][0]
    assert not set(native["other-image"][1:]) & set(native["image"][1:])
    assert native["extra-beyond"] == native["short-last"]
    assert foreign["reversed"] == foreign["three"][::-1]
    everywhere = (
        [key for name in ("short-last", "other-namespace", "request-salt") for key in native[name]]
        + foreign["three"]
        + foreign["request-salt"]
    )
    assert len(set(everywhere)) == len(everywhere)
