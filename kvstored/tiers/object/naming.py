"""What an object of the bucket is called. Pure.

    v1/<namespace>/<family, 64 hex digits>/<key, 64 hex digits>.<part>

below the prefix of the bucket's URL. The name follows from what the object is, so every node finds
it without asking anyone, and a namespace, or a family of one, is a listing.

Namespace and part are escaped: letters, digits, "_" and "-" stand for themselves, so does "." but
in front; any other byte of their UTF-8 is "=" and two upper-case hex digits. ("%" would be decoded
once too often by directories and by some servers.) What is longer than MAX_ESCAPED then is "=b" and
the URL-safe base64 of its UTF-8, without padding, so that a name fits into a file name.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

from kvstored.tiers.object.api import ObjectName

LAYOUT: Final = "v1"
"""First component of every object's name; another arrangement will have another one."""

CONTROL: Final = "control"
"""First component of what nodes tell each other through the bucket, like leases: no objects."""

MAX_ESCAPED: Final = 128

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.")
_PATH = re.compile(r"v1/([^/]+)/([0-9a-f]{64})/([0-9a-f]{64})\.([^/]*)")
_ESCAPED = re.compile(r"(?:[A-Za-z0-9_.-]|=[0-9A-F]{2})*")


def escape(name: str) -> str:
    """A namespace or part as it stands in a path: one component, never "." or ".."."""
    raw = name.encode()
    plain = "".join(
        chr(byte) if byte in _PLAIN and (at or byte != 0x2E) else f"={byte:02X}"
        for at, byte in enumerate(raw)
    )
    if len(plain) <= MAX_ESCAPED:
        return plain
    return "=b" + base64.urlsafe_b64encode(raw).decode().rstrip("=")


def unescape(text: str) -> str:
    """The name that `escape` made `text` of. Raises ValueError if it made no such text."""
    try:
        name = _unescaped(text)
    except (binascii.Error, UnicodeError) as error:
        raise ValueError(f"{text!r} is no escaped name") from error
    if escape(name) != text:
        raise ValueError(f"{text!r} is no escaped name")
    return name


def _unescaped(text: str) -> str:
    if text.startswith("=b"):
        coded = text[2:]
        return base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4)).decode()
    if not _ESCAPED.fullmatch(text):
        raise ValueError(f"{text!r} is no escaped name")
    raw = re.sub(
        rb"=([0-9A-F]{2})", lambda found: bytes([int(found.group(1), 16)]), text.encode("ascii")
    )
    return raw.decode()


def path_of(name: ObjectName) -> str:
    """Where an object is, below the bucket's prefix."""
    family, key = name.family.hex(), name.key.hex()
    return f"{LAYOUT}/{escape(name.namespace)}/{family}/{key}.{escape(name.part)}"


def name_of(path: str) -> ObjectName | None:
    """The object that is at a path; None if none of ours could be there."""
    found = _PATH.fullmatch(path)
    if found is None:
        return None
    namespace, family, key, part = found.groups()
    try:
        return ObjectName(
            unescape(namespace), bytes.fromhex(family), bytes.fromhex(key), unescape(part)
        )
    except ValueError:
        return None


def listing_prefix(namespace: str = "", family: bytes = b"") -> str:
    """What to list for all objects, those of a namespace, or those of one of its families."""
    if not namespace:
        return LAYOUT
    below = f"{LAYOUT}/{escape(namespace)}"
    return f"{below}/{family.hex()}" if family else below
