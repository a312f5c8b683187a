"""Measures what an object costs beyond its data: ``python object_memory.py COUNT [TTL_MS]``.

Prints anonymous bytes per object, of a process that enters so many objects of one part, in runs of
64 chunks, in the index, the recency, the accounts and the RAM tier's books, by the calls that a put
makes. The segments are left out: they are the data.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from kvstored.store.accounting import Accounts
from kvstored.store.namespace import Namespace
from kvstored.store.residency import Residency
from kvstored.tiers.base import TierKind
from kvstored.tiers.ram.slabs import Slabs
from kvstored.tiers.ram.tier import RamTier

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiers.ram_helpers import Bookkeeper

LENGTH = 4096
RUN = 64


class Objects:
    """One namespace filled with them."""

    def __init__(self, most: int) -> None:
        cap_bytes = 2 * most * LENGTH
        ram = RamTier(cap_bytes)
        self.books = Bookkeeper(Slabs(cap_bytes))
        self.ns = Namespace("default", 0)
        self.ns.tenant_number("default")
        self.residency = Residency(Accounts(10), {TierKind.RAM: ram}, lambda tier, places: None)

    def add_run(self, ttl_ms: int) -> None:
        keys = [os.urandom(32) for _ in range(RUN)]
        rows = []
        for depth, (key, parent) in enumerate(zip(keys, [b"", *keys], strict=False)):
            place = self.books.reserve("default", LENGTH)
            assert isinstance(place, int)
            chunk = self.ns.index.add_chunk(
                key,
                parent,
                family=0,
                tenant=0,
                depth=depth,
                end_token=64 * (depth + 1),
                expires_ms=ttl_ms,
            )
            self.books.publish(place, LENGTH)
            row = self.ns.index.add_object(chunk, 0, LENGTH, os.urandom(16))
            self.residency.place_object(self.ns, row, TierKind.RAM, place)
            rows.append(chunk)
        self.residency.touch(self.ns, rows)


def anonymous_bytes() -> int:
    gc.collect()
    fields = Path("/proc/self/status").read_text().split()
    return int(fields[fields.index("RssAnon:") + 1]) * 1024


def main() -> None:
    count, ttl_ms = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    Objects(4 * RUN).add_run(ttl_ms)  # loads what is loaded at first use
    before = anonymous_bytes()
    objects = Objects(count)
    while objects.ns.index.object_count < count:
        objects.add_run(ttl_ms)
    print((anonymous_bytes() - before) / objects.ns.index.object_count)


if __name__ == "__main__":
    main()
