"""Which daemon, as whom."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstored.kvctl.selection import Mistake, read_text
from kvstored.kvctl.wire import Wire
from kvstored.server.sockets import admin_socket_path
from kvstored_client import KVClient, default_target


@dataclass(frozen=True, slots=True)
class Access:
    """Which daemon, as whom, how long. `explicit`: the target was given, not the default."""

    target: str
    namespace: str
    token: str | None
    timeout_s: float
    explicit: bool

    @classmethod
    def of(cls, args: argparse.Namespace, environ: Mapping[str, str]) -> Access:
        """From arguments and environment. Raises Mistake."""
        given = args.target or environ.get("KVCTL_TARGET")
        token = environ.get("KVCTL_TOKEN")
        file = args.token_file or environ.get("KVCTL_TOKEN_FILE")
        if file and (args.token_file or not token):
            token = read_text("--token-file", file).strip()
            if not token:
                raise Mistake(f"--token-file {file} is empty")
        return cls(
            target=given or default_target(environ),
            namespace=args.namespace or environ.get("KVCTL_NAMESPACE") or "default",
            token=token or None,
            timeout_s=args.timeout,
            explicit=bool(given),
        )

    def client(self, target: str | None = None) -> KVClient:
        """A client of the daemon."""
        return KVClient(target or self.target, self.namespace, self.token)

    def wire(self) -> Wire:
        """The same for raw keys."""
        return Wire(self.target, self.namespace, self.token, self.timeout_s)

    def operators_wire(self) -> Wire:
        """The same for what only operators may ask."""
        return Wire(self.operators_target, self.namespace, self.token, self.timeout_s)

    @property
    def operators_target(self) -> str:
        """Where operators are known. Without a token that is the operators' socket alone; a caller
        may have named it already.
        """
        if self.token is None and self.target.startswith("unix://"):
            admin = admin_socket_path(Path(self.target.removeprefix("unix://")))
            return f"unix://{admin}" if admin.exists() else self.target
        return self.target
