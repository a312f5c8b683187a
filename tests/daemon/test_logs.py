"""One line per event, and never a wait for whoever reads them."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from collections.abc import Iterator

import pytest

from kvstored import logs
from kvstored.logs import JsonFormatter, LogfmtFormatter, QueuedHandler


@pytest.fixture
def root_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("root_restored")
def test_json_lines_hold_fields_and_folded_traces() -> None:
    stream = io.StringIO()
    handler = logs.configure("info", "json", stream)
    log = logging.getLogger("kvstored.test")
    log.debug("too quiet")
    log.info("ready", extra={"fields": {"port": 9440, "message": "not this one"}})
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("failed")
    assert handler.drain(5)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "ready"
    assert first["port"] == 9440
    assert first["level"] == "info"
    assert first["time"].endswith("Z")
    assert second["error"] == "ValueError: two\nlines"
    assert "Traceback" in second["trace"]


def test_logfmt_quotes_what_needs_it() -> None:
    record = logging.LogRecord("kvstored.x", logging.WARNING, "", 0, "all %s", ("well",), None)
    record.fields = {
        "path": "/a/b",
        "why": 'a "b"\n=c',
        "n": 3,
        "s": 0.123456789,
        "ok": True,
        "e": "",
    }
    line = LogfmtFormatter().format(record)
    assert line.count("\n") == 0
    rest = line.split(" ", 1)[1]
    assert rest == (
        'level=warning logger=kvstored.x message="all well" path=/a/b '
        'why="a \\"b\\"\\n=c" n=3 s=0.123457 ok=true e=""'
    )


def test_a_reader_that_does_not_read_holds_nobody_up() -> None:
    read_fd, write_fd = os.pipe()
    with os.fdopen(write_fd, "w") as stream, os.fdopen(read_fd, "rb") as reader:
        handler = QueuedHandler(stream, JsonFormatter())
        log = logging.Logger("flood")
        log.addHandler(handler)
        for i in range(2 * logs.QUEUE_RECORDS):
            log.warning("line", extra={"fields": {"i": i, "padding": "x" * 100}})
        assert not handler.drain(0.01)
        got: list[bytes] = []
        pump = threading.Thread(target=lambda: got.extend(reader), daemon=True)
        pump.start()
        assert handler.drain(20)
        stream.close()
        pump.join(20)
    lines = [json.loads(line) for line in got]
    dropped = sum(line.get("dropped", 0) for line in lines)
    told = sum(line["message"] == "line" for line in lines)
    assert dropped > 0
    assert told + dropped == 2 * logs.QUEUE_RECORDS


def test_a_closed_stream_is_survived() -> None:
    stream = io.StringIO()
    handler = QueuedHandler(stream, JsonFormatter())
    stream.close()
    logging.Logger("x").addHandler(handler)
    handler.handle(logging.LogRecord("x", logging.ERROR, "", 0, "lost", None, None))
    assert handler.drain(5)
