"""A real store over real tiers, and the few steps a server would take with it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvstored.io.base import Files, RealFiles
from kvstored.store.api import Family, Grant, PutOffer, Received, Run
from kvstored.store.loader import piece_checksums
from kvstored.store.reading import GetStream
from kvstored.store.store import NamespaceSettings, Store, StoreSettings
from kvstored.supervise import Supervisor, TaskDeath
from kvstored.tiers.nvme.volume_tier import VolumeTier
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.identity import GroupRule, KVFamily, KVPart
from kvstored_client.proto import kvstore_pb2 as pb

MIB = 1 << 20
CHUNK = 64
SALT = bytes(32)


def fail_on_death(death: TaskDeath) -> None:
    raise AssertionError(str(death))


@contextlib.asynccontextmanager
async def open_store(
    directory: Path | None = None,
    *,
    ram_bytes: int = 16 * MIB,
    nvme_bytes: int = 64 * MIB,
    settings: StoreSettings | None = None,
    ram_caps: dict[str, int] | None = None,
    files: Files | None = None,
    floors: bool = False,
) -> AsyncIterator[Store]:
    """A store that is open; NVMe only where a directory is given."""
    settings = settings or StoreSettings()
    ram = RamTier(
        ram_bytes,
        (lambda n: ram_caps.get(n, ram_bytes)) if ram_caps else None,
        namespaces=[ns.name for ns in settings.namespaces] if floors else (),
    )
    nvme = (
        VolumeTier(directory, nvme_bytes, files=files or RealFiles())
        if directory is not None
        else None
    )
    supervisor = Supervisor(fail_on_death)
    store = Store(ram, nvme, settings, supervisor)
    await store.open()
    try:
        yield store
    finally:
        report = await store.close(20.0)
        await supervisor.stop()
        assert not any(supervisor.restarts.values())
        assert report.lost_objects == 0


def two_namespaces() -> StoreSettings:
    return StoreSettings(namespaces=(NamespaceSettings("default"), NamespaceSettings("other")))


@dataclass
class Client:
    """What an engine would do, in terms of the store."""

    store: Store
    family: Family
    kv: KVFamily
    namespace: str = "default"
    tenant: str = "default"

    def run(
        self,
        tokens: list[int],
        start: int = 0,
        stop: int | None = None,
        parts: list[str] | None = None,
    ) -> Run:
        prefix = self.kv.prefix(tokens)
        packed = prefix.keys(SALT)
        keys = [packed[i : i + 32] for i in range(0, len(packed), 32)]
        chosen = parts if parts is not None else [part.name for part in self.kv.parts]
        return Run(
            self.namespace,
            self.store.accounts.tenant_label(self.namespace, self.tenant),
            self.family,
            b"".join(keys[start:stop]),
            start,
            keys[start - 1] if start else b"",
            min(len(tokens), (stop or len(keys)) * self.kv.chunk_tokens),
            tuple(self.family.part_index[name] for name in chosen),
        )

    async def put(
        self,
        run: Run,
        payloads: list[bytes],
        *,
        durable: bool = False,
        wait: bool = True,
        ttl_ms: int = 0,
        timeout_s: float = 20.0,
        checksums: bytes = b"",
    ) -> bytes:
        """Put one payload per object of the run; gives the PutStates."""
        until = time.monotonic() + timeout_s
        lengths = [len(p) for p in payloads]
        offer = PutOffer(run, lengths, checksums, durable, wait, ttl_ms, until)
        ticket = await self.store.begin_put(offer)
        received = []
        for wanted in ticket.wanted:
            wanted.view[:] = payloads[wanted.index]
            digest = xxhash.xxh3_128_digest(wanted.view)
            received.append(Received(wanted.index, digest, piece_checksums(wanted.view)))
        return await self.store.commit_put(ticket, received)

    async def get(self, run: Run, timeout_s: float = 20.0) -> tuple[dict[int, bytes], bytes]:
        """Get a run as a transport would: bytes by object index, and the ChunkStates."""
        stream = self.store.open_get(run, time.monotonic() + timeout_s)
        got: dict[int, bytes] = {}
        try:
            while (grants := await stream.next()) is not None:
                for grant in grants:
                    got[grant.index] = bytes(grant.view)
                    assert xxhash.xxh3_128_digest(got[grant.index]) == grant.checksum
                stream.delivered(grants)
            return got, stream.states
        finally:
            await stream.close()

    def states(self, run: Run, mode: int = pb.EACH) -> list[int]:
        return list(self.store.match(run, mode, pb.DEPTH_NODE).states)


async def client(
    store: Store,
    *,
    parts: list[KVPart] | None = None,
    groups: dict[str, GroupRule] | None = None,
    namespace: str = "default",
    tenant: str = "default",
    chunk_tokens: int = CHUNK,
    size: int = 64 * 1024 + 4096,
) -> Client:
    """Declare a family (by default of one part) and give a client for it."""
    kv = KVFamily(
        model="test-model",
        weights="w",
        kv_dtype="float32",
        chunk_tokens=chunk_tokens,
        parts=tuple(parts or [KVPart("kv", nbytes=size)]),
        **({"groups": groups} if groups else {}),
    )
    family = await store.declare(namespace, kv.spec())
    return Client(store, family, kv, namespace, tenant)


def payload(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def tokens(chunks: int, seed: int = 0, chunk_tokens: int = CHUNK) -> list[int]:
    return random.Random(seed).choices(range(50000), k=chunks * chunk_tokens)


async def hold(store: Store, run: Run) -> tuple[GetStream, list[Grant]]:
    """Open a get and take its grants without delivering them: leases that stay."""
    stream = store.open_get(run, time.monotonic() + 60)
    grants: list[Grant] = []
    while (more := await stream.next()) is not None:
        grants += more
    return stream, grants


async def settle(store: Store) -> None:
    """Wait until everything accepted so far is durable or refused."""
    if store.writer is not None:
        waiting = store.writer.in_flight()
        if waiting:
            await asyncio.wait(waiting)
