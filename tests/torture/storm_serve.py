"""`kvstored` itself, but for one thing: what it logs of the objects that leave is in a file (the
first argument) before it goes on, so that a kill leaves no decision unwritten.

The daemon's own log goes through a thread, since its loop may never wait for a file.
"""

from __future__ import annotations

import logging
import os
import sys

FIELDS = ("namespace", "key", "part", "tier", "reason", "kept")


class Written(logging.Handler):
    """One line for each record, by one system call."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def emit(self, record: logging.LogRecord) -> None:
        fields = record.__dict__["fields"]
        words = [str(int(record.created * 1e9)), *(fields[name] or "-" for name in FIELDS)]
        os.write(self._file, " ".join(words).encode() + b"\n")


def main() -> None:
    decisions = logging.getLogger("kvstored.decisions")
    decisions.addHandler(Written(sys.argv.pop(1)))
    decisions.setLevel(logging.DEBUG)
    decisions.propagate = False
    from kvstored.cli import run

    run()


if __name__ == "__main__":
    main()
