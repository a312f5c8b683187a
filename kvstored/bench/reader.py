"""A session that reads at full speed: the load of `bench lookup`.

Usage: python -m kvstored.bench.reader TARGET CHUNKS OBJECT_BYTES

Puts a prefix of its own, prints "ready", and reads it into its memory again and again until its
standard input is closed; then prints the bytes read, the seconds it took, and how many of the bytes
were compared (every 16th read, and the last). Fails where a byte came back wrong.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np

from kvstored.bench import payloads
from kvstored.server.allocator import keep_freed_frames
from kvstored_client import KVClient

COMPARE_EVERY = 16


def main() -> None:
    """See the module."""
    target, chunks, object_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    keep_freed_frames()
    source = payloads.random_bytes(chunks * object_bytes, int.from_bytes(os.urandom(4)))
    into = np.ones(chunks * object_bytes, np.uint8)
    stop = threading.Event()
    with KVClient(target) as client:
        prefix = payloads.fresh_prefix(payloads.family(object_bytes), chunks)
        payloads.put(client, prefix, source)
        payloads.get(client, prefix, into)
        _print("ready")
        threading.Thread(target=_wait_for_end, args=(stop,), daemon=True).start()
        reads = verified = 0
        begin = time.perf_counter()
        while not stop.is_set():
            payloads.get(client, prefix, into)
            reads += 1
            if reads % COMPARE_EVERY == 0:
                verified += payloads.compare(into, source)
                into.fill(0)
        took_s = time.perf_counter() - begin
        payloads.get(client, prefix, into)
        verified += payloads.compare(into, source)
    _print(f"{reads * into.nbytes} {took_s} {verified}")


def _wait_for_end(stop: threading.Event) -> None:
    sys.stdin.buffer.read()
    stop.set()


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
