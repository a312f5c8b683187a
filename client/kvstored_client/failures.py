"""How a step can fail, as a value: what becomes a miss, a refusal, or a ServiceError. No I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvstored_client import errors
from kvstored_client.proto import kvstore_pb2 as pb


class FailureKind(enum.Enum):
    """Why a step brought no answer. The values are the `reason` words of results."""

    UNREACHABLE = "unreachable"
    DEADLINE = "deadline"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    UNAUTHENTICATED = "unauthenticated"
    VERSION = "version"
    REFUSED = "refused"
    GARBAGE = "garbage"
    CLOSED = "closed"
    CANCELLED = "cancelled"
    NOT_LOCAL = "not_local"

    @property
    def of_daemon(self) -> bool:
        """Whether it says how the daemon fares; the others are the client's own doing."""
        return self not in _OWN_DOING


_OWN_DOING = frozenset((FailureKind.CLOSED, FailureKind.CANCELLED, FailureKind.NOT_LOCAL))


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed step. `code` is the daemon's own, 0 where the daemon said nothing."""

    kind: FailureKind
    message: str
    hint: str = ""
    code: int = 0
    retry_after_ms: int = 0

    @property
    def reason(self) -> str:
        """The word that results carry."""
        return self.kind.value

    @property
    def detail(self) -> str:
        """What went wrong and what to do, for people."""
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def chunk_state(self) -> int:
        """ChunkState of a chunk that was not delivered because of it."""
        return _CHUNK_STATES.get(self.kind, int(pb.MISS_UNREACHABLE))

    def put_state(self) -> int:
        """PutState of an object that was not stored because of it."""
        if self.code == pb.TOO_LARGE:
            return int(pb.REFUSED_TOO_LARGE)
        return _PUT_STATES.get(self.kind, int(pb.REFUSED_UNREACHABLE))

    def to_exception(self) -> errors.ServiceError:
        """The same as an exception, for verbs that have no miss to give."""
        if self.kind is FailureKind.OVERLOADED:
            return errors.OverloadedError(self.message, self.hint, self.retry_after_ms)
        return _EXCEPTIONS[self.kind](self.message, self.hint)


_CHUNK_STATES = {
    FailureKind.DEADLINE: int(pb.MISS_DEADLINE),
    FailureKind.OVERLOADED: int(pb.MISS_DECLINED),
    FailureKind.DRAINING: int(pb.MISS_DECLINED),
}

_PUT_STATES = {
    FailureKind.DEADLINE: int(pb.REFUSED_DEADLINE),
    FailureKind.OVERLOADED: int(pb.REFUSED_NO_ROOM),
    FailureKind.DRAINING: int(pb.REFUSED_DRAINING),
}

_EXCEPTIONS: dict[FailureKind, type[errors.ServiceError]] = {
    FailureKind.UNREACHABLE: errors.ConnectError,
    FailureKind.DEADLINE: errors.DeadlineError,
    FailureKind.DRAINING: errors.DrainingError,
    FailureKind.UNAUTHENTICATED: errors.AuthError,
    FailureKind.VERSION: errors.VersionError,
    FailureKind.REFUSED: errors.RefusedError,
    FailureKind.GARBAGE: errors.ProtocolError,
    FailureKind.CLOSED: errors.ConnectError,
    FailureKind.CANCELLED: errors.DeadlineError,
    FailureKind.NOT_LOCAL: errors.ConnectError,
}

_KINDS = {
    pb.RESOURCE_EXHAUSTED: FailureKind.OVERLOADED,
    pb.DEADLINE: FailureKind.DEADLINE,
    pb.DRAINING: FailureKind.DRAINING,
    pb.UNAUTHENTICATED: FailureKind.UNAUTHENTICATED,
    pb.VERSION: FailureKind.VERSION,
}


def failure_of_error(error: pb.Error) -> Failure:
    """The failure that a daemon's error trailer describes."""
    kind = _KINDS.get(error.code, FailureKind.REFUSED)
    return Failure(kind, error.message, error.hint, error.code, error.retry_after_ms)


class GarbageError(Exception):
    """Inside the client only: the peer broke the protocol; becomes a Failure at the transport."""

    def failure(self) -> Failure:
        """The same as a value."""
        return Failure(FailureKind.GARBAGE, str(self), "is this a kvstored of a fitting version?")


DEADLINE_PASSED = Failure(FailureKind.DEADLINE, "the deadline passed before the answer came")
CLIENT_CLOSED = Failure(FailureKind.CLOSED, "the client was closed")
CANCELLED = Failure(FailureKind.CANCELLED, "the call was cancelled")
NOT_LOCAL = Failure(
    FailureKind.NOT_LOCAL,
    "no local session with the daemon",
    "leases and slots need a daemon of this node, reached by its Unix socket",
)
