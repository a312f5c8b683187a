"""A real server on a real store, and a bare wire client that can misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import xxhash
from google.protobuf.message import Message

from kvstored.server.auth import Auth, NamespaceAuth, token_hash
from kvstored.server.dispatcher import Dispatcher
from kvstored.server.grpc_server import GrpcServer
from kvstored.server.limits import Limits
from kvstored.store.store import NamespaceSettings, Store, StoreSettings
from kvstored.supervise import Supervisor
from kvstored.tiers.ram.tier import RamTier
from kvstored_client.identity import KVFamily, KVPart
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods
from kvstored_client.proto.methods import Method

MIB = 1 << 20
TOKEN = "token-of-locked"
ADMIN_TOKEN = "token-of-an-operator"
SALTS = {"default": b"d" * 32, "locked": b"l" * 32}


class Outcomes:
    """Remembers how calls ended."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, str, str]] = []
        self._more = asyncio.Event()

    def call_ended(self, verb: str, outcome: str, seconds: float, tier: str) -> None:
        assert seconds >= 0
        self.ended.append((verb, outcome, tier))
        self._more.set()

    async def wait_for(self, verb: str) -> None:
        """Wait until a call of this verb has ended."""
        async with asyncio.timeout(10):
            while all(ended[0] != verb for ended in self.ended):
                self._more.clear()
                await self._more.wait()


@dataclass
class Served:
    """What a test needs of a running server."""

    server: GrpcServer
    dispatcher: Dispatcher
    store: Store
    ram: RamTier
    outcomes: Outcomes
    unix_path: Path
    port: int

    @property
    def unix(self) -> str:
        return f"unix:{self.unix_path}"

    @property
    def admin(self) -> str:
        return f"unix:{self.unix_path.with_name('k-admin.sock')}"

    @property
    def tcp(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def idle(self) -> None:
        """Wait until every payload call gave back what it held."""
        async with asyncio.timeout(10):
            await self.dispatcher.idle()

    def nothing_held(self) -> bool:
        return self.ram.leased_bytes == 0 and self.dispatcher.open_payload_calls == 0


@contextlib.asynccontextmanager
async def serving(
    limits: Limits | None = None, *, cap_bytes: int = 96 * MIB, insecure: bool = True
) -> AsyncIterator[Served]:
    """Namespaces: "default" needs no token on the Unix socket, "locked" needs TOKEN."""
    ram = RamTier(cap_bytes, hugepages=False)
    supervisor = Supervisor(lambda death: None)
    settings = StoreSettings(namespaces=tuple(NamespaceSettings(n) for n in SALTS))
    store = Store(ram, None, settings, supervisor)
    await store.open()
    auth = Auth(
        [
            NamespaceAuth("default", anonymous_unix=True, anonymous_tcp=insecure),
            NamespaceAuth("locked", (token_hash("an older one"), token_hash(TOKEN))),
        ],
        admin_token_hashes=[token_hash(ADMIN_TOKEN)],
    )
    outcomes = Outcomes()
    dispatcher = Dispatcher(store, auth, SALTS, limits=limits, observer=outcomes)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "k.sock")
        server = GrpcServer(
            dispatcher, asyncio.get_running_loop(), unix_path=path, tcp_address="127.0.0.1:0"
        )
        port = await server.start()
        assert port is not None
        try:
            yield Served(server, dispatcher, store, ram, outcomes, path, port)
        finally:
            await server.stop()
            assert os.listdir(directory) == []
            await supervisor.stop()
            await store.close(5.0)


PART_BYTES = 64 << 10
FAMILY = KVFamily(
    model="m",
    weights="w",
    kv_dtype="float32",
    chunk_tokens=64,
    parts=[KVPart("kv", nbytes=PART_BYTES), KVPart("extra", max_nbytes=4 * MIB)],
)
SPEC = FAMILY.spec()


def keys(count: int, salt: bytes = b"") -> bytes:
    """Distinct packed keys."""
    return b"".join(
        xxhash.xxh3_128_digest(salt + bytes([i % 256, i // 256])) * 2 for i in range(count)
    )


def run(count: int = 1, *, salt: bytes = b"", **fields: object) -> pb.ChunkRun:
    """A valid run of part "kv", changed by `fields`."""
    message = pb.ChunkRun(
        namespace="default", family=SPEC.fingerprint, keys=keys(count, salt), parts=["kv"]
    )
    for name, value in fields.items():
        if isinstance(value, list):
            del getattr(message, name)[:]
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


def header(
    count: int = 1, *, lengths: Sequence[int] | None = None, **fields: object
) -> pb.PutHeader:
    """A valid PutHeader for `run(count, **fields)`."""
    return pb.PutHeader(
        run=run(count, **fields),
        lengths_bytes=[PART_BYTES] * count if lengths is None else lengths,
    )


class Refused(Exception):
    """What the server answered instead."""

    def __init__(self, status: grpc.StatusCode, details: str, error: pb.Error) -> None:
        super().__init__(f"{status.name}: {details}")
        self.status = status
        self.details = details
        self.error = error


def refused(failure: grpc.RpcError) -> Refused:
    """An RpcError with its typed trailer decoded (empty where there is none)."""
    error = pb.Error()
    for key, value in failure.trailing_metadata() or ():
        if key == methods.ERROR_METADATA:
            error = pb.Error.FromString(value)
    return Refused(failure.code(), failure.details(), error)


class Wire:
    """A bare synchronous client; its methods are called in worker threads."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.channel = grpc.insecure_channel(
            address,
            options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
        )
        self.metadata = [("authorization", f"Bearer {token}")] if token is not None else []

    def close(self) -> None:
        self.channel.close()

    def unary(self, method: Method, request: Message | bytes, timeout: float = 10) -> Message:
        raw = request if isinstance(request, bytes) else request.SerializeToString()
        assert isinstance(method.reply, type)
        try:
            reply = self.channel.unary_unary(method.path)(
                raw, timeout=timeout, metadata=self.metadata
            )
        except grpc.RpcError as error:
            raise refused(error) from None
        return method.reply.FromString(reply)

    def hello(self, **fields: object) -> pb.HelloReply:
        request = pb.HelloRequest(
            protocol_version=1, client="test", namespace="default", families=[SPEC]
        )
        for name, value in fields.items():
            setattr(request, name, value)
        reply = self.unary(methods.HELLO, request)
        assert isinstance(reply, pb.HelloReply)
        return reply

    def start_get(
        self, request: pb.GetRequest | bytes, timeout: float | None = 10
    ) -> Iterator[bytes]:
        raw = request if isinstance(request, bytes) else request.SerializeToString()
        return self.channel.unary_stream(methods.GET.path)(
            raw, timeout=timeout, metadata=self.metadata
        )

    def get(self, request: pb.GetRequest) -> tuple[dict[int, bytes], bytes, list[int]]:
        """(object index -> bytes, states, frame sizes), everything checked on the way."""
        stream = self.start_get(request)
        objects: dict[int, bytes] = {}
        sizes: list[int] = []
        try:
            while True:
                block = pb.GetBlock.FromString(next(stream))
                payload = b""
                while len(payload) < block.payload_bytes:
                    frame = next(stream)
                    sizes.append(len(frame))
                    payload += frame
                assert len(payload) == block.payload_bytes
                at = 0
                for obj in block.objects:
                    data = payload[at : at + obj.length_bytes]
                    at += obj.length_bytes
                    assert xxhash.xxh3_128_digest(data) == obj.checksum
                    objects[obj.index] = data
                assert at == len(payload)
                if block.last:
                    assert next(stream, None) is None
                    return objects, block.states, sizes
        except grpc.RpcError as error:
            raise refused(error) from None

    def put(
        self,
        head: pb.PutHeader | bytes | None,
        payload: Iterable[bytes],
        timeout: float | None = 10,
    ) -> tuple[pb.PutPlan, bytes]:
        """(plan, final states). Sends `payload` whatever the plan says."""

        def messages() -> Iterator[bytes]:
            if head is not None:
                yield head if isinstance(head, bytes) else head.SerializeToString()
            yield from payload

        stream = self.channel.stream_stream(methods.PUT.path)(
            messages(), timeout=timeout, metadata=self.metadata
        )
        try:
            plan = pb.PutPlan.FromString(next(stream))
            reply = pb.PutReply.FromString(next(stream))
            assert next(stream, None) is None
        except grpc.RpcError as error:
            raise refused(error) from None
        return plan, reply.states
