"""Tokens, namespaces, operators."""

from __future__ import annotations

import pytest

from kvstored.errors import Unauthenticated
from kvstored.server.auth import Auth, NamespaceAuth, Transport, token_hash

UNIX, TCP, ADMIN = Transport.UNIX, Transport.TCP, Transport.ADMIN


@pytest.fixture
def auth() -> Auth:
    return Auth(
        [
            NamespaceAuth("open", anonymous_unix=True),
            NamespaceAuth("opener", anonymous_unix=True, anonymous_tcp=True),
            NamespaceAuth("a", (token_hash("old"), token_hash("new"))),
            NamespaceAuth("b", (token_hash("other"),)),
            NamespaceAuth("nobody"),
        ],
        admin_token_hashes=[token_hash("root")],
    )


@pytest.mark.parametrize(
    ("namespace", "token", "transport"),
    [
        ("open", None, UNIX),
        ("open", None, ADMIN),
        ("opener", None, TCP),
        ("a", "old", UNIX),
        ("a", "new", TCP),
        ("b", "other", TCP),
    ],
)
def test_granted(auth: Auth, namespace: str, token: str | None, transport: Transport) -> None:
    auth.require_namespace(namespace, token, transport)


@pytest.mark.parametrize(
    ("namespace", "token", "transport"),
    [
        ("open", None, TCP),
        ("open", "", UNIX),
        ("open", "new", UNIX),  # a token that is sent must be right
        ("a", None, UNIX),
        ("a", "", UNIX),
        ("a", "other", UNIX),
        ("a", "root", UNIX),  # an operator is not a tenant
        ("a", "neW", UNIX),
        ("a", "ne", UNIX),
        ("nobody", None, UNIX),
        ("nobody", "", UNIX),
        ("missing", None, UNIX),
        ("missing", "new", UNIX),
        ("", "new", UNIX),
    ],
)
def test_refused_with_one_answer(
    auth: Auth, namespace: str, token: str | None, transport: Transport
) -> None:
    with pytest.raises(Unauthenticated) as refused:
        auth.require_namespace(namespace, token, transport)
    with pytest.raises(Unauthenticated) as unknown:
        auth.require_namespace("no-such-namespace", "x", UNIX)
    assert str(refused.value) == str(unknown.value)


def test_operators(auth: Auth) -> None:
    auth.require_admin(None, ADMIN)
    auth.require_admin("root", TCP)
    auth.require_admin("root", UNIX)
    for token, transport in [(None, UNIX), (None, TCP), ("new", UNIX), ("wrong", ADMIN)]:
        with pytest.raises(Unauthenticated, match="admin"):
            auth.require_admin(token, transport)


def test_a_token_in_place_of_its_hash_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="32"):
        Auth([NamespaceAuth("a", (b"plain token",))])
