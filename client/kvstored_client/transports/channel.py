"""What the blocking and the asyncio transport share: channel options, metadata, gRPC errors."""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError

from kvstored_client.failures import Failure, FailureKind, failure_of_error
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods
from kvstored_client.transports.grpc_types import Metadata, Status

MAX_MESSAGE_BYTES = 16 << 20
"""Most that one message may hold: a full page of List is the largest that is ever sent."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A connection of the client's own: streams do not share another's window, and closing closes.
    ("grpc.use_local_subchannel_pool", 1),
    # The client retries what it knows to be safe.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]


def metadata_of(token: str | None) -> Metadata:
    """Request metadata of every call."""
    if token is None:
        return ()
    return ((methods.AUTHORIZATION_METADATA, methods.BEARER_PREFIX + token),)


_KINDS = {
    grpc.StatusCode.UNAVAILABLE: FailureKind.UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: FailureKind.DEADLINE,
    grpc.StatusCode.UNAUTHENTICATED: FailureKind.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: FailureKind.UNAUTHENTICATED,
    # A daemon that stops cancels what still runs. Where the client was closed the transport knows.
    grpc.StatusCode.CANCELLED: FailureKind.UNREACHABLE,
}


def failure_of_status(status: Status) -> Failure:
    """The failure that an RPC's end describes; the daemon's own trailer wins over gRPC's status."""
    code = status.code()
    trailers = status.trailing_metadata()
    for key, value in trailers or ():
        if key == methods.ERROR_METADATA and isinstance(value, bytes):
            try:
                return failure_of_error(pb.Error.FromString(value))
            except DecodeError:
                break
    name = code.name if code is not None else "no status"
    # Without a trailer it was not kvstored that spoke: another server, a proxy, or grpc itself.
    kind = FailureKind.GARBAGE if code is None else _KINDS.get(code, FailureKind.GARBAGE)
    return Failure(kind, f"{name}: {status.details() or 'no details'}")


DEADLINE_PASSED = Failure(FailureKind.DEADLINE, "the deadline passed before the request was sent")
CLIENT_CLOSED = Failure(FailureKind.CLOSED, "the client was closed")
CUT_SHORT = Failure(FailureKind.UNREACHABLE, "the daemon ended the call while frames were sent")
ENDED_EARLY = Failure(FailureKind.GARBAGE, "the stream ended before its last message")
