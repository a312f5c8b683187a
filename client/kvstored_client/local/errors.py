"""Inside the same-node path only: how a step ends early. At the transport they become Failures."""

from __future__ import annotations

from kvstored_client.failures import Failure


class StepError(Exception):
    """The step has failed; the session goes on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class LinkOverError(StepError):
    """The session is over. `unanswered`: nothing of the step's answer had come, so that it may be
    run again on another session.
    """

    def __init__(self, failure: Failure, *, unanswered: bool) -> None:
        super().__init__(failure)
        self.unanswered = unanswered


class NoSessionError(Exception):
    """There can be no local session with this daemon, at present; it may serve gRPC still."""
