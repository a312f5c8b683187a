"""What the storm stores. Bytes of an object follow from its key, its part and the number of the
offer, which they carry: whoever reads them knows whose they are, and whether all of them are.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from kvstored_client import KVFamily, KVPart, Prefix, derive_namespace_salt
from kvstored_client.identity import KEY_BYTES

Bytes = NDArray[np.uint8]

SECRET = "of the deployment, in the storm"  # no secret at all: keys must be known
CHUNK_TOKENS = 16
STEM_CHUNKS = 3
"""Leading chunks that the branches of a stem share."""

_POOL: Bytes = np.random.default_rng(0).integers(0, 256, 8 << 20, dtype=np.uint8)
_BLOCK = 4096


@dataclass(frozen=True)
class Shape:
    """A kind of family: parts with the sizes that their objects have, and chunks of a prefix."""

    name: str
    parts: dict[str, tuple[int, ...]]
    chunks: int

    def __hash__(self) -> int:
        return hash(self.name)


SHAPES = (
    Shape("small", {"kv": (12_345,)}, 12),
    Shape("slots", {"kv": (80 << 10,)}, 10),
    Shape("mixed", {"k": (20_000,), "v": (100_001, 222_222)}, 8),
    Shape("large", {"kv": (700_000, 1_400_000)}, 5),
)


@dataclass(frozen=True)
class Chain:
    """One prefix: a branch of a stem of a generation's family."""

    namespace: str
    shape: Shape
    generation: int
    stem: int
    branch: int

    @cached_property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Sizes that objects of each part have: other ones in each generation, for other slots."""
        if self.shape.name not in ("mixed", "large"):
            return self.shape.parts
        more = self.generation % 5 * 90_000
        return {
            p: s if p == "k" else tuple(n + more for n in s) for p, s in self.shape.parts.items()
        }

    @cached_property
    def family(self) -> KVFamily:
        parts = [
            KVPart(part, sizes[0]) if len(sizes) == 1 else KVPart(part, max_nbytes=max(sizes))
            for part, sizes in self.sizes.items()
        ]
        name = f"{self.shape.name} {self.generation}"
        return KVFamily(name, "w", "float32", CHUNK_TOKENS, parts=parts)

    @cached_property
    def prefix(self) -> Prefix:
        shared = STEM_CHUNKS * CHUNK_TOKENS
        tokens = np.arange(self.shape.chunks * CHUNK_TOKENS, dtype=np.uint32)
        tokens[:shared] += 1000 * self.stem
        tokens[shared:] += 1000 * self.branch + 500
        return self.family.prefix(tokens)

    @cached_property
    def keys(self) -> list[bytes]:
        packed = self.prefix.keys(derive_namespace_salt(SECRET.encode(), self.namespace))
        return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]

    def room(self, part: str) -> Bytes:
        """Memory that any object of the part fits into."""
        return np.empty(max(self.sizes[part]), np.uint8)

    def nbytes(self, chunk: int, part: str) -> int:
        sizes = self.sizes[part]
        return sizes[self.keys[chunk][0] % len(sizes)]


@cache
def chains(namespace: str, generation: int, stems: int, branches: int = 2) -> list[Chain]:
    """All prefixes of a generation; the same objects each time, which have their keys ready."""
    return [
        Chain(namespace, shape, generation, stem, branch)
        for shape in SHAPES
        for stem in range(stems)
        for branch in range(branches)
    ]


def content(key: bytes, part: str, offer: int, nbytes: int) -> Bytes:
    """Bytes of an object. No block of 4096 of it is found in another object, or twice in it."""
    seed = hashlib.blake2b(b"%s %s %d" % (key, part.encode(), offer), digest_size=8).digest()
    number = int.from_bytes(seed, "little")
    at = number % (len(_POOL) - nbytes)
    data = _POOL[at : at + nbytes].copy()
    blocks = nbytes // _BLOCK
    stamps = np.uint64(number) + np.arange(blocks, dtype=np.uint64)
    data[: blocks * _BLOCK].reshape(blocks, _BLOCK)[:, :8] = stamps.view(np.uint8).reshape(-1, 8)
    data[8:16] = np.array([offer], np.uint64).view(np.uint8)
    return data


def offer_of(key: bytes, part: str, data: Bytes) -> int | None:
    """The number of the offer that the bytes are of; None: of no offer of this object."""
    offer = int(data[8:16].copy().view(np.uint64)[0])
    if offer >> 63 or not np.array_equal(content(key, part, offer, len(data)), data):
        return None
    return offer
