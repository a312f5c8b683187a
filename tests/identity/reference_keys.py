"""A second implementation of docs/identity.md, with hashlib alone, to check the package by."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypedDict


class Group(TypedDict):
    name: str
    rule: str
    trailing_tokens: int
    attention: str


class Spec(TypedDict):
    model: str
    weights: str  # hex
    weights_epoch: str  # decimal
    lora: str
    kv_dtype: str
    quantisation: str
    quantisation_scales: str  # hex
    groups: list[Group]
    position_encoding: str
    draft_model: str
    chunk_tokens: int
    memory_order: str
    engine_format: str


class ExtraRange(TypedDict):
    start_token: int
    stop_token: int
    digest: str  # hex


def digest(person: str, message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=32, person=person.encode("ascii")).digest()


def u32(n: int) -> bytes:
    return n.to_bytes(4, "little")


def u64(n: int) -> bytes:
    return n.to_bytes(8, "little")


def var(b: bytes) -> bytes:
    return u32(len(b)) + b


def text(s: str) -> bytes:
    return var(s.encode("utf-8"))


def namespace_salt(secret: bytes, namespace: str) -> bytes:
    return digest("kvstored-salt-v1", var(secret) + text(namespace))


def family_encoding(spec: Spec) -> bytes:
    out = text(spec["model"])
    out += var(bytes.fromhex(spec["weights"]))
    out += u64(int(spec["weights_epoch"]))
    out += text(spec["lora"])
    out += text(spec["kv_dtype"])
    out += text(spec["quantisation"])
    out += var(bytes.fromhex(spec["quantisation_scales"]))
    out += u32(len(spec["groups"]))
    for group in sorted(spec["groups"], key=lambda g: g["name"].encode("utf-8")):
        out += text(group["name"])
        out += u32({"all": 1, "trailing": 2, "last": 3}[group["rule"]])
        out += u32(group["trailing_tokens"])
        out += text(group["attention"])
    out += text(spec["position_encoding"])
    out += text(spec["draft_model"])
    out += u32(spec["chunk_tokens"])
    out += text(spec["memory_order"])
    return out + text(spec["engine_format"])


def fingerprint(spec: Spec) -> bytes:
    return digest("kvstored-fmly-v1", family_encoding(spec))


def root(salt: bytes, fingerprint: bytes, request_salt: bytes) -> bytes:
    return digest("kvstored-root-v1", var(salt) + var(fingerprint) + var(request_salt))


def native(
    root: bytes, chunk_tokens: int, tokens: Sequence[int], extras: Sequence[ExtraRange] = ()
) -> list[bytes]:
    keys = []
    previous = root
    unique = {(e["start_token"], e["stop_token"], bytes.fromhex(e["digest"])) for e in extras}
    for start in range(0, len(tokens), chunk_tokens):
        chunk = tokens[start : start + chunk_tokens]
        stop = start + len(chunk)
        within = sorted(e for e in unique if e[0] < stop and e[1] > start)
        message = previous + u32(len(chunk)) + b"".join(u32(t) for t in chunk) + u32(len(within))
        for extra_start, extra_stop, extra_digest in within:
            message += u64(extra_start) + u64(extra_stop) + var(extra_digest)
        previous = digest("kvstored-link-v1", message)
        keys.append(previous)
    return keys


def foreign(root: bytes, block_hashes: Sequence[bytes]) -> list[bytes]:
    return [digest("kvstored-fkey-v1", root + var(block_hash)) for block_hash in block_hashes]


def holds(rule: str, n: int, boundary_tokens: int, chunk_tokens: int, present: str) -> bool:
    """Whether a rule holds at a boundary, token by token. `present`: "1" or "0" per chunk."""
    if boundary_tokens == 0:
        return True
    needed = {
        "all": range(boundary_tokens),
        "trailing": range(max(0, boundary_tokens - n), boundary_tokens),
        "last": range(boundary_tokens - 1, boundary_tokens),
    }[rule]
    return all(present[token // chunk_tokens] == "1" for token in needed)
