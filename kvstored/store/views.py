"""Read-only pictures of the store for List, Usage and Status."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from kvstored import __version__, errors
from kvstored.store.accounting import Accounts
from kvstored.store.index import NONE
from kvstored.store.namespace import Namespace
from kvstored.store.pooling import Pooling
from kvstored.store.residency import TIER_LABEL, now_ms
from kvstored.store.writer import Writer
from kvstored.tiers.base import Tier, TierKind
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.proto import admin_pb2
from kvstored_client.proto import kvstore_pb2 as pb

MAX_PAGE = 10_000
DEFAULT_PAGE = 1_000
ROWS_PER_PAGE = 65_536
"""Rows looked at per page, so that a listing never holds the loop up."""

_KIND = {"ram": pb.TIER_RAM, "nvme": pb.TIER_NVME, "object": pb.TIER_OBJECT}


class Figures(Protocol):
    """What these pictures show of a store."""

    boot_epoch: int
    started: float  # time.monotonic()
    accounts: Accounts
    namespaces: dict[str, Namespace]
    namespace_caps: Mapping[tuple[str, TierKind], int]
    ram: RamTier
    tiers: dict[TierKind, Tier]
    writer: Writer | None
    pooling: Pooling | None


def list_page(ns: Namespace, family: bytes, cursor: bytes, limit: int) -> pb.ListReply:
    """One page, in order of row number, which a chunk keeps as long as it is held.

    Raises BadRequest for a cursor that is not one of ours.
    """
    if len(cursor) not in (0, 8):
        raise errors.BadRequest("cursor is not one that List gave", "begin with an empty cursor")
    index = ns.index
    row = int.from_bytes(cursor, "little")
    limit = min(limit or DEFAULT_PAGE, MAX_PAGE)
    stop = min(index.chunk_rows, row + ROWS_PER_PAGE)
    at_ms = now_ms()
    reply = pb.ListReply()
    while row < stop and len(reply.entries) < limit:
        if index.held(row) and index.first_object[row] != NONE and not ns.expired(row, at_ms):
            entry = _entry(ns, row)
            if not family or entry.family == family:
                reply.entries.append(entry)
        row += 1
    if row < index.chunk_rows:
        reply.cursor = row.to_bytes(8, "little")
    return reply


def _entry(ns: Namespace, row: int) -> pb.ListEntry:
    index = ns.index
    family = ns.families.by_number[index.family[row]]
    objects = list(index.object_rows(row))
    in_ram = all(index.place[TierKind.RAM][obj] != NONE for obj in objects)
    return pb.ListEntry(
        key=index.key(row),
        family=family.fingerprint,
        tenant=ns.tenants[index.tenant[row]],
        depth=index.depth[row],
        end_token=index.end_token[row],
        payload_bytes=sum(index.object_length[obj] for obj in objects),
        tier=pb.TIER_RAM if in_ram else pb.TIER_NVME,
        expires_ms=index.expires_ms[row],
        parts=[family.parts[index.object_part[obj]].name for obj in objects],
    )


def usage_reply(store: Figures, namespace: str) -> pb.UsageReply:
    """What a namespace and its tenants hold per tier."""
    store.accounts.settle()
    reply = pb.UsageReply()
    for kind, tier in store.tiers.items():
        label = TIER_LABEL[kind]
        mine = [
            held
            for (ns, _, t), held in store.accounts.held.items()
            if (ns, t) == (namespace, label)
        ]
        reply.tiers.add(
            tier=_KIND[label],
            charged_bytes=sum(held.charged_bytes for held in mine),
            cap_bytes=store.namespace_caps.get((namespace, kind), tier.usage().cap_bytes),
            objects=sum(held.objects for held in mine),
        )
    for (ns, tenant, label), held in sorted(store.accounts.held.items()):
        if ns == namespace:
            reply.tenants.add(
                tenant=tenant,
                tier=_KIND[label],
                charged_bytes=held.charged_bytes,
                byte_seconds=held.byte_seconds,
            )
    return reply


def status_reply(store: Figures) -> admin_pb2.StatusReply:
    """The store's part of Admin.Status; `phase` is the daemon's to fill in."""
    reply = admin_pb2.StatusReply(
        version=__version__,
        boot_epoch=store.boot_epoch,
        uptime_ms=int(1000 * (time.monotonic() - store.started)),
        chunks=sum(ns.index.chunk_count for ns in store.namespaces.values()),
        objects=sum(ns.index.object_count for ns in store.namespaces.values()),
        dirty_bytes=store.writer.dirty_bytes if store.writer else 0,
        leased_bytes=store.ram.leased_bytes,
        families=sum(len(ns.families) for ns in store.namespaces.values()),
    )
    for kind, tier in store.tiers.items():
        usage = tier.usage()
        reply.tiers.add(
            name=TIER_LABEL[kind],
            cap_bytes=usage.cap_bytes,
            footprint_bytes=usage.footprint_bytes,
            charged_bytes=usage.charged_bytes,
            objects=usage.objects,
            health=tier.health,
            mode=tier.mode,
        )
        for name in store.namespaces:
            reply.namespaces.add(
                name=name,
                tier=TIER_LABEL[kind],
                charged_bytes=store.accounts.namespace_bytes(name, TIER_LABEL[kind]),
                cap_bytes=store.namespace_caps.get((name, kind), usage.cap_bytes),
            )
    if store.pooling is not None:
        _add_bucket(reply, store.pooling)
    return reply


def _add_bucket(reply: admin_pb2.StatusReply, pooling: Pooling) -> None:
    """The shared bucket, and its line among the tiers: known only as far as the janitor listed
    it, and charged to nobody here.
    """
    now = pooling.pool.status()
    reply.tiers.add(
        name=TIER_LABEL[TierKind.OBJECT],
        cap_bytes=pooling.cap_bytes,
        footprint_bytes=now.known_bytes,
        charged_bytes=now.known_bytes,
        objects=now.known_objects,
        health=now.health,
        mode=now.url.partition(":")[0],
    )
    reply.bucket.CopyFrom(
        admin_pb2.BucketStatus(
            url=now.url,
            health=f"{now.health}; {now.forgetful}" if now.forgetful else now.health,
            backlog_objects=now.backlog_objects,
            backlog_bytes=now.backlog_bytes,
            in_flight=now.in_flight,
            uploaded_bytes=now.uploaded_bytes,
            fetched_bytes=now.fetched_bytes,
            known_bytes=now.known_bytes,
            known_objects=now.known_objects,
            cap_bytes=pooling.cap_bytes,
            janitor=now.janitor,
            outcomes=[
                admin_pb2.BucketOutcome(verb=verb, outcome=outcome, count=count)
                for (verb, outcome), count in sorted(now.outcomes.items())
            ],
        )
    )
