"""Where `get` writes: files that are replaced when they are whole, and what is written through."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO, Protocol

from kvstored.kvctl.selection import Mistake

STDOUT = 1


class Sink(Protocol):
    """Takes bytes; nothing of them is to be seen before `keep`."""

    file: BinaryIO

    def keep(self, nbytes: int) -> None:
        """Let the leading bytes have their name, and the rest go."""

    def abandon(self) -> None:
        """Remove what is unfinished. Idempotent, also after `keep`."""


def check_destination(option: str, path: Path) -> None:
    """Raises Mistake for what cannot be written to, with the option's words in front."""
    real = Path(os.path.realpath(path))
    try:
        if (number := descriptor(path)) is not None:
            os.fstat(number)
            return
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not real.parent.is_dir():
            raise Mistake(f"{option}: there is no directory {real.parent}") from None
        return
    except OSError as error:
        raise Mistake(f"{option}: {error.strerror}") from error
    if stat.S_ISDIR(mode):
        raise Mistake(f"{option}: is a directory: name a file")
    if stat.S_ISSOCK(mode):
        raise Mistake(f"{option}: is a socket, which cannot be opened: name a file")


def descriptor(path: Path) -> int | None:
    """The file descriptor of this process that a path stands for, such as /dev/stdout, or None."""
    named = {"/dev/stdin": 0, "/dev/stdout": STDOUT, "/dev/stderr": 2}
    name = os.path.abspath(path)
    found = re.fullmatch(r"/(?:dev|proc/self)/fd/([0-9]{1,9})", name)
    return int(found[1]) if found else named.get(name)


def open_sink(path: Path) -> Sink:
    """For what `check_destination` has let pass. Raises OSError."""
    number = descriptor(path)
    if number is None and (not path.exists() or path.is_file()):
        return Replaced(Path(os.path.realpath(path)))
    return WrittenThrough(path, number)


class Replaced:
    """A regular file, or one to be: written beside its name and renamed when whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._beside = path.with_name(f".{path.name}.part")
        self.file: BinaryIO = self._beside.open("wb")

    def keep(self, nbytes: int) -> None:
        """See Sink."""
        self.file.truncate(nbytes)
        self.file.close()
        os.replace(self._beside, self._path)

    def abandon(self) -> None:
        """See Sink."""
        self.file.close()
        self._beside.unlink(missing_ok=True)


class WrittenThrough:
    """A device, a pipe, or an open file: it stays what it is, and gets the bytes when all is there,
    as what was written to it cannot be taken back.
    """

    def __init__(self, path: Path, number: int | None) -> None:
        self._path = path
        self._number = number
        self.file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115

    def keep(self, nbytes: int) -> None:
        """See Sink."""
        self.file.truncate(nbytes)
        self.file.seek(0)
        fd = os.open(self._path, os.O_WRONLY) if self._number is None else os.dup(self._number)
        with open(fd, "wb") as target:
            shutil.copyfileobj(self.file, target, 1 << 20)
        self.file.close()

    def abandon(self) -> None:
        """See Sink."""
        self.file.close()
