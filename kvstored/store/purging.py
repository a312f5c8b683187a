"""Everything of a namespace, or of one of its tenants, dropped: here and in the bucket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from kvstored.store.api import Run
from kvstored.store.namespace import Namespace
from kvstored.store.walk import column

SLICE_KEYS = 4096

DeleteHere = Callable[[Namespace, Run, bool], Awaitable[tuple[int, Sequence[bytes]]]]
"""Store's: drops a run's chunks from the local tiers, durably; how many there were."""


async def purge_here(ns: Namespace, tenant: str, delete_here: DeleteHere) -> int:
    """Drop what the local tiers hold of a namespace (of a tenant, unless ""), and what lies below
    that; how many chunks.
    """
    count = 0
    for number, family in enumerate(list(ns.families.by_number)):
        keys = _keys(ns, number, tenant)
        for at in range(0, len(keys), SLICE_KEYS):
            packed = b"".join(keys[at : at + SLICE_KEYS])
            run = Run(ns.name, tenant, family, packed, 0, b"", 0, (0,))
            count += (await delete_here(ns, run, False))[0]
    return count


def _keys(ns: Namespace, family: int, tenant: str) -> Sequence[bytes]:
    index = ns.index
    rows = index.chunk_rows
    mine = column(index.family, np.uint32)[:rows] == family
    if tenant:
        if tenant not in ns.tenants:
            return []
        mine &= column(index.tenant, np.uint32)[:rows] == ns.tenants.index(tenant)
    return index.keys(np.flatnonzero(mine).astype(np.int32))
