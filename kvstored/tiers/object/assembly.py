"""A bucket pool from its settings: which part is given what."""

from __future__ import annotations

from pathlib import Path

from kvstored.io.base import Files
from kvstored.supervise import Supervisor
from kvstored.tiers.nvme.breaker import Patience
from kvstored.tiers.object.backend import Bucket
from kvstored.tiers.object.creating import Creator
from kvstored.tiers.object.existence import Existence
from kvstored.tiers.object.guarded import PATIENCE, GuardedBucket
from kvstored.tiers.object.janitor import Janitor, JanitorLimits
from kvstored.tiers.object.journal import Journal, Owed
from kvstored.tiers.object.lease import Lease
from kvstored.tiers.object.leftovers import leftovers_of
from kvstored.tiers.object.obstore_bucket import ObstoreBucket
from kvstored.tiers.object.pool import BucketPool
from kvstored.tiers.object.settings import ObjectSettings
from kvstored.tiers.object.sweep import Sweeper
from kvstored.tiers.object.writeback import WriteBack, WriteBackLimits


def make_pool(
    settings: ObjectSettings,
    supervisor: Supervisor,
    files: Files,
    directory: Path,
    node: str,
    *,
    bucket: Bucket | None = None,
    patience: Patience = PATIENCE,
    limits: JanitorLimits | None = None,
) -> BucketPool:
    """The pool of a node, not opened yet. `directory`: of the data directory, for what is owed;
    made when it is needed. `node`: its name, in headers and leases, for people.

    `bucket`, `patience` and `limits` are for tests. Raises nothing; `open` does for a bad URL.
    """
    guarded = GuardedBucket(bucket or ObstoreBucket(settings), patience)
    existence = Existence(
        guarded, settings.parallel, settings.head_timeout_s, settings.negative_ttl_s
    )
    write_back = WriteBack(
        guarded,
        Creator(guarded, settings.range_bytes, settings.range_timeout_s, node),
        Owed(Journal(files, directory)),
        supervisor,
        WriteBackLimits(max_backlog_bytes=settings.max_backlog_bytes, parallel=settings.parallel),
        learned=existence.learn,
    )
    limits = limits or JanitorLimits(settings.cap_bytes, settings.ttl_s)
    janitor = Janitor(
        guarded,
        Lease(guarded, "janitor", node, limits.expires_s),
        Sweeper(guarded, settings.parallel),
        supervisor,
        limits,
        leftovers=leftovers_of(settings.url, files),
        enabled=settings.janitor,
    )
    return BucketPool(
        settings,
        guarded,
        supervisor,
        existence=existence,
        write_back=write_back,
        janitor=janitor,
    )
