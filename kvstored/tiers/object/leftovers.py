"""What a kill leaves in a bucket that is a directory: `NAME#1`, written but never given its name.

The library neither lists nor deletes such files, so no listing counts them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from kvstored.io.base import Files

OLD_S: Final = 3600.0
"""No upload takes so long."""

_UNFINISHED = re.compile(r".+#\d+")
_DEPTH: Final = 4  # v1, namespace, family, name


class Leftovers:
    """Of one directory. Blocks: for a thread."""

    def __init__(self, files: Files, directory: Path, now: Callable[[], float] = time.time) -> None:
        self._files = files
        self._directory = directory
        self._now = now

    def drop(self) -> int:
        """Remove those that are old; how many. What cannot be looked at is left alone."""
        return self._drop(self._directory, _DEPTH)

    def _drop(self, directory: Path, depth: int) -> int:
        dropped = 0
        try:
            names = self._files.listdir(directory)
        except OSError:  # a file; or it has gone
            return 0
        for name in names:
            path = directory / name
            if _UNFINISHED.fullmatch(name):
                with suppress(OSError):
                    if self._files.stat(path).st_mtime + OLD_S < self._now():
                        self._files.unlink(path)
                        dropped += 1
            elif depth > 1:
                dropped += self._drop(path, depth - 1)
        return dropped


def leftovers_of(url: str, files: Files) -> Leftovers | None:
    """The leftovers of a bucket; None for one that is no directory."""
    parts = urlsplit(url)
    return Leftovers(files, Path(unquote(parts.path))) if parts.scheme == "file" else None
