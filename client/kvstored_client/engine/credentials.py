"""The namespace's token, never an argument: those are readable by every user of the machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def read_token(file: str | None, environ: Mapping[str, str]) -> str | None:
    """What `file` holds, - for standard input; without a file what $KVSTORED_TOKEN is, None where
    it is not set. Raises ValueError for an empty file, OSError for one that cannot be read.
    """
    if file is None:
        return environ.get("KVSTORED_TOKEN") or None
    token = (sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")).strip()
    if not token:
        raise ValueError(f"--token-file {file} is empty")
    return token
