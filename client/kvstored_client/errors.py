"""The client's exceptions: one tree, KVStoredClientError.

Two branches. UsageError is a programming error, raised before anything is sent. ServiceError says
that the daemon could not be used; the hot verbs never raise it (there it is a miss or a refusal
with a reason), only `hello`, `check`, `list`, `usage` and `status` do.
"""

from __future__ import annotations


class KVStoredClientError(Exception):
    """Base of everything this package raises on purpose; `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint


class UsageError(KVStoredClientError, ValueError):
    """The call cannot be made as written. Nothing was sent and no buffer was touched."""


class OptionError(UsageError):
    """An option of the client or of a call is of the wrong type or out of range."""


class RangeError(UsageError):
    """start and stop do not name chunks of the prefix."""


class UnknownPartError(UsageError):
    """A part that the family does not declare."""


class BufferUsageError(UsageError):
    """Base of what can be wrong with a caller's buffers."""


class BufferTypeError(BufferUsageError):
    """Not a buffer: no CPU memory that can be addressed."""


class BufferLayoutError(BufferUsageError):
    """The memory is not contiguous."""


class ReadOnlyBufferError(BufferUsageError):
    """A destination that may not be written."""


class BufferSizeError(BufferUsageError):
    """A destination too small for its object, or a source whose length its part does not allow."""


class BufferCountError(BufferUsageError):
    """Another number of buffers than there are objects."""


class ClosedError(UsageError):
    """The client was closed."""


class LeaseUsageError(UsageError):
    """Base of what can be wrong with the use of a lease, a hold or of slots."""


class LeaseInUseError(LeaseUsageError):
    """The lease was to be released while views of it live; nothing was released."""


class LeaseEndedError(LeaseUsageError):
    """The lease was released, or belongs to the process that this one was forked from."""


class NotLeasedError(LeaseUsageError, IndexError):
    """That object is not in the lease: its chunk is not held, not needed, or out of range."""


class ServiceError(KVStoredClientError):
    """Base of what keeps a daemon from being used."""


class ConnectError(ServiceError):
    """No daemon answers there."""


class DeadlineError(ServiceError):
    """The answer did not come in time."""


class AuthError(ServiceError):
    """The token is missing, wrong, or does not grant the namespace."""


class VersionError(ServiceError):
    """Client and daemon have no protocol version in common."""


class OverloadedError(ServiceError):
    """A bounded queue of the daemon is full. `retry_after_ms` 0: no advice."""

    def __init__(self, message: str, hint: str = "", retry_after_ms: int = 0) -> None:
        super().__init__(message, hint)
        self.retry_after_ms = retry_after_ms


class DrainingError(ServiceError):
    """The daemon is stopping."""


class RefusedError(ServiceError):
    """The daemon refuses the request for a reason of its own; the message says which."""


class ProtocolError(ServiceError):
    """The peer answered something that is not the protocol."""
