"""The standard gRPC health service.

Its published stubs pin a protobuf version, so it is spoken by its wire form: HealthCheckRequest is
one string at number 1, as StringValue is, and HealthCheckResponse one enum at number 1, on the wire
the same as Int32Value. Source: the gRPC health checking protocol, grpc/health/v1/health.proto.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from kvstored.server.bridge import Admission

SERVICE = "grpc.health.v1.Health"
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
_MAX_WATCHERS = 64

_Context = grpc.aio.ServicerContext[bytes, bytes]


class Health:
    """Answers Check and Watch. Belongs to the stream loop."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = {"", *services}
        self._serving = False
        self._changed = asyncio.Event()
        self._watchers = Admission(_MAX_WATCHERS, "health watchers", retry_after_ms=1000)

    def set(self, *, serving: bool) -> None:
        """Change the state and tell watchers."""
        self._serving = serving
        self._changed.set()
        self._changed = asyncio.Event()

    def state(self, service: str) -> int:
        """SERVING, NOT_SERVING, or SERVICE_UNKNOWN."""
        if service not in self._services:
            return SERVICE_UNKNOWN
        return SERVING if self._serving else NOT_SERVING

    def handler(self) -> grpc.GenericRpcHandler[bytes, bytes]:
        """The service, ready to add to a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
            },
        )

    async def _check(self, request: bytes, context: _Context) -> bytes:
        state = self.state(await _service_of(request, context))
        if state == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return Int32Value(value=state).SerializeToString()

    async def _watch(self, request: bytes, context: _Context) -> None:
        service = await _service_of(request, context)
        if self._watchers.full:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watchers")
        with self._watchers.slot():
            told = 0
            while True:
                changed = self._changed
                if (state := self.state(service)) != told:
                    await context.write(Int32Value(value=state).SerializeToString())
                    told = state
                await changed.wait()


async def _service_of(request: bytes, context: _Context) -> str:
    try:
        return StringValue.FromString(request).value
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a HealthCheckRequest")
