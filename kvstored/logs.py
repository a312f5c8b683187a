"""Structured logs: one line per event on stderr, as logfmt or JSON.

Values go beside the message, not into it: `log.info("ready", extra={"fields": {"chunks": 12}})`.
Secrets are kept in `kvstored.config.Secret`, whose text form is masked, so that no log call can
print one by accident.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

QUEUE_RECORDS = 10_000


def event(record: logging.LogRecord) -> dict[str, object]:
    """The fields of one line, in order: time (UTC), level, logger, message, then the event's own.

    An exception becomes `error` and `trace`, its traceback folded into one line.
    """
    when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    line: dict[str, object] = {
        "time": when.replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
    }
    fields = getattr(record, "fields", None)
    if isinstance(fields, Mapping):
        line.update({str(k): v for k, v in fields.items() if str(k) not in line})
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        line["error"] = f"{type(error).__name__}: {error}"
        line["trace"] = logging.Formatter().formatException(record.exc_info)
    return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Render the record; what JSON cannot hold is rendered as text."""
        return json.dumps(event(record), default=str, ensure_ascii=False)


class LogfmtFormatter(logging.Formatter):
    """`key=value` pairs; values that hold spaces, quotes or line ends are quoted as in JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Render the record on one line."""
        return " ".join(f"{key}={_logfmt(value)}" for key, value in event(record).items())


def _logfmt(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    plain = text.isprintable() and text and not any(c in text for c in ' "=\\')
    return text if plain else json.dumps(text, ensure_ascii=False)


class QueuedHandler(logging.Handler):
    """Hands records to a thread that formats and writes them.

    A log call never waits for whoever reads stderr: the verbs' loop logs too. The queue is bounded;
    what does not fit is dropped, and how many were is told with the next line that gets through.
    """

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        super().__init__()
        self._stream = stream
        self._lines = formatter
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(QUEUE_RECORDS)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one record, or count it as dropped."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def drain(self, timeout_s: float) -> bool:
        """Write what is queued and end the thread. False where `timeout_s` was not enough."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _write(self) -> None:
        while (record := self._queue.get()) is not None:
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                self._line(_drop_notice(dropped))
            self._line(record)

    def _line(self, record: logging.LogRecord) -> None:
        # Nobody can be told that the log itself failed: the daemon goes on.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(self._lines.format(record) + "\n")
            self._stream.flush()


def _drop_notice(dropped: int) -> logging.LogRecord:
    record = logging.LogRecord(
        "kvstored.logs", logging.WARNING, __file__, 0, "log lines were dropped", None, None
    )
    record.fields = {"dropped": dropped}
    return record


def configure(level: str, form: str, stream: TextIO | None = None) -> QueuedHandler:
    """Send every log to stderr (or `stream`). `level`: debug, info, warning, error; `form`: logfmt
    or json. Call `drain` of what it returns before the process ends.
    """
    formatter = JsonFormatter() if form == "json" else LogfmtFormatter()
    handler = QueuedHandler(sys.stderr if stream is None else stream, formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # asyncio announces its selector and slow callbacks; the loop's lag is a metric of its own.
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    return handler
