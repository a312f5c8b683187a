"""Which way steps go: the local session where the daemon is on this node, gRPC otherwise.

grpc is imported with the first step that needs it; on the same node that is only `status`, and a
get that bypasses RAM.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvstored_client.failures import CLIENT_CLOSED, NOT_LOCAL, Failure, FailureKind
from kvstored_client.local import forking
from kvstored_client.local.transport import LocalTransport, serves
from kvstored_client.steps import Acquire, Answer, Commit, Download, Hold, Reserve, Step, Upload
from kvstored_client.stopping import StopFlag
from kvstored_client.target import local_socket_path

if TYPE_CHECKING:
    from kvstored_client.transports.blocking import BlockingTransport

_log = logging.getLogger("kvstored_client")

_UNIX = "unix://"
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""How long steps go by gRPC before the local session is tried again; twice as long each time."""
BY_WIRE = Failure(FailureKind.NOT_LOCAL, "this step goes by gRPC")


def _needs_no_room(step: Step, answer: Answer) -> bool:
    """Whether the session lacks room that gRPC does without: leases and a ring."""
    return (
        isinstance(step, Download | Upload)
        and isinstance(answer, Failure)
        and answer.kind is FailureKind.OVERLOADED
    )


class AutoTransport:
    """Runs steps, from any number of threads."""

    def __init__(self, target: str, namespace: str, token: str | None) -> None:
        self._target = target
        self._token = token
        self._closed = False
        self._lock = threading.Lock()
        self._wire: BlockingTransport | None = None
        self._local: LocalTransport | None = None
        self._not_before = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._told = False
        self._why = NOT_LOCAL
        if target.startswith(_UNIX):
            path = Path(target.removeprefix(_UNIX))
            self._local = LocalTransport(local_socket_path(path), path, namespace, token)
        forking.join(self)

    def run(self, step: Step, stop: StopFlag | None = None) -> Answer:
        """Run one step to its end; at the latest at its deadline, or soon after `stop` is set.

        Never raises for the peer. Steps that need a local session fail as NOT_LOCAL without one.
        """
        only_local = isinstance(step, Acquire | Hold | Reserve | Commit)
        local = self._local
        if local is not None and serves(step) and (only_local or self._worth_a_try()):
            answer = local.run(step, stop)
            if _needs_no_room(step, answer):
                wire = self._wire or self._connected()
                other = CLIENT_CLOSED if wire is None else wire.run(step, stop)
                return answer if isinstance(other, Failure) and other is not BY_WIRE else other
            if not isinstance(answer, Failure) or answer.kind is not FailureKind.NOT_LOCAL:
                if self._told and not isinstance(answer, Failure):
                    self._well_again()
                return answer
            self._fall_back(answer)
        if only_local:
            return self._why
        wire = self._wire or self._connected()
        return CLIENT_CLOSED if wire is None else wire.run(step, stop)

    def nudge(self) -> None:
        """A step will soon be run, most likely. Never raises."""
        if self._local is not None:
            self._local.nudge()

    def close(self) -> None:
        """End running steps (they fail as CLOSED) and the connections."""
        with self._lock:
            self._closed = True
            wire = self._wire
        if self._local is not None:
            self._local.close()
        if wire is not None:
            wire.close()

    def after_fork_in_child(self) -> None:
        """Another thread may have held the lock."""
        self._lock = threading.Lock()

    def _worth_a_try(self) -> bool:
        return not self._not_before or time.monotonic() >= self._not_before

    def _fall_back(self, failure: Failure) -> None:
        with self._lock:
            self._why = failure
            self._not_before = time.monotonic() + self._pause_s
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
            told, self._told = self._told, True
        if not told:
            _log.warning(
                "%s: no local session: %s; calls go by gRPC meanwhile", self._target, failure.detail
            )

    def _well_again(self) -> None:
        with self._lock:
            self._not_before = 0.0
            self._pause_s = FIRST_PAUSE_S
            told, self._told = self._told, False
        if told:
            _log.info("%s: a local session again", self._target)

    def _connected(self) -> BlockingTransport | None:
        from kvstored_client.transports.blocking import BlockingTransport

        with self._lock:
            if self._closed:
                return None
            if self._wire is None:
                self._wire = BlockingTransport(self._target, self._token)
            return self._wire
