"""Connecting, and the first exchange of a session."""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path

from google.protobuf.message import DecodeError

from kvstored_client.failures import (
    DEADLINE_PASSED,
    Failure,
    FailureKind,
    GarbageError,
)
from kvstored_client.local import events, forking
from kvstored_client.local.errors import StepError
from kvstored_client.local.link import Link
from kvstored_client.local.ring import unix_socket
from kvstored_client.local.turns import Budget
from kvstored_client.local.use import Use
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods
from kvstored_client.proto.local import Kind
from kvstored_client.session import client_label

# What OPEN says that gRPC would say as well. Whatever else keeps a session from being had, gRPC
# may not mind: too many sessions, a peer that may not, a feature that is off.
_SAME_EVERYWHERE = (
    FailureKind.UNREACHABLE,
    FailureKind.DEADLINE,
    FailureKind.DRAINING,
    FailureKind.UNAUTHENTICATED,
)


def open_link(
    path: Path, beside: Path, namespace: str, token: str | None, deadline: float, use: Use
) -> Link:
    """A session on the socket `path`, with its first user. `beside`: the daemon's gRPC socket, by
    which one sees whether a daemon without local sessions is there.

    Raises StepError; of the kind NOT_LOCAL where gRPC may still serve.
    """
    link = Link(_connect(path, beside, deadline))
    forking.join(link)
    try:
        link.enter(use)
        _open(link, namespace, token, deadline)
    except BaseException:
        link.end(Failure(FailureKind.UNREACHABLE, "opening the session was interrupted"))
        if not link.served:  # else its thread closes it
            link.close()
        raise
    return link


def _connect(path: Path, beside: Path, deadline: float) -> socket.socket:
    try:
        return _connected(path, deadline)
    except TimeoutError as error:
        raise StepError(DEADLINE_PASSED) from error
    except OSError as error:
        why = error.strerror or error
        if _listens(beside, deadline):
            raise StepError(Failure(FailureKind.NOT_LOCAL, f"{path}: {why}")) from error
        failure = Failure(
            FailureKind.UNREACHABLE, f"no daemon at {beside}: {why}", "is it running?"
        )
        raise StepError(failure) from error


def _connected(path: Path, deadline: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # Only a blocking connect waits for its turn where many connect at once.
        left = max(0.001, deadline - time.monotonic())
        whole = int(left)
        limit = struct.pack("ll", whole, int((left - whole) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.connect(str(path))
    except BlockingIOError as error:
        sock.close()
        raise TimeoutError from error
    except BaseException:
        sock.close()
        raise
    return sock


def _listens(path: Path, deadline: float) -> bool:
    try:
        _connected(path, deadline).close()
    except OSError:
        return False
    return True


def _open(link: Link, namespace: str, token: str | None, deadline: float) -> None:
    hello = pb.LocalOpen(
        protocol_version=methods.PROTOCOL_VERSION,
        namespace=namespace,
        token=token or "",
        client=client_label(),
    )
    try:
        body = link.call(Kind.OPEN, hello.SerializeToString(), deadline, None)
        link.opened = pb.LocalOpened.FromString(body)
        if not link.opened.max_leased_bytes or not link.opened.max_requests:
            raise GarbageError("the daemon opens a session without limits")
        fd, link.events_fd = link.events_fd, -1
        channel = unix_socket(fd, socket.SOCK_SEQPACKET)
    except StepError as error:
        if error.failure.kind in _SAME_EVERYWHERE:
            raise
        raise StepError(Failure(FailureKind.NOT_LOCAL, error.failure.detail)) from error
    except (GarbageError, DecodeError) as error:
        raise StepError(Failure(FailureKind.NOT_LOCAL, str(error))) from error
    link.max_requests = link.opened.max_requests
    link.budget = Budget(link.opened.max_leased_bytes // 2)
    events.start(link, channel)
