"""The hash behind every key, and the encoding of what goes into it (docs/identity.md).

BLAKE2b (RFC 7693) with 32 bytes of output and a 16-byte `person` per purpose, so that no two
purposes can give the same hash of anything. A changed scheme gets new persons.
"""

from __future__ import annotations

import hashlib
import struct

from kvstored_client.identity.checks import MAX_FIELD_BYTES, octets, validate_namespace
from kvstored_client.identity.errors import SaltError

KEY_BYTES = 32
"""Length of a chunk key, root, fingerprint and namespace salt."""

MIN_SECRET_BYTES = 16
"""Shortest deployment secret: clients know their own salt and could try short secrets out."""

_SALT = b"kvstored-salt-v1"
_FAMILY = b"kvstored-fmly-v1"
_ROOT = b"kvstored-root-v1"
_LINK = b"kvstored-link-v1"
_FOREIGN = b"kvstored-fkey-v1"


def encode_u32(value: int) -> bytes:
    """Little-endian, 4 bytes."""
    return struct.pack("<I", value)


def encode_u64(value: int) -> bytes:
    """Little-endian, 8 bytes."""
    return struct.pack("<Q", value)


def encode_bytes(value: bytes) -> bytes:
    """Length as u32, then the bytes."""
    return struct.pack("<I", len(value)) + value


def encode_text(value: str) -> bytes:
    """UTF-8, as `encode_bytes`."""
    return encode_bytes(value.encode("utf-8"))


def _digest(person: bytes, message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=KEY_BYTES, person=person).digest()


def derive_namespace_salt(deployment_secret: bytes, namespace: str) -> bytes:
    """Salt of a namespace, 32 bytes: the same on every node that has the deployment's secret.

    `deployment_secret` is 16 to 1024 random bytes, `namespace` a label. Raises SaltError and
    LabelError.
    """
    secret = octets("deployment_secret", deployment_secret, least=MIN_SECRET_BYTES, error=SaltError)
    return _digest(_SALT, encode_bytes(secret) + encode_text(validate_namespace(namespace)))


def family_fingerprint(encoded: bytes) -> bytes:
    """Fingerprint of a family from its canonical encoding, 32 bytes."""
    return _digest(_FAMILY, encoded)


def root_key(namespace_salt: bytes, fingerprint: bytes, request_salt: bytes) -> bytes:
    """What the first key of a prefix hangs on, 32 bytes, from salts checked before."""
    return _digest(
        _ROOT,
        encode_bytes(namespace_salt) + encode_bytes(fingerprint) + encode_bytes(request_salt),
    )


def link_keys(root: bytes, rows: list[bytes]) -> bytes:
    """Native keys, packed: key i is the hash of key i - 1 (the root for i = 0) and row i."""
    # Copying a prepared state costs a third less than setting person and size for every key.
    fresh = hashlib.blake2b(digest_size=KEY_BYTES, person=_LINK).copy
    keys: list[bytes] = []
    key = root
    for row in rows:
        state = fresh()
        state.update(key + row)
        key = state.digest()
        keys.append(key)
    return b"".join(keys)


def foreign_keys(root: bytes, block_hashes: tuple[bytes, ...]) -> bytes:
    """Foreign keys, packed: each the hash of the root and one block hash."""
    fresh = hashlib.blake2b(root, digest_size=KEY_BYTES, person=_FOREIGN).copy
    keys: list[bytes] = []
    for block_hash in block_hashes:
        state = fresh()
        state.update(encode_bytes(block_hash))
        keys.append(state.digest())
    return b"".join(keys)


def checked_namespace_salt(namespace_salt: bytes) -> bytes:
    """`namespace_salt` if it is 32 bytes; else raises SaltError."""
    return octets(
        "namespace_salt", namespace_salt, least=KEY_BYTES, most=KEY_BYTES, error=SaltError
    )


def checked_request_salt(request_salt: bytes) -> bytes:
    """`request_salt` if it is 0 to 1024 bytes; else raises SaltError."""
    return octets("request_salt", request_salt, most=MAX_FIELD_BYTES, error=SaltError)
