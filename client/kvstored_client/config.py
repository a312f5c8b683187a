"""Options of a client and of a call, checked when they are given. No I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TypedDict

from kvstored_client.errors import OptionError
from kvstored_client.identity import IdentityError, validate_namespace, validate_tenant
from kvstored_client.proto import kvstore_pb2 as pb

MAX_TIMEOUT_S = 3600.0
MAX_REQUEST_ID_BYTES = 64


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines in seconds, each for a whole call, whatever it takes inside: connecting, Hello,
    several requests for a long prefix. A call may bring its own as `timeout_s`.

    `match_s`: also touch, prefetch, pin, unpin, hello, status. `admin_s`: one page of list, usage,
    delete. Raises OptionError.
    """

    match_s: float = 2.0
    get_s: float = 30.0
    put_s: float = 30.0
    admin_s: float = 10.0

    def __post_init__(self) -> None:
        for each in fields(self):
            checked_timeout(each.name, getattr(self, each.name))


@dataclass(frozen=True, slots=True)
class Hints:
    """What the caller knows of a prefix's future; see proto Hints. Advice only."""

    session_id: str = ""
    turn: int = 0
    end_of_session: bool = False
    expected_gap_ms: int = 0
    shared_prefix: bool = False
    one_shot: bool = False
    probe: bool = False


class CallOptions(TypedDict, total=False):
    """Keywords that every verb takes.

    `timeout_s` replaces the client's default; `tenant` the client's label; `request_id` (at most
    64 bytes) goes to the daemon's log.
    """

    timeout_s: float
    tenant: str
    request_id: str
    hints: Hints


def checked_timeout(name: str, value: object) -> float:
    """`value` as seconds. Raises OptionError unless it is above 0 and at most an hour."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptionError(f"{name} must be a number of seconds, not {type(value).__name__}")
    if not (math.isfinite(value) and 0 < value <= MAX_TIMEOUT_S):
        raise OptionError(f"{name} {value} is out of range", f"above 0, at most {MAX_TIMEOUT_S:g}")
    return float(value)


def checked_target(target: str) -> str:
    """A gRPC target. Raises OptionError unless it is "unix:///path" or "dns:///host:port"."""
    if not isinstance(target, str):
        raise OptionError(f"target must be a str, not {type(target).__name__}")
    scheme, sep, rest = target.partition(":///")
    if sep and scheme == "unix" and rest:
        return target
    if sep and scheme == "dns":
        host, colon, port = rest.rpartition(":")
        if colon and host and port.isdigit() and 0 < int(port) < 1 << 16:
            return target
    raise OptionError(
        f"target {target!r} is not understood", 'write "unix:///path" or "dns:///host:port"'
    )


def checked_namespace(namespace: str) -> str:
    """A namespace name. Raises OptionError."""
    try:
        return validate_namespace(namespace)
    except IdentityError as error:
        raise OptionError(str(error)) from error


def checked_token(token: str | None) -> str | None:
    """A bearer token, or none. Raises OptionError; the message never holds the token."""
    if token is None:
        return None
    if not isinstance(token, str) or not token or not all(33 <= ord(c) < 127 for c in token):
        raise OptionError("token must be a str of visible ASCII characters without blanks")
    return token


def checked_salt(salt: bytes | None) -> bytes | None:
    """A namespace salt of 32 bytes, or none (then the daemon gives it). Raises OptionError."""
    if salt is not None and (not isinstance(salt, bytes) or len(salt) != 32):
        raise OptionError("salt must be 32 bytes", "see derive_namespace_salt")
    return salt


def checked_uint(name: str, value: object, stop: int) -> int:
    """`value` if it is an int in [0, stop). Raises OptionError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < stop:
        raise OptionError(f"{name} must be an int from 0 to {stop - 1}, not {value!r}")
    return value


def context_of(options: CallOptions, tenant: str) -> pb.Context:
    """The Context message of a call, without its deadline. Raises OptionError."""
    unknown = set(options) - set(CallOptions.__annotations__)
    if unknown:
        raise OptionError(
            f"unknown option {sorted(unknown)[0]!r}",
            "a call takes " + ", ".join(CallOptions.__annotations__),
        )
    try:
        label = validate_tenant(options.get("tenant", tenant))
        request_id = options.get("request_id", "")
        if len(request_id.encode("utf-8")) > MAX_REQUEST_ID_BYTES:
            raise OptionError(f"request_id is longer than {MAX_REQUEST_ID_BYTES} bytes")
        context = pb.Context(request_id=request_id, tenant=label)
        hints = options.get("hints")
        if hints is not None:
            context.hints.CopyFrom(_hints_message(hints))
    except (IdentityError, AttributeError, TypeError, UnicodeError) as error:
        raise OptionError(f"an option of the call is unusable: {error}") from error
    return context


def _hints_message(hints: Hints) -> pb.Hints:
    try:
        return pb.Hints(**{each.name: getattr(hints, each.name) for each in fields(Hints)})
    except ValueError as error:
        raise OptionError(f"hints: {error}") from error
