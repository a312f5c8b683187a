"""When a device is trusted. Pure: told what was seen and what time it is, it decides.

    CLOSED --errors in a row, or no answer--> OPEN --a good probe--> TRIAL --success--> CLOSED
                                               ^                       |
                                               +---first error---------+

Each volume has one for reads and one for changes: a device that refuses writes is still read.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a device may misbehave before something follows.

    `stuck_after_s`: one call without an answer for so long opens the breaker. `failures`: so many
    errors in a row do. Probes come `probe_first_s` after that, each pause twice the one before, up
    to `probe_longest_s`. A volume that cannot be read for `lost_after_s` is lost; it is opened anew
    after `reopen_first_s`, and so on up to `reopen_longest_s`. `open_timeout_s`: how long the start
    waits for a volume. `look_every_s`: how often all of this is looked at. `note_s`: how long the
    registry's own disk may take before a delete is refused. `check_every_s`: how often the names of
    a volume's files are checked.
    """

    stuck_after_s: float = 10.0
    failures: int = 8
    probe_first_s: float = 1.0
    probe_longest_s: float = 15.0
    lost_after_s: float = 60.0
    reopen_first_s: float = 1.0
    reopen_longest_s: float = 30.0
    open_timeout_s: float = 60.0
    look_every_s: float = 0.25
    note_s: float = 10.0
    check_every_s: float = 1.0


class BreakerState(enum.Enum):
    """See the module."""

    CLOSED = "closed"
    OPEN = "open"
    TRIAL = "trial"


@dataclass(frozen=True, slots=True)
class Seen:
    """What calls of one kind have shown so far."""

    oldest_s: float = 0.0
    """How long the oldest call that has not come back has been under way; 0.0: there is none."""
    failures: int = 0
    """Errors since the last success."""
    successes: int = 0
    """Since the start."""
    gone: bool = False
    """The last error says that there is no device any more."""
    error: str = ""
    """The last error in words."""


class Breaker:
    """One breaker. `what` names the calls for people."""

    def __init__(self, patience: Patience, what: str) -> None:
        self._patience = patience
        self._what = what
        self.state = BreakerState.CLOSED
        self.detail = ""
        """Why it is open; kept through the trial."""
        self.stuck = False
        """It is open because a call did not come back."""
        self.gone = False
        """It is open because there is no device any more."""
        self.opened_at = 0.0
        """When trust was lost; a trial that fails does not change it."""
        self._pause_s = 0.0
        self._probe_at = 0.0
        self._tried_at = 0  # successes when the trial began

    @property
    def closed(self) -> bool:
        """Whether calls may be made: also on trial."""
        return self.state is not BreakerState.OPEN

    def look(self, now: float, seen: Seen) -> None:
        """Take in what was seen."""
        if self.state is BreakerState.OPEN:
            self.gone = self.gone or seen.gone
            return
        if self.state is BreakerState.TRIAL and seen.successes > self._tried_at:
            self.state, self.detail = BreakerState.CLOSED, ""
            self._pause_s = 0.0
        allowed = 1 if self.state is BreakerState.TRIAL else self._patience.failures
        if seen.oldest_s >= self._patience.stuck_after_s:
            self._open(now, f"no answer to a {self._what} for {seen.oldest_s:.1f} s", stuck=True)
        elif seen.gone or seen.failures >= allowed:
            many = f"{seen.failures} {self._what}s in a row failed, the last: {seen.error}"
            self._open(now, many if seen.failures > 1 else seen.error, gone=seen.gone)

    def _open(self, now: float, detail: str, *, stuck: bool = False, gone: bool = False) -> None:
        if self.state is BreakerState.CLOSED:
            self.opened_at = now
        self.state, self.detail = BreakerState.OPEN, detail
        self.stuck, self.gone = stuck, gone
        self._wait(now)

    def vanished(self, now: float, detail: str) -> None:
        """What is behind the calls is not what it was: no probe can mend that."""
        self._open(now, detail, gone=True)

    def _wait(self, now: float) -> None:
        pause = 2 * self._pause_s or self._patience.probe_first_s
        self._pause_s = min(pause, self._patience.probe_longest_s)
        self._probe_at = now + self._pause_s

    def probe_due(self, now: float) -> bool:
        """Whether it is time to ask the device again."""
        return self.state is BreakerState.OPEN and now >= self._probe_at

    def probed(self, now: float, seen: Seen, error: str) -> None:
        """A probe has come back: "" if it went well, and then calls are tried again."""
        if self.state is not BreakerState.OPEN:
            return
        if error or seen.oldest_s >= self._patience.stuck_after_s:
            self.detail = error or self.detail
            self._wait(now)
            return
        self.state = BreakerState.TRIAL
        self.stuck = self.gone = False
        self._tried_at = seen.successes
