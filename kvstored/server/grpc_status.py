"""kvstored's errors as gRPC status, details and trailer."""

from __future__ import annotations

import grpc

from kvstored.errors import KvstoredError, ResourceExhausted
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto.methods import ERROR_METADATA

_STATUS: dict[int, grpc.StatusCode] = {
    pb.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    pb.BAD_KEYS: grpc.StatusCode.INVALID_ARGUMENT,
    pb.UNKNOWN_PART: grpc.StatusCode.INVALID_ARGUMENT,
    pb.UNKNOWN_FAMILY: grpc.StatusCode.FAILED_PRECONDITION,
    pb.FAMILY_CONFLICT: grpc.StatusCode.FAILED_PRECONDITION,
    pb.WRONG_LENGTH: grpc.StatusCode.INVALID_ARGUMENT,
    pb.TOO_LARGE: grpc.StatusCode.OUT_OF_RANGE,
    pb.TRUNCATED: grpc.StatusCode.DATA_LOSS,
    pb.OVERLONG: grpc.StatusCode.INVALID_ARGUMENT,
    pb.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    pb.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    pb.DRAINING: grpc.StatusCode.UNAVAILABLE,
    pb.UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    pb.INTERNAL: grpc.StatusCode.INTERNAL,
    pb.VERSION: grpc.StatusCode.FAILED_PRECONDITION,
}


def status_code(error: KvstoredError) -> grpc.StatusCode:
    """The gRPC status that fits best; the trailer is what clients should read."""
    return _STATUS.get(error.code, grpc.StatusCode.INTERNAL)


def trailer(error: KvstoredError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata: the serialised proto Error."""
    retry = error.retry_after_ms if isinstance(error, ResourceExhausted) else 0
    message = pb.Error(
        code=error.code, message=error.message, hint=error.hint, retry_after_ms=retry
    )
    return ((ERROR_METADATA, message.SerializeToString()),)
