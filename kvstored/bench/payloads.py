"""What the benchmarks store, read and compare, and how much of it fits."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstored.bench.processes import BenchError
from kvstored.config.host import memory_allowed
from kvstored_client import KVClient, KVFamily, KVPart, Prefix

MIB = 1 << 20
CHUNK_TOKENS = 64
TIMEOUT_S = 300.0

Bytes = NDArray[np.uint8]

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def random_bytes(nbytes: int, seed: int) -> Bytes:
    """Incompressible bytes; the same for the same seed, in every process."""
    words = np.random.default_rng(seed).integers(0, 1 << 64, -(-nbytes // 8), np.uint64)
    return words.view(np.uint8)[:nbytes]


def compare(got: Bytes, put: Bytes) -> int:
    """How many bytes were compared: all. Raises BenchError where they differ."""
    if got.nbytes != put.nbytes or _memcmp(got.ctypes.data, put.ctypes.data, got.nbytes):
        raise BenchError("bytes came back wrong")
    return got.nbytes


def family(object_bytes: int) -> KVFamily:
    """A family of one part with objects of one size."""
    return KVFamily(
        model="kvstored-bench",
        weights="none",
        kv_dtype="bytes",
        chunk_tokens=CHUNK_TOKENS,
        parts=[KVPart(f"kv{object_bytes}", nbytes=object_bytes)],
    )


def fresh_prefix(of: KVFamily, chunks: int) -> Prefix:
    """A prefix that nobody has put yet."""
    return of.prefix(range(chunks * CHUNK_TOKENS), request_salt=os.urandom(16))


def put(client: KVClient, prefix: Prefix, source: Bytes) -> None:
    """Put a whole prefix. Raises BenchError unless all of it was stored."""
    result = client.put(prefix, source, timeout_s=TIMEOUT_S)
    if result.stored != len(prefix):
        raise BenchError(f"put stored {result.stored} of {len(prefix)} chunks: {result.reason}")


def get(client: KVClient, prefix: Prefix, into: Bytes) -> None:
    """Read a whole prefix. Raises BenchError unless all of it came."""
    result = client.get(prefix, into, timeout_s=TIMEOUT_S)
    if result.chunks != len(prefix):
        raise BenchError(f"get brought {result.chunks} of {len(prefix)} chunks: {result.reason}")


def delete(client: KVClient, prefix: Prefix) -> None:
    """Drop a whole prefix."""
    client.delete(prefix, timeout_s=TIMEOUT_S)


def transport_of(client: KVClient, held: Prefix) -> str:
    """How the client reaches the daemon: "local", "unix" or "tcp". `held`: something to ask for."""
    with client.acquire(held, stop=1) as lease:
        if not lease.reason:
            return "local"
        if lease.reason != "not_local":
            raise BenchError(f"acquire found nothing that is held: {lease.reason} {lease.detail}")
    return "unix" if client.target.startswith("unix:") else "tcp"


def still(transport: str, client: KVClient, held: Prefix) -> None:
    """Raises BenchError where the client has gone over to another transport meanwhile."""
    now = transport_of(client, held)
    if now != transport:
        raise BenchError(f"the client reached the daemon by {transport} first, by {now} at the end")


def chunks_that_fit(wanted: int, bytes_per_chunk: int) -> int:
    """At most `wanted` chunks, as many as half of the memory has room for, at least one.

    `bytes_per_chunk`: what all copies of a chunk take, in all processes of the benchmark.
    """
    allowed, _ = memory_allowed()
    return max(1, min(wanted, allowed // 2 // bytes_per_chunk))


def cache_bytes() -> int:
    """Size of the last-level cache; 0 where the kernel does not tell."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdecimal():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes)
