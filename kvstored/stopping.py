"""How the process ends: signals, the deadline for a clean stop, and the last resort.

The stop signals are blocked in every thread and taken by one that does nothing else. So a stop
begins, a second signal counts, and the deadline holds also while the verbs' loop is stuck; the
interpreter's own handlers would wait for the main thread.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from kvstored.logs import QueuedHandler

log = logging.getLogger("kvstored.stop")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FLUSH_S = 0.5
"""Part of the deadline that is kept for the last log lines; at most a tenth of it is used."""

SAME_SIGNAL_S = 1.0
"""Until then a further signal counts as part of the first: timeout(1) and the like signal the
process and then its whole group."""


def block_signals() -> None:
    """Leave the stop signals to a StopWatch. Call it before any thread is started: numpy's import
    starts some.

    Child processes inherit the block unless they are started by uvloop, which undoes it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


class StopWatch:
    """Takes the stop signals, and ends the process when a stop takes too long.

    `on_stop(reason)` is called once, in the watch's thread, when a stop begins. When `timeout_s`
    have passed since, or at a second signal (SAME_SIGNAL_S or more later), `unfinished()` says in
    words what was left undone, and the process ends at once: with status 0 at the deadline, since
    stopping was what was asked for, and with 128 + the signal's number at a second signal, as if
    that had ended it.
    """

    def __init__(
        self,
        timeout_s: float,
        on_stop: Callable[[str], None],
        unfinished: Callable[[], str],
        logs: QueuedHandler | None,
    ) -> None:
        self._timeout_s = timeout_s
        self._on_stop = on_stop
        self._unfinished = unfinished
        self._logs = logs
        self._reason = ""
        self._status = 0
        self._began: float | None = None
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)

    def start(self) -> None:
        """Begin to listen. The signals must be blocked already."""
        self._thread.start()

    def begin(self, reason: str, status: int) -> None:
        """Stop without a signal; the process then ends with `status`, also at the deadline.

        May be called from any thread; only the first reason counts.
        """
        if not self._reason:
            self._reason, self._status = reason, status
            signal.pthread_kill(self._thread.ident or 0, signal.SIGTERM)

    @property
    def status(self) -> int:
        """Exit status of a stop that completes."""
        return self._status

    def left_s(self) -> float:
        """Time for a clean stop; what the last log lines need is already taken off."""
        if self._began is None:
            return self._timeout_s
        reserve_s = 2 * min(FLUSH_S, self._timeout_s / 10)
        return max(0.0, self._began + self._timeout_s - reserve_s - time.monotonic())

    def _watch(self) -> None:
        first = signal.sigwait(SIGNALS)
        self._began = time.monotonic()
        self._reason = self._reason or signal.Signals(first).name
        flush_s = min(FLUSH_S, self._timeout_s / 10)
        # Should a thread be stuck while it holds the interpreter lock, C code ends the process.
        faulthandler.dump_traceback_later(self._timeout_s, exit=True)
        self._on_stop(self._reason)
        until = self._began + self._timeout_s - flush_s
        while (left_s := until - time.monotonic()) > 0:
            again = signal.sigtimedwait(SIGNALS, left_s)
            if again is not None and time.monotonic() - self._began > SAME_SIGNAL_S:
                self._give_up("stopped by a second signal", 128 + again.si_signo, flush_s)
        self._give_up("the stop took too long", self._status, flush_s)

    def _give_up(self, why: str, status: int, flush_s: float) -> NoReturn:
        log.error(why, extra={"fields": {"unfinished": self._unfinished(), "status": status}})
        leave(status, self._logs, flush_s)


def leave(status: int, logs: QueuedHandler | None, flush_s: float = FLUSH_S) -> NoReturn:
    """End the process now, once what was logged is written.

    The interpreter's own way out would first join every thread of every pool, and one that is stuck
    in the kernel would hold it for ever.
    """
    if logs is not None:
        logs.drain(flush_s)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(status)
