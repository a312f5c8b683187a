"""Which chunks a command is about: a family file and a prompt, or keys as `list` shows them."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from kvstored_client import GroupRule, IdentityError, KVFamily, KVPart, Prefix
from kvstored_client.errors import UsageError
from kvstored_client.identity import KEY_BYTES
from kvstored_client.objects import checked_parts, checked_range, chunk_run
from kvstored_client.proto import kvstore_pb2 as pb

_HEX_FIELDS = ("weights", "quantisation_scales")


class Mistake(Exception):
    """The command cannot be carried out as written; the message names what is wrong."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Chunks to work on. Either `prefix` with its family is known, or `keys` and a fingerprint."""

    prefix: Prefix | None
    start: int
    stop: int
    fingerprint: bytes
    keys: bytes
    parts: tuple[str, ...]

    def run(self, namespace: str, salt: bytes) -> pb.ChunkRun:
        """The ChunkRun of a request."""
        if self.prefix is not None:
            keys = self.prefix.keys(salt)
            return chunk_run(self.prefix, self.start, self.stop, namespace, keys, list(self.parts))
        return pb.ChunkRun(
            namespace=namespace, family=self.fingerprint, keys=self.keys, parts=self.parts
        )


def select(arguments: argparse.Namespace) -> Selection:
    """The chunks that the arguments name. Raises Mistake."""
    by_keys = [arguments.fingerprint, arguments.keys]
    by_prompt = [arguments.family, arguments.token_ids]
    parts = tuple(arguments.parts.split(",")) if arguments.parts else ()
    if all(by_keys) and not any(by_prompt):
        if arguments.start or arguments.stop is not None:
            raise Mistake("--start and --stop belong to a prompt, not to --keys")
        keys = b"".join(hex_bytes("--keys", k, KEY_BYTES) for k in arguments.keys.split(","))
        fingerprint = hex_bytes("--fingerprint", arguments.fingerprint, KEY_BYTES)
        return Selection(None, 0, len(keys) // KEY_BYTES, fingerprint, keys, parts)
    if all(by_prompt) and not any(by_keys):
        prefix = prompt(arguments)
        try:
            start, stop = checked_range(prefix, arguments.start, arguments.stop)
            checked = checked_parts(prefix.family, parts or None)
        except UsageError as error:
            raise Mistake(str(error)) from error
        names = tuple(part.name for part in checked)
        return Selection(prefix, start, stop, prefix.family.fingerprint, b"", names)
    raise Mistake("name the chunks by --family and --token-ids, or by --fingerprint and --keys")


def prompt(arguments: argparse.Namespace) -> Prefix:
    """The prefix that --family, --token-ids and --request-salt name. Raises Mistake."""
    if not (arguments.family and arguments.token_ids):
        raise Mistake("--family and --token-ids are needed")
    family = read_family(arguments.family)
    salt = hex_bytes("--request-salt", arguments.request_salt)
    try:
        return family.prefix(_read_tokens(arguments.token_ids), request_salt=salt)
    except IdentityError as error:
        raise Mistake(f"--token-ids {arguments.token_ids}: {error}") from error


def hex_bytes(option: str, text: str, length: int | None = None) -> bytes:
    """Bytes written as hex. Raises Mistake."""
    try:
        data = bytes.fromhex(text)
    except ValueError as error:
        raise Mistake(f"{option}: {text!r} is not hex") from error
    if length is not None and len(data) != length:
        raise Mistake(f"{option}: {text!r} has {len(data)} bytes, not {length}")
    return data


def read_text(option: str, name: str) -> str:
    """A file's text, or standard input's for "-". Raises Mistake."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Mistake(f"{option} {name}: {error}") from error


def _read_tokens(name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    words = re.split(r"[\s,\[\]]+", read_text("--token-ids", name).strip(" \t\r\n,[]"))
    try:
        return np.array([int(word) for word in words if word], dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise Mistake(f"--token-ids {name}: {error}; write whole numbers") from error


def read_family(path: Path) -> KVFamily:
    """The family that a JSON file describes; see docs/kvctl.md. Raises Mistake."""
    try:
        given = json.loads(read_text("--family", str(path)))
    except json.JSONDecodeError as error:
        raise Mistake(f"--family {path}: {error}") from error
    if not isinstance(given, dict):
        raise Mistake(f"--family {path}: a JSON object is needed")
    build: Callable[..., KVFamily] = KVFamily  # which checks every field, types included
    try:
        return build(**_family_arguments(given))
    except (IdentityError, TypeError, ValueError) as error:
        raise Mistake(f"--family {path}: {error}") from error


def _family_arguments(given: dict[str, object]) -> dict[str, object]:
    known = {f.name for f in fields(KVFamily) if f.init}
    arguments = dict(given)
    for name in _HEX_FIELDS:
        text = arguments.pop(f"{name}_hex", None)
        if text is not None:
            arguments[name] = bytes.fromhex(str(text))
    unknown = sorted(set(arguments) - known)
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; a family has {', '.join(sorted(known))}")
    if "parts" in arguments:
        arguments["parts"] = [_part(item) for item in _as_list("parts", arguments["parts"])]
    if "groups" in arguments:
        groups = arguments["groups"]
        if not isinstance(groups, dict):
            raise ValueError("groups must be an object of name and rule")
        arguments["groups"] = {name: _rule(rule) for name, rule in groups.items()}
    return arguments


def _as_list(name: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list")
    return value


def _part(item: object) -> KVPart:
    if not isinstance(item, dict):
        raise ValueError("each part must be an object with name and nbytes or max_nbytes")
    arguments = dict(item)
    for span in ("layers", "heads"):
        if span in arguments:
            arguments[span] = tuple(_as_list(span, arguments[span]))
    return KVPart(**arguments)


def _rule(rule: object) -> GroupRule:
    if rule == "all":
        return GroupRule.all()
    if rule == "last":
        return GroupRule.last()
    if isinstance(rule, dict) and set(rule) == {"trailing"}:
        return GroupRule.trailing(rule["trailing"])
    raise ValueError(f'group rule {rule!r}: write "all", "last" or {{"trailing": TOKENS}}')
