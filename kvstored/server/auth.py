"""Who may do what: bearer tokens and namespaces.

The daemon holds SHA-256 hashes of tokens, never tokens. A plain hash is right because tokens are
long random strings (docs/configuration.md), not passwords.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvstored.errors import Unauthenticated


class Transport(enum.Enum):
    """The listener a call came in by."""

    UNIX = "unix"
    LOCAL = "local"  # the local session's socket, which has the mode of UNIX
    ADMIN = "admin"  # the operators' Unix socket: owner and root alone can connect
    TCP = "tcp"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, how, and until when. `deadline`: time.monotonic() of the transport's deadline."""

    transport: Transport
    token: str | None = None
    peer: str = ""
    deadline: float = float("inf")
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class NamespaceAuth:
    """Access to one namespace. `token_hashes`: SHA-256 of each token, 32 bytes.

    `anonymous_unix`, `anonymous_tcp`: a call without a token is granted on that transport.
    """

    name: str
    token_hashes: tuple[bytes, ...] = ()
    anonymous_unix: bool = False
    anonymous_tcp: bool = False

    def admits_anonymous(self, transport: Transport) -> bool:
        """Whether a call by this transport needs no token."""
        return self.anonymous_tcp if transport is Transport.TCP else self.anonymous_unix


def token_hash(token: str) -> bytes:
    """SHA-256 of a token, 32 bytes."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _one_answer() -> Unauthenticated:
    return Unauthenticated(
        "the call's token does not grant this namespace, or there is no such namespace",
        "check the namespace's name and send its token as `authorization: Bearer TOKEN`",
    )


class Auth:
    """Decides on tokens. Immutable; usable from any thread."""

    def __init__(
        self,
        namespaces: Iterable[NamespaceAuth],
        admin_token_hashes: Sequence[bytes] = (),
        admin_anonymous_tcp: bool = False,
    ) -> None:
        self._namespaces = {n.name: n for n in namespaces}
        self._admin_hashes = tuple(admin_token_hashes)
        self._admin_anonymous_tcp = admin_anonymous_tcp
        hashes = [h for n in self._namespaces.values() for h in n.token_hashes]
        for digest in [*hashes, *self._admin_hashes]:
            if len(digest) != hashlib.sha256().digest_size:
                msg = f"a token hash has {len(digest)} bytes, not 32"
                raise ValueError(msg)
        # An unknown namespace does the work of one that has a token, so that time tells nothing.
        self._decoy = NamespaceAuth("", (hashlib.sha256(b"\0decoy").digest(),))

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Names of every namespace."""
        return tuple(self._namespaces)

    def require_namespace(self, namespace: str, token: str | None, transport: Transport) -> None:
        """Raise Unauthenticated unless the token (or its absence) grants the namespace."""
        known = self._namespaces.get(namespace)
        grants = known or self._decoy
        matched = _matches(token, grants.token_hashes)
        anonymous = token is None and grants.admits_anonymous(transport)
        if known is None or not (matched or anonymous):
            raise _one_answer()

    def require_admin(self, token: str | None, transport: Transport) -> None:
        """Raise Unauthenticated unless the call comes by the admin socket or has an admin token."""
        matched = _matches(token, self._admin_hashes)
        if token is None:
            matched = transport is Transport.ADMIN or (
                transport is Transport.TCP and self._admin_anonymous_tcp
            )
        if not matched:
            raise Unauthenticated(
                "this call needs an admin token",
                "use the admin socket as the daemon's user or root, or send an admin token",
            )


def _matches(token: str | None, hashes: Sequence[bytes]) -> bool:
    digest = token_hash(token or "")
    matched = False
    for candidate in hashes:  # all of them, whatever matched
        matched |= hmac.compare_digest(digest, candidate)
    return matched and token is not None
