"""What is used of grpc, with types: those of the published stubs lack the half of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

Metadata = tuple[tuple[str, str], ...]
Options = Sequence[tuple[str, int]]
Serialiser = Callable[[Message], bytes] | None
Parser = Callable[[bytes], Message] | None


class Status(Protocol):
    """How an RPC ended."""

    def code(self) -> grpc.StatusCode | None:
        """GRPC status."""

    def details(self) -> str | None:
        """Text beside it."""

    def trailing_metadata(self) -> Sequence[tuple[str, str | bytes]] | None:
        """Pairs that came last."""


class BlockingCall(Iterator[bytes], Protocol):
    """A call that answers with raw messages; raises grpc.RpcError when it fails."""

    def cancel(self) -> bool:
        """End it, if it has not ended."""


class BlockingReply(Protocol):
    """A call with one reply that is under way."""

    def result(self) -> Message:
        """Wait for it; raises grpc.RpcError, or grpc.FutureCancelledError after `cancel`."""

    def cancel(self) -> bool:
        """End it, if it has not ended."""


class BlockingUnary(Protocol):
    """A method with one reply."""

    def __call__(self, request: Message, *, timeout: float, metadata: Metadata) -> Message:
        """Call it."""

    def future(self, request: Message, *, timeout: float, metadata: Metadata) -> BlockingReply:
        """Begin a call that can be cancelled."""


class BlockingDownload(Protocol):
    """A method with a raw reply stream."""

    def __call__(self, request: Message, *, timeout: float, metadata: Metadata) -> BlockingCall:
        """Call it."""


class BlockingUpload(Protocol):
    """A method with raw streams both ways."""

    def __call__(
        self, requests: Iterator[bytes], *, timeout: float, metadata: Metadata
    ) -> BlockingCall:
        """Call it."""


class BlockingChannel(Protocol):
    """grpc.Channel."""

    def unary_unary(
        self, method: str, request_serializer: Serialiser, response_deserializer: Parser
    ) -> BlockingUnary:
        """A method with one reply."""

    def unary_stream(self, method: str, request_serializer: Serialiser) -> BlockingDownload:
        """A method with a raw reply stream."""

    def stream_stream(self, method: str) -> BlockingUpload:
        """A method with raw streams both ways."""

    def close(self) -> None:
        """Cancel every call and disconnect."""


class AsyncCall(Protocol):
    """A call with raw messages; raises AioRpcError when it fails."""

    async def read(self) -> object:
        """Next message as bytes; something else at the end."""

    async def write(self, message: bytes) -> None:
        """Send a message."""

    async def done_writing(self) -> None:
        """Close the sending side."""

    def cancel(self) -> bool:
        """End it, if it has not ended."""

    async def code(self) -> grpc.StatusCode:
        """Wait for the end; its status."""

    async def details(self) -> str:
        """Wait for the end; its text."""

    async def trailing_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """Wait for the end; pairs that came last."""


class AsyncUnary(Protocol):
    """A method with one reply."""

    def __call__(
        self, request: Message, *, timeout: float, metadata: Metadata
    ) -> Awaitable[Message]:
        """Call it."""


class AsyncDownload(Protocol):
    """A method with a raw reply stream."""

    def __call__(self, request: Message, *, timeout: float, metadata: Metadata) -> AsyncCall:
        """Call it."""


class AsyncUpload(Protocol):
    """A method with raw streams both ways."""

    def __call__(self, *, timeout: float, metadata: Metadata) -> AsyncCall:
        """Call it."""


class AsyncChannel(Protocol):
    """grpc.aio.Channel."""

    def unary_unary(
        self, method: str, request_serializer: Serialiser, response_deserializer: Parser
    ) -> AsyncUnary:
        """A method with one reply."""

    def unary_stream(self, method: str, request_serializer: Serialiser) -> AsyncDownload:
        """A method with a raw reply stream."""

    def stream_stream(self, method: str) -> AsyncUpload:
        """A method with raw streams both ways."""

    async def close(self) -> None:
        """Cancel every call and disconnect."""


def blocking_channel(target: str, options: Options) -> BlockingChannel:
    """A channel of grpc's blocking API."""
    return cast("BlockingChannel", grpc.insecure_channel(target, options=options))


def async_channel(target: str, options: Options) -> AsyncChannel:
    """A channel of grpc.aio, for the running event loop."""
    return cast("AsyncChannel", grpc.aio.insecure_channel(target, options=options))
