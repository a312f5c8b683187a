"""Puts of one session on a real store, and the client's side of ring, areas and data channel."""

from __future__ import annotations

import array
import asyncio
import contextlib
import mmap
import os
import random
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import serving
import xxhash

from kvstored.errors import KvstoredError
from kvstored.server.auth import Auth, Caller, NamespaceAuth, Transport
from kvstored.server.dispatcher import Dispatcher
from kvstored.server.limits import Limits, LocalLimits
from kvstored.server.local.mover import Movers
from kvstored.server.local.puts import Puts
from kvstored.server.local.staging import Staging
from kvstored.store.loader import piece_checksums
from kvstored.store.store import NamespaceSettings, Store, StoreSettings
from kvstored.supervise import Supervisor
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.local import ABANDONED, POSITION, Kind

MIB = 1 << 20
RING_BYTES = MIB
LIMITS = Limits(local=LocalLimits(ring_bytes=RING_BYTES))


def staging_maps() -> int:
    """How many mappings of staging memory this process has."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:kvstored-staging" in line for line in maps)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@dataclass
class Mapped:
    """Shared memory as a client has it: its own descriptor and mapping."""

    fd: int
    memory: mmap.mmap

    @staticmethod
    def of(fd: int, size_bytes: int) -> Mapped:
        return Mapped(fd, mmap.mmap(fd, size_bytes))

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


class FakeSession:
    """Remembers what the session would send; duplicates descriptors as SCM_RIGHTS does."""

    namespace = "default"

    def __init__(self, cap_bytes: int = 64 * MIB) -> None:
        self.ring: Mapped | None = None
        self.channel: socket.socket | None = None
        self.areas: dict[int, Mapped] = {}
        self.retiring: list[int] = []
        self.failed: list[KvstoredError] = []
        self.failing = asyncio.Event()
        self.charged_bytes = 0
        self.cap_bytes = cap_bytes
        self.on_retire = lambda ids: None

    def notice(self, kind: Kind, body: bytes, fds: Sequence[int] = ()) -> None:
        own = _received(fds)
        if kind is Kind.RING:
            self.ring = Mapped.of(own[0], pb.LocalRing.FromString(body).size_bytes)
            self.channel = socket.socket(fileno=own[1])
            self.channel.setblocking(False)
        else:
            assert kind is Kind.AREA
            area = pb.LocalArea.FromString(body)
            assert area.area_id not in self.areas
            self.areas[area.area_id] = Mapped.of(own[0], area.size_bytes)

    def retire_areas(self, area_ids: list[int]) -> None:
        self.retiring += area_ids
        self.on_retire(area_ids)

    def fail(self, error: KvstoredError) -> None:
        self.failed.append(error)
        self.failing.set()

    def charge(self, nbytes: int) -> bool:
        if self.charged_bytes + nbytes > self.cap_bytes:
            return False
        self.charged_bytes += nbytes
        return True

    def uncharge(self, nbytes: int) -> None:
        self.charged_bytes -= nbytes
        assert self.charged_bytes >= 0

    def gone(self) -> None:
        """The client's process has ended."""
        for mapped in [*self.areas.values(), *([self.ring] if self.ring else [])]:
            mapped.close()
        self.areas.clear()
        self.ring = None
        if self.channel is not None:
            self.channel.close()


def _received(fds: Sequence[int]) -> list[int]:
    """What a process gets that these are sent to."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        _, got, _, _ = socket.recv_fds(theirs, 1, len(fds))
    return got


class RunningPut:
    """One Put under way, and a client that writes its payload."""

    def __init__(self, rig: Rig, header: pb.PutHeader, request_id: int) -> None:
        self.rig = rig
        self.request_id = request_id
        self.replies: list[tuple[bytes, bool]] = []
        self.planned = asyncio.Event()
        self.task = asyncio.create_task(
            rig.puts.put(header, request_id, rig.caller(), self._replied)
        )
        self.task.add_done_callback(lambda _: self.planned.set())
        self.written = 0
        self.taken = 0

    def _replied(self, body: bytes, last: bool) -> None:
        self.replies.append((body, last))
        self.planned.set()

    async def plan(self) -> pb.PutPlan:
        await self.planned.wait()
        if not self.replies:
            await self.task
        body, last = self.replies[0]
        assert not last
        return pb.PutPlan.FromString(body)

    def tell(self, position: int) -> None:
        assert self.rig.session.channel is not None
        self.rig.session.channel.send(POSITION.pack(self.request_id, position))

    async def hear(self) -> int:
        """The daemon's next position for this put."""
        loop = asyncio.get_running_loop()
        assert self.rig.session.channel is not None
        while True:
            message = await loop.sock_recv(self.rig.session.channel, 64)
            request_id, position = POSITION.unpack(message)
            if request_id == self.request_id:
                return int(position)

    async def send(self, payload: bytes, step: int) -> None:
        """Write the payload in steps, never ahead of the credit. Stops when abandoned."""
        session = self.rig.session
        assert session.ring is not None
        size = len(session.ring.memory)
        while self.written < len(payload):
            stop = min(self.written + step, len(payload), self.taken + size)
            if stop == self.written:
                self.taken = await self.hear()
                if self.taken == ABANDONED:
                    return
                continue
            write_ring(session.ring.memory, self.written, payload[self.written : stop])
            self.written = stop
            self.tell(stop)

    async def states(self) -> bytes:
        await self.task
        body, last = self.replies[-1]
        assert last
        assert len(self.replies) == 2
        return pb.PutReply.FromString(body).states


def write_ring(ring: mmap.mmap, at: int, data: bytes) -> None:
    """Write payload bytes where they belong in the ring."""
    while data:
        offset = at % len(ring)
        room = len(ring) - offset
        ring[offset : offset + len(data[:room])] = data[:room]
        at += len(data[:room])
        data = data[room:]


@dataclass
class Rig:
    """One session's puts on a store of their own."""

    store: Store
    ram: RamTier
    dispatcher: Dispatcher
    movers: Movers
    staging: Staging
    session: FakeSession
    puts: Puts
    ids: list[int] = field(default_factory=lambda: [0])

    def caller(self) -> Caller:
        return Caller(Transport.LOCAL)

    def next_id(self) -> int:
        self.ids[0] += 1
        return self.ids[0]

    def start_put(self, header: pb.PutHeader) -> RunningPut:
        return RunningPut(self, header, self.next_id())

    async def put(self, header: pb.PutHeader, payload: bytes, step: int = 200_001) -> bytes:
        put = self.start_put(header)
        plan = await put.plan()
        assert plan.payload_bytes == len(payload)
        await put.send(payload, step)
        return await put.states()

    async def reserve(
        self, lengths: Sequence[int], lease_id: int, **fields: object
    ) -> pb.ReserveReply:
        request = pb.ReserveRequest(
            run=serving.run(len(lengths), parts=["extra"], **fields),
            lease_id=lease_id,
            lengths_bytes=lengths,
        )
        return await self.puts.reserve(request, self.caller())

    async def commit(self, lease_id: int, indices: Sequence[int] = (), **fields: int) -> bytes:
        request = pb.CommitRequest(lease_id=lease_id, indices=indices, **fields)
        return (await self.puts.commit(request, self.caller())).states

    async def stored(self, run: pb.ChunkRun) -> dict[int, bytes]:
        """What a get of it gives, every checksum looked at."""
        found = self.dispatcher.run_of(run, pb.Context())
        stream = self.store.open_get(found, float("inf"))
        got: dict[int, bytes] = {}
        try:
            while (grants := await stream.next()) is not None:
                for grant in grants:
                    got[grant.index] = bytes(grant.view)
                    assert xxhash.xxh3_128_digest(grant.view) == grant.checksum
                    if grant.piece_checksums:
                        assert grant.piece_checksums == piece_checksums(grant.view)
                stream.delivered(grants)
        finally:
            await stream.close()
        return got

    async def session_over(self) -> None:
        """End the session and wait for its memory."""
        await self.puts.close()
        self.session.gone()
        await self.staging.settled()

    def new_session(self, cap_bytes: int = 64 * MIB) -> Rig:
        """Another session on the same store."""
        session = FakeSession(cap_bytes)
        puts = Puts(self.dispatcher, self.movers, self.staging, session)
        return replace(self, session=session, puts=puts)


@contextlib.asynccontextmanager
async def rigged(limits: Limits = LIMITS, *, cap_bytes: int = 96 * MIB) -> AsyncIterator[Rig]:
    """A store, its dispatcher and one session's puts. Everything must be back at the end."""
    ram = RamTier(cap_bytes, hugepages=False)
    supervisor = Supervisor(lambda death: None)
    settings = StoreSettings(namespaces=(NamespaceSettings("default"), NamespaceSettings("other")))
    store = Store(ram, None, settings, supervisor)
    await store.open()
    await store.declare("default", serving.SPEC)
    auth = Auth([NamespaceAuth(n, anonymous_unix=True) for n in ("default", "other")])
    salts = {"default": b"d" * 32, "other": b"o" * 32}
    dispatcher = Dispatcher(store, auth, salts, limits=limits)
    maps, fds = staging_maps(), open_fds()
    movers = Movers(asyncio.get_running_loop(), 1)
    movers.start()
    staging = Staging(limits.local)
    session = FakeSession()
    rig = Rig(
        store, ram, dispatcher, movers, staging, session, Puts(dispatcher, movers, staging, session)
    )
    try:
        yield rig
    finally:
        await rig.session_over()
        movers.stop()
        await staging.close()
        await supervisor.stop()
        await store.close(5.0)
    assert staging.footprint_bytes == 0
    assert staging_maps() == maps
    assert session.charged_bytes == 0
    assert dispatcher.open_payload_calls == 0
    assert open_fds() <= fds


def lengths_of(rng: random.Random, count: int, most_bytes: int) -> list[int]:
    return [rng.randint(4096, most_bytes) for _ in range(count)]


def header(lengths: Sequence[int], **fields: object) -> pb.PutHeader:
    """A PutHeader of part "extra", whose objects have any length."""
    return serving.header(len(lengths), lengths=lengths, parts=["extra"], **fields)


def cut(payload: bytes, lengths: Sequence[int]) -> dict[int, bytes]:
    """The objects of a payload in which each is wanted."""
    objects, at = {}, 0
    for index, length in enumerate(lengths):
        objects[index] = payload[at : at + length]
        at += length
    return objects
