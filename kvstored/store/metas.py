"""What is known of an object besides its bytes, put together from the index."""

from __future__ import annotations

from kvstored.store.namespace import Namespace
from kvstored.tiers.base import ObjectMeta


def object_meta(ns: Namespace, row: int, piece_checksums: bytes = b"") -> ObjectMeta:
    """Of the object in a row of a namespace's index.

    `piece_checksums`: XXH3-64 of each piece, 8 bytes each; the index does not keep them.
    """
    index = ns.index
    chunk = index.object_chunk[row]
    family = ns.families.by_number[index.family[chunk]]
    return ObjectMeta(
        namespace=ns.name,
        family=family.fingerprint,
        key=index.key(chunk),
        part=family.parts[index.object_part[row]].name,
        tenant=ns.tenants[index.tenant[chunk]],
        parent=index.parent_key(chunk),
        depth=index.depth[chunk],
        end_token=index.end_token[chunk],
        expires_ms=index.expires_ms[chunk],
        length_bytes=index.object_length[row],
        checksum=index.checksum(row),
        piece_checksums=piece_checksums,
    )
