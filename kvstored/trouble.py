"""Says what goes on failing without filling the log with it."""

from __future__ import annotations

import logging

EVERY_S = 60.0


class Trouble:
    """One kind of it, said when it begins and then at most once in `EVERY_S`, with how often it
    came meanwhile.
    """

    def __init__(self, log: logging.Logger, message: str) -> None:
        """`message` has one `%s`, for the error."""
        self._log = log
        self._message = message
        self._said_at: float | None = None
        self._unsaid = 0

    def came(self, error: Exception, now: float) -> None:
        """It has come again. `now`: a monotonic time in seconds, of the same clock each time."""
        if self._said_at is not None and now - self._said_at < EVERY_S:
            self._unsaid += 1
            return
        self._log.error(
            self._message,
            error,
            extra={"fields": {"times_unsaid": self._unsaid}} if self._unsaid else None,
        )
        self._said_at, self._unsaid = now, 0
