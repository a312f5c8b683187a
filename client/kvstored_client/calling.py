"""What all verbs share: options, deadlines, the session keeper. No I/O."""

from __future__ import annotations

import time
from typing import TypeVar

from kvstored_client.config import CallOptions, Timeouts, checked_timeout, context_of
from kvstored_client.errors import OptionError
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.session import SessionKeeper

_T = TypeVar("_T")

MAX_TTL_MS = 1 << 63


def choice(name: str, value: str, table: dict[str, _T]) -> _T:
    """What stands behind a word. Raises OptionError."""
    if not isinstance(value, str) or value not in table:
        raise OptionError(f"{name} {value!r} is unknown", "use " + ", ".join(map(repr, table)))
    return table[value]


class Calling:
    """Base of the verbs: one daemon, one namespace."""

    def __init__(
        self, keeper: SessionKeeper, namespace: str, tenant: str, timeouts: Timeouts
    ) -> None:
        self.keeper = keeper
        self.namespace = namespace
        self.tenant = tenant
        self.timeouts = timeouts

    def opening(self, options: CallOptions, default_s: float) -> tuple[pb.Context, float]:
        """(context, deadline in time.monotonic()) of a call that begins now. Raises OptionError."""
        timeout_s = checked_timeout("timeout_s", options.get("timeout_s", default_s))
        return context_of(options, self.tenant), time.monotonic() + timeout_s
