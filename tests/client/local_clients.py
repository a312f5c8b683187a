"""A client on a real local server, and contents to compare."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from server.local_serving import MIB, LocalServed, local_serving

from kvstored_client import KVClient, KVFamily, KVPart

__all__ = ["FAMILY", "MIB", "OBJECT_BYTES", "LocalServed", "chunks", "client_of", "local_serving"]

OBJECT_BYTES = 64 << 10
FAMILY = KVFamily("local clients", "w", "float32", parts=[KVPart("kv", OBJECT_BYTES)])


def chunks(count: int, seed: int = 0, nbytes: int = OBJECT_BYTES) -> NDArray[np.uint8]:
    """Contents of chunks, shape [count, nbytes]."""
    return np.random.default_rng(seed).integers(0, 256, (count, nbytes), dtype=np.uint8)


@contextlib.contextmanager
def client_of(served: LocalServed, **options: object) -> Iterator[KVClient]:
    """A client that is closed at the end, and whose session's thread has ended then."""
    client = KVClient(f"unix://{served.path.with_name('k.sock')}", **options)  # type: ignore[arg-type]  # passed on
    try:
        yield client
    finally:
        client.close()
        join_session_threads()


def join_session_threads() -> None:
    """Wait until no session of this process is open."""
    for thread in threading.enumerate():
        if thread.name == "kvstored-session":
            thread.join(20)
            assert not thread.is_alive()
