"""What a client knows of its daemon: Hello, salt, limits, declared families, and how it fares.

Shared by the threads of a client; every field is replaced, never changed in place.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from kvstored_client.failures import Failure, FailureKind
from kvstored_client.identity import KVFamily
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods
from kvstored_client.steps import Verb, ask, remaining_ms

_log = logging.getLogger("kvstored_client")
_Result = TypeVar("_Result")

REFRESH_S = 60.0
"""Hello is repeated with the first call after this time, so that a daemon that was restarted with
other settings is noticed even where it still knows the family."""

QUIET_S = 30.0
"""After a warning about the daemon's condition; further changes are logged at DEBUG until then."""

SALT_BYTES = 32
CLIENT_VERSION = "0.1.0"


def client_label() -> str:
    """What Hello says of the client."""
    return f"kvstored-client/{CLIENT_VERSION} python/{platform.python_version()}"


@dataclass(frozen=True, slots=True)
class Session:
    """One Hello's worth of knowledge. `declared` holds (fingerprint, parts)."""

    hello: pb.HelloReply
    salt: bytes
    began: float
    declared: frozenset[object] = field(default_factory=frozenset)

    @property
    def limits(self) -> pb.Limits:
        """The daemon's limits; 0 where it named none."""
        return self.hello.limits


class SessionKeeper:
    """Says Hello when it is needed."""

    def __init__(self, target: str, namespace: str, salt: bytes | None) -> None:
        self._target = target
        self._namespace = namespace
        self._salt = salt
        self._session: Session | None = None
        self._trouble = ""
        self._told = False
        self._quiet_until = 0.0
        self._lock = threading.Lock()

    def after_fork_in_child(self) -> None:
        """Another thread may have held the lock."""
        self._lock = threading.Lock()

    # ---- Hello -----------------------------------------------------------------------------------

    def session(
        self, family: KVFamily | None, context: pb.Context, deadline: float
    ) -> Verb[Session | Failure]:
        """A session in which `family` is declared."""
        known = self._session
        if (
            known is not None
            and (family is None or _declaration(family) in known.declared)
            and time.monotonic() - known.began < REFRESH_S
        ):
            return known
        return (yield from self.hello(family, context, deadline))

    def hello(
        self, family: KVFamily | None, context: pb.Context, deadline: float
    ) -> Verb[Session | Failure]:
        """Say Hello whatever is known."""
        request = pb.HelloRequest(
            ctx=context,
            protocol_version=methods.PROTOCOL_VERSION,
            client=client_label(),
            namespace=self._namespace,
            families=[family.spec()] if family is not None else [],
        )
        request.ctx.deadline_ms = remaining_ms(deadline)
        reply = yield from ask(methods.HELLO, request, pb.HelloReply, deadline)
        if isinstance(reply, Failure):
            return reply
        return self._accept(reply, family)

    def _accept(self, reply: pb.HelloReply, family: KVFamily | None) -> Session | Failure:
        failure = _unfit(reply, self._salt)
        if failure is not None:
            return failure
        if self._salt is not None and reply.namespace_salt not in (b"", self._salt):
            self._warn_of_salt()
        declared: frozenset[object] = frozenset()
        if family is not None:
            declared = frozenset([_declaration(family)])
        with self._lock:
            known = self._session
            if known is not None and known.hello.boot_epoch == reply.boot_epoch:
                declared |= known.declared
            self._session = Session(
                reply, self._salt or reply.namespace_salt, time.monotonic(), declared
            )
            return self._session

    def _warn_of_salt(self) -> None:
        if self._session is None:
            _log.warning(
                "%s: the salt given for namespace %r is not the daemon's: chunks are shared only "
                "with clients that were given the same salt",
                self._target,
                self._namespace,
            )

    def forget(self, session: Session) -> None:
        """That session is no longer right, for example after UNKNOWN_FAMILY."""
        with self._lock:
            if self._session is session:
                self._session = None

    # ---- retry and trouble -----------------------------------------------------------------------

    def with_family(
        self,
        family: KVFamily,
        context: pb.Context,
        deadline: float,
        attempt: Callable[[Session], Verb[_Result | Failure]],
    ) -> Verb[_Result | Failure]:
        """Run `attempt` in a session that knows the family; once more if the daemon forgot it."""
        session = yield from self.session(family, context, deadline)
        if isinstance(session, Failure):
            return self.noted(session)
        result = yield from attempt(session)
        if isinstance(result, Failure) and result.code == pb.UNKNOWN_FAMILY:
            self.forget(session)
            session = yield from self.session(family, context, deadline)
            if isinstance(session, Failure):
                return self.noted(session)
            result = yield from attempt(session)
        return self.noted(result)

    def noted(self, result: _Result | Failure) -> _Result | Failure:
        """Pass a result on; log when the daemon's condition changes, not with every call."""
        kind = result.kind if isinstance(result, Failure) else None
        if kind is not None and not kind.of_daemon:
            return result
        if kind in (FailureKind.UNREACHABLE, FailureKind.DRAINING):
            # Whoever answers next may be another daemon.
            self._session = None
        trouble = kind.value if kind is not None else ""
        if trouble == self._trouble:
            return result
        with self._lock:
            before, self._trouble = self._trouble, trouble
        if before == trouble:
            return result
        if isinstance(result, Failure):
            # A call that was late, or refused for what it asked (a delete that the bucket did not
            # confirm), says nothing of the next ones.
            alone = kind in (FailureKind.DEADLINE, FailureKind.REFUSED)
            lasts = "" if alone else "; calls are misses until this ends"
            _log.log(
                self._level(),
                "%s, namespace %r: %s: %s%s",
                self._target,
                self._namespace,
                trouble,
                result.detail,
                lasts,
            )
        else:
            level = logging.INFO if self._told else logging.DEBUG
            _log.log(level, "%s, namespace %r: well again", self._target, self._namespace)
        return result

    def _level(self) -> int:
        """Of a line about new trouble: trouble that comes and goes fills no log."""
        now = time.monotonic()
        self._told = now >= self._quiet_until
        if not self._told:
            return logging.DEBUG
        self._quiet_until = now + QUIET_S
        return logging.WARNING


def _declaration(family: KVFamily) -> object:
    return family.fingerprint, tuple(family.parts)


def _unfit(reply: pb.HelloReply, salt: bytes | None) -> Failure | None:
    ours = methods.PROTOCOL_VERSION
    if not 1 <= reply.protocol_version <= ours or reply.min_protocol_version > ours:
        return Failure(
            FailureKind.VERSION,
            f"the daemon speaks protocol {reply.min_protocol_version} to {reply.protocol_version}, "
            f"this client {ours}",
            "upgrade the older of the two",
        )
    if salt is None and len(reply.namespace_salt) != SALT_BYTES:
        return Failure(
            FailureKind.GARBAGE, f"Hello brought a salt of {len(reply.namespace_salt)} bytes"
        )
    return None
