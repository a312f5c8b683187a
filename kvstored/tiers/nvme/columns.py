"""From index records to the columns that a tier hands over when it is opened. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstored.tiers.base import Recovered
from kvstored.tiers.nvme.index import KINDS
from kvstored.tiers.nvme.walker import Loaded

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ID_COLUMNS = dict(zip(KINDS, ("namespace", "family", "part", "tenant"), strict=True))


def columns(index: Loaded, small: Loaded, dropped: dict[str, int]) -> Recovered:
    """Both environments' records as one table, their numbers of names made common."""
    tables: dict[str, list[bytes]] = {}
    ids: dict[str, NDArray[np.uint32]] = {}
    for kind, column in _ID_COLUMNS.items():
        common: dict[bytes, int] = {}
        parts = []
        for loaded in (index, small):
            numbers = [common.setdefault(n, len(common)) for n in loaded.names.in_order(kind)]
            translate = np.array(numbers or [0], np.uint32)
            parts.append(translate[loaded.records[column]])
        ids[kind] = np.concatenate(parts)
        tables[kind] = list(common)

    def joined(column: str) -> NDArray[np.generic]:
        return np.concatenate([index.records[column], small.records[column]])

    return Recovered(
        namespaces=[name.decode() for name in tables["n"]],
        families=tables["f"],
        parts=[name.decode() for name in tables["p"]],
        tenants=[name.decode() for name in tables["t"]],
        namespace_id=ids["n"],
        family_id=ids["f"],
        part_id=ids["p"],
        tenant_id=ids["t"],
        keys=joined("key").astype(np.uint8),
        parents=joined("parent").astype(np.uint8),
        depth=joined("depth").astype(np.uint32),
        end_token=joined("end_token").astype(np.uint64),
        expires_ms=joined("expires_ms").astype(np.uint64),
        length_bytes=joined("length_bytes").astype(np.uint64),
        checksums=joined("checksum").astype(np.uint8),
        place=joined("place").astype(np.uint64),
        sequence=joined("sequence").astype(np.uint64),
        family_specs=small.families | index.families,
        dropped=dropped,
    )
