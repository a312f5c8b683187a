"""Whether a record of the index and the header it points to say the same. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvstored.fsck import ondisk
from kvstored.fsck.ondisk import Header

Names = Mapping[str, Mapping[int, bytes]]
"""Name by kind (n, f, p, t) and number."""

_NUMBERED = (("n", "namespace"), ("f", "family"), ("p", "part"), ("t", "tenant"))


def missing_names(row: np.void, names: Names) -> list[str]:
    """Columns of a record whose number has no name."""
    return [column for kind, column in _NUMBERED if int(row[column]) not in names[kind]]


def namespace_of(row: np.void, names: Names) -> str | None:
    """The namespace that a record names."""
    name = names["n"].get(int(row["namespace"]))
    return None if name is None else name.decode(errors="replace")


def differences(row: np.void, header: Header, names: Names, dedication: int) -> list[str]:
    """In which fields they differ. Names that are missing are not compared."""
    told = {
        "namespace": header.namespace.encode(),
        "family": header.family,
        "part": header.part.encode(),
        "tenant": header.tenant.encode(),
    }
    known = {column: names[kind].get(int(row[column])) for kind, column in _NUMBERED}
    found = [c for c, name in known.items() if name is not None and name != told[c]]
    figures = ("sequence", "end_token", "expires_ms", "length_bytes", "depth")
    found += [c for c in figures if int(row[c]) != getattr(header, c)]
    found += [c for c in ("key", "checksum") if row[c].tobytes() != getattr(header, c)]
    parent = row["parent"].tobytes() if int(row["flags"]) & 1 else None
    if parent != header.parent:
        found.append("parent")
    if int(row["dedication"]) != dedication & 0xFFFFFFFF:
        found.append("dedication")
    return found


def one_record(raw: bytes) -> np.void:
    """A record of 152 bytes."""
    row = np.frombuffer(raw, ondisk.RECORD)[0]
    assert isinstance(row, np.void)
    return row
