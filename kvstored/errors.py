"""The daemon's exceptions.

Each says what went wrong, where, and what to do (`hint`). `code` is what travels to a client; it
decides the gRPC status in `kvstored.server`. A cache failure inside a verb is an answer (a state
byte per chunk), not an exception: exceptions are for requests that cannot be answered at all, for
bad configuration, and for a data directory that cannot be used.
"""

from __future__ import annotations

from typing import ClassVar

from kvstored_client.proto import kvstore_pb2 as pb


class KvstoredError(Exception):
    """Base of everything kvstored raises on purpose.

    `hint` tells the reader what to do; it may be empty where nothing can be done.
    """

    code: ClassVar[pb.ErrorCode] = pb.INTERNAL

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(KvstoredError):
    """The configuration cannot be used. `problems` lists every fault found, one line each."""

    code = pb.BAD_REQUEST

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems), "mend the configuration and start again")
        self.problems = problems


class DataDirectoryError(KvstoredError):
    """The data directory is unwritable, in use, or of a format this version does not read."""


class BucketSilent(KvstoredError):
    """The shared bucket did not confirm in time what a caller has to be sure of."""


class RequestError(KvstoredError):
    """Base of what a client did wrong."""

    code = pb.BAD_REQUEST


class BadRequest(RequestError):
    """The request is malformed in a way that no other class names."""


class BadKeys(RequestError):
    """Keys, parent or fingerprint of a wrong length."""

    code = pb.BAD_KEYS


class UnknownPart(RequestError):
    """A part that the family does not declare."""

    code = pb.UNKNOWN_PART


class UnknownFamily(RequestError):
    """A family not declared since the daemon started; Hello declares it."""

    code = pb.UNKNOWN_FAMILY


class FamilyConflict(RequestError):
    """A family or part declared before in another way, or a fingerprint that is not the spec's."""

    code = pb.FAMILY_CONFLICT


class WrongLength(RequestError):
    """An object's length is not what its part declares."""

    code = pb.WRONG_LENGTH


class TooLarge(RequestError):
    """A call, object or frame is over its limit."""

    code = pb.TOO_LARGE


class Truncated(RequestError):
    """The payload ended before the bytes that were announced."""

    code = pb.TRUNCATED


class Overlong(RequestError):
    """More payload came than was announced."""

    code = pb.OVERLONG


class Unauthenticated(RequestError):
    """No token, a wrong one, or one that does not grant the namespace: one answer for all three."""

    code = pb.UNAUTHENTICATED


class Unimplemented(RequestError):
    """A verb or feature this daemon does not serve."""

    code = pb.UNIMPLEMENTED


class VersionUnsupported(RequestError):
    """The client's protocol version is no longer served."""

    code = pb.VERSION


class ResourceExhausted(KvstoredError):
    """A bounded queue or table is full. `retry_after_ms` says when to try again (0: no advice)."""

    code = pb.RESOURCE_EXHAUSTED

    def __init__(self, message: str, hint: str = "", retry_after_ms: int = 0) -> None:
        super().__init__(message, hint)
        self.retry_after_ms = retry_after_ms


class DeadlineExceeded(KvstoredError):
    """The caller's deadline passed before an answer could be given."""

    code = pb.DEADLINE


class Draining(KvstoredError):
    """The daemon is stopping and takes no new work."""

    code = pb.DRAINING
