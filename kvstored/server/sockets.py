"""Unix sockets that appear with the right permissions and in one step."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from kvstored.sockets import ListenError, prepare_directory, refuse_live_socket


def admin_socket_path(unix_path: Path) -> Path:
    """The operators' socket beside the engines' one."""
    return unix_path.with_name(f"{unix_path.stem}-admin{unix_path.suffix}")


class UnixSocket:
    """One listening path. Bind at `address`, then `publish`; `remove` at the end.

    Raises ListenError when the path cannot be used.
    """

    def __init__(self, path: Path, mode: int) -> None:
        self._path = path
        self._mode = mode
        prepare_directory(path.parent)
        refuse_live_socket(path)
        try:
            # Nobody else can enter it, so that no one connects before `publish`.
            self._private = Path(tempfile.mkdtemp(prefix=".k", dir=path.parent))
        except OSError as error:
            raise ListenError(
                f"cannot make a directory in {path.parent}: {error.strerror}",
                "set listen.unix to a path in a directory of yours",
            ) from error
        self._bound = self._private / "s"
        self._identity: tuple[int, int] | None = None

    @property
    def address(self) -> str:
        """For gRPC."""
        return f"unix:{self._bound}"

    def publish(self) -> None:
        """Give the listening socket its mode and its name, replacing a stale one."""
        self._bound.chmod(self._mode)
        found = self._bound.stat()
        self._identity = (found.st_dev, found.st_ino)
        self._bound.rename(self._path)
        self._private.rmdir()

    def remove(self) -> None:
        """Take the path away if it is still this socket."""
        if self._identity is None:
            self._bound.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._private.rmdir()
            return
        with contextlib.suppress(FileNotFoundError):
            found = self._path.lstat()
            if (found.st_dev, found.st_ino) == self._identity:
                self._path.unlink()
