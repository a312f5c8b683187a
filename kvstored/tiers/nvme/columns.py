"""From index records to the columns that a tier hands over when it is opened. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstored.tiers.base import Recovered
from kvstored.tiers.nvme.index import KINDS
from kvstored.tiers.nvme.walker import Loaded

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ID_COLUMNS = dict(zip(KINDS, ("namespace", "family", "part", "tenant"), strict=True))


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """One behind the other; without a copy where only one is not empty."""
    filled = [part for part in parts if len(part)]
    return filled[0] if len(filled) == 1 else np.concatenate(parts)


def columns(index: Loaded, small: Loaded, dropped: dict[str, int]) -> Recovered:
    """Both environments' records as one table, their numbers of names made common."""
    tables: dict[str, list[bytes]] = {}
    ids: dict[str, NDArray[np.uint32]] = {}
    for kind, column in _ID_COLUMNS.items():
        common: dict[bytes, int] = {}
        parts = []
        for loaded in (index, small):
            numbers = [common.setdefault(n, len(common)) for n in loaded.names.in_order(kind)]
            column_of = loaded.records[column]
            if numbers != list(range(len(numbers))):
                column_of = np.array(numbers, np.uint32)[column_of]
            parts.append(column_of)
        ids[kind] = _joined(parts)
        tables[kind] = list(common)

    def joined(column: str) -> NDArray[Any]:
        return _joined([loaded.records[column] for loaded in (index, small)])

    return Recovered(
        namespaces=[name.decode() for name in tables["n"]],
        families=tables["f"],
        parts=[name.decode() for name in tables["p"]],
        tenants=[name.decode() for name in tables["t"]],
        namespace_id=ids["n"],
        family_id=ids["f"],
        part_id=ids["p"],
        tenant_id=ids["t"],
        keys=joined("key"),
        parents=joined("parent"),
        depth=joined("depth"),
        end_token=joined("end_token"),
        expires_ms=joined("expires_ms"),
        length_bytes=joined("length_bytes").astype(np.uint64),
        checksums=joined("checksum"),
        place=joined("place"),
        sequence=joined("sequence"),
        family_specs=small.families | index.families,
        dropped=dropped,
    )
