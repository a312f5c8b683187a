"""A real gRPC server that answers as a test tells it to: honestly, or as no daemon should."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import xxhash
from google.protobuf.message import Message
from numpy.typing import NDArray

from kvstored_client.identity import KVFamily, KVPart
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods

GIVE_UP_S = 30.0
HOLD_S = 10.0
"""How long a script stays silent at most; deadlines in tests are far shorter."""

SALT = b"s" * 32
OBJECT_BYTES = 64 << 10
FAMILY = KVFamily("m", "w", "float32", parts=[KVPart("kv", OBJECT_BYTES)])

GetScript = Callable[[pb.GetRequest, grpc.ServicerContext], Iterator[bytes]]
PutScript = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]


def payload(number: int, nbytes: int = OBJECT_BYTES) -> bytes:
    """Contents of one object; never all alike, and never the canary."""
    return np.random.default_rng(number).integers(0, 160, nbytes, dtype=np.uint8).tobytes()


def block(objects: dict[int, bytes], *, last: bool = False, states: bytes = b"") -> bytes:
    """A GetBlock that tells the truth about its objects."""
    return pb.GetBlock(
        objects=[
            pb.GetObject(
                index=index,
                length_bytes=len(data),
                checksum=xxhash.xxh3_128_digest(data),
                tier=pb.TIER_RAM,
            )
            for index, data in objects.items()
        ],
        payload_bytes=sum(map(len, objects.values())),
        last=last,
        states=states,
    ).SerializeToString()


def honest_get(request: pb.GetRequest, _context: object = None) -> Iterator[bytes]:
    """Every chunk of the request, of contents `payload(absolute chunk index)`."""
    count = len(request.run.keys) // 32
    for i in range(count):
        data = payload(request.run.start + i)
        yield block({i: data})
        yield data[:40_000]
        yield data[40_000:]
    yield block({}, last=True, states=bytes([pb.IN_RAM]) * count)


def refuse(context: grpc.ServicerContext, code: int, **more: int) -> None:
    """End the call as the daemon does, with its error trailer."""
    error = pb.Error(code=code, message="told to refuse", hint="ask the test", **more)
    context.set_trailing_metadata(((methods.ERROR_METADATA, error.SerializeToString()),))
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, "told to refuse")


class WireServer:
    """Listens on a Unix socket. `on_get`, `on_put` and `unary` can be replaced at any time."""

    def __init__(self, folder: Path) -> None:
        self.target = f"unix://{folder}/w.sock"
        self.hello = pb.HelloReply(
            protocol_version=1,
            min_protocol_version=1,
            server="test",
            boot_epoch=1,
            namespace_salt=SALT,
            limits=pb.Limits(max_keys_per_call=1000, max_put_bytes=1 << 30),
        )
        self.hellos: list[pb.HelloRequest] = []
        self.gets: list[pb.GetRequest] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.on_get: GetScript = honest_get
        self.on_put: PutScript = lambda requests, context: iter(())
        self.unary: dict[str, Callable[[Message, grpc.ServicerContext], Message]] = {
            "Hello": self._hello
        }
        self.ended = threading.Semaphore(0)
        """Released when a payload handler has ended, whatever it did."""
        self.patience_ended = False
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers([self._handlers(methods.KVSTORE_SERVICE)])
        self._server.add_insecure_port(self.target)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.tcp_target = f"dns:///localhost:{port}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait(GIVE_UP_S)

    def hold(self, event: threading.Event) -> None:
        """In a script: wait until the client has returned, which must not be for our sake."""
        if not event.wait(HOLD_S):
            self.patience_ended = True
            event.set()

    def forever(self, context: grpc.ServicerContext) -> Iterator[None]:
        """In a script: as long as the client stays, which must not be until we end."""
        end = time.monotonic() + HOLD_S
        while context.is_active():
            if time.monotonic() > end:
                self.patience_ended = True
                return
            yield

    def wait_ended(self) -> None:
        assert self.ended.acquire(timeout=GIVE_UP_S)

    def _hello(self, request: Message, _context: object) -> Message:
        assert isinstance(request, pb.HelloRequest)
        self.hellos.append(request)
        return self.hello

    def _get(self, request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        self.gets.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            yield from self.on_get(request, context)
        finally:
            self.ended.release()

    def _put(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from self.on_put(requests, context)
        finally:
            self.ended.release()

    def _handlers(self, service: str) -> grpc.GenericRpcHandler:
        table = {}
        for method in methods.METHODS:
            if method.service == service and method.kind is methods.Kind.UNARY_UNARY:
                table[method.name] = self._unary(method)
        table["Get"] = grpc.unary_stream_rpc_method_handler(
            self._get, request_deserializer=pb.GetRequest.FromString
        )
        table["Put"] = grpc.stream_stream_rpc_method_handler(self._put)
        return grpc.method_handlers_generic_handler(service, table)

    def _unary(self, method: methods.Method) -> grpc.RpcMethodHandler:
        def handle(request: Message, context: grpc.ServicerContext) -> Message:
            script = self.unary.get(method.name)
            if script is None:
                context.abort(grpc.StatusCode.UNIMPLEMENTED, "no script")
            assert script is not None
            return script(request, context)

        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=method.request_deserializer,
            response_serializer=method.reply_serializer,
        )


@contextlib.contextmanager
def wire_server() -> Iterator[WireServer]:
    """A started server; nothing is left of it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="kvwire-"))
    server = WireServer(folder)
    try:
        yield server
        assert not server.patience_ended, "a call outlived its deadline by far"
    finally:
        server.stop()
        shutil.rmtree(folder)


CANARY = 0xA5


class Canary:
    """Memory for `chunks` objects between two guards, all of it of one value at first."""

    def __init__(self, chunks: int, nbytes: int = OBJECT_BYTES) -> None:
        self.all: NDArray[np.uint8] = np.full((chunks + 2) * nbytes, CANARY, np.uint8)
        self.into = self.all[nbytes:-nbytes]
        self._nbytes = nbytes

    def guards_stand(self) -> bool:
        guards = np.concatenate([self.all[: self._nbytes], self.all[-self._nbytes :]])
        return bool((guards == CANARY).all())

    def untouched(self) -> bool:
        return bool((self.all == CANARY).all())

    def chunk(self, i: int) -> bytes:
        return self.into[i * self._nbytes : (i + 1) * self._nbytes].tobytes()
