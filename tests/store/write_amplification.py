"""What the device is made to write for a payload byte, on a real trace of chats.

    python tests/store/write_amplification.py TRACE [--object-bytes N] [--requests N] [--share X]

Replays the trace through a store whose NVMe tier holds that share of the trace's distinct blocks:
each request asks for its blocks, and puts those that are missing. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import lzma
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash

from kvstored.store.api import Family, PutOffer, PutTicket, Received, Run
from kvstored.store.store import Store, StoreSettings
from kvstored.supervise import Supervisor, TaskDeath
from kvstored.tiers.base import PIECE_BYTES
from kvstored.tiers.nvme import layout
from kvstored.tiers.nvme.volume_tier import VolumeTier
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.identity import KVFamily, KVPart
from kvstored_client.proto import kvstore_pb2 as pb

BLOCK_TOKENS = 512
MIB = 1 << 20
PATIENCE_S = 3600.0
"""For each put, and for the stop: it is bytes that are counted here, whatever time they take."""


@dataclass
class Outcome:
    """`capacity_blocks`: what the tier holds at most; `written` and `evicted` count blocks."""

    requests: int
    distinct_blocks: int
    capacity_blocks: int
    object_bytes: int
    written: int
    evicted: int
    accepted_bytes: int
    written_bytes: int
    ratio: float
    seconds: float


def read_trace(path: Path, requests: int | None = None) -> list[list[int]]:
    """The block identities of each request, in order."""
    with lzma.open(path, "rt") as lines:
        found = [json.loads(line)["hash_ids"] for line in lines]
    return found[:requests]


def _fail(death: TaskDeath) -> None:
    raise AssertionError(str(death))


def _tier(directory: Path, blocks: int, object_bytes: int) -> VolumeTier:
    """A volume with room for that many objects, and less than a region's more."""
    slot = layout.charge_bytes(object_bytes)
    region = -(-max(8 * slot, blocks * slot // 64) // 4096) * 4096
    small = layout.default_small_bytes(0)
    wanted = -(-blocks // (region // slot))
    cap = wanted * region
    while layout.make_plan(cap, region, small).regions < wanted:
        cap += region // 4
    return VolumeTier(
        directory, cap, region_bytes=region, small_bytes=small, walk_timeout_s=PATIENCE_S
    )


class _Payload:
    """Objects that differ in their first bytes only: the device cannot tell."""

    def __init__(self, object_bytes: int) -> None:
        self._bytes = np.random.default_rng(1).integers(0, 256, object_bytes, dtype=np.uint8)

    def fill(self, ticket: PutTicket) -> Iterator[Received]:
        for wanted in ticket.wanted:
            view = np.frombuffer(wanted.view, np.uint8)
            np.copyto(view, self._bytes)
            view[:8] = np.frombuffer(wanted.index.to_bytes(8, "little"), np.uint8)
            pieces = b"".join(
                xxhash.xxh3_64_intdigest(view[at : at + PIECE_BYTES]).to_bytes(8, "little")
                for at in range(0, len(view), PIECE_BYTES)
            )
            yield Received(wanted.index, xxhash.xxh3_128_digest(view), pieces)
            del view


def _run(family: Family, ids: Sequence[int]) -> Run:
    keys = [hashlib.blake2b(i.to_bytes(8, "little"), digest_size=32).digest() for i in ids]
    return Run("default", "default", family, b"".join(keys), 0, b"", len(ids) * BLOCK_TOKENS, (0,))


def _rest(run: Run, start: int) -> Run:
    return Run(
        run.namespace, run.tenant, run.family, b"".join(run.keys[start:]), start,
        run.keys[start - 1] if start else b"", run.end_token, run.parts,
    )  # fmt: skip


async def replay(
    directory: Path, requests: list[list[int]], object_bytes: int, share: float
) -> Outcome:
    """Replay against a tier that holds that share of the distinct blocks."""
    distinct = len({block for ids in requests for block in ids})
    longest = max(map(len, requests))
    capacity = max(int(distinct * share), 16)
    tier = _tier(directory, capacity, object_bytes)
    ram = RamTier(max(2 * longest * object_bytes, 64 * MIB))
    supervisor = Supervisor(_fail)
    store = Store(ram, tier, StoreSettings(), supervisor)
    await store.open()
    kv = KVFamily(
        model="trace", weights="w", kv_dtype="float16", chunk_tokens=BLOCK_TOKENS,
        parts=(KVPart("kv", nbytes=object_bytes),),
    )  # fmt: skip
    family = await store.declare("default", kv.spec())
    payload = _Payload(object_bytes)
    began = time.monotonic()
    for ids in requests:
        run = _run(family, ids[:capacity])
        hits = store.match(run, pb.PREFIX, pb.DEPTH_NODE).chunks
        store.touch(run, 0)
        if hits < len(run):
            rest = _rest(run, hits)
            lengths = [object_bytes] * len(rest)
            offer = PutOffer(rest, lengths, b"", False, True, 0, time.monotonic() + PATIENCE_S)
            ticket = await store.begin_put(offer)
            await store.commit_put(ticket, list(payload.fill(ticket)))
    lost = (await store.close(PATIENCE_S)).lost_objects
    await supervisor.stop()
    assert not lost, f"{lost} objects could not be written"
    nvme = [gone for (_, label, _), gone in store.accounts.evicted.items() if label == "nvme"]
    return Outcome(
        len(requests), distinct, capacity, object_bytes,
        written=tier.accepted_bytes // object_bytes,
        evicted=sum(gone.chunks for gone in nvme),
        accepted_bytes=tier.accepted_bytes,
        written_bytes=tier.written_bytes,
        ratio=round(tier.written_bytes / max(1, tier.accepted_bytes), 4),
        seconds=round(time.monotonic() - began, 1),
    )  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--object-bytes", type=int, default=MIB)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--most", type=float, default=1.05, help="exit with 1 above this ratio")
    options = parser.parse_args()
    requests = read_trace(options.trace, options.requests)
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        outcome = asyncio.run(
            replay(Path(directory), requests, options.object_bytes, options.share)
        )
    print(json.dumps(asdict(outcome)))
    sys.exit(outcome.ratio > options.most)


if __name__ == "__main__":
    main()
