"""Prefixes: a prompt cut into chunks, and the keys of its chunks under either scheme."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvstored_client.identity.checks import octets, uint
from kvstored_client.identity.errors import BlockHashError, ExtraError, TokenError
from kvstored_client.identity.hashing import (
    KEY_BYTES,
    checked_namespace_salt,
    checked_request_salt,
    encode_bytes,
    encode_u32,
    encode_u64,
    foreign_keys,
    link_keys,
    root_key,
)
from kvstored_client.identity.tokens import TOKEN_STOP, TokenIds, token_array

if TYPE_CHECKING:
    from kvstored_client.identity.family import KVFamily

MAX_DIGEST_BYTES: Final = 64
MAX_BLOCK_HASH_BYTES: Final = 64

# A client has one salt; more than a few per prefix only ever happen in tests and tools.
_SALTS_REMEMBERED: Final = 4


@dataclass(frozen=True, slots=True, order=True)
class Extra:
    """What lies under the tokens start_token <= t < stop_token besides their ids, like an image.

    `digest` (1 to 64 bytes) must identify it. It counts for every chunk it overlaps, together with
    its range; it may reach past the prompt's end. Raises ExtraError.
    """

    start_token: int
    stop_token: int
    digest: bytes

    def __post_init__(self) -> None:
        start = uint("start_token", self.start_token, error=ExtraError)
        stop = uint("stop_token", self.stop_token, error=ExtraError)
        if start >= stop:
            raise ExtraError("start_token", f"must be less than stop_token {stop}, not {start}")
        octets("digest", self.digest, least=1, most=MAX_DIGEST_BYTES, error=ExtraError)

    def _encoded(self) -> bytes:
        return (
            encode_u64(self.start_token) + encode_u64(self.stop_token) + encode_bytes(self.digest)
        )


class Prefix(ABC):
    """A prompt cut into chunks. `len()` is the number of chunks; `tokens` the prompt's length.

    Made by `KVFamily.prefix` and `KVFamily.foreign`; never changes.
    """

    def __init__(self, family: KVFamily, tokens: int, request_salt: bytes) -> None:
        self.family = family
        self.tokens = tokens
        self.request_salt = request_salt
        self._keys: dict[bytes, bytes] = {}
        self.worked_out: dict[object, object] = {}
        """What kvstored_client.objects has worked out for calls; no part of the identity."""

    def __len__(self) -> int:
        return -(-self.tokens // self.family.chunk_tokens)

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"<{kind} of {self.family.model!r}: {len(self)} chunks, {self.tokens} tokens>"

    def end_token(self, index: int) -> int:
        """Tokens of the prompt up to the end of chunk `index`. Raises IndexError."""
        return min((self._checked(index) + 1) * self.family.chunk_tokens, self.tokens)

    def keys(self, namespace_salt: bytes) -> bytes:
        """Keys of all chunks, 32 bytes each, back to back; chunk i's are [32 * i : 32 * i + 32].

        Computed once per salt and kept. Raises SaltError for a salt that is not 32 bytes.
        """
        salt = checked_namespace_salt(namespace_salt)
        known = self._keys.get(salt)
        if known is not None:
            return known
        root = root_key(salt, self.family.fingerprint, self.request_salt)
        keys = self._keys_under(root)
        while len(self._keys) >= _SALTS_REMEMBERED:
            del self._keys[next(iter(self._keys))]
        self._keys[salt] = keys
        return keys

    def key(self, index: int, namespace_salt: bytes) -> bytes:
        """Key of chunk `index`, 32 bytes. Raises IndexError and SaltError."""
        at = self._checked(index) * KEY_BYTES
        return self.keys(namespace_salt)[at : at + KEY_BYTES]

    def _checked(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"chunk {index} of a prefix of {len(self)}")
        return index

    @abstractmethod
    def _keys_under(self, root: bytes) -> bytes:
        """Keys of all chunks under a root."""


class NativePrefix(Prefix):
    """A prefix given by its tokens: each key is chained to the one before."""

    def __init__(
        self,
        family: KVFamily,
        token_ids: NDArray[np.uint32],
        request_salt: bytes,
        extras: tuple[Extra, ...],
    ) -> None:
        super().__init__(family, len(token_ids), request_salt)
        self.token_ids = token_ids
        self.extras = extras

    def _keys_under(self, root: bytes) -> bytes:
        return link_keys(root, self._rows())

    def _rows(self) -> list[bytes]:
        """For each chunk what its key adds to the one before: token count, tokens, extras."""
        chunk_tokens = self.family.chunk_tokens
        full = self.tokens // chunk_tokens
        # One array of [count, tokens..., number of extras = 0] per row, cut up as bytes: no work
        # per token in Python.
        table = np.zeros((full, chunk_tokens + 2), "<u4")
        table[:, 0] = chunk_tokens
        table[:, 1:-1] = self.token_ids[: full * chunk_tokens].reshape(full, chunk_tokens)
        packed = table.tobytes()
        row_bytes = 4 * (chunk_tokens + 2)
        rows = [packed[at : at + row_bytes] for at in range(0, len(packed), row_bytes)]
        rest = self.token_ids[full * chunk_tokens :]
        if len(rest):
            rows.append(encode_u32(len(rest)) + rest.tobytes() + encode_u32(0))
        for index, found in self._extras_by_chunk().items():
            rows[index] = rows[index][:-4] + encode_u32(len(found)) + b"".join(found)
        return rows

    def _extras_by_chunk(self) -> dict[int, list[bytes]]:
        chunk_tokens = self.family.chunk_tokens
        found: dict[int, list[bytes]] = {}
        for extra in self.extras:
            if extra.start_token >= self.tokens:
                break  # they are sorted
            encoded = extra._encoded()
            stop = min(extra.stop_token, self.tokens)
            for index in range(extra.start_token // chunk_tokens, -(-stop // chunk_tokens)):
                found.setdefault(index, []).append(encoded)
        return found


class ForeignPrefix(Prefix):
    """A prefix given by the engine's block hashes: no key depends on the one before."""

    def __init__(
        self,
        family: KVFamily,
        block_hashes: tuple[bytes, ...],
        request_salt: bytes,
        tokens: int,
    ) -> None:
        super().__init__(family, tokens, request_salt)
        self.block_hashes = block_hashes

    def _keys_under(self, root: bytes) -> bytes:
        return foreign_keys(root, self.block_hashes)


def native_prefix(
    family: KVFamily, token_ids: TokenIds, request_salt: bytes, extras: Iterable[Extra]
) -> NativePrefix:
    """See KVFamily.prefix."""
    tokens = token_array(token_ids)
    if len(tokens) >= TOKEN_STOP:
        raise TokenError("token_ids", f"must be fewer than {TOKEN_STOP}, not {len(tokens)}")
    unique = set()
    for position, extra in enumerate(extras):
        if not isinstance(extra, Extra):
            raise ExtraError("extras", f"must be an Extra, not {type(extra).__name__}", position)
        unique.add(extra)
    return NativePrefix(family, tokens, checked_request_salt(request_salt), tuple(sorted(unique)))


def foreign_prefix(
    family: KVFamily, block_hashes: Iterable[bytes], request_salt: bytes, tokens: int | None
) -> ForeignPrefix:
    """See KVFamily.foreign."""
    hashes = tuple(block_hashes)
    for position, value in enumerate(hashes):
        octets(
            "block_hashes",
            value,
            least=1,
            most=MAX_BLOCK_HASH_BYTES,
            error=BlockHashError,
            position=position,
        )
    most = len(hashes) * family.chunk_tokens
    least = most - family.chunk_tokens + 1 if hashes else 0
    length = most if tokens is None else uint("tokens", tokens, error=TokenError)
    if not least <= length <= most:
        problem = f"must be {least} to {most} for {len(hashes)} blocks, not {length}"
        raise TokenError("tokens", problem)
    return ForeignPrefix(family, hashes, checked_request_salt(request_salt), length)
